"""The work of `certvit verify`: what kind of file it is, its claims, and the document about
them."""

import functools
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from certcli.audit.document_builder import with_evidence
from certcli.certify import around, methods
from certcli.checkpoint import record, schema, tensor_files
from certcli.checkpoint.file import Checkpoint
from certcli.cli.log.run import document_of, files_of
from certcli.cli.shared import groups, inputs, output
from certcli.cli.verify import command, records
from certcli.evaluation import image_doubts, threat
from certcli.evaluation.evidence import Claim, statuses
from certcli.images.labelled import Images
from certcli.models.build import load_double, with_network
from certcli.report.document import from_json
from certcli.system import errors, reading
from certcli.verification import documents, evidence
from certcli.verification import report as reports
from certcli.verification.report import SLACK


def verify_file(options: command.VerifyOptions, talk: groups.Talk) -> None:
    """Check the file. GateError (exit 7) unless all that was asked for is verified."""
    sink = talk.sink()

    file = options.file
    if reading.is_absent(file):
        raise inputs.missing_file(
            str(file), "give a report (--json), records (.jsonl) or a checkpoint"
        )
    if file.is_dir() or file.suffix == ".safetensors" or tensor_files.is_index(file):
        verify_checkpoints(options, sink)
        return
    if file.suffix == ".jsonl":
        records.conclude(options.file, records.check_records(options, sink), records.RECORDS, sink)
    else:
        kind, checked = check_report(options, sink)
        records.conclude(options.file, checked, f"{kind} report", sink)


def check_report(
    options: command.VerifyOptions, sink: output.Sink
) -> tuple[str, records.CheckedFile]:
    """Check a report: of lipschitz by its proof, of the others as the evidence of their run."""

    file = options.file
    try:
        text = reading.read_bounded(file, reading.LARGEST_REPORT)
        kind = documents.kind_of(schema.decode_json(text, schema.Json))
        if kind == "lipschitz":
            return kind, check_proof_report(options, text, sink)
        return kind, check_results(options, text, kind, sink)
    except (OSError, errors.Refused) as failure:
        raise errors.CheckpointError(
            f"{file} is not a report of certvit ({failure})",
            "lipschitz, certify, attack and audit write one with --json; records end in .jsonl",
        ) from failure


def check_proof_report(
    options: command.VerifyOptions, text: bytes, sink: output.Sink
) -> records.CheckedFile:
    """Check the laws of a proof and, where its checkpoint is named too, all of it from the weights."""

    report = schema.decode_json(text, schema.ReportFields)
    facts = {"nodes": len(report.proof), "theorems": documents.theorems(report)}
    if not options.files.ckpts:
        words = (
            f"laws only: {facts['nodes']} steps follow from {facts['theorems']} statements about weights that nobody "
            "checked here. This verifies no bound: certvit verify REPORT CKPT proves them again"
        )
        return records.CheckedFile(documents.verify_laws(report), words, whole=False, about=facts)

    checked = {*schema.ReportFields.__struct_fields__, "command"} - {"lower"}
    unread = documents.unread_fields(
        {*schema.decode_json(text, schema.Json), reports.SHAPES} - checked
    )
    of_features = report.bound_of == "features"
    checkpoint = options.open(sink, features=of_features, logits=report.around is UNSET)
    claims = reports.verify_report(report, checkpoint, unread, options.machine.pick())
    if report.around is not UNSET:
        claims += near_images(report.around, checkpoint, options, sink)
    words = (
        f"verified{', a bound of features' if of_features else ''}: {facts['nodes']} steps hold, {facts['theorems']} of "
        f"them proven again from the weights of {options.files.ckpts[0]}; nothing else of it ({unread}) was checked"
    )
    return records.CheckedFile(claims, words, about=facts)


def check_results(
    options: command.VerifyOptions, text: bytes, kind: str, sink: output.Sink
) -> records.CheckedFile:
    """Check a report of certify, attack or audit as the evidence that its run would have written."""

    checkpoint = options.open(sink)
    seed = options.data.seed
    report = schema.decode_json(text, schema.Json)
    unread = documents.unread_of(report)
    claims = []
    further: dict[int, dict[str, Any]] = {}
    if kind == "audit":
        entries, further = _audited(checkpoint, text, seed)
    else:
        entries = documents.evidence_of_document(report, seed)
        if kind == "certify":
            further = documents.method_fields(report, entries)
            problems = documents.document_contradictions(report)
            claims = [Claim("the report", "refuted", problem) for problem in problems]
    claims += evidence.check_entries(
        checkpoint,
        entries,
        certify_again(checkpoint, options.scope, options.data, options.machine, sink),
        options.machine.pick(),
        measured=not options.scope.proven_only,
        further=further,
    )
    rest = Claim(f"all other fields ({unread})", "unverified", "the author's word", asked=False)
    return records.CheckedFile(
        [*claims, rest],
        "verified: the bounds, shares and certificates above; all other fields of the report are the author's word",
    )


