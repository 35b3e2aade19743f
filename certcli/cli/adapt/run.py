"""Run the two goals of `certvit adapt`, and show the trade between accuracy and the bound."""

import resource
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from certcli.adapt import fit, keep
from certcli.adapt.plan import plan
from certcli.adapt.settings import HEAD, AdaptSettings
from certcli.checkpoint import file, outputs
from certcli.cli.adapt.command import Mode
from certcli.cli.shared import fidelity, groups, inputs
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation import image_doubts, threat
from certcli.evaluation.fidelity import ReferenceLogits
from certcli.images import calibration, labelled
from certcli.lipschitz import bound, network
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system import errors, processes, reading

PARTS = "Adapted parts, with their relative output error on the calibration images"
PARTS_ALONE = "Adapted parts, with the change of the network's logits by each alone"

KEEP = 0.98
MOST_CHOOSING = 100
"""Most images that choose the changes: enough to tell 98 % from 93 %, in a third of the time that
all would take."""


MANY_CLASSES = 100
"""L2 attention kept 51 to 96 % of first choices of networks of 10 classes, and 5 of 79 right
answers of a ViT-Tiny."""

OLD_HEAD = (
    "training with --loss margin from the old head ended at chance (a ViT on digits, one on MNIST), "
    "from that of --head 128,128 it learnt: adapt with it first"
)
BRINGS_BACK = ("--loss", "ce", "--lr", "1e-5", "--clip-grad", "1")
"""Options of finetune with which 31 steps gave a ViT-Tiny 37 of 100 right answers; at --lr 1e-4 without clipping it fell to
chance."""


def say_training_follows(
    settings: AdaptSettings, classes: int, teach: Sequence[str], sink: Sink
) -> None:
    """Say early that the adapted network is only a start for training, or the goal does not fit.

    Args:
        teach: The words of the command that trains the output with its source as the teacher,
            without loss and steps.
    """
    if settings.goal != "certify":
        return
    if classes > MANY_CLASSES and settings.attention in ("l2", "l2-untied-value"):
        sink.warn(
            f"--goal certify does not suit {classes} classes: with L2 attention a ViT-Tiny kept 5 of 79 correct predictions. "
            f"Only training could recover them ({shlex.join([*teach, *BRINGS_BACK])}); --goal keep preserves them"
        )
    else:
        trained = shlex.join([*teach[:3], "--loss", "margin"])
        sink.note(f"--goal certify needs training afterwards: {trained}")


def with_head(checkpoint: file.Checkpoint, settings: AdaptSettings, sink: Sink) -> AdaptSettings:
    """Return the settings with a new head where --goal certify needs one and no option names it;
    where the network takes none, or has many classes, the head stays.
    """

    if settings.goal != "certify" or checkpoint.record.classes > MANY_CLASSES:
        return settings
    if settings.head is not None:
        if settings.widths is None:
            sink.warn(OLD_HEAD)
        return settings
    with_one = replace(settings, head=HEAD)
    try:
        plan(checkpoint, with_one)
    except errors.CertvitError:
        return settings
    widths = ",".join(map(str, HEAD))
    sink.note(f"--goal certify: a new head, --head {widths} (--head keep leaves the old one)")
    return with_one


def make_adapter(
    checkpoint: file.Checkpoint,
    settings: AdaptSettings,
    pixels: torch.Tensor,
    device: torch.device,
    choosing: labelled.Images | None,
) -> fit.Adapter | keep.Keeper:
    """Return the adapter that the settings need; `choosing`: images that judge further changes."""

    if settings.refit:
        return fit.Adapter(checkpoint, settings, pixels, device, processes.team())
    keeper = keep.Keeper(checkpoint, settings, pixels, device, processes.team())
    if choosing is not None and len(choosing):
        keeper.choose_by(
            ReferenceLogits(keeper.teacher, choosing.limit(MOST_CHOOSING, settings.seed))
            if processes.team().leads
            else None
        )
    return keeper


def run_adapter(
    adapter: fit.Adapter | keep.Keeper, state_path: Path, resume: bool, locks: ExitStack, sink: Sink
) -> None:
    """Run the adapter, saving each step, held by `held`; --goal keep is too quick for that."""

    if isinstance(adapter, keep.Keeper):
        if resume:
            sink.note("--goal keep saves no state: it starts again")
        with sink.progress("adapt", total=adapter.steps) as bar:
            for remark in adapter.run():
                bar.advance(remark=remark)
        return
    if processes.team().agree(lambda: resume and not reading.is_absent(state_path)):
        adapter.restore(state_path)
        sink.note(
            f"continuing after {adapter.records[-1].path if adapter.records else 'the start'}"
        )
    with sink.progress("adapt", total=adapter.steps) as bar:
        bar.advance(adapter.done)
        for record in adapter.run():
            if processes.team().leads:
                adapter.store(state_path)
                outputs.hold_state(state_path, locks)
            bar.advance(remark=f"{record.path}: error {percent(record.error)}")


