"""Properties of a network that its tensors do not show, and files whose tensors fit two networks.

Heads, pooling, activation, eps and pixel statistics leave no trace in the shapes of tensors. Each
is reported with its origin. Where an argument departs from the architecture's default and the
tensors fit both, the file is refused until the user decides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from timm.models.vision_transformer import Block, ResPostBlock
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record
from certcli.models import build
from certcli.models.origins import Fact, Reading
from certcli.models.pixels import PixelModel
from certcli.models.weights import load_weights
from certcli.system.errors import ArchitectureError

OWN = "the architecture's own"
RECORD = "its record"

_ORDERS = {Block: "pre-norm", ResPostBlock: "norms at the branches' ends"}
"""The places of norms in timm's blocks of vision transformers: the same tensors fit blocks of both orders."""
_IMAGE_AND_CLASSES = frozenset(("num_classes", "in_chans", "img_size"))
_SAME = 0.01
"""Relative difference of logits up to which two readings are one network; eps 1e-5 in place of 1e-6 is far below."""

_ARGUMENTS = {
    "heads": ("num_heads",),
    "norm": ("norm_eps", "norm_layer"),
    "activation": ("act_layer",),
    "pooling": ("global_pool", "pool_include_prefix"),
}


def reading_of(
    net: nn.Module,
    record: Record,
    origins: Mapping[str, str],
    default: str = OWN,
    doubts: Iterable[str] = (),
) -> Reading:
    """Return the facts that reading this network rests on.

    Args:
        origins: The origin of an architecture's argument, of "architecture", "mean", "std" or
            "view".
        default: The origin of all others.
    """
    spec = record.input
    option_names = {
        name: next((origins[key] for key in keys if key in origins), default)
        for name, keys in _ARGUMENTS.items()
    }
    facts = [Fact("architecture", record.arch, origins.get("architecture", default))]
    facts += [Fact(name, value, option_names[name]) for name, value in invisible(net).items()]
    facts += [
        Fact("mean", _numbers_text(spec.mean), origins.get("mean", default)),
        Fact("std", _numbers_text(spec.std), origins.get("std", default)),
        Fact("images", image_preparation(spec), origins.get("view", default)),
    ]
    return Reading(tuple(facts), tuple(doubts))


def image_preparation(spec: InputSpec) -> str:
    """Return how images become pixels: "3x224x224 bicubic, crop 0.9"."""
    view = f"{'x'.join(map(str, spec.size))} {spec.interpolation}, crop {spec.crop_pct:g}"
    view += "" if spec.crop_mode == "center" else f" {spec.crop_mode}"
    if spec.resized is not None:
        view += f", resized to {'x'.join(map(str, spec.resized))} by the first layer"
    return view


def invisible(net: nn.Module) -> dict[str, str]:
    """Return what no tensor's shape shows: heads, norms' eps and place, activations, pooling."""
    properties: dict[str, list[str]] = {"heads": [], "norm": [], "activation": []}
    for path, module in net.named_modules():
        kind = type(module).__name__
        if isinstance(getattr(module, "num_heads", None), int):
            properties["heads"].append(str(module.num_heads))
        if "norm" in kind.lower() and not list(module.children()):
            eps = getattr(module, "eps", None)
            properties["norm"].append(f"{kind} eps {eps:g}" if isinstance(eps, float) else kind)
        last = path.rpartition(".")[2]
        if last.startswith("act") and not list(module.children()):
            properties["activation"].append(kind)
    shown = {
        name: " and ".join(dict.fromkeys(values)) or "none" for name, values in properties.items()
    }
    if properties["norm"]:
        kinds = {type(module) for module in net.modules()}
        shown["norm"] += "".join(f", {order}" for block, order in _ORDERS.items() if block in kinds)
    pooling = getattr(net, "global_pool", None)
    if isinstance(pooling, str):
        with_prefix = pooling != "token" and bool(getattr(net, "pool_include_prefix", False))
        shown["pooling"] = (pooling or "none") + (" of all tokens" if with_prefix else "")
    return shown


def statistics_doubts(net: nn.Module, record: Record) -> list[str]:
    """Return a sentence a pixel statistic, of a published network's size, that is not timm's."""
    pretrained = getattr(net, "pretrained_cfg", None) or {}
    if record.classes != pretrained.get("num_classes"):
        return []  # a head of one's own: trained on other images
    pairs = ((name, getattr(record.input, name), pretrained.get(name)) for name in ("mean", "std"))
    return [
        f"{name} {_numbers_text(value)} is not timm's own {_numbers_text(tuple(usual))} for {record.arch}"
        for name, value, usual in pairs
        if usual
        and len(usual) == len(value)
        and any(abs(a - b) > 5e-3 for a, b in zip(value, usual, strict=True))
    ]


def _numbers_text(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else " ".join(f"{value:g}" for value in values)


def rival(
    net: nn.Module, record: Record, tensors: Mapping[str, Tensor], names: Iterable[str]
) -> str | None:
    """Return why the tensors may belong to another network: they fit without the `given` arguments,
    with other logits.

    None where the tensors show the arguments, as those of a network that is not registered with its
    number of heads.
    """
    optional = set(names) - _IMAGE_AND_CLASSES
    if not optional:
        return None
    usual = replace(
        record,
        arch_args={key: value for key, value in record.arch_args.items() if key not in optional},
    )
    try:
        checkpoints = (
            build.with_network(Checkpoint(tensors, record), net),
            Checkpoint(tensors, usual),
        )
        nets = [build.own_network(each) for each in checkpoints]
        for each in nets:
            load_weights(each, tensors)
        pixels = torch.rand(2, *record.input.size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            here, there = (PixelModel(record.input, each).eval()(pixels).double() for each in nets)
        difference = float((here - there).norm() / there.norm().clamp_min(1e-300))
    except (ArchitectureError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None  # one of the two does not fit; loading shows whether the other runs
    if difference <= _SAME:
        return None
    first, second = (invisible(each) for each in nets)
    differ = [
        f"{name} {second.get(name, 'none')}" for name in first if first[name] != second.get(name)
    ]
    words = ", ".join(
        f"{key}={record.arch_args[key]}" for key in sorted(optional) if key in record.arch_args
    )
    difference_text = f" ({', '.join(differ)})" if differ else ""
    return (
        f"the tensors fit {record.arch} with {words} and without{difference_text} alike, and the logits of the two differ by "
        f"{100 * difference:.0f} %"
    )
