"""`--verify`: of a report (lipschitz) and of checkpoints (log), shown; what is checked is in `certcli.verification`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.groups import Machine, Source
from certcli.cli.shared.output import Gate, Sink
from certcli.system.errors import CheckpointError, DataError, GateError, NoBoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from certcli.checkpoint.file import Checkpoint
    from certcli.verification.claims import Again, Claim, Request

LARGEST_REPORT = 256 * 2**20


def verify_report(path: Path, source: Source, machine: Machine, sink: Sink) -> None:
    """A report's laws and, where its checkpoint is named too, all of it from the weights; GateError where it fails."""
    from certcli.checkpoint.schema import ReportFields, decode
    from certcli.system.errors import Refused
    from certcli.verification.laws import verify_laws

    try:
        if not path.is_file() or path.stat().st_size > LARGEST_REPORT:
            raise Refused("no regular file of a report's size")
        report = decode(path.read_bytes(), ReportFields)
    except (OSError, Refused) as failure:
        raise CheckpointError(
            f"{path} is not a report of `certvit lipschitz --json` ({failure})", "write one, then verify it"
        ) from failure
    if source.ckpt:
        from certcli.verification.report import verify

        found = verify(report, source.open(sink), machine.pick())
    else:
        found = verify_laws(report)
    gate = Gate()
    told = f"{len(found.problems)} of its statements fail" if found.leaves else "its laws do not hold"
    gate.demand(found.laws_hold, GateError(f"{path} is refuted: {told}; first: {(*found.problems, '')[0]}"))
    sink.document(
        {
            "verified": found.verified,
            "checked": "laws and leaves" if found.leaves else "laws only",
            "leaves": "proven again from the weights" if found.leaves else "unchecked",
            "laws_hold": found.laws_hold,
            "nodes": found.nodes,
            "theorems": found.theorems,
            "problems": list(found.problems),
        },
        gate,
    )
    for problem in found.problems:
        sink.text(problem)
    gate.enforce()
    if found.verified:
        sink.text(
            f"verified: {found.nodes} steps hold, {found.theorems} of them proven again from the weights of {source.ckpt}; "
            "whatever else the report holds (lower, attention_weight, formulas, network) was not checked"
        )
    else:
        sink.text(
            f"laws only, leaves unchecked: {found.nodes} steps follow from {found.theorems} statements about weights that "
            "nobody checked here. This verifies no bound: certvit lipschitz CKPT --verify REPORT proves them again"
        )


@dataclass(frozen=True)
class Asked:
    """What `log --verify` was asked: which images, how many of them, and whether measured results count."""

    dataset: str | None
    data_dir: Path | None
    sample: int | None
    measured: bool
    machine: Machine


def verify_checkpoints(read: Mapping[str, Checkpoint], asked: Asked, gate: Gate, sink: Sink) -> list[list[Claim]]:
    """The claims of each checkpoint, shown; the gate fails unless all that was asked for was verified."""
    from certcli.models.build import with_network
    from certcli.verification.claims import check, compare_lineages, verdict

    linked = list(compare_lineages(read))
    found = []
    for name, checkpoint in read.items():
        checkpoint = with_network(checkpoint)
        claims = check(checkpoint, _certifier(checkpoint, asked, sink), asked.machine.pick(), measured=asked.measured)
        claims += [claim for file, claim in linked if file == name]
        reasons = verdict(claims)
        gate.demand(not reasons, GateError(f"{name} is not verified: {(*reasons, '')[0]}"))
        _show(name, claims, sink)
        found.append(claims)
    return found


def _show(name: str, claims: list[Claim], sink: Sink) -> None:
    sink.table(
        f"Verification of {name}",
        ["claim", "status", "why"],
        [(f"{claim.entry}, {claim.claim}", claim.status, claim.why) for claim in claims],
    )


def _certifier(checkpoint: Checkpoint, asked: Asked, sink: Sink) -> Any:
    """`certify` of the verification: the images that the evidence names, certified again by its method."""
    from certcli.certify.methods import certify, options_of, prepare
    from certcli.cli.shared.inputs import evaluation_images
    from certcli.verification.claims import Again, Held

    def again(request: Request) -> Again:
        images = evaluation_images(
            checkpoint.record, asked.dataset, asked.data_dir, request.split, request.limit, request.seed, sink
        )
        if request.digest is not None and images.digest != request.digest:
            raise DataError("these are other images than those of the evidence: name its --dataset")
        chosen = images
        if asked.sample is not None and asked.sample < len(images):
            seed = int.from_bytes(os.urandom(4), "little")  # nobody who wrote the file can have known which images
            sink.note(f"a sample of {asked.sample} of {len(images)} images, drawn with seed {seed}")
            chosen = images.limit(asked.sample, seed)
        device, batch = asked.machine.pick(), asked.machine.batch_size
        whose = Again([], len(images), images.name, images.split, registered=images.ahead is None)
        try:
            certifier = prepare(
                request.method, checkpoint, device, options_of(request.method, {**request.options, "batch_size": batch})
            )
        except NoBoundError:
            if request.method != "lipschitz":
                raise
            return replace(whose, rows=[(correct, 0.0) for correct in _right(checkpoint, chosen, device, batch)])
        with sink.progress("certify again", total=len(chosen)) as bar:
            rows: list[tuple[bool, Held]] = []
            for found in certify(certifier, chosen, batch):
                rows += [(certificate.correct, certificate.held) for certificate in found]
                bar.advance(len(found))
        stated = {name: getattr(certifier, name) for name in ("promise", "failure", "arithmetic")}
        parameters = json.loads(json.dumps(dict(certifier.parameters)))
        return replace(whose, rows=rows, stated={**stated, "parameters": parameters})

    return again


def _right(checkpoint: Checkpoint, images: Any, device: Any, batch: int) -> list[bool]:
    """Which images have the label as their top logit: all that is left to check where there is no bound."""
    import torch

    from certcli.models.build import load_double

    model = load_double(checkpoint, device)
    found: list[bool] = []
    with torch.no_grad():
        for _, pixels, labels in images.batches(batch):
            found += (model(pixels.double().to(device)).argmax(1).cpu() == labels).tolist()
    return found
