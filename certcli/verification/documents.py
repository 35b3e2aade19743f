"""Reports by themselves, no torch: the laws of `lipschitz --json`; `certify`'s and `attack`'s as
the evidence of -o.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from certcli.checkpoint import record, schema
from certcli.evaluation import evidence, evidence_schema
from certcli.evaluation.intervals import share_interval
from certcli.lipschitz.bound import FEATURES, check_proof_laws
from certcli.lipschitz.numerics.real import ZERO, Real
from certcli.system.errors import Refused, one_line

LAWS = "the steps of its proof follow from each other"
WEIGHTS = "its theorems hold of the weights"


def verify_laws(report: schema.ReportFields) -> list[evidence.Claim]:
    """Return a report's claims by itself: does it hang together; theorems are unverified."""
    problems = [evidence.Claim(LAWS, "refuted", problem) for problem in check_laws(report)]
    if problems:
        return problems
    why = "nobody checked them here: give the checkpoint too"
    return [
        evidence.Claim(LAWS, "verified", f"{len(report.proof)} steps"),
        evidence.Claim(WEIGHTS, "unverified", f"{theorems(report)} theorems; {why}", asked=False),
    ]


def theorems(report: schema.ReportFields) -> int:
    """Return the number of leaves that follow from weights."""
    return sum(row.law == "theorem" for row in report.proof)


def check_laws(report: schema.ReportFields) -> Iterator[str]:
    """Yield the report's own errors: a law that fails, a root that is not the headline."""
    if not report.proof:
        yield "the proof is empty"
        return
    yield from check_proof_laws([row.as_dict() for row in report.proof])
    used = {part for row in report.proof for part in row.parts} | {len(report.proof) - 1}
    if len(used) < len(report.proof):
        yield f"{len(report.proof) - len(used)} nodes of the proof belong to nothing"
    for number, row in enumerate(report.proof):
        value = Real.from_json(list(row.value))
        if row.log10_upper is not UNSET and not _same_log10(row.log10_upper, value):
            yield f"node {number}: log10_upper {row.log10_upper} is not that of its value, {value}"
    root = Real.from_json(list(report.proof[-1].value))
    if report.upper != (float(root) if float(root) < float("inf") else "inf"):
        yield f"the headline upper {report.upper} is not the root of the proof, {root}"
    if (report.upper_finite, report.upper_text) != (root.finite, str(root)):
        yield f"the headline is '{one_line(report.upper_text)}', the root of the proof {root}"
    if (report.proof[-1].kind == FEATURES) is not (report.bound_of == FEATURES):
        yield f"the headline is about {report.bound_of}, the root of the proof about {one_line(report.proof[-1].kind)[:40]}"
    if not _same_log10(report.log10_upper, root):
        yield f"the headline log10_upper {report.log10_upper} is not that of the root of the proof, {root}"


def _same_log10(log10_stated: float | UnsetType | None, value: Real) -> bool:
    """Tell whether this is the value's logarithm; None stands for that of 0 or infinity."""
    log10 = value.log10() if value.finite and value > ZERO else None
    if not isinstance(log10_stated, float) or log10 is None:
        return log10_stated is None and log10 is None
    return abs(log10 - log10_stated) <= 1e-12 * max(1.0, abs(log10))  # a logarithm's last digits


REPORTS: Mapping[str, frozenset[str]] = {
    "lipschitz": frozenset({"proof"}),
    "certify": frozenset({"method", "certified"}),
    "attack": frozenset({"attacks", "robust"}),
    "audit": frozenset({"certificates"}),
}
"""Who writes reports, and fields that make a document one of theirs."""
OF_THE_METHOD = ("norm", "domain", "sigma", "reach", "passes")
"""Fields beside the evidence that the method states when it is made ready again."""
DERIVED = ("bound", "intervals", "not_drawn_for", "methods")
WORDS_OF_AUDITS = "words, blocks, abstained and seconds of its bound and certificates"
SHOWN_NAMES = 40
"""Fields that nothing recomputes, of which a person reads the names."""


def kind_of(document: Mapping[str, Any]) -> str:
    """Return the command that writes such a document; Refused for any other."""
    command = document.get("command")
    for name, fields in REPORTS.items():
        if command == name and fields <= document.keys():
            if document.get("schema") != 1:
                raise Refused("its schema is not 1, the one that this version reads")
            return name
    raise Refused("no lipschitz, certify, attack or audit writes such a document")


