"""The report of `certvit lipschitz` and its tables: layers and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certcli.cli.shared.output import Gate, Sink, percent
from certcli.evaluation.radii import proven_radius, rounded_down, rounded_up
from certcli.lipschitz.bound import FEATURES, LOGITS, bound_document, log10_or_none
from certcli.lipschitz.network import NetworkBound
from certcli.lipschitz.numerics.real import Real
from certcli.models.build import OpenCheckpoint
from certcli.models.pixels import PixelModel
from certcli.nn.residual import attention_weight
from certcli.system.errors import GateError, NoBoundError

USABLE = 1e-3
"""Smallest radius of use: a quarter of a grey level of one pixel."""


@dataclass(frozen=True)
class Audited:
    """A checkpoint with its network and proven bound."""

    name: str
    checkpoint: OpenCheckpoint
    model: PixelModel
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
        show_blocks(bound, sink)
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


DEEPEST = 1
"""Dots in the path of a module that has a row: blocks.0, but not blocks.0.mlp."""
SAME = 1e-6
"""Logarithms that differ by less are one factor: bounds are proven to far more digits, and shown with four."""


@dataclass(frozen=True)
class BlockRow:
    """A module, or a single layer outside all. after: the constant from pixels to output."""

    name: str
    kind: str
    constant: Real
    after: Real

    def holds(self, other: BlockRow) -> bool:
        return other.name.startswith(f"{self.name}.")


def block_rows(bound: NetworkBound) -> list[BlockRow]:
    """Return all blocks and layers outside them, without modules that are their parts' product."""
    blocks = [
        BlockRow(path, kind, block_constant(before, after), after)
        for path, kind, before, after in bound.blocks
        if path and path.count(".") <= DEEPEST
    ]
    named = {row.name for row in blocks}
    single = [
        BlockRow(charge.path, charge.kind, charge.constant, charge.cumulative)
        for charge in bound.charges
        if charge.path.count(".") == 0 and charge.path not in named
    ]
    place = {charge.path: number for number, charge in enumerate(bound.charges)}
    chosen = [row for row in [*blocks, *single] if not _is_its_parts(row, blocks)]
    chosen.sort(
        key=lambda row: max(
            (place[path] for path in place if _is_within(path, row.name)), default=-1
        )
    )
    return chosen + _last_map_row(bound, chosen)


def show_blocks(bound: NetworkBound, sink: Sink) -> None:
    shown = block_rows(bound)
    whole = abs(bound.upper.log10()) if bound.upper.finite and bound.upper > 0.0 else 0.0
    sink.table(
        "Blocks: proven constant, share of the network's logarithm, cumulative constant from the pixels",
        ["block", "kind", "constant", "share", "cumulative"],
        [
            (row.name, row.kind, str(row.constant), _log_share(row, whole, shown), str(row.after))
            for row in shown
        ],
    )


def block_constant(before: Real, after: Real) -> Real:
    return after / before if before.finite and after.finite and float(before) > 0 else after


def _last_map_row(bound: NetworkBound, chosen: Sequence[BlockRow]) -> list[BlockRow]:
    """Return the last linear map's row, charged after all others: it waits for class pairs."""
    if not (bound.charges and bound.upper.finite and chosen):
        return []
    before = chosen[-1].after
    last = bound.charges[-1]
    if (
        not (before.finite and before > 0.0 and bound.upper > 0.0)
        or abs((bound.upper / before).log10()) < SAME
    ):
        return []
    return [BlockRow(last.path, last.kind, bound.upper / before, bound.upper)]


def _is_its_parts(row: BlockRow, blocks: Sequence[BlockRow]) -> bool:
    inner = [part for part in blocks if row.holds(part)]
    outermost = [part for part in inner if not any(other.holds(part) for other in inner)]
    constants = [part.constant for part in outermost]
    if not constants or not all(
        constant.finite and constant > 0.0 for constant in (row.constant, *constants)
    ):
        return False
    return abs(row.constant.log10() - sum(constant.log10() for constant in constants)) < SAME


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _log_share(row: BlockRow, whole: float, shown: Sequence[BlockRow]) -> str:
    """Return a row's share of the logarithm, "" for a module whose parts have rows of their own."""
    inside = any(row.holds(other) and other.after <= row.after for other in shown)
    if inside or whole < 1e-9 or not row.constant.finite or row.constant == 0.0:
        return ""
    return percent(row.constant.log10() / whole, 0)


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
