"""certvit adapt: replace parts of a vision transformer by Lipschitz parts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli.adapt import run
from certcli.cli.shared import fidelity
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Calibration, Machine, Output, Source, Talk, beside
from certcli.cli.shared.inputs import say_wider
from certcli.cli.shared.output import percent
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.adapt.settings import AdaptSettings
    from certcli.checkpoint.file import Checkpoint
    from certcli.models.build import PixelModel


@group("Fitting")
class Fitting:
    """How the new parts are fitted to the old ones."""

    epochs: Annotated[
        int | None,
        typer.Option(
            min=-1, help="AdamW epochs a block; 0: closed forms only; -1: no images. 3, or 0 where only norms change."
        ),
    ] = None
    distill: Annotated[
        int | None,
        typer.Option(min=0, help="Final epochs on the old network's logits; 5, or 0 without --epochs."),
    ] = None
    lr: Annotated[float, typer.Option(help="Learning rate, relative to the size of each tensor.")] = 5e-3
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")] = False


@group("Surgery")
class Surgery:
    """Which parts are replaced, and by which parts."""

    goal: Annotated[
        str,
        typer.Option(help="keep: the network keeps its answers; certify: parts for training against the bound."),
    ] = "keep"
    keep: Annotated[
        float | None,
        typer.Option(
            help="With --goal keep: share of first choices to keep while more parts change for a lower bound. 0.98 with "
            "--dataset; else 1, which changes norms alone."
        ),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(help="l2 (Kim et al., tied), l2-untied-value, scsa, lnorm, conv, orthogonal; keep or dp."),
    ] = None
    norm: Annotated[
        str | None,
        typer.Option(
            help="center, floor (LayerNorm above a floor), fold (center, multiplied into the next map), keep."
        ),
    ] = None
    norm_floor: Annotated[
        float | None, typer.Option(help="Floor of --norm floor. Default: each layer's 5 % quantile on the images.")
    ] = None
    residual: Annotated[str | None, typer.Option(help="convex: (1-t)x + t f; weighted: x + a f; or keep.")] = None
    activation: Annotated[str, typer.Option(help="keep, or of slope 1: relu, maxmin (loses no gradient norm).")] = (
        "keep"
    )
    head: Annotated[
        str | None, typer.Option(help="'flat', or widths such as 128,128: tokens side by side into a MaxMin MLP.")
    ] = None

    def settings(self, fitting: Fitting, batch_size: int, seed: int) -> "AdaptSettings":
        """Return the core's settings: named options win over the goal, and then the new parts are fitted."""
        from certcli.adapt.settings import EPOCHS, settings_for

        goal = settings_for(self.goal)
        chosen = replace(
            goal,
            attention=goal.attention if self.attention is None else self.attention,
            norm=goal.norm if self.norm is None else self.norm,
            residual=goal.residual if self.residual is None else self.residual,
            activation=self.activation,
            head=_widths(self.head),
            epochs=EPOCHS if fitting.epochs is None else fitting.epochs,
            distill=fitting.distill,
            lr=fitting.lr,
            batch_size=batch_size,
            seed=seed,
            norm_floor=self.norm_floor,
            refit=True,
        )
        if not goal.refit and chosen.only_floors and fitting.epochs is None and self.norm_floor is None:
            return replace(chosen, epochs=0, refit=False)
        return chosen


