"""certvit adapt: a vision transformer becomes Lipschitz-continuous, and keeps what it knew or is ready to be trained."""

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


@group("Surgery")
class Surgery:
    """What takes the place of what."""

    goal: Annotated[
        str,
        typer.Option(help="keep: the network keeps its answers; certify: parts for training against the bound."),
    ] = "keep"
    keep: Annotated[
        float | None,
        typer.Option(
            help="Of --goal keep: share of first choices to keep while more is changed for a lower bound, on images that "
            "choose. 0.98 with --dataset; else 1, which changes norms alone."
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


@group("Fitting")
class Fitting:
    """How the new parts learn what the old ones did."""

    epochs: Annotated[
        int | None,
        typer.Option(
            min=-1, help="AdamW epochs a block; 0: closed forms only; -1: no images. 3, or 0 where only norms change."
        ),
    ] = None
    distill: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs on the old network's logits, at the end; 5, or 0 without --epochs."),
    ] = None
    lr: Annotated[float, typer.Option(help="Learning rate, relative to the size of each tensor.")] = 5e-3
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")] = False


@group()
class Plan:
    """A look before the leap."""

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
    plan: Plan = Plan(),
    data: Calibration = Calibration(limit=400),
    machine: Machine = Machine(batch_size=64),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Put Lipschitz parts in the place of others: the network keeps its answers, or is made ready for certified training."""
    from certcli.adapt.pixels import compact
    from certcli.adapt.plan import plan as replacements
    from certcli.adapt.state import KEY
    from certcli.checkpoint.outputs import discard_state, require_own_state
    from certcli.cli.adapt.dry_run import open_for_plan, show_plan
    from certcli.evaluation.seen import remember
    from certcli.images.calibration import hold_out
    from certcli.models import build

    sink = talk.sink()
    settings = _settings(surgery, fitting, machine.batch_size, data.seed)
    run.check(surgery.keep, settings)
    if plan.dry_run:
        show_plan(open_for_plan(source, data.seed, sink), settings, plan.bounds, sink)
        return
    path = output.target("adapt", source.ckpt, source, data, state=KEY)
    state_path = beside(path, "state")
    checkpoint = source.open(sink)
    replacements(checkpoint.record, settings)  # what cannot be replaced is refused before any image is read
    images = data.images(checkpoint.record, sink)
    seen, unseen = hold_out(images)
    keep = run.usual_share(settings, images, unseen) if surgery.keep is None else surgery.keep
    learnt, choosing = hold_out(seen, 3) if keep < 1 else (seen, None)
    pixels = compact(batch for _, batch, _ in learnt.batches(256))
    adapter = run.begin(checkpoint, settings, pixels, machine.pick(), keep, choosing)
    if not team().leads:
        run.fit(adapter, state_path, fitting.resume, sink)
        proves = team().rank == team().size - 1
        team().everyone(_proven("upper_before", adapter.teacher, checkpoint) if proves else None)
        return
    witness = fidelity.witness(adapter.teacher, seen, unseen, checkpoint.record, machine.batch_size, sink)
    require_own_state(state_path, KEY, adapter.identity, output.force or fitting.resume)
    run.fit(adapter, state_path, fitting.resume, sink)
    result = remember(
        adapter.result(), seen
    )  # first: it folds norms, and what is told is of the network as it is written
    end_to_end = fidelity.told(witness, adapter.student, checkpoint.record, took_part=not len(unseen))
    written = build.load(result, machine.pick())  # as whoever reads the file will have it
    after = _proven("upper_after", written, checkpoint)
    before = team().everyone(None if team().several else _proven("upper_before", adapter.teacher, checkpoint))[-1]
    trade = run.trade_document(adapter)
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
            "options": run.options_document(adapter),
            "replaced": parts,
            "peak_memory_bytes": memory,
        }
    )
    fidelity.show(end_to_end, sink)
    sink.text(f"network's bound: {before['upper_before_text']} -> {after['upper_after_text']}")
    run.show_trade(adapter, sink)
    sink.table(
        run.PARTS if settings.refit else run.PARTS_ALONE,
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in adapter.records],
    )
    sink.text(f"wrote {path}; peak memory {memory / 2**30:.1f} GiB")


def _proven(name: str, model: "PixelModel", checkpoint: "Checkpoint") -> dict[str, Any]:
    """The network's proven bound as the document has it, under this name."""
    from certcli.lipschitz.bound import bound_document
    from certcli.lipschitz.network import prove

    return bound_document(prove(model, checkpoint.record.classes).upper, name)


def _settings(surgery: Surgery, fitting: Fitting, batch_size: int, seed: int) -> "AdaptSettings":
    from certcli.adapt.settings import settings_for

    return settings_for(
        surgery.goal,
        attention=surgery.attention,
        norm=surgery.norm,
        residual=surgery.residual,
        activation=surgery.activation,
        head=_widths(surgery.head),
        epochs=fitting.epochs,
        distill=fitting.distill,
        lr=fitting.lr,
        batch_size=batch_size,
        seed=seed,
        norm_floor=surgery.norm_floor,
    )


def _peak_memory() -> int:
    """Bytes that this process held at most."""
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
