"""The report of `certvit lipschitz` and its tables: layers and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certcli.audit.judging import bound_parts
from certcli.cli.shared.output import Gate, Sink, percent
from certcli.evaluation.threat import proven_radius, rounded_down, rounded_up
from certcli.lipschitz.bound import FEATURES, LOGITS, bound_document, log10_or_none
from certcli.lipschitz.network import NetworkBound
from certcli.models import build, pixels
from certcli.nn.blocks import attention_weight
from certcli.system.errors import GateError, NoBoundError

USABLE = 1e-3
"""Smallest radius of use: a quarter of a grey level of one pixel."""


@dataclass(frozen=True)
class Audited:
    """A checkpoint with its network and proven bound."""

    name: str
    checkpoint: build.OpenCheckpoint
    model: pixels.PixelModel
    proven: NetworkBound

    @property
    def of_features(self) -> bool:
        """Tell whether the bound is one of features, since the network has no classifier."""
        return self.checkpoint.record.classes == 0


def report_of(audited: Audited, lower: float | None) -> dict[str, Any]:

    bound = audited.proven
    model = audited.model
    return {
        "schema": 1,
        "checkpoint": audited.checkpoint.digest,
        "arch": audited.checkpoint.record.arch,
        "input": list(audited.checkpoint.record.input.size),
        "function": audited.checkpoint.record.function(),
        **bound_document(bound.upper),
        "bound_of": FEATURES if audited.of_features else LOGITS,
        "lower": lower,
        "why": bound.bound.why,
        "attention_weight": attention_weight(model),
        "layers": [
            {
                "path": charge.path,
                "kind": charge.kind,
                "shape": weight_shape(model, charge.path),
                **bound_document(charge.constant),
                "log10_cumulative": log10_or_none(charge.cumulative),
                "law": charge.law,
                "why": charge.why,
            }
            for charge in bound.charges
        ],
    }


def show_bound(audited: Audited, layers: bool, sink: Sink) -> None:
    """Show one row a block, or a layer."""
    bound = audited.proven
    model = audited.model
    if not bound.charges:
        return
    if not layers:
        whole = bound.upper.log10() if bound.upper.finite and bound.upper > 0.0 else 0.0
        sink.table(
            "Blocks: proven constant, share of the network's logarithm, cumulative constant from the pixels",
            ["block", "kind", "constant", "share", "cumulative"],
            [
                (
                    block.path or "(network)",
                    block.kind,
                    block.text,
                    percent(block.log10 / whole, 0) if abs(whole) > 1e-9 else "",
                    str(after),
                )
                for block, after in bound_parts(bound)
            ],
        )
        return
    total = (
        sum(
            max(charge.constant.log10(), 0.0)
            for charge in bound.charges
            if float(charge.constant) > 0
        )
        or 1.0
    )
    sink.table(
        "Layers: proven constant, share of the logarithm, cumulative constant from the pixels",
        ["layer", "kind", "shape", "constant", "share", "cumulative", "why"],
        [
            (
                charge.path,
                charge.kind,
                "x".join(str(n) for n in weight_shape(model, charge.path) or ()),
                str(charge.constant),
                percent(
                    max(charge.constant.log10(), 0.0) / total
                    if float(charge.constant) > 0
                    else 0.0,
                    0,
                ),
                str(charge.cumulative),
                charge.why,
            )
            for charge in bound.charges
        ],
    )


def weight_shape(model: Any, path: str) -> list[int] | None:
    try:
        weight = getattr(model.net.get_submodule(path), "weight", None)
    except AttributeError:
        return None
    return None if weight is None else list(weight.shape)


def explain_bound(audited: Audited, lower: float | None, share: float | None, sink: Sink) -> None:
    """Say both bounds in words, and the radius that they certify for a margin of 1."""
    upper = audited.proven.upper
    why = audited.proven.bound.why
    of = " of the features" if audited.of_features else ""
    if upper.finite:
        sink.text(f"upper bound{of} (proven, l2, pixels in [0, 1]):  {upper}")
    else:
        sink.text(f"upper bound{of}: none. {why}")
    if lower is not None:
        sink.text(f"lower bound{of} (measured):  {rounded_down(lower, 4)}")
    if audited.of_features:
        sink.text("the file has no classifier: this bounds its features, not its classes")
    elif not audited.checkpoint.reading.decides:
        sink.text("no margin, class or radius is judged: the largest logit decides nothing here")
    elif upper.finite and float(upper) > 0:
        radius = (1 - 2**-50) / (2**0.5 * float(upper))
        if radius >= USABLE:
            sink.text(
                f"an image whose margin is 1 is certified within r = {proven_radius(radius, 3)} "
                "at least; per-pair margins give more"
            )
        else:
            sink.text(
                "no usable proof: an image whose margin is 1 is certified within r = "
                f"{proven_radius(radius, 1)}. That says little "
                "about the network; certvit certify --method smoothing, or local, takes it as it is"
            )
    if share is not None and share < 0.01:
        sink.text(
            f"attention has little weight here: at most {rounded_up(share, 2)} of a block's residual sum"
        )


def draw_bound(audited: Audited, path: Path, sink: Sink) -> None:
    from certcli.report.figures import draw_layers

    bound = audited.proven
    draw_layers(
        [(charge.path, log10_or_none(charge.constant)) for charge in bound.charges],
        f"{Path(audited.name).name.removesuffix('.safetensors')}: bound {bound.upper}",
        path,
        "Where the bound comes from, layer by layer",
    )
    sink.note(f"wrote {path}")


def compare_bounds(audited: Audited, other: Audited, sink: Sink) -> dict[str, Any]:
    """Say a second network's bound, and the factor between both; return the report's part."""
    upper = other.proven.upper
    why = other.proven.bound.why
    ours = log10_or_none(audited.proven.upper)
    theirs = log10_or_none(upper)
    said = str(upper) if upper.finite else f"none. {why}"
    if ours is not None and theirs is not None:
        said = f"{said}, 10^{theirs - ours:+.4f} times that of {audited.name}"
    sink.text(f"upper bound of {other.name}:  {said}")
    return {"other_log10_upper": theirs, "other_why": why}


def bound_gate(audited: Audited, maximum: float | None) -> Gate:
    gate = Gate()
    upper = audited.proven.upper
    if maximum is not None and not upper.finite:
        why = f"no finite bound: {audited.proven.bound.why}"
        hint = "" if audited.of_features else audited.proven.hint
        gate.demand(False, NoBoundError(why, hint))
    elif maximum is not None:
        of = " of the features" if audited.of_features else ""
        gate.demand(upper <= maximum, GateError(f"the bound{of} {upper} exceeds --max {maximum:g}"))
    return gate
