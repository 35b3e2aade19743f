"""certvit adapt: replace parts of a vision transformer by Lipschitz parts."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from certcli.adapt.settings import AdaptSettings
from certcli.cli.adapt import run
from certcli.cli.shared import fidelity
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Source, Talk, beside
from certcli.cli.shared.inputs import say_wider
from certcli.cli.shared.output import percent
from certcli.system.options import option
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.models.pixels import PixelModel


@group()
class Mode:
    """Continue an interrupted run."""

    resume: bool = option(
        False, "Continue an interrupted run of the same command.", panel="Fitting"
    )


@command(
    "certvit adapt m.safetensors --dataset photos/ -o lipschitz.safetensors",
    "certvit adapt m.safetensors --goal certify --norm fold --activation maxmin --head 128,128",
    page="adapt.md",
    often=(
        "goal",
        "keep",
        "norm",
        "activation",
        "head",
        "epochs",
        "resume",
    ),
)
def adapt(
    source: Source,
    settings: AdaptSettings,
    mode: Mode = Mode(),
    data: Calibration = Calibration(limit=400),
    machine: BatchDevice = BatchDevice(batch_size=64),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Replace layers by Lipschitz layers: keep the predictions, or prepare for certified training."""
    from certcli.adapt.pixels import compact
    from certcli.adapt.plan import plan
    from certcli.adapt.state import KEY
    from certcli.checkpoint.outputs import discard_state, hold_state, require_own_state
    from certcli.evaluation.training_images import remember
    from certcli.images.calibration import hold_out
    from certcli.models import build

    sink = talk.sink()
    settings = replace(settings, batch_size=machine.batch_size, seed=data.seed)
    path = output.target("adapt", source.ckpt, source, data, mode, state=KEY)
    state_path = beside(path, "state")
    checkpoint = source.open(sink)
    settings = run.with_head(checkpoint, settings, sink)
    teach = [
        "certvit",
        "finetune",
        str(path),
        "--teacher",
        source.ckpt,
        "--dataset",
        data.dataset or "DATASET",
    ]
    run.say_training_follows(settings, checkpoint.record.classes, teach, sink)
    plan(checkpoint, settings)  # refuses parts that cannot be replaced before any image is read
    images = data.images(checkpoint.record, sink)
    used, unseen = hold_out(images)
    if settings.keep is None and not settings.refit:
        settings = replace(settings, keep=run.default_keep(images, unseen))
    learnt, choosing = (
        hold_out(used, 3) if settings.keep is not None and settings.keep < 1 else (used, None)
    )
    pixels = compact(batch for _, batch, _ in learnt.batches(32))
    adapter = run.make_adapter(checkpoint, settings, pixels, machine.pick(), choosing)
    locks = contextlib.ExitStack()
    if not team().leads:
        run.fit(adapter, state_path, mode.resume, locks, sink)
        proves = team().rank == team().size - 1
        team().everyone(_proven("upper_before", adapter.teacher, checkpoint) if proves else None)
        return
    reference = fidelity.measure_reference(
        adapter.teacher, used, unseen, checkpoint.record, machine.batch_size, sink
    )
    require_own_state(state_path, KEY, adapter.identity, output.force or mode.resume)
    hold_state(state_path, locks)
    run.fit(adapter, state_path, mode.resume, locks, sink)
    result = remember(adapter.result(), used)  # before the comparison: `result` folds norms
    end_to_end = fidelity.fidelity_document(
        reference,
        adapter.student,
        checkpoint.record,
        took_part=not len(unseen),
        refitted=settings.refit,
    )
    written = build.load(result, machine.pick())
    after = _proven("upper_after", written, checkpoint)
    before = team().everyone(
        None if team().several else _proven("upper_before", adapter.teacher, checkpoint)
    )[-1]
    trade = run.trade_document(adapter.trade)
    say_wider(checkpoint, result, sink)
    output.write(
        result.with_evidence("adapt", {"calibration": images.name}, {**end_to_end, **trade}),
        path,
        mode.resume,
    )
    discard_state(state_path, KEY, adapter.identity)
    memory = _peak_memory()
    sink.document(
        {
            "output": str(path),
            "kept": end_to_end,
            **before,
            **after,
            **trade,
            "options": [
                candidate.to_json(adapter.trade.placed) for candidate in adapter.trade.candidates
            ],
            "replaced": [
                {"path": r.path, "from": r.before, "to": r.after, "error": r.error}
                for r in adapter.records
            ],
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
    """Return the network's proven bound in the form of the document, under this name."""
    from certcli.lipschitz.bound import bound_document
    from certcli.lipschitz.network import prove

    return bound_document(prove(model, checkpoint.record.classes).upper, name)


def _peak_memory() -> int:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
