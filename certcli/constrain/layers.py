"""Layers that are one matrix: their inputs as rows, and the operator whose norm is proven."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.images.labelled import sent
from certcli.lipschitz.numerics.convolution import Geometry, conv_norm
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.system.errors import DataError, UsageError, raise_if
from certcli.system.torch_modes import fast_products

CHUNK_BYTES = 64 * 2**20
"""Inputs are cast and unfolded in pieces of at most this many bytes."""

Batches = Iterable[Tensor] | Callable[[], Iterable[Tensor]]
"""Batches of images; or a function that reads them again in every pass, so that memory never holds all."""


Visit = Callable[[int, str, nn.Module, Tensor], None]
"""Called with the number of a batch, a path, its module and the module's input."""


def refusal(module: nn.Module) -> str | None:
    """Return why a module cannot be constrained; None if it can."""
    if isinstance(module, nn.Linear):
        same = type(module).forward is nn.Linear.forward
    elif isinstance(module, nn.Conv2d):
        same = (
            type(module).forward is nn.Conv2d.forward
            and type(module)._conv_forward is nn.Conv2d._conv_forward
        )
        if module.groups != 1:
            return "grouped convolutions (one matrix a group) are not supported"
    else:
        return f"{type(module).__name__} is neither Linear nor Conv2d"
    if not same:
        return f"{type(module).__name__} overrides forward"
    if module._parameters.get("weight") is None:
        return "its weight is not a plain parameter (parametrised?)"
    return None


def module_at(model: nn.Module, path: str) -> Any:
    """Return the module at `path`, or raise UsageError."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(
            f"the model has no layer '{path}'", "certvit lipschitz --layers lists them"
        ) from None


def run_batches(model: nn.Module, batches: Batches) -> None:
    """Run the network on the batches. DataError: there are none."""
    batch = None
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.inference_mode(), fast_products(model):
        for batch in batches() if callable(batches) else batches:
            model(sent(batch, device))
    hint = "give --dataset or a larger --limit"
    raise_if(batch is None, DataError, "there are no calibration images", hint)


@contextlib.contextmanager
def visiting(model: nn.Module, paths: Sequence[str], visit: Visit) -> Iterator[None]:
    """Call `visit` at each call of a module of `paths`, while the caller runs the model."""
    count = 0

    def hook_for(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit(count, path, module, (args[0] if args else kwargs["input"]).detach())

        return hook

    def ended(*_: object) -> None:
        nonlocal count
        count += 1

    with contextlib.ExitStack() as hooks:
        for path in paths:
            hook = hook_for(path)
            layer = module_at(model, path)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.enter_context(model.register_forward_hook(ended))
        yield


def require_finite_inputs(path: str, diagonal: Tensor) -> None:
    """Raise DataError, naming the layer, where the diagonal of X X^T, and so X, is not finite."""
    raise_if(
        not bool(diagonal.isfinite().all()),
        DataError,
        f"the input of layer '{path}' holds NaN or infinite numbers",
        "check the calibration images, and that the weights before this layer are finite",
    )


def conv_geometry(module: nn.Module, value: Tensor) -> Geometry | None:
    """Return the geometry of a zero-padded convolution without groups; None: other modules."""
    if not isinstance(module, nn.Conv2d):
        return None
    padding = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros" and any(padding):
        return None
    pairs = tuple(zip(padding[-2::-2], padding[-1::-2]))
    return Geometry(module.stride, pairs, module.dilation, 1, tuple(value.shape[-2:]))


def proven_norm(weight: Tensor, conv: Geometry | None) -> float:
    """Bound the layer's norm: of the zero-padded convolution itself, or the out x in matrix.

    weight has the parameter's shape. The matrix is the operator for Linear; for a circular or
    reflecting padding, it is a surrogate.
    """
    return spectral_norm(weight.double().flatten(1)) if conv is None else conv_norm(weight, conv)


def input_rows(
    module: nn.Module, value: Tensor, dtype: torch.dtype = torch.float64
) -> Iterator[Tensor]:
    """Yield the layer's input as rows (tokens, in) of `dtype`, in pieces of at most CHUNK_BYTES."""
    if isinstance(module, nn.Linear):
        tokens = value.reshape(-1, value.shape[-1])
        for piece in tokens.split(max(1, CHUNK_BYTES // (8 * tokens.shape[1]))):
            yield piece.to(dtype)
        return
    assert isinstance(module, nn.Conv2d)
    images = value if value.dim() == 4 else value[None]
    width = module.weight[0].numel()
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padding = module._reversed_padding_repeated_twice
    for piece in images.split(max(1, CHUNK_BYTES // (8 * width * _window_count(module, images)))):
        padded = F.pad(piece, padding, mode=mode) if any(padding) else piece
        patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
        yield patches.mT.reshape(-1, width).to(dtype)


def sampled(module: nn.Module, value: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Yield at most `count` rows of each image's input, in its precision (half: float32).

    These are the first row, where a class token stands, and a seeded draw of the others, the same
    for the whole batch.
    """
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(module, nn.Linear):
        tokens = value.flatten(1, -2) if value.dim() > 2 else value[:, None]
        yield tokens[:, _drawn(tokens.shape[1], count, seed).to(value.device)].flatten(0, 1)
        return
    assert isinstance(module, nn.Conv2d)
    for piece in input_rows(module, value, value.dtype):
        images = piece.unflatten(0, (-1, _window_count(module, value)))
        yield images[:, _drawn(images.shape[1], count, seed).to(value.device)].flatten(0, 1)


@lru_cache(maxsize=8)
def _drawn(rows: int, count: int, seed: int) -> Tensor:
    if rows <= count:
        return torch.arange(rows)
    generator = torch.Generator().manual_seed(seed)
    others = 1 + torch.randperm(rows - 1, generator=generator)[: count - 1]
    return torch.cat([torch.zeros(1, dtype=torch.long), others.sort().values])


def _window_count(module: nn.Conv2d, value: Tensor) -> int:
    """Return the number of windows of an image."""
    padding = module._reversed_padding_repeated_twice
    return math.prod(
        (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
        for size, before, after, dilation, kernel, stride in zip(
            value.shape[-2:],
            padding[-2::-2],
            padding[-1::-2],
            module.dilation,
            module.kernel_size,
            module.stride,
        )
    )
