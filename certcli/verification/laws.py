"""A report of `certvit lipschitz --json` by itself: its laws and its headline. No torch."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from certcli.checkpoint.schema import ReportFields
from certcli.evaluation.claim import Claim
from certcli.lipschitz.bound import FEATURES, check_proof_laws
from certcli.lipschitz.numerics.real import ZERO, Real
from certcli.system.errors import one_line

LAWS = "the steps of its proof follow from each other"
WEIGHTS = "its theorems hold of the weights"


def verify_laws(report: ReportFields) -> list[Claim]:
    """Return a report's claims by itself: does it hang together; theorems are unverified."""
    problems = [Claim(LAWS, "refuted", problem) for problem in check_laws(report)]
    if problems:
        return problems
    why = "nobody checked them here: give the checkpoint too"
    return [
        Claim(LAWS, "verified", f"{len(report.proof)} steps"),
        Claim(WEIGHTS, "unverified", f"{theorems(report)} theorems; {why}", asked=False),
    ]


def theorems(report: ReportFields) -> int:
    """Return the number of leaves that follow from weights."""
    return sum(row.law == "theorem" for row in report.proof)


def check_laws(report: ReportFields) -> Iterator[str]:
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
