"""Several processes that run one command.

`torchrun --nproc-per-node N --no-python certvit COMMAND ...` starts N processes that know their rank. Rank 0
leads: only the leader writes files and messages. Free processes draw pieces of work from a counter
in torch.distributed's store and return their results over the store; the leader passes them on in
order, so that results do not depend on the number of processes. Only numbers that are added up
(gradients) go through a process group, gloo or NCCL.

The first process that fails says why; the others end silently with its code (`fail`, `Ended`).
torch is imported only where there are several processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from certcli.system.errors import UsageError, one_line

if TYPE_CHECKING:
    import torch

Piece = TypeVar("Piece")
Found = TypeVar("Found")

POLL = 0.01
"""Seconds between two polls of the store, whose own wait writes to stderr each time it runs out."""
PATIENCE = 10.0
"""Seconds in which the first failed process reports, before the others end."""
LONGEST = timedelta(days=7)
"""Timeout of collectives. No slow process is abandoned; a dead one breaks its connection."""


class Ended(Exception):
    """Another process failed first and reports it; all end with its exit `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another process ended with {code}")
        self.code = code


class Team:
    """Processes that run one command, each calling the same methods in the same order; `ALONE` is a
    single process.

    Args:
        store: A store of torch.distributed; None for the one that the environment names.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        if not 0 <= rank < size:
            raise UsageError(
                f"there is no process {rank} of {size}", "RANK and WORLD_SIZE are torchrun's to set"
            )
        self.rank = rank
        self.size = size
        self._given = store
        self._calls = 0
        self._grouped = False
        self._unreachable = False

    @property
    def leads(self) -> bool:
        """Tell whether this process writes files and messages."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def _store(self) -> Any:
        if self._given is None:
            from torch.distributed.rendezvous import rendezvous

            if self._unreachable:
                raise RuntimeError("the store cannot be reached")
            try:
                self._given = next(iter(rendezvous("env://")))[0]
            except (RuntimeError, ValueError, OSError) as failure:
                self._unreachable = True
                raise UsageError(
                    f"the {self.size} processes do not find each other: {one_line(failure)}",
                    "torchrun sets MASTER_ADDR and MASTER_PORT, where the first of them listens",
                ) from failure
        return self._given

    def deal(
        self,
        pieces: Sequence[Piece],
        find: Callable[[Piece], Found],
        cached: Callable[[Piece], Found | None] = lambda piece: None,
        pack: Callable[[Found], Any] = lambda result: result,
        unpack: Callable[[Any], Found] = lambda plain: plain,
    ) -> Iterator[tuple[bool, Found]]:
        """Yield (whether it is new, the result) of every piece, in order, in the leader; nothing in
        the others.

        Args:
            cached: The result of an earlier run, or None; called in the leader, up to the first
                piece without one.
            pack, unpack: Turn a result into plain JSON values and back.
        """
        if not self.several:
            for piece in pieces:
                earlier = cached(piece)
                yield (True, find(piece)) if earlier is None else (False, earlier)
            return
        name = self._next()
        if not self.leads:
            start = int(self._wait(f"{name}/from"))
            while (turn := self._draw(name, start)) < len(pieces):
                self._set(f"{name}/{turn}", pack(find(pieces[turn])))
            return
        start = 0
        while start < len(pieces) and (earlier := cached(pieces[start])) is not None:
            yield False, earlier
            start += 1
        self._set(f"{name}/from", start)
        results: dict[int, Found] = {}
        tasks_left = True
        turn = start
        while turn < len(pieces):
            key = f"{name}/{turn}"
            if turn in results:
                yield True, results.pop(turn)
                turn += 1
            elif self._store.check([key]):
                yield True, unpack(json.loads(self._store.get(key)))
                self._store.delete_key(key)
                turn += 1
            elif tasks_left and (mine := self._draw(name, start)) < len(pieces):
                results[mine] = find(pieces[mine])
            else:
                tasks_left = False
                self._pause()

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return the leader's value of `make` in all: clocks and machines may differ."""
        return self.everyone(make() if self.leads else None)[0]

    def everyone(self, mine: Any) -> list[Any]:
        """Return the plain values of all processes, by rank."""
        if not self.several:
            return [mine]
        name = self._next()
        self._set(f"{name}/{self.rank}", mine)
        return [json.loads(self._wait(f"{name}/{rank}")) for rank in range(self.size)]

    def group(self) -> Any:
        """Return torch.distributed with its process group: gloo on the CPU, NCCL on CUDA."""
        import torch
        import torch.distributed as distributed

        if not self._grouped:
            backend = (
                "cpu:gloo,cuda:nccl"
                if torch.cuda.is_available() and distributed.is_nccl_available()
                else "gloo"
            )
            store = distributed.PrefixStore("group", self._store)
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=LONGEST
            )
            self._grouped = True
        return distributed

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over processes, bit for bit alike; a message a dtype."""
        import torch

        if not self.several:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            self.group().all_reduce(flat)
            for tensor, total in zip(
                same, flat.split([tensor.numel() for tensor in same]), strict=True
            ):
                tensor.detach().copy_(total.view_as(tensor))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all processes, of one shape and dtype, by rank."""
        import torch

        if not self.several:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group().all_gather(parts, tensor)
        return parts

    def copy_from_leader(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by the leader's, since copies on unlike processors drift apart."""
        for tensor in tensors if self.several else ():
            self.spread(tensor, 0)

    def spread(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace the tensor by that of process `rank`, in all."""
        import torch

        payload = tensor.detach()  # gloo has no booleans
        self.group().broadcast(
            payload.view(torch.uint8) if payload.dtype == torch.bool else payload, src=rank
        )

    def fail(self, code: int) -> int | None:
        """Return None in the first process that fails, which reports; else that one's code."""
        if not self.several:
            return None
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set("code", str(code))
                return None
            until = time.monotonic() + PATIENCE
            while not self._store.check(["said"]) and time.monotonic() < until:
                time.sleep(POLL)
            return int(self._store.get("code")) if self._store.check(["code"]) else code
        except (
            RuntimeError,
            UsageError,
        ):  # the store went with the process that held it, or was never there
            return None if self.leads or self._unreachable else code

    def said(self) -> None:
        """Let the others end, after the first failed process has reported."""
        if self.several:
            try:
                self._store.set("said", "1")
            except (RuntimeError, UsageError):
                return

    def finish(self) -> None:
        """End well: the leader, whose process may hold the store, ends last."""
        if not self.several or self._given is None:
            return
        name = self._next()
        if not self.leads:
            self._store.set(f"{name}/{self.rank}", "gone")
            return
        for rank in range(1, self.size):
            self._wait(f"{name}/{rank}")

    def _next(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _draw(self, name: str, start: int) -> int:
        self._stop_with_others()
        return start + int(self._store.add(f"{name}/drawn", 1)) - 1

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _wait(self, key: str) -> bytes:
        while not self._store.check([key]):
            self._pause()
        return self._store.get(key)

    def _pause(self) -> None:
        self._stop_with_others()
        time.sleep(POLL)

    def _stop_with_others(self) -> None:
        if self._store.check(["code"]):
            raise Ended(int(self._store.get("code")))


ALONE = Team()


@cache
def team() -> Team:
    """Return the processes that torchrun started, by RANK and WORLD_SIZE; `ALONE` without
    torchrun."""
    rank = os.environ.get("RANK")
    size = os.environ.get("WORLD_SIZE")
    if rank is None or size is None or size == "1":
        return ALONE
    try:
        processes = Team(int(rank), int(size))
    except ValueError as failure:
        raise UsageError(
            f"RANK {one_line(rank)}, WORLD_SIZE {one_line(size)} are no numbers",
            "torchrun sets them",
        ) from failure
    port = os.environ.get("MASTER_PORT", "")
    if not (os.environ.get("MASTER_ADDR") and port.isdecimal() and 0 < int(port[:9]) < 2**16):
        message = f"RANK and WORLD_SIZE name {size} processes, MASTER_ADDR and MASTER_PORT no place where they meet"
        raise UsageError(
            message, "torchrun sets them all; unset RANK and WORLD_SIZE for one process"
        )
    return processes


def local_rank() -> int:
    """Return the number of this process on its machine, which is that of its GPU."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def require_one(what: str, hint: str) -> None:
    """Raise UsageError where there are several processes and `what` cannot be split."""
    if team().several:
        raise UsageError(f"{what} in one process only, not in {team().size}", hint)
