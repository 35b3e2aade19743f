"""The layers that `certvit constrain` chooses, and its report on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink, percent
from certcli.lipschitz.bound import bound_document

if TYPE_CHECKING:
    from certcli.models.pixels import PixelModel

CONVERGED = 0.01
"""A layer whose norm may lie more than this share above the least possible one is named."""


def choose(model: "PixelModel", layers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the paths of the layers to constrain, and the chosen ones that cannot be, and why."""
    from fnmatch import fnmatch

    from torch import nn

    from certcli.constrain.layers import refusal
    from certcli.system.errors import UsageError

    paths = []
    refused = {}
    for name, module in model.net.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        included = not layers or any(fnmatch(name, pattern) for pattern in layers)
        if included:
            reason = refusal(module)
            if reason is None:
                paths.append(f"net.{name}" if name else "net")
            else:
                refused[name] = reason
    if not paths:
        raise UsageError(
            "no layer is left to constrain",
            "see --layers; `certvit lipschitz --layers`",
        )
    return paths, refused


def document(
    path: Path, before: Any, after: Any, fidelity: Mapping[str, Any], results: Sequence[Any]
) -> dict[str, Any]:
    """Return the JSON report. kept: the comparison end to end."""
    fields = (
        *("kind", "before", "after", "error", "held_out_error", "eta", "iterations"),
        *("primal_residual", "gap", "feasible", "rank", "ridge", "seconds"),
    )
    return {
        "output": str(path),
        "kept": dict(fidelity),
        **bound_document(before, "upper_before"),
        **bound_document(after, "upper_after"),
        "clean_before": fidelity["accuracy_before"],
        "clean_after": fidelity["accuracy_after"],
        "layers": [
            {"path": short(r.path), **{name: getattr(r, name) for name in fields}} for r in results
        ],
    }


def table(title: str, results: Sequence[Any], sink: Sink) -> None:
    """Print a row for each layer; a gap below a tenth of a percent counts as none."""
    sink.table(
        title,
        ["layer", "before", "after", "error", "on others", "iterations", "gap"],
        [
            (
                short(r.path),
                f"{r.before:.4g}",
                f"{r.after:.4g}",
                percent(r.error) + ("" if r.feasible else " infeasible"),
                percent(r.held_out_error),
                str(r.iterations),
                "-" if r.gap is None else "< 0.1 %" if r.gap < 0.001 else percent(r.gap),
            )
            for r in results
        ],
    )


def remarks(
    results: Sequence[Any], absent: Sequence[str], refused: Mapping[str, str], sink: Sink
) -> None:
    """Name layers that did not change, lack images, did not converge, or have a surrogate norm."""
    if absent:
        sink.warn(f"never called as a module, hence unchanged: {', '.join(map(short, absent))}")
    for path, reason in refused.items():
        sink.warn(f"left as it is: {short(path)}: {reason}")
    thin = [short(r.path) for r in results if r.rank < r.inputs]
    if thin:
        sink.note(
            f"fewer independent inputs than width in {_some(thin)}: more, or more varied, images help"
        )
    slow = [short(r.path) for r in results if r.gap is not None and r.gap > CONVERGED]
    if slow:
        sink.note(f"stopped with the norm possibly over 1 % above the least in {_some(slow)}")
    windows = [short(r.path) for r in results if r.surrogate]
    if windows:
        sink.note(
            f"windows overlap in {_some(windows)}: the norm of the reshaped kernel was minimised; before and after are "
            "proven for the convolution itself"
        )


def short(path: str) -> str:
    return path.removeprefix("net.")


def _some(paths: Sequence[str]) -> str:
    return f"{len(paths)} layer{'s' if len(paths) > 1 else ''} ({paths[0]}{', ...' if len(paths) > 1 else ''})"