def _audited(
    checkpoint: Checkpoint, text: bytes, seed: int
) -> tuple[list[record.Evidence], dict[int, dict[str, Any]]]:
    """Return what the audit would have written, about the network that the audit names, and by the
    number of the entry what it says of a method beside.
    """

    audit = from_json(text)
    bare = Checkpoint(checkpoint.tensors, replace(checkpoint.record, evidence=()))
    entries = [
        replace(entry, digest=audit.checkpoint)
        for entry in with_evidence(bare, audit, seed).record.evidence
    ]
    domains = {shares.method: shares.domain for shares in audit.certificates}
    if len(domains) < len(audit.certificates):
        raise errors.Refused("two of its certificates are of one method")
    patched = audit.patched
    if patched is not None and patched.parameters.get("procedure") != patched.procedure:
        raise errors.Refused("its procedure against patches is another one in the parameters")
    further = {}
    for number, entry in enumerate(entries):
        if entry.command == "lipschitz" and audit.bound is not None:
            words = {name: getattr(audit.bound, name) for name in ("upper_text", "upper_finite")}
            entries[number] = replace(entry, result={**entry.result, **words})
        elif entry.command == "certify" and entry.parameters["method"] in domains:
            further[number] = {"domain": domains[entry.parameters["method"]]}
    return entries, further


def verify_checkpoints(options: command.VerifyOptions, sink: output.Sink) -> None:
    """Check the evidence of checkpoints, and compare their lineages with each other."""

    paths = files_of([options.file, *map(Path, options.files.ckpts)])
    checkpoints = {path: Checkpoint.read(path) for path in paths}
    by_name = {str(path): checkpoint for path, checkpoint in checkpoints.items()}
    linked = [*reports.compare_lineages(by_name), *reports.remake_means(by_name)]
    gate = output.Gate()
    documents = []
    for path, checkpoint in checkpoints.items():
        opened = with_network(checkpoint)
        claims = evidence.check_record_evidence(
            opened,
            certify_again(opened, options.scope, options.data, options.machine, sink),
            options.machine.pick(),
            measured=not options.scope.proven_only,
        )
        claims += [claim for name, claim in linked if name == str(path)]
        reason = records.failure(path, claims)
        gate.demand(not reason, errors.GateError(reason))
        records.show_claims(path, claims, sink)
        document = document_of(path, checkpoint)
        entries = document["evidence"]
        for entry, status in zip(entries, statuses(claims, len(entries)), strict=True):
            entry["status"] = status
        documents.append({**document, **records.summary(claims)})
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents}, gate)
    gate.enforce()
    sample = options.scope.sample
    by = "" if sample is None else f" (shares by samples of {sample} images)"
    sink.text(
        f"verified{by}: all proven statements about this network; measured figures, lineage and "
        "results about other networks cannot be verified"
    )


WITHOUT_BOUND = {"promise": "proof", "failure": 0.0, "arithmetic": "real", "parameters": {}}


def certify_again(
    checkpoint: Checkpoint,
    scope: command.VerifyScope,
    data: groups.Evaluation,
    machine: groups.BatchDevice,
    sink: output.Sink,
) -> evidence.Certify:
    """Return a function that certifies the images of an entry again, all or a sample."""

    def recertify(request: evidence.Request) -> evidence.Recertified:
        named = groups.Evaluation(dataset=data.dataset, data_dir=data.data_dir, split=request.split)
        named = replace(named, limit=request.limit, seed=request.seed)
        images = named.images(checkpoint.record, sink)
        if request.digest is not None and images.digest != request.digest:
            raise errors.DataError(
                "these are other images than those of the evidence: name its --dataset"
            )
        chosen = _unpredictable_sample(images, scope.sample, sink)
        batch = machine.batch_size
        result = evidence.Recertified(
            [], len(images), images.name, images.split, images.ahead is None
        )
        settings = methods.options_of_method(
            request.method,
            {**request.options, "batch_size": batch, "denoiser_file": scope.denoiser},
        )
        device = machine.pick_for(getattr(settings, "arithmetic", None))
        try:
            certifier = methods.prepare_method(request.method, checkpoint, device, settings)
        except errors.NoBoundError:
            if request.method != "lipschitz":
                raise
            correct = image_doubts.right_of(load_double(checkpoint, device), chosen, batch)
            return replace(result, rows=[(right, 0.0) for right in correct], stated=WITHOUT_BOUND)
        certifier.kept_back = 0.0
        rows: list[tuple[bool, evidence.Certified]] = []
        with sink.progress("certify again", total=len(chosen)) as bar:
            for certificates in methods.certify_images(certifier, chosen, batch):
                rows += [(one.correct, one.held) for one in certificates]
                bar.advance(len(certificates))
        names = ("promise", "failure", "arithmetic", "norm", "domain")
        fields = {name: getattr(certifier, name) for name in names}
        return replace(
            result,
            rows=rows,
            stated=json.loads(
                json.dumps({**certifier.about, **fields, "parameters": dict(certifier.parameters)})
            ),
        )

    return recertify


