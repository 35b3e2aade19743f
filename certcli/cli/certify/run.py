"""What `certify` does between options and result: demand, methods, certificates."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.certify.local_options import BRANCH, Effort
from certcli.cli.certify.demands import AUTO, PROVING, CertifiedDemand
from certcli.cli.certify.options import ASKED, CertifyOptions
from certcli.cli.shared.output import Sink
from certcli.evaluation.radii import Norm, attacked_radius, proven_percent
from certcli.system.errors import DataError, NoBoundError, UsageError
from certcli.system.processes import team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from certcli.certify.certificate import Certificate, CertifiedAccuracy, Certifier
    from certcli.certify.method_choice import MethodChoice
    from certcli.certify.options import CertifierOptions as MethodOptions
    from certcli.checkpoint.file import Checkpoint
    from certcli.evaluation.resumed import Resumed
    from certcli.evaluation.threat import Threat
    from certcli.images.labelled import Images


NOT_DRAWN_FOR = "not drawn for"
"""In place of a share at a radius beyond --enough: images reach it by chance only."""


@dataclass(frozen=True)
class CertifyTask:
    """A network, its images, and the threats of one norm at which shares are shown."""

    checkpoint: Checkpoint
    images: Images
    threats: Sequence[Threat]
    demand: CertifiedDemand


def choose(task: CertifyTask, options: CertifyOptions, sink: Sink) -> MethodChoice:
    """Return the methods as named; for `auto` the one worth having, whose reason is shown."""
    from certcli.certify.method_choice import MethodChoice, choose_method

    first, *others = options.target.methods
    if first != AUTO:
        return MethodChoice(first, "", tuple(others), options.local.effort)
    smallest = next((threat.radius for threat in task.threats if threat.radius > 0), 0.25)
    machine = options.machine
    choice = choose_method(
        task.checkpoint, machine.pick(), task.images, smallest, machine.batch_size
    )
    sink.text(f"--method {choice.method}: {choice.reason}")
    return choice


def run_all(
    choice: MethodChoice, task: CertifyTask, options: CertifyOptions, sink: Sink
) -> list[Result]:
    """Certify by each method that says something. None where another process leads."""
    results: list[Result] = []
    for method in (choice.method, *choice.beside):
        try:
            result = _run(method, choice, task, options, sink)
        except NoBoundError as failure:
            # gate and document speak of the first: no other may stand in its place
            if method == choice.method:
                raise
            sink.warn(f"skipped {method}: {failure.message}")
        else:
            results += [result] if result is not None else []
    return results


def _options_of(
    method: str, choice: MethodChoice, task: CertifyTask, options: CertifyOptions
) -> MethodOptions | None:
    if method == "local":
        return _local_options(choice.effort, task, options)
    if method in PROVING:
        return options.proof
    if method == "smoothing":
        return replace(
            options.smoothing, seed=options.data.seed, batch_size=options.machine.batch_size
        )
    return options.patches if method == "patch" else None


def _local_options(effort: Effort, task: CertifyTask, options: CertifyOptions) -> MethodOptions:
    """Return the options of `local`: the radii of -e are decided, others searched."""
    return replace(
        options.local,
        effort=effort,
        at=[threat.radius for threat in task.threats if threat.radius > 0]
        if _decides(options)
        else options.local.at,
        seconds=options.local.seconds if effort == BRANCH else None,
        arithmetic=options.proof.arithmetic,
    )


def _decides(options: CertifyOptions) -> bool:
    """Tell whether `local` decides radii in place of a search."""
    return bool(options.target.epsilon) and options.target.radius == ASKED


@dataclass(frozen=True)
class Result:
    """The certificates of a method. seconds: an image; None where all was read from --records."""

    certifier: Certifier
    rows: Sequence[Certificate]
    accuracy: CertifiedAccuracy
    seconds: float | None
    resumed: Resumed | None = None

    def share(self, threat: Threat) -> str:
        return (
            proven_percent(self.accuracy.against(threat))
            if self.certifier.searches(threat)
            else NOT_DRAWN_FOR
        )

    def to_json(self) -> dict[str, Any]:
        certifier = self.certifier
        left_out = [
            threat.key for threat in self.accuracy.threats if not certifier.searches(threat)
        ]
        return {
            **self.accuracy.to_json(),
            **({"not_drawn_for": left_out} if left_out else {}),
            **{
                name: getattr(certifier, name)
                for name in ("promise", "norm", "arithmetic", "domain")
            },
            **certifier.about,
            "parameters": dict(certifier.parameters),
            **({} if self.resumed is None else {"resumed": self.resumed.to_json()}),
        }


def _run(
    method: str, choice: MethodChoice, task: CertifyTask, options: CertifyOptions, sink: Sink
) -> Result | None:
    """Certify all images by a method, records written at once; None where another leads.

    Of the records that were read instead, those that the demand rests on are computed again.
    """
    from certcli.certify.certificate import certified_accuracy
    from certcli.certify.methods import certify, prepare, run_of
    from certcli.certify.record_check import disagreements
    from certcli.evaluation.records import RecordFile
    from certcli.evaluation.resumed import RecordBatch, compute_again
    from certcli.evaluation.threat import one_norm

    images = task.images
    demand = task.demand
    batch_size = options.machine.batch_size
    certifier = choice.ready.get(method)
    if certifier is None or (method == "local" and _decides(options)):
        chosen = _options_of(method, choice, task, options)
        device = options.machine.pick_for(getattr(chosen, "arithmetic", None))
        certifier = prepare(method, task.checkpoint, device, chosen)
    assert one_norm(task.threats) == certifier.norm, f"{method} certifies in {certifier.norm}"
    _require_reach(certifier, task.threats, demand, sink)
    if certifier.reading:
        sink.note(certifier.reading)
    if not team().leads:
        list(certify(certifier, images, batch_size, team=team()))
        return None
    rows: list[Certificate] = []
    first = method == choice.method  # a file holds the records of the first method
    records, resume = (options.target.records, options.target.resume) if first else (None, False)
    run = run_of(certifier, task.checkpoint, images)
    force = options.output.force
    with RecordFile(records, run, images, resume=resume, force=force, network=sink.network) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        new_images = (len(images) - file.earlier + team().size - 1) // team().size
        cost = (
            "" if sink.quiet else certifier.expected(new_images, task.checkpoint.record.input.size)
        )
        if cost:
            sink.note(f"{method}: {cost}")
        started = time.perf_counter()
        with sink.progress(f"certify ({method})", total=len(images), done=file.earlier) as bar:
            certifier.within = bar.within
            for batch in certify(certifier, images, batch_size, file, team()):
                rows += batch
                bar.advance(len(batch))
    spent = time.perf_counter() - started
    resumed = None
    if file.taken:
        claims = rows[: file.taken]
        resumed = compute_again(
            [RecordBatch(1, int(claim.holds_at(demand.threat))) for claim in claims],
            partial(disagreements, certifier, claims, images, batch_size, str(records)),
            gate=demand.share > 0,
            every=demand.every,
        )
    accuracy = certified_accuracy(rows, task.threats)
    if certifier.remark:
        sink.warn(certifier.remark)
    if accuracy.abstained == 1:
        sink.warn(
            "the method abstains on every image: try a smaller --sigma, or finetune --noise first"
        )
    each = spent / (len(rows) - file.taken) if len(rows) > file.taken else None
    return Result(certifier, rows, accuracy, each, resumed)


def _require_reach(
    certifier: Certifier, threats: Sequence[Threat], demand: CertifiedDemand, sink: Sink
) -> None:
    """Raise UsageError when no radius can be certified by any network; warn when some cannot."""
    if demand.share > 0 and not certifier.searches(demand.threat):
        message = (
            f"nothing is drawn for {demand.threat.attacked()}, of which --min-certified speaks"
        )
        raise UsageError(
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
        raise UsageError(
            f"{message}; asked for {', '.join(beyond)}",
            "a smaller --epsilon, more --samples, a larger --sigma",
        )
    sink.warn(f"{message}: 0 % at {', '.join(beyond)} says nothing about the network")


def attacked_shares(
    path: Path | None, checkpoint: str, images: Images, norm: Norm = "l2"
) -> dict[Threat, dict[int, bool]]:
    """Records of `attack` -> threat -> index -> withstood all attacks, where all radii were run.

    DataError when they are of another network, other images or other norms, or when no image was
    attacked at all radii.
    """
    from certcli.evaluation.records import read_records, require_same_images, require_same_network
    from certcli.evaluation.threat import Threat

    if path is None:
        return {}
    run, rows = read_records(path, "attack")
    require_same_network(run, checkpoint, path)
    require_same_images(rows, images, path)
    outcomes: dict[Threat, dict[int, bool]] = {}
    clean: dict[int, bool] = {}
    for row in rows:
        if row["kind"] == norm and row["index"] in images.digests:
            at = outcomes.setdefault(Threat(norm, row["epsilon"]), {})
            at[row["index"]] = at.get(row["index"], True) and all(
                withstood is True for withstood in row["robust"].values()
            )
            clean[row["index"]] = row["prediction"] == row["label"]
    common = set.intersection(*map(set, outcomes.values())) if outcomes else set()
    if not common:
        raise DataError(
            f"none of these images has records in {norm} at every radius of {path}",
            "certvit attack this checkpoint on these images, with --epsilon and --records",
        )
    outcomes.setdefault(Threat(norm, 0.0), clean)
    return {
        threat: {index: withstood for index, withstood in sorted(at.items()) if index in common}
        for threat, at in outcomes.items()
    }
