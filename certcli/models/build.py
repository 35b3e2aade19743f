"""From a record to its network, which first normalises pixels; weights are set strictly, once."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import timm
import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record, Replacement, arch_arguments
from certcli.checkpoint.schema import is_name, surgery_arguments
from certcli.models.origins import NOTHING_ASSUMED, Reading
from certcli.models.pixels import PixelModel
from certcli.models.weights import Building, load_weights
from certcli.nn import blocks
from certcli.nn.reference import SHAPES  # which registers our reference nets with timm
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    Refused,
    UsageError,
    one_line,
    raise_if,
)
from certcli.system.torch_modes import seed_all


@dataclass(frozen=True, repr=False)
class OpenCheckpoint(Checkpoint):
    """A checkpoint with its network, built once and handed on, and what was assumed in reading it.

    Attributes:
        runtime: another program that runs the file, with `differences` from the network.
    """

    reading: Reading = NOTHING_ASSUMED
    runtime: Any = None

    def differences(self, batches: Iterable[Tensor]) -> list[str]:
        """Return doubts about images (b, c, h, w) where the file's own program answers otherwise."""
        return [] if self.runtime is None else self.runtime.differences(load(self), batches)

    @cached_property
    def net(self) -> nn.Module:
        """The network of `build`; every `load` puts the tensors into a copy of its modules."""
        return build(self.record, like=self.tensors)


def with_network(
    checkpoint: Checkpoint,
    net: nn.Module | None = None,
    reading: Reading = NOTHING_ASSUMED,
    runtime: Any = None,
) -> OpenCheckpoint:
    """Return the checkpoint with its network, so that it is built at most once.

    Args:
        net: The network, where it is built already.
    """
    if isinstance(checkpoint, OpenCheckpoint):
        return checkpoint
    opened = OpenCheckpoint(checkpoint.tensors, checkpoint.record, reading, runtime)
    if net is not None:
        vars(opened)["net"] = net  # where `cached_property` looks first
    return opened


def own_network(checkpoint: Checkpoint) -> nn.Module:
    """Return the checkpoint's modules for the caller to change, weights yet to be set."""
    if isinstance(checkpoint, OpenCheckpoint):
        return copy.deepcopy(
            checkpoint.net, {id(weight): weight for weight in checkpoint.net.parameters()}
        )
    return build(checkpoint.record, like=checkpoint.tensors)


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether bfloat16 products are faster: tensor cores, a CPU's AMX tiles or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


def own_name(model: nn.Module, path: str) -> str:
    """Return the checkpoint's name of a part of `model`: without PixelModel's `net.`."""
    if not isinstance(model, PixelModel):
        return path
    return "" if path == "net" else path.removeprefix("net.")