def unread_fields(names: Iterable[str]) -> str:
    """Return the names of fields that nothing recomputes, in one line."""
    spelled = [one_line(name)[:40] for name in sorted(names)]
    more = len(spelled) - SHOWN_NAMES
    return ", ".join([*spelled[:SHOWN_NAMES], *([f"{more} more"] if more > 0 else [])])


def unread_of(document: Mapping[str, Any]) -> str:
    """Return the fields of a report of certify, attack or audit that nothing recomputes."""
    checked = {"schema", "command", "checkpoint"}
    kind = kind_of(document)
    if kind == "certify":
        checked |= {
            "dataset",
            *evidence_schema.CertifyResult.__struct_fields__,
            *OF_THE_METHOD,
            *DERIVED,
        }
    elif kind == "attack":
        checked |= {*evidence_schema.AttackResult.__struct_fields__}
    else:
        checked |= {"bound", "slope", "certificates", "patched", "attack"}
    words = {WORDS_OF_AUDITS} if kind == "audit" else set()
    return unread_fields({*document, *words} - checked)


def document_contradictions(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a report of certify says twice, and differently.

    Its fields at the top are those of the first of several methods; an interval follows from its
    share.
    """
    parts = _methods(document)
    for name, value in parts[0].items():
        if document.get(name) != value:
            yield f"{one_line(name)[:40]} is another one in its methods"
    for part in parts:
        intervals = part.get("intervals")
        claimed = {
            "clean": part.get("clean"),
            **schema.convert_json(part.get("certified"), schema.Json),
        }
        shares = schema.convert_json(claimed, dict[str, schema.Share])
        images = schema.convert_json(part.get("images"), evidence_schema.ImageCount)
        if intervals is None:
            continue
        if not isinstance(intervals, dict) or intervals.keys() != shares.keys():
            yield "its intervals are not those of its shares"
            return
        for key, share in shares.items():
            interval = schema.convert_json(intervals[key], tuple[schema.Share, schema.Share])
            ends = share_interval(evidence.count_of(share, images), images)
            pairs = zip(interval, ends, strict=True)
            if not all(math.isclose(one, end, rel_tol=1e-9, abs_tol=1e-9) for one, end in pairs):
                yield f"the interval at {one_line(key)[:40]} is not that of its share"


def method_fields(
    document: Mapping[str, Any], entries: Sequence[record.Evidence]
) -> dict[int, schema.Json]:
    """Return, by the number of the entry, what the report says of each method beside the evidence."""
    parts = iter(_methods(document))
    return {
        number: _kept(next(parts), OF_THE_METHOD)
        for number, entry in enumerate(entries)
        if entry.command == "certify"
    }


def evidence_of_document(document: Mapping[str, Any], seed: int) -> list[record.Evidence]:
    """Return the evidence that a report of certify or attack states. seed: of the choice of its
    images.

    Raises:
        Refused: it names no network or no images.
    """
    kind = kind_of(document)
    digest = schema.convert_json(document.get("checkpoint"), schema.Digest)
    images = schema.convert_json(document.get("dataset"), evidence_schema.JudgedImages)
    if kind == "attack":
        result = _kept(document, evidence_schema.AttackResult.__struct_fields__)
        return [record.Evidence("attack", {}, result, digest)]
    bounds = [
        record.Evidence("lipschitz", {}, schema.convert_json(part["bound"], schema.Json), digest)
        for part in _methods(document)
        if "bound" in part
    ]
    about = {
        "dataset": images.name,
        "split": images.split,
        "limit": images.images,
        "seed": seed,
    }
    return bounds + [
        record.Evidence("certify", {**about, "method": result.get("method")}, result, digest)
        for result in _method_results(document)
    ]


def _methods(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results of each method: the document itself where it holds one."""
    methods = document.get("methods", [document])
    if not isinstance(methods, list) or not methods:
        raise Refused("its methods are no list of results")
    if not all(isinstance(part, dict) for part in methods):
        raise Refused("its methods are no list of results")
    return methods


def _method_results(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each method, with the shares at radii for which the method was drawn."""
    for part in _methods(document):
        result = _kept(
            {**part, "dataset": document["dataset"]},
            evidence_schema.CertifyResult.__struct_fields__,
        )
        shares, left_out = result.get("certified"), part.get("not_drawn_for", [])
        if isinstance(shares, dict) and isinstance(left_out, list):
            drawn = {key: share for key, share in shares.items() if key not in left_out}
            result["certified"] = drawn or shares
        yield result


def _kept(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: document[name] for name in names if name in document}