def _unpredictable_sample(images: Images, sample: int | None, sink: output.Sink) -> Images:
    """Return a sample that the file's author cannot have predicted; all images without one."""
    if sample is None or sample >= len(images):
        return images
    seed = int.from_bytes(os.urandom(4), "little")
    sink.note(f"a sample of {sample} of {len(images)} images, drawn with seed {seed}")
    return images.limit(sample, seed)


def near_images(
    claimed: schema.AroundFields,
    checkpoint: Checkpoint,
    options: command.VerifyOptions,
    sink: output.Sink,
) -> list[Claim]:
    """Return the claim of each image that a report bounds slopes near; of a sample with --sample."""
    statement = f"slopes near {claimed.dataset.images} images of {claimed.dataset.name}"
    try:
        return list(_near_claims(claimed, checkpoint, options, sink))
    except errors.CertvitError as failure:
        return [Claim(statement, "unverified", failure.message)]


def _near_claims(
    claimed: schema.AroundFields,
    checkpoint: Checkpoint,
    options: command.VerifyOptions,
    sink: output.Sink,
) -> Iterator[Claim]:

    data = replace(
        options.data, split=claimed.dataset.split, limit=claimed.dataset.images, seed=claimed.seed
    )
    images = data.images(checkpoint.record, sink)
    if images.digest != claimed.dataset.digest:
        raise errors.DataError(
            "these are other images than those of the report: name its --dataset"
        )
    near = {
        row.radius: around.Around(row.radius, claimed.norm, slopes=False) for row in claimed.images
    }
    network = around.prepare(checkpoint, list(near.values()), options.machine.pick())
    rows = list(claimed.images)
    if options.scope.sample is not None and options.scope.sample < len(rows):
        chooser = random.Random(os.urandom(8))  # the file's author cannot have predicted it
        rows = chooser.sample(rows, options.scope.sample)

    @functools.cache
    def proven(index: int) -> dict[float, around.NearImage]:
        """Return what is proven near an image in all its balls: radii build on those before."""
        places = (images.indices == index).nonzero().flatten().tolist()
        balls = {row.radius: near[row.radius] for row in claimed.images if row.index == index}
        nearby = network.each(images.fetch(places[:1]), list(balls.values())) if places else ()
        return {one.around.radius: one for one in nearby}

    with sink.progress("prove slopes again", total=len(rows)) as bar:
        for row in rows:
            yield _near_claim(row, proven(row.index).get(row.radius))
            bar.advance()


def _near_claim(row: schema.NearImageFields, proven: around.NearImage | None) -> Claim:
    statement = f"slopes near image {row.index}, within {row.radius:g}"
    if proven is None:
        return Claim(statement, "refuted", "no such image is among them")
    problem = next(_near_problems(row, proven), None)
    if problem is not None:
        return Claim(statement, "refuted", problem)
    return Claim(
        statement,
        "verified",
        f"the logits' proven again: {threat.rounded_up(proven.logits, 5)}; slopes from below and seconds: the author's word",
    )


def _near_problems(row: schema.NearImageFields, proven: around.NearImage) -> Iterator[str]:
    """Yield what does not follow: bounds below those proven again, radii above them."""
    if row.prediction != proven.prediction:
        yield f"class {row.prediction} is stated, the network says {proven.prediction}"
    upper = proven.upper.tolist()
    if len(row.upper) != len(upper):
        yield f"{len(row.upper)} margins are stated, the network has {len(upper)}"
    margins = proven.margins.tolist()
    off = 1e-9 * max(map(abs, margins), default=0.0)  # another machine's rounding in float64
    pairs = zip(row.margins, margins, strict=False)
    if len(row.margins) != len(margins) or any(not abs(a - b) <= off for a, b in pairs):
        yield "the margins at the image are other ones"
    elif row.rival != proven.rival:
        yield f"class {row.rival} is the nearest, as is stated, and {proven.rival} is"
    slopes = [(slope, bound) for slope, bound in zip(row.lower, upper) if slope is not None]
    if len(row.lower) != len(upper) or any(slope > bound for slope, bound in slopes):
        yield "a slope is stated that is above what is proven"
    for claimed, bound in [
        *zip(row.upper, upper, strict=False),
        (row.logits_upper, proven.logits),
    ]:
        if float(claimed) * (1 + SLACK) < bound and float(claimed) < math.inf:
            yield f"{threat.rounded_down(claimed, 9)} is stated, {threat.rounded_up(bound, 9)} is proven"
    radii = (row.certified, proven.radius), (row.certified_by_integral, proven.by_integral)
    for claimed, radius in radii:
        if claimed > radius * (1 + SLACK):
            shown = threat.rounded_up(claimed, 9), threat.rounded_down(radius, 9)
            yield f"radius {shown[0]} is stated, {shown[1]} is proven"