def create(
    arch: str,
    arch_args: Mapping[str, Any],
    *,
    initialise: bool,
    like: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Build a timm model in eval mode, without published weights; ArchitectureError for an unknown
    name or argument.

    Args:
        like: The tensors of the network; an architecture much larger than they are is refused
            before it is built.
    """
    with Building(like, initialise=initialise):
        return _create(arch, arch_args)


def _create(arch: str, arch_args: Mapping[str, Any]) -> nn.Module:
    if not is_name(arch) or not timm.is_model(arch):
        close = get_close_matches(arch, timm.list_models(), 4, 0.7) if is_name(arch) else []
        further = f"; timm knows also {', '.join(close[1:])}" if close[1:] else ""
        raise ArchitectureError(
            f"unknown architecture '{one_line(arch)[:80]}'",
            f"did you mean '{close[0]}'?{further}" if close else "see timm.list_models()",
        )
    try:
        arguments = arch_arguments(arch_args)
        return _construct(arch, blocks.with_layers(arguments)).eval()
    except Refused as refusal:
        raise ArchitectureError(
            str(refusal), "an architecture is described by numbers, switches and words"
        ) from refusal
    except CertvitError:
        raise
    except Exception as failure:  # timm's constructors raise errors of any type
        raise ArchitectureError(
            f"'{arch}' cannot be built with {one_line(arguments)}: {one_line(failure)}",
            "check --arch and --arch-arg",
        ) from failure


def _construct(arch: str, arguments: dict[str, Any]) -> nn.Module:
    """Call timm's constructor; set `norm_eps` afterwards where it does not take it."""
    try:
        return timm.create_model(arch, pretrained=False, **arguments)
    except TypeError as failure:
        if blocks.NORM_EPS not in arguments or not blocks.takes_no_norm_eps(failure):
            raise
    eps = arguments.pop(blocks.NORM_EPS)
    net = timm.create_model(arch, pretrained=False, **arguments)
    blocks.set_norm_eps(net, eps)
    return net


def build(
    record: Record, *, initialise: bool = False, like: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Build the record's network and surgery, without weights unless `initialise`."""
    with Building(like, initialise=initialise):
        net = _create(record.arch, record.arch_args)
        for replacement in record.surgery:
            replace_module(net, replacement)
    return net.eval()


def replace_module(net: nn.Module, replacement: Replacement) -> nn.Module:
    """Replace one module (path "" is the network itself) and return the new one."""
    try:
        surgery_arguments(replacement.path, replacement.kind, dict(replacement.args))
        old = net.get_submodule(replacement.path)
    except Refused as refusal:
        raise ArchitectureError(str(refusal)) from refusal
    except AttributeError as failure:
        raise ArchitectureError(
            f"surgery names '{replacement.path}', which the architecture lacks"
        ) from failure
    builder: Callable[..., nn.Module] = REPLACEMENTS.load(replacement.kind)
    try:
        new = builder(old, **replacement.args)
    except (
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as failure:  # a module of another kind
        raise ArchitectureError(
            f"'{replacement.kind}' cannot replace the {type(old).__name__} at '{replacement.path}': {one_line(failure)}"
        ) from failure
    if replacement.path and new is not old:
        parent, _, name = replacement.path.rpartition(".")
        setattr(net.get_submodule(parent), name, new)
    return new


def keep_float32(device: torch.device) -> None:
    """Switch off TF32, in which CUDA computes float32 convolutions by default, and sums in half
    precision: the roundings that are proven assume float32.
    """
    if device.type == "cuda":
        products = torch.backends.cuda.matmul
        torch.backends.cudnn.allow_tf32 = products.allow_tf32 = False
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False


def load(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    writable: bool = False,
) -> PixelModel:
    """Return the checkpoint's network with its weights, in eval mode, from pixels to logits.

    Args:
        writable: Copy the weights, for training. Without it, they share the checkpoint's
            memory-mapped tensors where device and dtype allow, and must not be changed.
    """
    keep_float32(torch.device(device))
    net = own_network(checkpoint)
    # copies for the CPU are mapped where they are large; a device converts after the transfer
    on_cpu = dtype if torch.device(device).type == "cpu" else None
    load_weights(net, checkpoint.tensors, copy=writable, dtype=on_cpu)
    net.requires_grad_(False)
    model = PixelModel(checkpoint.record.input, net).eval().to(device)
    if dtype is not None:
        model = model.to(dtype)
    require_described(model, checkpoint.record)
    return model


@torch.no_grad()
def require_described(model: PixelModel, record: Record) -> None:
    """Raise ArchitectureError unless the network maps a black image of the record's size to finite
    logits, one a class.

    With a record of two classes and ten logits, a certificate would be the smallest of 2 margins
    instead of 10.
    """
    weight = next((value for value in model.parameters() if value.is_floating_point()), None)
    kind, where = (torch.float32, "cpu") if weight is None else (weight.dtype, weight.device)
    size = "x".join(map(str, record.input.size))
    try:
        logits = model(torch.zeros(1, *record.input.size, dtype=kind, device=where))
    except Exception as failure:  # timm's networks raise errors of any type
        raise ArchitectureError(
            f"the network does not take an image of size {size} ({one_line(failure)})",
            "check --arch and --arch-arg",
        ) from failure
    raise_if(
        not isinstance(logits, Tensor),
        ArchitectureError,
        f"the network maps an image to {type(logits).__name__}, not to one row of logits or features",
        "wrap it in a module that returns the tensor",
    )
    raise_if(
        logits.dim() != 2 or len(logits) != 1,
        ArchitectureError,
        f"the network maps an image to a tensor {tuple(logits.shape)}, not to one row of logits or features",
        "--arch-arg global_pool=token or avg pools the tokens; without one certvit proves no bound",
    )
    raise_if(
        record.classes not in (0, logits.shape[1]),
        ArchitectureError,
        f"the record says {record.classes} classes, and the network has {logits.shape[1]} logits",
        "the file was edited, or written by another program; go back to the checkpoint it came from",
    )
    raise_if(
        not bool(torch.isfinite(logits).all()),
        ArchitectureError,
        f"the network's logits of a black image are not finite in {str(kind).removeprefix('torch.')}",
        "no result about such a network is valid",
    )


def load_double(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> PixelModel:
    """Return the network in float64, for certificates; on the CPU where the device has no float64."""
    place = torch.device(device)
    return load(checkpoint, "cpu" if place.type == "mps" else place, torch.float64)


def converted(model: PixelModel, dtype: torch.dtype) -> PixelModel:
    """Return a copy with floating weights in another dtype; unchanged tensors are shared."""
    place = (
        "cpu" if dtype == torch.float64 and next(model.parameters()).device.type == "mps" else None
    )
    memo: dict[int, Any] = {}
    for value in (*model.parameters(), *model.buffers()):
        kind = dtype if value.is_floating_point() and value.dtype != dtype else value.dtype
        other = value.detach().to(place, kind)
        memo[id(value)] = (
            nn.Parameter(other, requires_grad=False) if isinstance(value, nn.Parameter) else other
        )
    copied = copy.deepcopy(model, memo)
    copied.normalize = model.normalize if place is None else copied.normalize
    return copied


def tensors_of(model: PixelModel, *, copy: bool = True) -> dict[str, Tensor]:
    """Return the tensors for a checkpoint, by timm's names, without the normalisation, which the
    record holds.

    Args:
        copy: Copy them, for a model that will change.
    """
    tensors = {name: value.detach().cpu() for name, value in model.net.state_dict().items()}
    return {name: value.clone() for name, value in tensors.items()} if copy else tensors


def initialise(
    arch: str,
    arch_args: Mapping[str, Any],
    spec: InputSpec | None = None,
    classes: int | None = None,
    seed: int = 0,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> OpenCheckpoint:
    """Return a freshly initialised checkpoint; the same seed gives the same bytes.

    Without `spec` and `classes` they are the architecture's, with `mean` and `std` where given. The
    record names the shape that a new network of this name gets (`SHAPES`).
    """
    arch_args = {**SHAPES.get(arch, {}), **arch_args}
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        net = create(arch, arch_args, initialise=True)
    spec = spec or spec_of(net, size=input_size_of(net), mean=mean, std=std)
    record = Record(
        arch, arch_arguments(arch_args), spec, classes_of(net) if classes is None else classes
    )
    tensors = {name: value.detach() for name, value in net.state_dict().items()}
    for name, _ in net.named_buffers():
        if name in tensors and tensors[name].is_floating_point():
            # timm writes "clip nothing" as an infinite limit: no finite number exceeds the largest
            # one
            tensors[name] = tensors[name].nan_to_num(nan=math.nan)
    return with_network(Checkpoint(tensors, record), net)


def input_size_of(net: nn.Module) -> tuple[int, int, int] | None:
    """Return the input size, which `img_size` may set; None: only its configuration has it."""
    config = getattr(net, "pretrained_cfg", None) or {}
    size = getattr(getattr(net, "patch_embed", None), "img_size", None)
    expected = tuple(config.get("input_size") or ())
    if size is None or len(expected) != 3:
        return None
    first = next((part for part in net.modules() if isinstance(part, nn.Conv2d)), None)
    channels = expected[0] if first is None else first.in_channels
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return int(channels), int(height), int(width)


def classes_of(net: nn.Module) -> int:
    """Return the number of logits; 0 where the network does not state it."""
    return int(getattr(net, "num_classes", 0))


def spec_of(
    net: nn.Module,
    *,
    size: tuple[int, int, int] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> InputSpec:
    """Return the input, completed by timm's configuration; one value stands for all channels."""
    config = getattr(net, "pretrained_cfg", None) or {}
    input_size = size or tuple(config.get("input_size") or ())
    mean = mean or config.get("mean") or ()
    std = std or config.get("std") or ()
    raise_if(
        len(input_size) != 3 or not mean or not std,
        UsageError,
        "the architecture does not say its input size, mean or std",
        "give --mean and --std",
    )
    channels = int(input_size[0])
    mean, std = (tuple(values) * channels if len(values) == 1 else values for values in (mean, std))
    raise_if(
        not len(mean) == len(std) == channels,
        UsageError,
        f"mean and std have {len(mean)} and {len(std)} values for {channels} input channels",
        "give --mean and --std, one value or one a channel",
    )
    return InputSpec(
        size=(channels, int(input_size[1]), int(input_size[2])),
        mean=tuple(float(v) for v in mean),
        std=tuple(float(v) for v in std),
        interpolation=config.get("interpolation") or "bicubic",
        crop_pct=float(config.get("crop_pct") or 1.0),
    )