def show_trade(trade: keep.Trade, sink: Sink) -> None:
    """Print the rungs; nothing where no parts were chosen."""
    if not trade.rungs:
        return
    first = trade.rungs[0].log10_upper
    if first is None:
        sink.note(
            "with floors alone the bound is not finite, so no other change was tried: see "
            "`certvit lipschitz`"
        )
        return
    sink.table(
        "The trade, on the images that chose (not those above): > marks the row taken",
        [
            *("", "floors raised", "log10 bound", "digits gained"),
            *("same top-1", "at least", "logit error"),
        ],
        [
            (
                ">" if rung.taken else "",
                str(rung.floors),
                "-"
                if rung.log10_upper is None
                else threat.power_of_ten(rung.log10_upper).removeprefix("10^"),
                "-" if rung.log10_upper is None else f"{first - rung.log10_upper:.1f}",
                f"{100 * rung.agreement:.1f} %",
                f"{100 * rung.agreement_at_least:.1f} %"
                if isinstance(rung.agreement_at_least, float)
                else "-",
                f"{100 * rung.error:.1f} %",
            )
            for rung in trade.rungs
        ],
    )


def write_adapted(
    source: groups.Source,
    settings: AdaptSettings,
    mode: Mode,
    data: groups.Calibration,
    machine: groups.BatchDevice,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Replace layers by Lipschitz layers: keep the predictions, or prepare for certified training."""

    sink = talk.sink()
    settings = replace(settings, batch_size=machine.batch_size, seed=data.seed)
    path = output.target("adapt", source.ckpt, source, data, mode, state=fit.KEY)
    state_path = inputs.path_beside(path, "state")
    checkpoint = source.open(sink)
    settings = with_head(checkpoint, settings, sink)
    teach = [
        "certvit",
        "finetune",
        str(path),
        "--teacher",
        source.ckpt,
        "--dataset",
        data.dataset or "DATASET",
    ]
    say_training_follows(settings, checkpoint.record.classes, teach, sink)
    plan(checkpoint, settings)  # refuses parts that cannot be replaced before any image is read
    images = data.images(checkpoint.record, sink)
    used, unseen = calibration.hold_out(images)
    if settings.keep is None and not settings.refit:
        real = len(unseen) and images.name != calibration.PHOTOGRAPHS
        settings = replace(settings, keep=KEEP if real else 1.0)
    learnt, choosing = (
        calibration.hold_out(used, 3)
        if settings.keep is not None and settings.keep < 1
        else (used, None)
    )
    pixels, _ = learnt.tensors()
    adapter = make_adapter(checkpoint, settings, pixels, machine.pick(), choosing)
    locks = ExitStack()
    if not processes.team().leads:
        run_adapter(adapter, state_path, mode.resume, locks, sink)
        proves = processes.team().rank == processes.team().size - 1
        processes.team().everyone(
            _bound_fields("upper_before", adapter.teacher, checkpoint) if proves else None
        )
        return
    reference = fidelity.measure_reference(
        adapter.teacher, used, unseen, checkpoint.record, machine.batch_size, sink
    )
    outputs.require_own_state(state_path, fit.KEY, adapter.identity, output.force or mode.resume)
    outputs.hold_state(state_path, locks)
    run_adapter(adapter, state_path, mode.resume, locks, sink)
    result = image_doubts.remember_images(
        adapter.result(), used
    )  # before the comparison: `result` folds norms
    end_to_end = fidelity.fidelity_document(
        reference,
        adapter.student,
        checkpoint.record,
        took_part=not len(unseen),
        refitted=settings.refit,
    )
    after = _bound_fields("upper_after", build.load(result, machine.pick()), checkpoint)
    before = processes.team().everyone(
        None
        if processes.team().several
        else _bound_fields("upper_before", adapter.teacher, checkpoint)
    )[-1]
    chosen = adapter.trade if isinstance(adapter, keep.Keeper) else keep.Trade()
    rungs = [to_builtins(rung) for rung in chosen.rungs]
    trade = {"trade": rungs} if rungs else {}
    output.write(
        result.with_evidence("adapt", {"calibration": images.name}, {**end_to_end, **trade}),
        path,
        mode.resume,
    )
    outputs.discard_state(state_path, fit.KEY, adapter.identity)
    unit = 1 if sys.platform == "darwin" else 1024
    memory = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sink.document(
        {
            "output": str(path),
            "kept": end_to_end,
            **before,
            **after,
            **trade,
            "options": [
                {
                    "path": tried.path,
                    "change": tried.change,
                    "digits": tried.digits,
                    "logits_error": tried.error,
                    "taken": chosen.placed.get(tried.path) is tried,
                }
                for tried in chosen.candidates
            ],
            "replaced": [
                {"path": r.path, "from": r.before, "to": r.after, "error": r.error}
                for r in adapter.records
            ],
            "peak_memory_bytes": memory,
        }
    )
    fidelity.show_fidelity(end_to_end, sink)
    sink.text(f"network's bound: {before['upper_before_text']} -> {after['upper_after_text']}")
    show_trade(chosen, sink)
    sink.table(
        PARTS if settings.refit else PARTS_ALONE,
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in adapter.records],
    )
    sink.text(f"wrote {path}; peak memory {memory / 2**30:.1f} GiB")


def _bound_fields(name: str, model: PixelModel, checkpoint: file.Checkpoint) -> dict[str, Any]:
    """Return the network's proven bound in the form of the document, under this name."""

    return bound.bound_document(network.prove_network(model, checkpoint.record.classes).upper, name)
