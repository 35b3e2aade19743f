"""`--verify` of `lipschitz` (a report) and of `log` (checkpoints); the checks themselves are in
`certcli.verification`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.cli.shared.groups import Evaluation, Machine
from certcli.cli.shared.output import Gate, Sink
from certcli.system.errors import CheckpointError, DataError, GateError, NoBoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.lipschitz.options import Network
    from certcli.cli.log.command import Verification
    from certcli.verification.claims import Again, Claim, Request

LARGEST_REPORT = 256 * 2**20


def verify_report(path: Path, source: Network, machine: Machine, sink: Sink) -> None:
    """Check the laws of a report and, where its checkpoint is named too, all of it from the
    weights.

    A report about features opens a network without a classifier, with or without --features.

    Raises:
        GateError: a statement of the report fails.
    """
    from certcli.checkpoint.schema import ReportFields, decode
    from certcli.system.errors import Refused
    from certcli.verification.laws import verify_laws

    try:
        if not path.is_file() or path.stat().st_size > LARGEST_REPORT:
            raise Refused("no regular file of a report's size")
        report = decode(path.read_bytes(), ReportFields)
    except (OSError, Refused) as failure:
        raise CheckpointError(
            f"{path} is not a report of `certvit lipschitz --json` ({failure})",
            "write one, then verify it",
        ) from failure
    if source.ckpt:
        from certcli.verification.report import verify

        source = replace(source, features=source.features or report.bound_of == "features")
        result = verify(report, source.open(sink), machine.pick())
    else:
        result = verify_laws(report)
    gate = Gate()
    reason = (
        f"{len(result.problems)} of its statements fail"
        if result.leaves
        else "its laws do not hold"
    )
    gate.demand(
        result.laws_hold,
        GateError(f"{path} is refuted: {reason}; first: {(*result.problems, '')[0]}"),
    )
    sink.document(
        {
            "verified": result.verified,
            "checked": "laws and leaves" if result.leaves else "laws only",
            "leaves": "proven again from the weights" if result.leaves else "unchecked",
            "laws_hold": result.laws_hold,
            "nodes": result.nodes,
            "theorems": result.theorems,
            "problems": list(result.problems),
        },
        gate,
    )
    for problem in result.problems:
        sink.text(problem)
    gate.enforce()
    if result.verified:
        about = ", a bound of features" if report.bound_of == "features" else ""
        sink.text(
            f"verified{about}: {result.nodes} steps hold, {result.theorems} of them proven again from the weights of "
            f"{source.ckpt}; nothing else of it (lower, attention_weight, formulas, network, gate, shapes) was checked"
        )
    else:
        sink.text(
            f"laws only, leaves unchecked: {result.nodes} steps follow from {result.theorems} statements about weights that "
            "nobody checked here. This verifies no bound: certvit lipschitz CKPT --verify REPORT proves them again"
        )


def verify_checkpoints(
    read: Mapping[str, Checkpoint], options: Verification, machine: Machine, gate: Gate, sink: Sink
) -> list[list[Claim]]:
    """Print and return the claims of each checkpoint; the gate demands that each of them is
    verified.
    """
    from certcli.models.build import with_network
    from certcli.verification.claims import check, compare_lineages, remake_means, verdict

    linked = [*compare_lineages(read), *remake_means(read)]
    claims_of = []
    for name, checkpoint in read.items():
        checkpoint = with_network(checkpoint)
        certify_request = certify_again(checkpoint, options, machine, sink)
        claims = check(
            checkpoint, certify_request, machine.pick(), measured=not options.proven_only
        )
        claims += [claim for file, claim in linked if file == name]
        reasons = verdict(claims)
        gate.demand(not reasons, GateError(f"{name} is not verified: {(*reasons, '')[0]}"))
        rows = [(f"{claim.entry}, {claim.claim}", claim.status, claim.why) for claim in claims]
        sink.table(f"Verification of {name}", ["claim", "status", "why"], rows)
        claims_of.append(claims)
    return claims_of


def certify_again(
    checkpoint: Checkpoint, options: Verification, machine: Machine, sink: Sink
) -> Callable[[Request], Again]:
    """Return a function that certifies the images of an entry again, by the entry's method."""
    from certcli.certify.methods import certify, options_of, prepare
    from certcli.evaluation.doubts import right_of
    from certcli.models.build import load_double
    from certcli.verification.claims import Again, Held

    def recertify(request: Request) -> Again:
        data = Evaluation(dataset=options.dataset, data_dir=options.data_dir, split=request.split)
        images = replace(data, limit=request.limit, seed=request.seed).images(
            checkpoint.record, sink
        )
        if request.digest is not None and images.digest != request.digest:
            raise DataError("these are other images than those of the evidence: name its --dataset")
        chosen = images
        if options.sample is not None and options.sample < len(images):
            seed = int.from_bytes(
                os.urandom(4), "little"
            )  # the author of the file cannot know this sample
            sink.note(
                f"a sample of {options.sample} of {len(images)} images, drawn with seed {seed}"
            )
            chosen = images.limit(options.sample, seed)
        device = machine.pick()
        batch = machine.batch_size
        rows: list[tuple[bool, Held]] = []
        whose = Again([], len(images), images.name, images.split, registered=images.ahead is None)
        try:
            settings = options_of(request.method, {**request.options, "batch_size": batch})
            certifier = prepare(request.method, checkpoint, device, settings)
        except NoBoundError:
            if request.method != "lipschitz":
                raise
            rows = [
                (correct, 0.0)
                for correct in right_of(load_double(checkpoint, device), chosen, batch)
            ]
            return replace(
                whose,
                rows=rows,
                stated={"promise": "proof", "failure": 0.0, "arithmetic": "real", "parameters": {}},
            )
        certifier.kept_back = 0.0
        with sink.progress("certify again", total=len(chosen)) as bar:
            for certificates in certify(certifier, chosen, batch):
                rows += [(certificate.correct, certificate.held) for certificate in certificates]
                bar.advance(len(certificates))
        fields = {name: getattr(certifier, name) for name in ("promise", "failure", "arithmetic")}
        parameters = json.loads(json.dumps(dict(certifier.parameters)))
        return replace(whose, rows=rows, stated={**fields, "parameters": parameters})

    return recertify
