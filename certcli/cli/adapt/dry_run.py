"""`certvit adapt --dry-run`: the changes of surgery and their costs; nothing is fitted."""

from typing import TYPE_CHECKING

from certcli.cli.shared.output import Sink
from certcli.evaluation.radii import power_of_ten
from certcli.system.reading import is_absent

if TYPE_CHECKING:
    from certcli.adapt.settings import AdaptSettings
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.shared.groups import Source


def open_for_plan(source: "Source", seed: int, sink: Sink) -> "Checkpoint":
    """Return a checkpoint; a timm name gets random weights, because a plan needs no download."""
    from pathlib import Path

    import certcli.system.compat  # noqa: F401

    # isort: split
    import timm

    from certcli.models.build import initialise

    if not is_absent(Path(source.ckpt)) or not timm.is_model(source.ckpt):
        return source.open(sink)
    sink.note("nothing is downloaded for a plan: the bounds are those of random weights")
    source_hints = source.hints()
    return initialise(
        source.ckpt, source_hints.arch_args, seed=seed, mean=source_hints.mean, std=source_hints.std
    )


def show_plan(checkpoint: "Checkpoint", settings: "AdaptSettings", sink: Sink) -> None:
    from certcli.adapt.preview import grouped, preview

    document = preview(checkpoint, settings)
    sink.document(document)
    columns = ["modules", "count", "are", "become"]
    sink.table("Plan: nothing was changed", columns, grouped(document["plan"]))
    costs = [document["before"], document["after"]]
    rows = [
        ("parameters", *(f"{cost['parameters']:,}" for cost in costs)),
        ("multiply-adds an image", *(f"{cost['multiply_adds'] / 1e6:,.1f} M" for cost in costs)),
        ("Lipschitz bound", *(_power(cost["log10_upper"]) for cost in costs)),
    ]
    sink.table("Before and after surgery, before any fitting", ["", "before", "after"], rows)
    for name in ("before", "after"):
        if document[name]["log10_upper"] is None:
            sink.text(f"no bound {name}: {document[name]['why']}")
    if settings.norm == "floor":
        sink.note(
            "floors are found on the calibration images; the bound after surgery counts them as 1"
        )


def _power(log10: float | None) -> str:
    return "inf" if log10 is None else power_of_ten(log10)
