"""What a network makes of its own tensors: numbers moved, never rounded, or others computed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certcli.engine.tracer import tensors_in
from certcli.system.torch_modes import OperationMode

MOVING = frozenset(
    ("index", "index_select", "gather", "cat", "stack", "clone", "roll", "flip", "repeat", "repeat_interleave", "copy",
     "constant_pad_nd", "tril", "triu", "zeros", "ones", "eye", "full", "scalar_tensor",
     "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)  # fmt: skip
"""Operations whose results hold entries of their operands, and numbers of the code."""


@dataclass(frozen=True)
class Computed:
    """An operation (its name in aten) on tensors that do not depend on the image, and its
    result."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


class Moved(OperationMode):
    """Follows what is made of a network's own tensors. Views share the memory of what they show.

    storages: where the network's tensors lie, and those that were made of them by moving entries,
        or of integers only.
    computed: how the other ones were made, by the place where they lie.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages = {place_of(tensor) for tensor in tensors}
        self.computed: dict[int, Computed] = {}
        self._kept: list[Tensor] = []  # no other tensor gets their memory

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            arguments = {
                **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
                **kwargs,
            }
            written = [
                a.name
                for a in func._schema.arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for place in map(place_of, tensors_in([arguments.get(label) for label in written])):
                self.storages.discard(place)
                # which keeps what is known of the error
                if name != "relu_" or self._is_read(place):
                    self.computed.pop(place, None)
            return result
        operands = tensors_in((args, kwargs))
        results = tensors_in(result)
        places = {place_of(x) for x in operands}
        counted = not any(
            x.is_floating_point() for x in (*operands, *results)
        ) and not name.startswith("empty")
        moving = name in MOVING or (name == "_to_copy" and _is_wider(results[0], operands[0]))
        # torch.tensor(numbers)
        if name == "lift_fresh" or ((counted or moving) and places <= self.storages):
            self._kept += results
            self.storages.update(map(place_of, results))
        elif operands and all(place in self.storages or place in self.computed for place in places):
            for x in results:
                if x.is_floating_point() and place_of(x) not in places:  # a view is what it shows
                    self.computed[place_of(x)] = Computed(name, args, kwargs, x)
        return result

    def _is_read(self, place: int) -> bool:
        """Tell whether something was computed of the tensor that lies here."""
        return any(
            place_of(x) == place
            for step in self.computed.values()
            for x in tensors_in((step.args, step.kwargs))
        )


def _is_wider(result: Tensor, x: Tensor) -> bool:
    """Tell whether a result's arithmetic has all numbers of x's."""
    return torch.promote_types(result.dtype, x.dtype) == result.dtype


def place_of(x: Tensor) -> int:
    """Return where a tensor's memory begins."""
    return x.untyped_storage().data_ptr()
