"""Image files read and decoded ahead by threads; results do not depend on the threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

MOST = 8
"""Threads by default at most: beyond, decoders wait for memory."""


def usual_workers() -> int:
    """Return this process's share of the machine's cores, at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MOST, cores // max(1, int(beside) if beside.isdecimal() else 1)))


class Ahead:
    """Images by position, (b, c, h, w) in the order of the positions; errors of `read` are raised when an image is fetched.

    Args:
        read: position -> one image (c, h, w).
        workers: Threads; 0 reads in the caller's thread.
    """

    def __init__(self, read: Callable[[int], Tensor], workers: int | None = None) -> None:
        self._read = read
        self.workers = usual_workers() if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[int, Future[Tensor]] = {}

    def __call__(self, positions: Sequence[int]) -> Tensor:
        if self.workers == 0 or (len(positions) == 1 and positions[0] not in self._waiting):
            return torch.stack([self._read(position) for position in positions])
        found = [
            self._waiting.pop(position) if position in self._waiting else self._submit(position)
            for position in positions
        ]
        return torch.stack([image.result() for image in found])

    def expect(self, positions: Sequence[int]) -> None:
        """Start reading exactly these images, in this order; drop all others."""
        if self.workers == 0:
            return
        expected = set(positions)
        for position in [position for position in self._waiting if position not in expected]:
            self._waiting.pop(position).cancel()
        for position in positions:
            if position not in self._waiting:
                self._waiting[position] = self._submit(position)

    def _submit(self, position: int) -> "Future[Tensor]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="certvit-images")
        return self._pool.submit(self._read, position)
