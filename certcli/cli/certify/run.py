"""What `certify` does between options and result: demand, methods, certificates."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import typer

from certcli.certify import certificate, method_choice, methods
from certcli.certify.options import CertifierOptions
from certcli.checkpoint.file import Checkpoint
from certcli.cli.certify import command, demands, query, view
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.records import (
    RecordBatch,
    RecordFile,
    compute_again,
    digested,
)
from certcli.evaluation.threat import Threat, attacked_radius, one_norm
from certcli.images.labelled import Images
from certcli.system import errors, processes


@dataclass(frozen=True)
class CertifyTask:
    """A network, its images, and the threats of one norm at which shares are shown."""

    checkpoint: Checkpoint
    images: Images
    threats: Sequence[Threat]
    demand: demands.CertifiedDemand


def choose_methods(
    task: CertifyTask, options: command.CertifyOptions, sink: Sink
) -> method_choice.MethodChoice:
    """Return the methods as named; for `auto` the one worth having, whose reason is shown."""
    first, *others = options.target.methods
    if first != demands.AUTO:
        return method_choice.MethodChoice(first, "", tuple(others))
    smallest = next((threat.radius for threat in task.threats if threat.radius > 0), 0.25)
    machine = options.machine
    choice = method_choice.choose_method(
        task.checkpoint, machine.pick(), task.images, smallest, machine.batch_size
    )
    sink.text(f"--method {choice.method}: {choice.reason}")
    return choice


def run_all(
    choice: method_choice.MethodChoice,
    task: CertifyTask,
    options: command.CertifyOptions,
    sink: Sink,
) -> list[view.Result]:
    """Certify by each method that says something. None where another process leads."""
    results: list[view.Result] = []
    for method in (choice.method, *choice.others):
        try:
            result = _certify_by(method, choice, task, options, sink)
        except errors.NoBoundError as failure:
            # gate and document speak of the first: no other may stand in its place
            if method == choice.method:
                raise
            sink.warn(f"skipped {method}: {failure.message}")
        else:
            results += [result] if result is not None else []
    return results


def _method_options(
    method: str, task: CertifyTask, options: command.CertifyOptions
) -> CertifierOptions | None:
    if method == "local":  # the radii of -e are decided, others searched
        asked = [threat.radius for threat in task.threats if threat.radius > 0]
        return replace(
            options.local,
            at=asked if options.decides else options.local.at,
            arithmetic=options.proof.arithmetic,
        )
    if method in demands.PROVING:
        return options.proof
    if method == "smoothing":
        return replace(
            options.smoothing, seed=options.data.seed, batch_size=options.machine.batch_size
        )
    return options.patches if method == "patch" else None


def _certify_by(
    method: str,
    choice: method_choice.MethodChoice,
    task: CertifyTask,
    options: command.CertifyOptions,
    sink: Sink,
) -> view.Result | None:
    """Certify all images by a method, records written at once; None where another leads.

    Of the records that were read instead, those that the demand rests on are computed again.
    """
    images = task.images
    demand = task.demand
    batch_size = options.machine.batch_size
    certifier = choice.ready.get(method)
    if certifier is None or (method == "local" and options.decides):
        chosen = _method_options(method, task, options)
        certifier = methods.prepare_method(
            method,
            task.checkpoint,
            options.machine.pick_for(getattr(chosen, "arithmetic", None)),
            chosen,
        )
    assert one_norm(task.threats) == certifier.norm, f"{method} certifies in {certifier.norm}"
    _require_reach(certifier, task.threats, demand, sink)
    if certifier.reading:
        sink.note(certifier.reading)
    if not processes.team().leads:
        list(methods.certify_images(certifier, images, batch_size, team=processes.team()))
        return None
    rows: list[certificate.Certificate] = []
    first = method == choice.method  # a file holds the records of the first method
    records, resume = (options.target.records, options.target.resume) if first else (None, False)
    with RecordFile(
        records,
        methods.certify_run(certifier, task.checkpoint, images),
        images,
        resume=resume,
        force=options.output.force,
        network=sink.network,
    ) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        new_images = (
            len(images) - file.earlier + processes.team().size - 1
        ) // processes.team().size
        cost = (
            "" if sink.quiet else certifier.expected(new_images, task.checkpoint.record.input.size)
        )
        if cost:
            sink.note(f"{method}: {cost}")
        started = time.perf_counter()
        with sink.progress(f"certify ({method})", total=len(images), done=file.earlier) as bar:
            certifier.within = bar.within
            for batch in methods.certify_images(
                certifier, images, batch_size, file, processes.team()
            ):
                rows += batch
                bar.advance(len(batch))
    spent = time.perf_counter() - started
    resumed = None
    if file.taken:
        claims = rows[: file.taken]
        resumed = compute_again(
            [RecordBatch(1, int(claim.holds_at(demand.threat))) for claim in claims],
            partial(methods.disagreements, certifier, claims, images, batch_size, str(records)),
            gate=demand.share > 0,
            every=demand.every,
        )
    accuracy = certificate.certified_accuracy(rows, task.threats)
    if certifier.remark:
        sink.warn(certifier.remark)
    if accuracy.abstained == 1:
        sink.warn(
            "the method abstains on every image: try a smaller --sigma, or finetune --noise first"
        )
    each = spent / (len(rows) - file.taken) if len(rows) > file.taken else None
    return view.Result(certifier, rows, accuracy, each, resumed)


def _require_reach(
    certifier: certificate.Certifier,
    threats: Sequence[Threat],
    demand: demands.CertifiedDemand,
    sink: Sink,
) -> None:
    """Raise UsageError when no radius can be certified by any network; warn when some cannot."""
    if demand.share > 0 and not certifier.searches(demand.threat):
        message = (
            f"nothing is drawn for {demand.threat.attacked()}, of which --min-certified speaks"
        )
        raise errors.UsageError(
            f"{message}: --enough {certifier.drawn_to:g} ends the draws", "a larger --enough"
        )
    beyond = [
        t.attacked() for t in threats if isinstance(t.size, float) and t.size >= certifier.reach
    ]
    if not beyond:
        return
    reach = attacked_radius(certifier.reach, 4)
    message = f"no radius beyond {reach} can be certified with these --samples, --alpha and --sigma"
    if len(beyond) == len(threats):
        raise errors.UsageError(
            f"{message}; asked for {', '.join(beyond)}",
            "a smaller --epsilon, more --samples, a larger --sigma",
        )
    sink.warn(f"{message}: 0 % at {', '.join(beyond)} says nothing about the network")


def report_certificates(
    context: typer.Context, options: command.CertifyOptions, talk: groups.Talk
) -> None:
    """Certify images, or answer a query; show, draw and write the certified accuracy."""
    sink = talk.sink()
    target = options.target
    output = options.output
    machine = options.machine
    data = options.data
    if target.vnnlib is not None:
        query.require_read(context)
        output.claim(options.source, target)
        query.answer_query(options, sink)
        return
    if target.result is not None:
        raise errors.UsageError(
            "--result is the answer to a query", "certvit certify NET.onnx --vnnlib SPEC"
        )
    gate = Gate()
    demand, threats = demands.require_compatible(options)
    if demands.AUTO in target.methods:
        processes.require_one(
            "auto chooses by trying",
            "certvit certify ... --limit 50 says what it chooses; name that",
        )
    output.claim(options.source, target, options.smoothing, data)
    checkpoint = options.source.read(sink)
    if demand is None:
        size = checkpoint.record.input.size[1:]
        patches = [Threat("patch", patch) for patch in options.patches.sizes(size)]
        demand, threats = demands.demand_of(target.minimum, patches, size)
    demand = replace(demand, every=output.output is not None)
    images = data.images(checkpoint.record, sink, unlabelled=True)
    images = digested(inputs.answered(checkpoint, images, machine.pick(), sink), processes.team())
    shares_seen = inputs.say_seen(checkpoint, images, sink)
    sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
    attacked = view.attacked_shares(
        target.attack_records, checkpoint.digest, images, options.local.norm
    )
    task = CertifyTask(checkpoint, images, threats, demand)
    choice = choose_methods(task, options, sink)
    results = run_all(choice, task, options, sink)
    if not results:  # a process that leads no others
        return
    first = results[0]
    demand.check(first.accuracy, gate)
    sink.document(
        {
            **view.document(results, choice.reason or None, checkpoint.digest, images),
            "seen": shares_seen,
            "doubts": sink.doubts,
        },
        gate,
    )
    view.show_certificates(results, images, attacked, sink)
    if choice.method not in (
        "smoothing",
        "patch",
    ):  # whose network is another one: under noise, behind masks
        inputs.doubt_accuracy(
            first.accuracy.clean, images, checkpoint, sink, [row.prediction for row in first.rows]
        )
    if target.plot is not None:
        path = Path(options.source.ckpt)
        view.draw_shares(
            results,
            attacked,
            path.parent.name if path.stem == "model" and path.parent.name else path.stem,
            images,
            target.plot,
            threats[-1].radius,
            sink,
        )
    about = {
        "dataset": images.name,
        "split": images.split,
        "limit": data.limit,
        "seed": data.seed,
    }
    written: Checkpoint = checkpoint
    for result in reversed(results):  # the first named comes last, where `log` looks for it
        written = written.with_evidence(
            "certify", {**about, "method": result.certifier.method}, view.evidence(result, images)
        )
    output.write_evidence(written, sink)
    gate.enforce()