@group()
class PlanOptions:
    """Show the plan without carrying it out."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with parameters, multiply-adds and bounds, and stop.")
    ] = False
    bounds: Annotated[bool, typer.Option("--bounds/--no-bounds", help="Prove bounds for the plan.")] = True


@command(
    "certvit adapt m.safetensors --dry-run",
    "certvit adapt m.safetensors --dataset photos/ -o lipschitz.safetensors",
    "certvit adapt m.safetensors --goal certify --norm fold --activation maxmin --head 128,128",
    page="adapt.md",
)
def adapt(
    source: Source,
    surgery: Surgery = Surgery(),
    fitting: Fitting = Fitting(),
    plan: PlanOptions = PlanOptions(),
    data: Calibration = Calibration(limit=400),
    machine: Machine = Machine(batch_size=64),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Replace parts by Lipschitz parts: keep the network's answers, or prepare it for certified training."""
    from certcli.adapt.pixels import compact
    from certcli.adapt.plan import plan as replacements
    from certcli.adapt.state import KEY
    from certcli.checkpoint.outputs import discard_state, require_own_state
    from certcli.cli.adapt.dry_run import open_for_plan, show_plan
    from certcli.evaluation.seen import remember
    from certcli.images.calibration import hold_out
    from certcli.models import build

    sink = talk.sink()
    settings = surgery.settings(fitting, machine.batch_size, data.seed)
    run.check(surgery.keep, settings)
    if plan.dry_run:
        show_plan(open_for_plan(source, data.seed, sink), settings, plan.bounds, sink)
        return
    path = output.target("adapt", source.ckpt, source, data, state=KEY)
    state_path = beside(path, "state")
    checkpoint = source.open(sink)
    replacements(checkpoint, settings)  # refuses parts that cannot be replaced before any image is read
    images = data.images(checkpoint.record, sink)
    seen, unseen = hold_out(images)
    keep = run.default_keep(settings, images, unseen) if surgery.keep is None else surgery.keep
    learnt, choosing = hold_out(seen, 3) if keep < 1 else (seen, None)
    pixels = compact(batch for _, batch, _ in learnt.batches(256))
    adapter = run.begin(checkpoint, settings, pixels, machine.pick(), keep, choosing)
    if not team().leads:
        run.fit(adapter, state_path, fitting.resume, sink)
        proves = team().rank == team().size - 1
        team().everyone(_proven("upper_before", adapter.teacher, checkpoint) if proves else None)
        return
    reference = fidelity.measure_reference(adapter.teacher, seen, unseen, checkpoint.record, machine.batch_size, sink)
    require_own_state(state_path, KEY, adapter.identity, output.force or fitting.resume)
    run.fit(adapter, state_path, fitting.resume, sink)
    result = remember(adapter.result(), seen)  # before the comparison: `result` folds norms
    end_to_end = fidelity.fidelity_document(reference, adapter.student, checkpoint.record, took_part=not len(unseen))
    written = build.load(result, machine.pick())
    after = _proven("upper_after", written, checkpoint)
    before = team().everyone(None if team().several else _proven("upper_before", adapter.teacher, checkpoint))[-1]
    trade = run.trade_document(adapter.trade)
    say_wider(checkpoint, result, sink)
    output.write(result.with_evidence("adapt", {"calibration": images.name}, {**end_to_end, **trade}), path)
    discard_state(state_path, KEY, adapter.identity)
    parts = [{"path": r.path, "from": r.before, "to": r.after, "error": r.error} for r in adapter.records]
    memory = _peak_memory()
    sink.document(
        {
            "output": str(path),
            "kept": end_to_end,
            **before,
            **after,
            **trade,
            "options": [option.to_json(adapter.trade.placed) for option in adapter.trade.options],
            "replaced": parts,
            "peak_memory_bytes": memory,
        }
    )
    fidelity.show(end_to_end, sink)
    sink.text(f"network's bound: {before['upper_before_text']} -> {after['upper_after_text']}")
    run.show_trade(adapter.trade, sink)
    sink.table(
        run.PARTS if settings.refit else run.PARTS_ALONE,
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in adapter.records],
    )
    sink.text(f"wrote {path}; peak memory {memory / 2**30:.1f} GiB")


def _proven(name: str, model: "PixelModel", checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the network's proven bound, as the document holds it under this name."""
    from certcli.lipschitz.bound import bound_document
    from certcli.lipschitz.network import prove

    return bound_document(prove(model, checkpoint.record.classes).upper, name)


def _peak_memory() -> int:
    """Return the most bytes that this process held."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def _widths(head: str | None) -> tuple[int, ...] | None:
    from certcli.system.errors import UsageError

    if head is None or head == "keep":
        return None
    if head == "flat":
        return ()
    try:
        widths = tuple(int(part) for part in head.replace(",", " ").split())
    except ValueError:
        widths = ()
    if not widths or any(width < 2 or width % 2 for width in widths):
        raise UsageError(f"--head '{head}' is neither keep, flat nor even widths", "--head flat, or --head 128,128")
    return widths
