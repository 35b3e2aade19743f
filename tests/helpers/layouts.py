"""How a network's tensors may lie in memory, and which kernels may run: what an arithmetic's bound
says nothing about, so that it holds for all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


def channels_last(x: Tensor) -> Tensor:
    """Store the channels of images and volumes next to each other; other tensors backwards."""
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        return x.contiguous(memory_format=torch.channels_last_3d)
    return stored_backwards(x)


def stored_backwards(x: Tensor) -> Tensor:
    """Store the first axis innermost."""
    axes = list(range(x.dim()))[::-1]
    return x.permute(axes).contiguous().permute(axes)


def stored_with_steps(x: Tensor) -> Tensor:
    """Store a number beside each entry, so that the last axis has a step of 2."""
    return torch.stack([x, torch.full_like(x, 7.0)], -1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    """Store entries once that are equal along the first axis, else as they are."""
    same = x.dim() > 1 and len(x) > 1 and bool((x == x[:1]).all())
    return x[:1].expand(x.shape) if same else x.contiguous()


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": channels_last,
    "strided": stored_with_steps,
    "backwards": stored_backwards,
    "expanded": expanded,
}


class Laid(TorchFunctionMode):
    """Every function of torch gets its tensors in one memory format, as a caller may hand them over.

    What writes in place and what needs a view keeps the tensors that it has.
    """

    def __init__(self, lay: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lay = lay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in VIEWS:
            args = tree_map_only(Tensor, Tensor.contiguous, args)
        elif not (name.endswith("_") or name.startswith("__i") or name == "__get__"):
            args, kwargs = tree_map_only(Tensor, self._lay, (args, kwargs))
        return func(*args, **kwargs)

    def _lay(self, x: Tensor) -> Tensor:
        return self.lay(x) if x.is_floating_point() and x.dim() > 1 else x


VIEWS = ("view", "view_as", "_reshape_alias")
Surroundings = Callable[[], AbstractContextManager[Any]]


def without_onednn() -> AbstractContextManager[Any]:
    """Switch oneDNN off, and NNPACK, which would take its place with Winograd's convolutions."""
    stack = ExitStack()
    stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
    stack.enter_context(torch.backends.nnpack.flags(enabled=False))
    return stack


KERNELS: dict[str, Surroundings] = {
    "as they are": nullcontext,
    "without oneDNN": without_onednn,
    "attention written out": lambda: sdpa_kernel(SDPBackend.MATH),
    "fused attention": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
}


def formats_and_kernels() -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Yield every memory format with every choice of kernels, by name."""
    for kernel, switched in KERNELS.items():
        yield kernel, switched
        for name, lay in FORMATS.items():

            def both(
                switched: Surroundings = switched, lay: Callable[[Tensor], Tensor] = lay
            ) -> AbstractContextManager[Any]:
                stack = ExitStack()
                stack.enter_context(switched())
                stack.enter_context(Laid(lay))
                return stack

            yield f"{kernel}, {name}", both
