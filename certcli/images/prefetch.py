"""Image files read and decoded ahead by threads, small ones once; results do not depend on it."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

MOST = 8
"""Threads by default at most: beyond, decoders wait for memory."""

SMALL = 3 * 64 * 64
"""Entries of an image that is decoded once: for a small network, decoding would take a fifth of
each training step."""
ROOM = 1 << 28
"""Bytes for decoded images, beyond which they are decoded again."""


def usual_workers() -> int:
    """Return this process's share of the machine's cores, at most MOST."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MOST, cores // max(1, int(processes) if processes.isdecimal() else 1)))


class Ahead:
    """Images by position, (b, c, h, w) in the order of the positions; errors of `read` are raised
    when an image is fetched.

    Args:
        read: position -> one image (c, h, w).
        workers: Threads; 0 reads in the caller's thread.
    """

    def __init__(self, read: Callable[[int], Tensor], workers: int | None = None) -> None:
        self._read = read
        self.workers = usual_workers() if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[int, Future[Tensor]] = {}
        self._decoded: dict[int, Tensor] = {}
        self._room = ROOM

    def __call__(self, positions: Sequence[int]) -> Tensor:
        in_turn = self.workers == 0 or (len(positions) == 1 and positions[0] not in self._waiting)
        if not in_turn:
            self._start(positions)
        return torch.stack([self._image(position) for position in positions])

    def _image(self, position: int) -> Tensor:
        decoded = self._decoded.get(position)
        if decoded is not None:
            return decoded.float().div_(255)
        waiting = self._waiting.pop(position, None)
        image = self._read(position) if waiting is None else waiting.result()
        if image.numel() <= min(SMALL, self._room):
            decoded = (image * 255).round().to(torch.uint8)
            # not of 16 bits: its bytes are all of it
            if torch.equal(decoded.float().div_(255), image):
                self._decoded[position] = decoded
                self._room -= image.numel()
        return image

    def expect(self, positions: Sequence[int]) -> None:
        """Start reading exactly these images, in this order; drop all others."""
        if self.workers == 0:
            return
        expected = set(positions)
        for position in [position for position in self._waiting if position not in expected]:
            self._waiting.pop(position).cancel()
        self._start(positions)

    def _start(self, positions: Sequence[int]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="certvit-images")
        for position in positions:
            if position not in self._waiting and position not in self._decoded:
                self._waiting[position] = self._pool.submit(self._read, position)
