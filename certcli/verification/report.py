"""A report of `certvit lipschitz --json` and the checkpoint it is about: every leaf proven again from the weights."""

from collections.abc import Iterator

import torch
from msgspec import UNSET

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.schema import LayerFields, ReportFields
from certcli.lipschitz.bound import FEATURES, LOGITS
from certcli.lipschitz.network import NetworkBound, prove_checkpoint
from certcli.lipschitz.numerics.real import ZERO, Real
from certcli.verification.laws import Verification, check_laws, theorems

SLACK = 1e-6
"""Relative: how far a stated number may lie below the one proven again. A norm is proven from a power iteration and a
residual, whose last digits differ between BLAS libraries, thread counts and devices by some 1e-12; 1e-6 is far above that,
and far below what a forged number would have to gain."""


def verify(
    report: ReportFields, checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> Verification:
    """Check the report's laws and headline, and prove its leaves, root and layers again."""
    problems = tuple(check_laws(report)) or tuple(check_weights(report, checkpoint, device))
    return Verification(len(report.proof), theorems(report), True, problems)


def check_weights(
    report: ReportFields, checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> Iterator[str]:
    """Yield each statement that does not follow from these weights; the engine proves everything again."""
    record = checkpoint.record
    if report.checkpoint != checkpoint.digest:
        yield f"the report is about network {report.checkpoint[:16]}, this is {checkpoint.digest[:16]}"
        return
    if (report.arch, report.input) != (record.arch, record.input.size):
        yield f"the report is about {report.arch} on {report.input}, this is {record.arch} on {record.input.size}"
    if report.function not in (record.function(), UNSET):
        yield "the report's function (architecture, arguments, input, surgery) is not this network's"
    if report.bound_of != (outputs := LOGITS if record.classes else FEATURES):
        yield f"the report speaks of {report.bound_of}, and this network ends in {outputs}"
        return
    found = prove_checkpoint(checkpoint, device)
    rows = found.bound.to_json()
    if len(rows) != len(report.proof):
        yield f"the report's proof has {len(report.proof)} steps, that of these weights {len(rows)}"
        return
    for number, (stated, proven) in enumerate(zip(report.proof, rows, strict=True)):
        where = f"node {number} ({proven['path']})"
        names = ("path", "kind", "law", "parts", "why")
        different = next(
            (name for name in names if getattr(stated, name) not in (proven[name], UNSET)), None
        )
        if different is not None:
            yield f"{where}: {different} is {getattr(stated, different)!a}, of these weights {proven[different]!a}"
        elif below(Real.from_json(list(stated.value)), Real.from_json(proven["value"])):
            lower, again = Real.from_json(list(stated.value)), Real.from_json(proven["value"])
            yield f"{where}: {lower.log10():.9f} is stated (log10), {again.log10():.9f} is proven"
    if report.why not in (found.bound.why, UNSET):
        yield f"the headline's why is {report.why!a}, of these weights {found.bound.why!a}"
    yield from _check_layers(report.layers, found)


def _check_layers(layers: list[LayerFields], found: NetworkBound) -> Iterator[str]:
    if [layer.path for layer in layers] != [charge.path for charge in found.charges]:
        yield "the report's layers are not those that these weights have"
        return
    for layer, charge in zip(layers, found.charges, strict=True):
        for stated, proven in (
            (layer.log10_upper, charge.constant),
            (layer.log10_cumulative, charge.cumulative),
        ):
            if below_log10(stated, proven) or (stated is None and proven.finite and proven > ZERO):
                yield f"layer {layer.path}: 10^{stated} is stated, 10^{proven.log10():.9f} is proven"
        if isinstance(layer.upper, float) and below(Real(layer.upper), charge.constant):
            yield f"layer {layer.path}: {layer.upper} is stated, {charge.constant} is proven"
        words = (layer.kind, layer.law, layer.why, layer.upper_finite)
        again = (charge.kind, charge.law, charge.why, charge.constant.finite)
        if any(one not in (other, UNSET) for one, other in zip(words, again, strict=True)):
            yield f"layer {layer.path}: its kind, law, why or upper_finite is not that of these weights"
        if isinstance(layer.upper_text, str) and below_text(layer.upper_text, charge.constant):
            yield f"layer {layer.path}: '{layer.upper_text[:40]!a}' is stated, {charge.constant} is proven"


def below(stated: Real, proven: Real) -> bool:
    """Tell whether a stated bound lies below the proven one by more than SLACK."""
    return stated * (1 + SLACK) < proven


def below_text(text: str, proven: Real) -> bool:
    """Return the same for a bound in words ("1.23e+968"), which are rounded up; also what is no number."""
    mantissa, _, exponent = text.partition("e")
    if text == "inf":
        return False
    try:
        stated = Real(float(mantissa)).log10() + int(exponent or 0)
    except (ValueError, OverflowError):
        return text != str(proven)
    return below_log10(stated, proven)


def below_log10(stated: float | None, proven: Real) -> bool:
    """Return the same for a logarithm; None stands for a bound that is 0 or infinite."""
    if stated is None:
        return False
    return not proven.finite or (
        proven > ZERO and stated < proven.log10() - SLACK / 3
    )  # log10(1 + SLACK) > SLACK / 3
