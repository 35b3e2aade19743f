"""Resume a forward pass where the last one stopped: many passes cost little more than one.

Most networks have a trunk: an nn.Sequential whose blocks run one after the other, each depending
only on the tensor that enters it. Each pass keeps the tensor, one a batch, that enters the first
block of the next pass. The modules and tensors are those of a whole run, so the results are equal
to the bit.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.mapped import Spool
from certcli.constrain.layers import Batches, StopBatch, Visit, all_of, module_at, stream, visiting
from certcli.images.labelled import sent
from certcli.system.products import fast_products

BEFORE = -1
"""The place of modules before the trunk; modules after it have the number of its blocks."""


@dataclass(frozen=True, eq=False)
class Trunk:
    """An nn.Sequential that runs once, and the places of layers: path -> (first, last).

    A place is the number of the running block. A layer that is not called has none.
    """

    blocks: nn.Sequential
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module, batches: Batches, paths: Sequence[str]) -> "Trunk | None":
        """Return the trunk with most of these layers, from a run of an image; None: no resuming."""
        blocks = _widest(model, paths)
        first = next(iter(all_of(batches)), None)
        if blocks is None or first is None:
            return None
        places = _observed(model, blocks, first[:1], paths)
        return None if places is None else cls(blocks, places)

    def span(self, paths: Sequence[str]) -> tuple[int, int]:
        """Return the first and last place of these layers; behind the trunk where none is called."""
        places = [self.places[path] for path in paths if path in self.places]
        if not places:
            return len(self.blocks), BEFORE
        return min(first for first, _ in places), max(last for _, last in places)


class ResumedStream:
    """Run `stream` for groups of layers in order; without a trunk each run is a whole one."""

    def __init__(self, model: nn.Module, batches: Batches, trunk: Trunk | None) -> None:
        self.model = model
        self.batches = batches
        self.trunk = trunk
        self._place = BEFORE
        self._kept: deque[Tensor] = deque()

    def stream(self, paths: Sequence[str], following: Sequence[str], visit: Visit) -> None:
        """Run to the last of `paths`, keep what `following` needs."""
        if self.trunk is None:
            stream(self.model, self.batches, paths, visit)
            return
        blocks, (first, last) = self.trunk.blocks, self.trunk.span(paths)
        goes_on = self.trunk.span(following)[0] if following else BEFORE
        taken_up = self._place != BEFORE and self._place <= first
        begin, values = (self._place, self._kept) if taken_up else (0, deque[Tensor]())
        goes_on = goes_on if goes_on >= begin else BEFORE
        self._place, self._kept = goes_on, deque()
        spool = Spool()

        def forward(value: Tensor) -> Tensor:
            value = values.popleft() if taken_up else value
            for place in range(begin, len(blocks) + 1):
                if place == goes_on:  # a copy, since the block may write into its input
                    self._kept.append(
                        spool.keep(value.clone()) if value.is_contiguous() else value.clone()
                    )
                if place >= goes_on and place > last:
                    raise StopBatch
                if place < len(blocks):
                    value = blocks[place](value)
            return value

        with _in_place_of(blocks, forward):
            if not taken_up or last == len(blocks):
                stream(self.model, self.batches, paths, visit)
                return
            observed = visiting(self.model, paths, visit, each=blocks)
            with observed, torch.inference_mode(), fast_products(self.model):
                while values:  # resumed: no images are needed
                    with contextlib.suppress(StopBatch):
                        blocks(values[0])


def _widest(model: nn.Module, paths: Sequence[str]) -> nn.Sequential | None:
    """Return the outermost nn.Sequential of distinct blocks with most of these layers."""
    best = None
    largest = 1
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if plain and "forward" not in vars(module) and len(set(map(id, module))) == len(module) > 1:
            inside = sum(path.startswith(f"{name}." if name else "") for path in paths)
            if inside > largest:
                best = module
                largest = inside
    return best


def _observed(
    model: nn.Module, blocks: nn.Sequential, image: Tensor, paths: Sequence[str]
) -> dict[str, tuple[int, int]] | None:
    """Return each layer's places; None unless the trunk runs once, in order, on one tensor."""
    places: dict[str, list[int]] = {}
    place = BEFORE
    runs = 0
    orderly = True

    def before_blocks(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def after_block(_: nn.Module, args: object, output: object) -> None:
        nonlocal orderly
        orderly &= isinstance(output, Tensor)

    def called(path: str) -> Callable[..., None]:
        return lambda *_: places.setdefault(path, []).append(place)

    handles = [
        blocks.register_forward_pre_hook(before_blocks, with_kwargs=True),
        blocks.register_forward_hook(ended),
    ]
    for number, block in enumerate(blocks):
        handles += [
            block.register_forward_pre_hook(entered(number)),
            block.register_forward_hook(after_block),
        ]
    handles += [module_at(model, path).register_forward_pre_hook(called(path)) for path in paths]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for handle in handles:
            hooks.enter_context(handle)
        model(sent(image, device))
    if runs != 1 or not orderly:
        return None
    return {path: (min(numbers), max(numbers)) for path, numbers in places.items()}


@contextlib.contextmanager
def _in_place_of(blocks: nn.Sequential, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    blocks.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del blocks.forward
