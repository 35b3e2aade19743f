"""Image files read and decoded by threads before they are asked for; what is handed out does not depend on it."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

MOST = 8
"""Threads at most unless more are asked for: decoders wait for one another where memory is what they use."""


def usual_workers() -> int:
    """The cores that this process may use, shared with those that torchrun started beside it; at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MOST, cores // max(1, int(beside) if beside.isdecimal() else 1)))


class Ahead:
    """read(position) -> one image (c, h, w); called with positions, images (b, c, h, w) in their order.

    workers: threads; 0 reads when asked, in the caller's thread. An error of `read` is raised where its image is asked for.
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
        """All that will be asked for next, in order: it is begun, and what else was begun is let go."""
        if self.workers == 0:
            return
        wanted = set(positions)
        for position in [position for position in self._waiting if position not in wanted]:
            self._waiting.pop(position).cancel()
        for position in positions:
            if position not in self._waiting:
                self._waiting[position] = self._submit(position)

    def _submit(self, position: int) -> "Future[Tensor]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="certvit-images")
        return self._pool.submit(self._read, position)
