"""A network run part by part: each part of its layers goes on from where the one before it stopped.

Where statistics are made in many passes, each would run the network from its first layer, at a cost of passes times depth.
Most networks have a trunk, an nn.Sequential that runs its blocks one after the other: what enters a block is all that the
rest of the trunk depends on. So it is kept, a tensor a batch, where the next pass begins, and all passes together cost a
little more than one. What is computed is what a whole run would compute, to the bit: the same modules on the same tensors.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.mapped import Spool
from certcli.constrain.layers import Batches, Enough, Visit, all_of, images_of, module_at, stream, watched
from certcli.images.labelled import sent

BEFORE = -1
"""The place of what runs before the trunk; what runs after it has the number of its blocks."""


@dataclass(frozen=True, eq=False)
class Trunk:
    """An nn.Sequential that a run of the model calls once, and where layers are called: path -> (first, last place).

    A place is the number of the block that runs. A layer that is not called has none.
    """

    blocks: nn.Sequential
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module, batches: Batches, paths: Sequence[str]) -> "Trunk | None":
        """That with the most of these layers, seen in a run of one image; None where a run cannot be taken up in it."""
        blocks = _widest(model, paths)
        first = next(iter(all_of(batches)), None)
        if blocks is None or first is None:
            return None
        places = _observed(model, blocks, images_of(first)[:1], paths)
        return None if places is None else cls(blocks, places)

    def span(self, paths: Sequence[str]) -> tuple[int, int]:
        """The first and the last place at which one of these is called; none of them: behind everything."""
        seen = [self.places[path] for path in paths if path in self.places]
        if not seen:
            return len(self.blocks), BEFORE
        return min(first for first, _ in seen), max(last for _, last in seen)


class Legs:
    """`stream` over these batches for one part of the layers after another, in order. Without a trunk each is a whole run."""

    def __init__(self, model: nn.Module, batches: Batches, trunk: Trunk | None) -> None:
        self.model, self.batches, self.trunk = model, batches, trunk
        self._place = BEFORE
        self._kept: deque[Tensor] = deque()

    def stream(self, paths: Sequence[str], following: Sequence[str], visit: Visit) -> int:
        """As `layers.stream`, to the last of `paths`; what is needed to go on with `following` is kept. -> batches."""
        if self.trunk is None:
            return stream(self.model, self.batches, paths, visit)
        blocks, (first, last) = self.trunk.blocks, self.trunk.span(paths)
        goes_on = self.trunk.span(following)[0] if following else BEFORE
        taken_up = self._place != BEFORE and self._place <= first
        begin, given = (self._place, self._kept) if taken_up else (0, deque[Tensor]())
        goes_on = goes_on if goes_on >= begin else BEFORE
        self._place, self._kept = goes_on, deque()
        spool = Spool()

        def forward(value: Tensor) -> Tensor:
            value = given.popleft() if taken_up else value
            for place in range(begin, len(blocks) + 1):
                if place == goes_on:  # in memory of its own: the block may write into what it is given
                    self._kept.append(_put_away(value, spool))
                if place >= goes_on and place > last:
                    raise Enough
                if place < len(blocks):
                    value = blocks[place](value)
            return value

        with _in_place_of(blocks, forward):
            if not taken_up or last == len(blocks):
                return stream(self.model, self.batches, paths, visit)
            count = len(given)
            with watched(self.model, paths, visit, each=blocks), torch.inference_mode():
                while given:  # without the images
                    with contextlib.suppress(Enough):
                        blocks(given[0])
            return count


def _widest(model: nn.Module, paths: Sequence[str]) -> nn.Sequential | None:
    """The plain nn.Sequential, of blocks that are all different, with the most of these layers inside; the outermost one."""
    best, most = None, 1
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if plain and "forward" not in vars(module) and len(set(map(id, module))) == len(module) > 1:
            inside = sum(path.startswith(f"{name}." if name else "") for path in paths)
            if inside > most:
                best, most = module, inside
    return best


def _observed(
    model: nn.Module, blocks: nn.Sequential, image: Tensor, paths: Sequence[str]
) -> dict[str, tuple[int, int]] | None:
    """Where each layer is called; None where the trunk is not run once, from its first block to its last, on one tensor."""
    places: dict[str, list[int]] = {}
    place, runs, orderly = BEFORE, 0, True

    def begun(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal runs, orderly
        runs += 1
        orderly &= place == BEFORE and len(args) == 1 and isinstance(args[0], Tensor) and not kwargs

    def ended(*_: object) -> None:
        nonlocal place, orderly
        orderly &= place == len(blocks) - 1
        place = len(blocks)

    def entered(number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            nonlocal place, orderly
            orderly &= runs == 1 and place == number - 1
            place = number

        return hook

    def left(_: nn.Module, args: object, output: object) -> None:
        nonlocal orderly
        orderly &= isinstance(output, Tensor)

    def called(path: str) -> Callable[..., None]:
        return lambda *_: places.setdefault(path, []).append(place)

    handles = [blocks.register_forward_pre_hook(begun, with_kwargs=True), blocks.register_forward_hook(ended)]
    for number, block in enumerate(blocks):
        handles += [block.register_forward_pre_hook(entered(number)), block.register_forward_hook(left)]
    handles += [module_at(model, path).register_forward_pre_hook(called(path)) for path in paths]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        with torch.inference_mode():
            model(sent(image, device))
    finally:
        for handle in handles:
            handle.remove()
    if runs != 1 or not orderly:
        return None
    return {path: (min(seen), max(seen)) for path, seen in places.items()}


@contextlib.contextmanager
def _in_place_of(blocks: nn.Sequential, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the trunk run `forward`."""
    blocks.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del blocks.forward


def _put_away(value: Tensor, spool: Spool) -> Tensor:
    """A copy, mapped where there are many; one whose entries are laid out in another order stays as it is."""
    return spool.keep(value.clone()) if value.is_contiguous() else value.clone()
