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


def show_plan(
    checkpoint: "Checkpoint", settings: "AdaptSettings", bounds: bool, sink: Sink
) -> None:
    from dataclasses import asdict

    from certcli.adapt.preview import grouped, preview

    changes = preview(checkpoint, settings, bounds)
    sink.document(
        {
            "plan": [
                {"path": change.path, "from": change.before, "to": change.after}
                for change in changes.changes
            ],
            "before": asdict(changes.before),
            "after": asdict(changes.after),
        }
    )
    sink.table(
        "Plan: nothing was changed",
        ["modules", "count", "are", "become"],
        [
            (pattern, str(count), before, after)
            for pattern, count, before, after in grouped(changes.changes)
        ],
    )
    rows = [
        ("parameters", f"{changes.before.parameters:,}", f"{changes.after.parameters:,}"),
        (
            "multiply-adds an image",
            *(f"{cost.multiply_adds / 1e6:,.1f} M" for cost in (changes.before, changes.after)),
        ),
    ]
    if bounds:
        rows.append(
            (
                "Lipschitz bound",
                *(_power(cost.log10_upper) for cost in (changes.before, changes.after)),
            )
        )
    sink.table("Before and after surgery, before any fitting", ["", "before", "after"], rows)
    for name, cost in (("before", changes.before), ("after", changes.after)):
        if bounds and cost.log10_upper is None:
            sink.text(f"no bound {name}: {cost.why}")
    if settings.norm == "floor" and settings.norm_floor is None:
        sink.note(
            "floors are found on the calibration images; the bound after surgery counts them as 1"
        )


def _power(log10: float | None) -> str:
    return "inf" if log10 is None else power_of_ten(log10)
