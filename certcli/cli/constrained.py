"""What `certvit constrain` chooses and reports: images held out, layers before and after, what did not converge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.output import Sink, percent
from certcli.cli.views import log10_or_none, number

if TYPE_CHECKING:
    from certcli.data import Images
    from certcli.models import PixelModel
    from certcli.provenance import Record

CONVERGED = 0.01
"""A layer whose norm may lie more than this share above the least possible one is named."""


def choose(model: "PixelModel", layers: Sequence[str], exclude: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(full paths to constrain, those among the chosen that cannot be and why)."""
    from fnmatch import fnmatch

    from torch import nn

    from certcli.constrain.layers import refusal
    from certcli.errors import UsageError

    paths, refused = [], {}
    for name, module in model.net.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        wanted = not layers or any(fnmatch(name, pattern) for pattern in layers)
        if wanted and not any(fnmatch(name, pattern) for pattern in exclude):
            reason = refusal(module)
            if reason is None:
                paths.append(f"net.{name}" if name else "net")
            else:
                refused[name] = reason
    if not paths:
        raise UsageError("no layer is left to constrain", "see --layers and --exclude; `certvit lipschitz --layers`")
    return paths, refused


def split(images: "Images") -> tuple["Images", "Images"]:
    """(to calibrate on, held out): every fifth image is held out, for the order is by class in many datasets."""
    held_out = set(range(0, len(images), 5)) if len(images) >= 10 else set()
    return images.select([row for row in range(len(images)) if row not in held_out]), images.select(sorted(held_out))


def accuracy(model: "PixelModel", images: "Images", record: "Record") -> float | None:
    """Clean accuracy where the calibration images have the network's labels."""
    import torch

    from certcli import data
    from certcli.errors import DataError

    try:
        labelled = data.require_classes(images, record.classes, record.class_names)
    except DataError:
        return None
    if record.dataset is None and labelled.name == "digits":
        return None  # the default images: their ten labels are not those of a foreign network
    right, device = 0, next(model.parameters()).device
    with torch.no_grad():
        for _, pixels, labels in labelled.batches(64):
            right += int((model(pixels.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(labelled) if len(labelled) else None


def document(
    path: Path, before: Any, after: Any, clean_before: float | None, clean_after: float | None, results: Sequence[Any]
) -> dict[str, Any]:
    """The JSON report. primal_residual, gap: how far from converged; error: see distance."""
    return {
        "output": str(path),
        "upper_before": number(before),
        "upper_after": number(after),
        "log10_upper_before": log10_or_none(before),
        "log10_upper_after": log10_or_none(after),
        "clean_before": clean_before,
        "clean_after": clean_after,
        "layers": [
            {
                "path": short(r.path),
                "kind": r.kind,
                "before": r.before,
                "after": r.after,
                "error": r.error,
                "held_out_error": r.held_out_error,
                "distance": r.distance,
                "eta": r.eta,
                "iterations": r.iterations,
                "primal_residual": r.primal_residual,
                "gap": r.gap,
                "feasible": r.feasible,
                "rank": r.rank,
                "ridge": r.ridge,
                "seconds": r.seconds,
            }
            for r in results
        ],
    }


def table(title: str, results: Sequence[Any], sink: Sink) -> None:
    sink.table(
        title,
        ["layer", "before", "after", "error", "held out", "iterations", "residual", "gap", "s"],
        [
            (
                short(r.path) + (" (relu)" if r.distance == "relu" else ""),
                f"{r.before:.4g}",
                f"{r.after:.4g}",
                percent(r.error) + ("" if r.feasible else " infeasible"),
                percent(r.held_out_error),
                str(r.iterations),
                f"{r.primal_residual:.0e}",
                "-" if r.gap is None else f"{100 * r.gap:.2g} %",
                f"{r.seconds:.2f}",
            )
            for r in results
        ],
    )


def remarks(results: Sequence[Any], absent: Sequence[str], refused: Mapping[str, str], sink: Sink) -> None:
    """Everything about the layers that a reader of the table must know."""
    if absent:
        sink.warn(f"never called as a module, hence unchanged: {', '.join(map(short, absent))}")
    for path, reason in refused.items():
        sink.warn(f"left as it is: {short(path)}: {reason}")
    thin = [short(r.path) for r in results if r.ridge > 0]
    if thin:
        sink.note(
            f"fewer independent inputs than width in {_some(thin)}: regularised "
            f"(a ridge of {max(r.ridge for r in results):g} of the mean eigenvalue); more, or more varied, images help"
        )
    slow = [short(r.path) for r in results if r.gap is not None and r.gap > CONVERGED]
    if slow:
        sink.note(f"stopped with the norm possibly over 1 % above the least in {_some(slow)}: --iterations for more")
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


def plot(found: Mapping[str, Any], results: Sequence[Any], path: Path, sink: Sink) -> None:
    from certcli.report.pareto import draw_curves

    draw_curves(
        {short(name): [(point.error, point.norm) for point in curve] for name, curve in found.items()},
        {short(r.path): (r.error, r.after) for r in results},
        path,
    )
    sink.note(f"wrote {path}")
