"""Tensors become the weights of a network, all of them and no others."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from certcli.checkpoint import mapped
from certcli.checkpoint.file import FLOATS, INTEGERS, Checkpoint
from certcli.models.converters.wrapping import first_names
from certcli.system.errors import ArchitectureError, UsageError, one_line

FITTING_HINT = "name the architecture with --arch (and --arch-arg key=value), or put timm's config.json beside the file"
"""The hint where nothing but the misfit is known."""


def load_weights(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    copy: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Set the weights of `net` to exactly these tensors; ArchitectureError names those that do not
    fit.

    Args:
        copy: Copy all tensors. Without it, the network shares those whose type need not change.
    """
    require_fitting(net, tensors)
    # half precision is widened, and single beside double. This is exact: bound and forward pass use
    # the same numbers
    double = any(value.dtype == torch.float64 for value in tensors.values())
    wide = dtype or (torch.float64 if double else torch.float32)
    dtypes = {
        name: wide if value.is_floating_point() else value.dtype for name, value in tensors.items()
    }
    copied = {name: value for name, value in tensors.items() if copy or value.dtype != dtypes[name]}
    net.load_state_dict({**tensors, **mapped.copies(copied, dtypes)}, strict=True, assign=True)


def require_fitting(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ArchitectureError unless `net` has exactly these tensors."""
    expected = net.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    shapes = [
        f"'{name}' is {tuple(tensors[name].shape)}, the architecture wants {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    problems = []
    if missing:
        problems.append(f"missing {first_names(missing)}")
    if surplus:
        problems.append(f"unexpected {first_names(surplus)}")
    problems += [
        f"'{name}' is {_value_kind(tensors[name])} where the architecture has {_value_kind(expected[name])} values"
        for name in sorted(expected.keys() & tensors.keys())
        if _value_kind(tensors[name]) != _value_kind(expected[name])
    ][:3]
    problems += shapes[:3] + ([f"and {len(shapes) - 3} more shapes"] if len(shapes) > 3 else [])
    if problems:
        raise ArchitectureError(
            f"architecture and tensors disagree: {'; '.join(problems)}",
            FITTING_HINT,
        )


def require_computed(net: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Raise ArchitectureError unless tensors that the network computes itself are, in the file,
    what it computes.

    A difference is allowed up to four roundings of the file's type, which logarithms may differ by.
    """
    buffers = dict(net.named_buffers())
    for name, value in stored.items():
        if name not in buffers:
            raise ArchitectureError(
                f"architecture and tensors disagree: unexpected '{one_line(name)}'"
            )
        expected = buffers[name].double().flatten()
        rounding = 4 * torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
        allowed = rounding * float(expected.abs().max()) if len(expected) else 0.0
        same = value.numel() == len(expected)
        if not (same and torch.allclose(value.double().flatten(), expected, rtol=0, atol=allowed)):
            raise ArchitectureError(
                f"'{one_line(name)}' is not the one that timm's network computes: another window, or an edited file"
            )


def _value_kind(tensor: Tensor) -> str:
    """Return the kind of a tensor's values; weights are floating, indices integer, masks boolean."""
    if tensor.dtype in FLOATS:
        return "floating"
    if tensor.dtype == torch.bool:
        return "boolean"
    return "integer" if tensor.dtype in INTEGERS else str(tensor.dtype).removeprefix("torch.")


def headless(source: str) -> ArchitectureError:
    return ArchitectureError(
        f"{one_line(source)} has no classifier: its network ends in features",
        "certvit lipschitz --features bounds them; other commands need a classifier: train one "
        "on the features with timm or transformers",
    )


def require_classifier(checkpoint: Checkpoint, source: str) -> None:
    """Raise ArchitectureError for a network that ends in features."""
    if not checkpoint.record.classes:
        raise headless(source)


def require_features(checkpoint: Checkpoint, source: str) -> None:
    """Raise UsageError for a network that ends in a classifier."""
    if checkpoint.record.classes:
        raise UsageError(
            f"{one_line(source)} has a classifier of {checkpoint.record.classes} classes, and --features is for networks "
            "without",
            "leave out --features",
        )
