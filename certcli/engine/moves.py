"""Which tensors hold numbers of the network's own, moved but not computed: what no arithmetic can round."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from certcli.engine.tracer import tensors_of

_MOVING = frozenset(
    ("index", "index_select", "gather", "cat", "stack", "clone", "roll", "flip", "repeat", "repeat_interleave", "copy",
     "constant_pad_nd", "tril", "triu", "zeros", "ones", "full", "scalar_tensor",
     "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)  # fmt: skip
"""Operations whose results hold entries of their operands, and numbers of the code."""


class Moved(TorchDispatchMode):
    """Follows what is made of a network's own tensors without arithmetic. Views share the memory of what they show.

    storages: where the network's tensors lie, and those that were made of them by moving entries, or of integers only.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._kept: list[Tensor] = []  # no other tensor gets their memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler at the first call, to tell it not to compile this one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if func._schema.is_mutable:
            given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
            written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            self.storages.difference_update(map(_place, tensors_of([given.get(name) for name in written])))
            return result
        operands, made = tensors_of((args, kwargs or {})), tensors_of(result)
        counted = not any(x.is_floating_point() for x in (*operands, *made)) and not name.startswith("empty")
        literal = name == "lift_fresh"  # torch.tensor(numbers)
        if literal or ((counted or name in _MOVING) and all(_place(x) in self.storages for x in operands)):
            self._kept += made
            self.storages.update(map(_place, made))
        return result


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
