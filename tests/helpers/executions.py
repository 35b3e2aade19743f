"""A network executed in another precision, and with its sums in other orders than the library's.

How tensors may lie in memory, and which kernels may run: what an arithmetic's bound says nothing about,
so that it holds for all of them.
"""

import copy
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from certcli.rounding import PRECISIONS, NeighbourErrors
from tests.helpers.grids import EVERY


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


Product = Callable[[Tensor, Tensor], Tensor]


def summed_in_turn(a: Tensor, b: Tensor) -> Tensor:
    """a b, one term after the other; in half precision sums are kept in float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    for k in range(a.shape[-1]):
        total = total + a[..., k : k + 1].to(wide) * b[..., k : k + 1, :].to(wide)
    return total.to(a.dtype)


def summed_backwards(a: Tensor, b: Tensor) -> Tensor:
    return summed_in_turn(a.flip(-1), b.flip(-2))


def blocked(a: Tensor, b: Tensor) -> Tensor:
    """Blocks of seven terms, then their sums."""
    wide = torch.promote_types(a.dtype, torch.float32)
    parts = zip(a.to(wide).split(7, -1), b.to(wide).split(7, -2), strict=True)
    return torch.stack([x @ y for x, y in parts]).sum(0).to(a.dtype)


def cut_off(a: Tensor, b: Tensor) -> Tensor:
    """TF32 at its worst: 13 bits of each factor are dropped."""
    short = [(x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    return summed_in_turn(*short)


class Ordered(TorchDispatchMode):
    """Matrix products and convolutions by `product`."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            return self.product(*args)
        if name in ("addmm", "baddbmm"):
            beta, alpha = ((kwargs or {}).get(name, 1) for name in ("beta", "alpha"))
            return args[0] * beta + self.product(*args[1:3]) * alpha
        if name == "convolution" and args[8] == 1 and args[1].dim() == 4 and not args[6]:
            x, weight, bias, stride, padding, dilation = args[:6]
            columns = F.unfold(
                x.float() if x.dtype != torch.float64 else x,
                weight.shape[2:],
                dilation,
                padding,
                stride,
            )
            found = self.product(weight.flatten(1).expand(len(x), -1, -1), columns.to(x.dtype))
            found = found.view(func(*args, **(kwargs or {})).shape)
            return found if bias is None else found + bias.view(-1, 1, 1)
        return func(*args, **(kwargs or {}))


def representable(x: Tensor, arithmetic: str) -> Tensor:
    """Return the image that the arithmetic has in place of x, still in [0, 1], in float64."""
    return x.to(PRECISIONS[arithmetic].dtype).double()


@torch.no_grad()
def logits_of_executions(model: nn.Module, pixels: Tensor, arithmetic: str) -> Iterator[Tensor]:
    """Yield the logits of `representable` images in several executions, in float64: orders of sums,
    batches, kernels, memory formats.

    By default one memory format and choice of kernels, which the network's name decides; under
    `make soundness` all of them.
    """
    dtype = PRECISIONS[arithmetic].dtype
    net = copy.deepcopy(model).to(dtype).eval()
    images = pixels.to(dtype)
    products = (cut_off,) if arithmetic == "tf32" else (summed_in_turn, summed_backwards, blocked)
    if arithmetic != "tf32":
        yield net(images).double()
        yield torch.cat([net(image[None]) for image in images]).double()
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        yield net(images).double()
        torch.set_num_threads(threads)
        every = list(formats_and_kernels())
        first = zlib.crc32(repr(model).encode()) % len(every)
        for _, surrounded in every if EVERY else every[first : first + 1]:
            with surrounded():
                yield net(images).double()
    for product in products:
        with sdpa_kernel(SDPBackend.MATH), Ordered(product):
            yield net(images).double()


def images_within(pixels: Tensor, radius: float, seed: int) -> Tensor:
    """Return images of the box within a little less than this radius."""
    away = torch.randn(
        pixels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    length = away.flatten(1).norm(dim=1).view(-1, *[1] * (pixels.dim() - 1))
    return (pixels + away / length * radius * (1 - 1e-2)).clamp(0, 1)


def pairwise_differences(one: Tensor, other: Tensor) -> Tensor:
    """Return |(z_i - z_j) - (z'_i - z'_j)|: (b, k), (b, k) -> (b, k, k)."""
    moved = one - other
    assert math.prod(moved.shape)
    return (moved[:, :, None] - moved[:, None, :]).abs()


def require_within(
    analysis: NeighbourErrors,
    model: nn.Module,
    pixels: Tensor,
    radius: float,
    arithmetic: str,
    executed: Callable[[nn.Module, Tensor, str], Iterator[Tensor]] = logits_of_executions,
) -> float:
    """Require of all executions at images and at neighbours that they differ from real arithmetic
    by no more than is proven.

    Two logits are compared with all others. Of float64, whose real numbers nobody has here, two
    executions are within twice the bound. Return the largest bound.
    """
    radii = torch.full((len(pixels),), radius)
    tops = [0, model(pixels).shape[1] - 1]
    bound = torch.stack(
        [analysis(pixels, radii, torch.full((len(pixels),), top)) for top in tops], 1
    )
    for near in (pixels, images_within(pixels, radius, 7)):
        near = representable(near, arithmetic)
        real = model(near)
        for logits in executed(model, near, arithmetic):
            within = pairwise_differences(logits, real)[:, tops] <= bound * (
                2 if arithmetic == "float64" else 1
            )
            # an infinite bound claims nothing, and inf - inf, of logits that overflow, is no number
            assert bool((within | bound.isinf()).all())
    return float(bound.max())
