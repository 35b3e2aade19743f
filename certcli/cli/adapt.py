"""certvit adapt: a ViT, DeiT, Swin or ConViT becomes Lipschitz-continuous and keeps what it knew."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli import kept
from certcli.cli.command import command, group
from certcli.cli.groups import Calibration, Machine, Output, Source, Talk, beside
from certcli.cli.output import Sink, percent, stated

if TYPE_CHECKING:
    from certcli.adapt.run import Adapter
    from certcli.adapt.settings import AdaptSettings


@group("Surgery")
class Surgery:
    """What takes the place of what."""

    goal: Annotated[
        str,
        typer.Option(help="keep: the network answers as it did; certify: parts for training against the bound."),
    ] = "keep"
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
        float | None, typer.Option(help="Floor of --norm floor; by default each layer's 5 % quantile on the images.")
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")] = False


@group()
class Plan:
    """A look before the leap."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with parameters, multiply-adds and bounds, and stop.")
    ] = False
    bounds: Annotated[bool, typer.Option("--bounds/--no-bounds", help="Bounds in the plan.")] = True


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
    """Turn a ViT, DeiT, Swin or ConViT into a Lipschitz-continuous one, block by block, fitted to the old one's outputs."""
    from certcli.adapt.pixels import compact
    from certcli.adapt.run import Adapter
    from certcli.adapt.state import KEY
    from certcli.calibration import hold_out
    from certcli.cli.dry_run import open_for_plan, show_plan
    from certcli.lipschitz.network import prove
    from certcli.outputs import discard_state, require_own_state

    sink = talk.sink()
    settings = _settings(surgery, fitting, machine.batch_size, data.seed)
    if plan.dry_run:
        show_plan(open_for_plan(source, data.seed, sink), settings, plan.bounds, sink)
        return
    path = output.target("adapt", source.ckpt, source, data, state=KEY)
    state_path = beside(path, "state")
    checkpoint = source.open(sink)
    images = data.images(checkpoint.record, sink)
    seen, unseen = hold_out(images)
    pixels = compact(batch for _, batch, _ in seen.batches(256))
    adapter = Adapter(checkpoint, settings, pixels, machine.pick())
    witness = kept.witness(adapter.teacher, seen, unseen, checkpoint.record, machine.batch_size, sink)
    require_own_state(state_path, KEY, adapter.identity, output.force or fitting.resume)
    _fit(adapter, state_path, fitting.resume, sink)
    result = adapter.result()  # first: it folds norms, and what is told is of the network as it is written
    end_to_end = kept.told(witness, adapter.student, checkpoint.record, took_part=not len(unseen))
    before, after = (prove(model, checkpoint.record.classes).upper for model in (adapter.teacher, adapter.student))
    result.with_evidence("adapt", {"calibration": images.name}, end_to_end).write(path, output.force)
    discard_state(state_path, KEY, adapter.identity)
    parts = [{"path": r.path, "from": r.before, "to": r.after, "error": r.error} for r in adapter.records]
    memory = _peak_memory()
    sink.document(
        {
            "output": str(path),
            "kept": end_to_end,
            **stated("upper_before", before),
            **stated("upper_after", after),
            "replaced": parts,
            "peak_memory_bytes": memory,
        }
    )
    kept.show(end_to_end, sink)
    sink.text(f"network's bound: {before} -> {after}")
    sink.table(
        "Adapted parts, with their relative output error on the calibration images",
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in adapter.records],
    )
    sink.text(f"wrote {path}; peak memory {memory / 2**30:.1f} GiB")


def _fit(adapter: "Adapter", state_path: Path, resume: bool, sink: Sink) -> None:
    """Block by block, each one saved, so that an interrupted run can be gone on with."""
    from certcli.adapt.state import load_state, save_state

    if resume and state_path.exists():
        adapter.restore(load_state(state_path, adapter.identity))
        sink.note(f"going on after {adapter.records[-1].path if adapter.records else 'the start'}")
    with sink.progress("adapt", total=adapter.steps) as bar:
        bar.advance(adapter.steps_done)
        for record in adapter.run():
            save_state(state_path, adapter.state())
            bar.advance(remark=f"{record.path}: error {percent(record.error)}")


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
    from certcli.errors import UsageError

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
