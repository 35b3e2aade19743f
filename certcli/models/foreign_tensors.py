"""Tensors of other types than torch's own, whose operations are other code than torch's."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_OWN = (Tensor, nn.Parameter)


def foreign_tensor(net: nn.Module) -> str | None:
    """Name the first tensor of a network that is of another type, or whose entries do not lie in rows.

    A theorem reads the entries of a weight. A type of another library may store something else, or
    compute something else of them: a quantised tensor, say.
    """
    for path, value in _tensors_by_path(net):
        if not is_torch_tensor(value):
            kind = type(value).__name__ if type(value) not in _OWN else str(value.layout)
            return f"'{path}' ({kind})"
    return None


def is_torch_tensor(value: Tensor) -> bool:
    """Tell whether a tensor is torch's own, with its entries in rows."""
    return type(value) in _OWN and value.layout == torch.strided


def _tensors_by_path(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in net.named_modules():
        spaces = (module._parameters, module._buffers, vars(module))
        for name, value in ((name, value) for space in spaces for name, value in space.items()):
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value
