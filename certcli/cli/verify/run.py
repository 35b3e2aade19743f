"""The work of `certvit verify`: what kind of file it is, its claims, and the document about them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from certcli.audit.evidence import with_evidence
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Evidence
from certcli.checkpoint.schema import Json, ReportFields, decode
from certcli.checkpoint.shards import is_index
from certcli.cli.log.run import files_of
from certcli.cli.log.view import document_of
from certcli.cli.shared.inputs import missing_file
from certcli.cli.shared.output import Gate, Sink
from certcli.cli.verify import view
from certcli.cli.verify.again import certify_again
from certcli.cli.verify.around import near_images
from certcli.cli.verify.options import VerifyOptions
from certcli.cli.verify.records import check_records
from certcli.evaluation.claim import Claim, statuses
from certcli.models.build import with_network
from certcli.report.document import from_json
from certcli.system.errors import CheckpointError, GateError, Refused
from certcli.system.reading import LARGEST_REPORT, is_absent, read_bounded
from certcli.verification import documents
from certcli.verification import report as reports
from certcli.verification.documents import kind_of, unread_fields
from certcli.verification.evidence import check, check_entries
from certcli.verification.laws import theorems, verify_laws
from certcli.verification.lineage import compare_lineages, remake_means


def verify(options: VerifyOptions, sink: Sink) -> None:
    """Check the file. GateError (exit 7) unless all that was asked for is verified."""

    file = options.file
    if is_absent(file):
        raise missing_file(
            str(file),
            "give a report (--json), records (.jsonl) or a checkpoint",
            ".json",
            ".jsonl",
            ".safetensors",
        )
    if file.is_dir() or file.suffix == ".safetensors" or is_index(file):
        verify_checkpoints(options, sink)
        return
    if file.suffix == ".jsonl":
        view.conclude(options.file, check_records(options, sink), view.RECORDS, sink)
    else:
        kind, checked = check_report(options, sink)
        view.conclude(options.file, checked, f"{kind} report", sink)


def check_report(options: VerifyOptions, sink: Sink) -> tuple[str, view.CheckedFile]:
    """Check a report: of lipschitz by its proof, of the others as the evidence of their run."""

    file = options.file
    try:
        text = read_bounded(file, LARGEST_REPORT)
        kind = kind_of(decode(text, Json))
        if kind == "lipschitz":
            return kind, check_proof(options, text, sink)
        return kind, check_results(options, text, kind, sink)
    except (OSError, Refused) as failure:
        raise CheckpointError(
            f"{file} is not a report of certvit ({failure})",
            "lipschitz, certify, attack and audit write one with --json; records end in .jsonl",
        ) from failure


def check_proof(options: VerifyOptions, text: bytes, sink: Sink) -> view.CheckedFile:
    """Check the laws of a proof and, where its checkpoint is named too, all of it from the weights."""

    report = decode(text, ReportFields)
    facts = {"nodes": len(report.proof), "theorems": theorems(report)}
    if not options.files.ckpts:
        words = (
            f"laws only: {facts['nodes']} steps follow from {facts['theorems']} statements about weights that nobody "
            "checked here. This verifies no bound: certvit verify REPORT CKPT proves them again"
        )
        return view.CheckedFile(verify_laws(report), words, whole=False, about=facts)

    checked = {*ReportFields.__struct_fields__, "command"} - {"lower"}
    unread = unread_fields({*decode(text, Json), reports.SHAPES} - checked)
    of_features = report.bound_of == "features"
    checkpoint = options.open(sink, features=of_features)
    claims = reports.verify(report, checkpoint, unread, options.machine.pick())
    if report.around is not UNSET:
        claims += near_images(report.around, checkpoint, options, sink)
    words = (
        f"verified{', a bound of features' if of_features else ''}: {facts['nodes']} steps hold, {facts['theorems']} of "
        f"them proven again from the weights of {options.files.ckpts[0]}; nothing else of it ({unread}) was checked"
    )
    return view.CheckedFile(claims, words, about=facts)


def check_results(options: VerifyOptions, text: bytes, kind: str, sink: Sink) -> view.CheckedFile:
    """Check a report of certify, attack or audit as the evidence that its run would have written."""

    checkpoint = options.open(sink)
    seed = options.data.seed
    report = decode(text, Json)
    unread = documents.unread_of(report)
    claims = []
    further: dict[int, dict[str, Any]] = {}
    if kind == "audit":
        entries, further = _audited(checkpoint, text, seed)
    else:
        entries = documents.entries_of(report, seed)
        if kind == "certify":
            further = documents.method_fields(report, entries)
            problems = documents.contradictions(report)
            claims = [Claim("the report", "refuted", problem) for problem in problems]
    claims += check_entries(
        checkpoint,
        entries,
        certify_again(checkpoint, options.scope, options.data, options.machine, sink),
        options.machine.pick(),
        measured=not options.scope.proven_only,
        further=further,
    )
    rest = Claim(f"all other fields ({unread})", "unverified", "the author's word", asked=False)
    return view.CheckedFile(
        [*claims, rest],
        "verified: the bounds, shares and certificates above; all other fields of the report are the author's word",
    )


def _audited(
    checkpoint: Checkpoint, text: bytes, seed: int
) -> tuple[list[Evidence], dict[int, dict[str, Any]]]:
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
        raise Refused("two of its certificates are of one method")
    patched = audit.patched
    if patched is not None and patched.parameters.get("procedure") != patched.procedure:
        raise Refused("its procedure against patches is another one in the parameters")
    further = {}
    for number, entry in enumerate(entries):
        if entry.command == "lipschitz" and audit.bound is not None:
            words = {name: getattr(audit.bound, name) for name in ("upper_text", "upper_finite")}
            entries[number] = replace(entry, result={**entry.result, **words})
        elif entry.command == "certify" and entry.parameters["method"] in domains:
            further[number] = {"domain": domains[entry.parameters["method"]]}
    return entries, further


def verify_checkpoints(options: VerifyOptions, sink: Sink) -> None:
    """Check the evidence of checkpoints, and compare their lineages with each other."""

    paths = files_of([options.file, *map(Path, options.files.ckpts)])
    checkpoints = {path: Checkpoint.read(path) for path in paths}
    by_name = {str(path): checkpoint for path, checkpoint in checkpoints.items()}
    linked = [*compare_lineages(by_name), *remake_means(by_name)]
    gate = Gate()
    documents = []
    for path, checkpoint in checkpoints.items():
        claims = check_evidence(checkpoint, options, sink)
        claims += [claim for name, claim in linked if name == str(path)]
        reason = view.failure(path, claims)
        gate.demand(not reason, GateError(reason))
        view.table(path, claims, sink)
        document = document_of(path, checkpoint)
        entries = document["evidence"]
        for entry, status in zip(entries, statuses(claims, len(entries)), strict=True):
            entry["status"] = status
        documents.append({**document, **view.summary(claims)})
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents}, gate)
    gate.enforce()
    sample = options.scope.sample
    by = "" if sample is None else f" (shares by samples of {sample} images)"
    sink.text(
        f"verified{by}: all proven statements about this network; measured figures, lineage and "
        "results about other networks cannot be verified"
    )


def check_evidence(checkpoint: Checkpoint, options: VerifyOptions, sink: Sink) -> list[Claim]:
    """Return the claims of one checkpoint's record."""

    checkpoint = with_network(checkpoint)
    certify = certify_again(checkpoint, options.scope, options.data, options.machine, sink)
    return check(
        checkpoint, certify, options.machine.pick(), measured=not options.scope.proven_only
    )
