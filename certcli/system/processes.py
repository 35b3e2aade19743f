"""Several processes as one command: who does which piece, how what is found comes together, how all end as one.

`torchrun --nproc-per-node N -m certcli COMMAND ...` starts N processes that know their rank. The one of rank 0 leads: it
alone writes and speaks. Pieces of work are dealt from a counter in torch.distributed's store to whoever is free, what is
found comes back over the store, and the leader hands it on in order: it is what one process finds, in whatever order and
by however many it was found. Only numbers that must be added (gradients) go through a process group, gloo or NCCL.

A process that fails first says why; the others end silently with its code (`fail`, `Ended`). Nothing of torch is imported
before a second process is there.
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
"""Seconds between two looks at the store: its own waiting would write to stderr each time that it is in vain."""
PATIENCE = 10.0
"""Seconds in which the process that failed first says why, before the others end."""
LONGEST = timedelta(days=7)
"""No process is given up by the others for being slow: one that has ended breaks its connection."""


class Ended(Exception):
    """Another process failed first, and says why. code: with which all end."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another process ended with {code}")
        self.code = code


class Team:
    """Processes that do one command together, each calling the same methods in the same order; `ALONE` is one of itself.

    store: of torch.distributed, to speak over; where none is given, the one that the environment names, at first use.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"there is no process {rank} of {size}", "RANK and WORLD_SIZE are torchrun's to set")
        self.rank, self.size = rank, size
        self._given, self._calls, self._grouped = store, 0, False
        self._unreachable = False

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks."""
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
        known: Callable[[Piece], Found | None] = lambda piece: None,
        pack: Callable[[Found], Any] = lambda found: found,
        unpack: Callable[[Any], Found] = lambda plain: plain,
        aside: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[bool, Found]]:
        """(whether it is new, what was found) of every piece, in order, for the leader; nothing for the others.

        known: what an earlier run found, asked by the leader alone, from the first piece to the first that is not known.
        pack, unpack: to plain values and back. aside: what the leader does before its first piece, while the others have
        begun with theirs.
        """
        if not self.several:
            aside()
            for piece in pieces:
                earlier = known(piece)
                yield (True, find(piece)) if earlier is None else (False, earlier)
            return
        name = self._next()
        if not self.leads:
            start = int(self._wait(f"{name}/from"))
            while (turn := self._draw(name, start)) < len(pieces):
                self._set(f"{name}/{turn}", pack(find(pieces[turn])))
            return
        start = 0
        while start < len(pieces) and (earlier := known(pieces[start])) is not None:
            yield False, earlier
            start += 1
        self._set(f"{name}/from", start)
        aside()
        own: dict[int, Found] = {}
        left, turn = True, start
        while turn < len(pieces):
            key = f"{name}/{turn}"
            if turn in own:
                yield True, own.pop(turn)
                turn += 1
            elif self._store.check([key]):
                yield True, unpack(json.loads(self._store.get(key)))
                self._store.delete_key(key)
                turn += 1
            elif left and (mine := self._draw(name, start)) < len(pieces):
                own[mine] = find(pieces[mine])
            else:
                left = False
                self._pause()

    def agree(self, make: Callable[[], Any]) -> Any:
        """What the leader makes, a plain value, for all: for what clocks and unlike machines could decide differently."""
        if not self.several:
            return make()
        name = self._next()
        if self.leads:
            made = make()
            self._set(name, made)
            return made
        return json.loads(self._wait(name))

    def everyone(self, mine: Any) -> list[Any]:
        """What each process gave, plain values, by rank."""
        if not self.several:
            return [mine]
        name = self._next()
        self._set(f"{name}/{self.rank}", mine)
        return [json.loads(self._wait(f"{name}/{rank}")) for rank in range(self.size)]

    def group(self) -> Any:
        """torch.distributed with its process group made: gloo for the CPU, NCCL for CUDA."""
        import torch
        import torch.distributed as distributed

        if not self._grouped:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
            store = distributed.PrefixStore("group", self._store)
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=LONGEST)
            self._grouped = True
        return distributed

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor becomes the sum of all processes' (bit for bit the same in all), in one message for each dtype."""
        import torch

        if not self.several:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            self.group().all_reduce(flat)
            for tensor, total in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(total.view_as(tensor))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each process, by rank: all of one shape and dtype."""
        import torch

        if not self.several:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group().all_gather(found, tensor)
        return found

    def copy_from_leader(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor becomes the leader's: unlike processors would let copies drift apart."""
        for tensor in tensors if self.several else ():
            self.spread(tensor, 0)

    def spread(self, tensor: torch.Tensor, rank: int) -> None:
        """The tensor becomes that of process `rank`, in all."""
        import torch

        sent = tensor.detach()  # gloo knows no truth values
        self.group().broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, src=rank)

    def join(self, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """For the leader the tensor of this shape, on the CPU, of which each process holds the rows that torch.chunk gives
        it; None for the others.
        """
        most = -(-shape[0] // self.size)
        sent = rows.new_zeros(most, *shape[1:], device="cpu")
        sent[: len(rows)] = rows.detach()
        found = sent.new_empty(most * self.size, *shape[1:]) if self.leads else None
        self.group().gather(sent, None if found is None else list(found.chunk(self.size)), dst=0)
        return None if found is None else found[: shape[0]]

    def fail(self, code: int) -> int | None:
        """None for the first process that fails: it says why, and then that it has (`said`). Else the first one's code."""
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
        except (RuntimeError, UsageError):  # the store went with the process that held it, or was never there
            return None if self.leads or self._unreachable else code

    def said(self) -> None:
        """After `fail` gave None: why is said, the others may go."""
        if self.several:
            try:
                self._store.set("said", "1")
            except (RuntimeError, UsageError):
                return

    def finish(self) -> None:
        """At a good end: the leader, whose process may hold the store, goes last."""
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
        found: bytes = self._store.get(key)
        return found

    def _pause(self) -> None:
        self._stop_with_others()
        time.sleep(POLL)

    def _stop_with_others(self) -> None:
        if self._store.check(["code"]):
            raise Ended(int(self._store.get("code")))


ALONE = Team()


@cache
def team() -> Team:
    """This process and those that torchrun started with it, as RANK and WORLD_SIZE say; `ALONE` where it did not."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None or size == "1":
        return ALONE
    try:
        found = Team(int(rank), int(size))
    except ValueError as failure:
        raise UsageError(
            f"RANK {one_line(rank)}, WORLD_SIZE {one_line(size)} are no numbers", "torchrun sets them"
        ) from failure
    port = os.environ.get("MASTER_PORT", "")
    if not (os.environ.get("MASTER_ADDR") and port.isdecimal() and 0 < int(port[:9]) < 2**16):
        told = f"RANK and WORLD_SIZE name {size} processes, MASTER_ADDR and MASTER_PORT no place where they meet"
        raise UsageError(told, "torchrun sets them all; unset RANK and WORLD_SIZE for one process")
    return found


def local_rank() -> int:
    """Which of the processes on this machine: the number of its GPU."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def require_one(what: str, hint: str) -> None:
    """UsageError where `what` cannot be split and there are several processes."""
    if team().several:
        raise UsageError(f"{what} in one process only, and these are {team().size}", hint)
