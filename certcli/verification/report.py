"""A `certvit lipschitz --json` report and its checkpoint: every leaf proven again by weights."""

from collections.abc import Iterator

import torch
from msgspec import UNSET

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.schema import LayerFields, ReportFields
from certcli.evaluation.claim import Claim
from certcli.evaluation.radii import rounded_down
from certcli.lipschitz.bound import FEATURES, LOGITS
from certcli.lipschitz.network import NetworkBound, prove_checkpoint
from certcli.lipschitz.numerics.real import ZERO, Real
from certcli.verification.documents import WEIGHTS, theorems, verify_laws

SLACK = 1e-6
"""Relative: how far a stated number may lie below the one proven again. A norm is proven from a
power iteration and a residual, whose last digits differ between BLAS libraries, thread counts and
devices by some 1e-12; 1e-6 is far above that, and far below what a forged number would have to
gain.
"""


SHAPES = "layers' shapes"
"""Fields of the layers of a report that nothing recomputes."""


def verify_report(
    report: ReportFields, checkpoint: Checkpoint, unread: str, device: torch.device | str = "cpu"
) -> list[Claim]:
    """Return the claims of a report: its laws and headline, and its leaves, root and layers, proven
    again. unread: its other fields.
    """
    laws = verify_laws(report)
    if any(claim.status == "refuted" for claim in laws):
        return laws
    problems = [
        Claim(WEIGHTS, "refuted", problem) for problem in check_weights(report, checkpoint, device)
    ]
    why = f"{theorems(report)} theorems are proven again"
    weights = problems or [Claim(WEIGHTS, "verified", why)]
    return [laws[0], *weights, Claim(unread, "unverified", "the author's word", asked=False)]


def check_weights(
    report: ReportFields, checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> Iterator[str]:
    """Yield statements that do not follow from these weights: the engine proves all again."""
    record = checkpoint.record
    if report.checkpoint != checkpoint.digest:
        yield f"the report is about network {report.checkpoint[:16]}, this is {checkpoint.digest[:16]}"
        return
    if (report.arch, report.input) != (record.arch, record.input.size):
        yield f"the report is about {report.arch} on {report.input}, this is {record.arch} on {record.input.size}"
    if report.function not in (record.function(), UNSET):
        yield "the report's function (architecture, arguments, input, surgery) is not this network's"
    if report.bound_of != (outputs := LOGITS if record.classes else FEATURES):
        yield f"the report is about {report.bound_of}, and this network ends in {outputs}"
        return
    network_bound = prove_checkpoint(checkpoint, device)
    upper = network_bound.upper
    if isinstance(report.lower, float) and upper * (1 + SLACK) < Real(report.lower):
        yield f"the measured slope {rounded_down(report.lower, 6)} is above what is proven, {upper}"
    rows = network_bound.bound.to_json()
    if len(rows) != len(report.proof):
        yield f"the report's proof has {len(report.proof)} steps, that of these weights {len(rows)}"
        return
    for number, (claimed, proven) in enumerate(zip(report.proof, rows, strict=True)):
        where = f"node {number} ({proven['path']})"
        names = ("path", "kind", "law", "parts", "why")
        different = next(
            (name for name in names if getattr(claimed, name) not in (proven[name], UNSET)), None
        )
        if different is not None:
            yield f"{where}: {different} is {getattr(claimed, different)!a}, of these weights {proven[different]!a}"
        elif states_less(Real.from_json(list(claimed.value)), Real.from_json(proven["value"])):
            lower = Real.from_json(list(claimed.value))
            proven_value = Real.from_json(proven["value"])
            yield f"{where}: {lower.log10():.9f} is stated (log10), {proven_value.log10():.9f} is proven"
    if report.why not in (network_bound.bound.why, UNSET):
        yield f"the headline's why is {report.why!a}, of these weights {network_bound.bound.why!a}"
    yield from _check_layers(report.layers, network_bound)


def _check_layers(layers: list[LayerFields], bound: NetworkBound) -> Iterator[str]:
    if [layer.path for layer in layers] != [charge.path for charge in bound.charges]:
        yield "the report's layers are not those that these weights have"
        return
    for layer, charge in zip(layers, bound.charges, strict=True):
        for claimed, proven in (
            (layer.log10_upper, charge.constant),
            (layer.log10_cumulative, charge.cumulative),
        ):
            if below_log10(claimed, proven) or (
                claimed is None and proven.finite and proven > ZERO
            ):
                yield f"layer {layer.path}: 10^{claimed} is stated, 10^{proven.log10():.9f} is proven"
        if isinstance(layer.upper, float) and states_less(Real(layer.upper), charge.constant):
            yield f"layer {layer.path}: {layer.upper} is stated, {charge.constant} is proven"
        words = (layer.kind, layer.law, layer.why, layer.upper_finite)
        proven_words = (charge.kind, charge.law, charge.why, charge.constant.finite)
        if any(one not in (other, UNSET) for one, other in zip(words, proven_words, strict=True)):
            yield f"layer {layer.path}: its kind, law, why or upper_finite is not that of these weights"
        if isinstance(layer.upper_text, str) and below_text(layer.upper_text, charge.constant):
            yield f"layer {layer.path}: '{layer.upper_text[:40]!a}' is stated, {charge.constant} is proven"


def states_less(claimed: Real, proven: Real) -> bool:
    """Tell whether a stated bound lies below the proven one by more than SLACK."""
    return claimed * (1 + SLACK) < proven


def below_text(text: str, proven: Real) -> bool:
    """Return it for bounds in words ("1.23e+968"), rounded up; also what is no number."""
    mantissa, _, exponent = text.partition("e")
    if text == "inf":
        return False
    try:
        claimed = Real(float(mantissa)).log10() + int(exponent or 0)
    except (ValueError, OverflowError):
        return text != str(proven)
    return below_log10(claimed, proven)


def below_log10(claimed: float | None, proven: Real) -> bool:
    """Return the same for a logarithm; None stands for a bound that is 0 or infinite."""
    if claimed is None:
        return False
    # log10(1 + SLACK) > SLACK / 3
    return not proven.finite or (proven > ZERO and claimed < proven.log10() - SLACK / 3)
