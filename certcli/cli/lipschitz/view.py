"""An audit and its views: layers, blocks, two checkpoints side by side, published formulas."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.lipschitz import blocks
from certcli.cli.shared.groups import Machine, Source
from certcli.cli.shared.output import Sink, percent, stated
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.images.labelled import Images
    from certcli.models.build import PixelModel


USABLE = 1e-3
"""A radius below this is no certificate that anyone could use: a quarter of a grey level of one pixel."""


@dataclass(frozen=True)
class Audited:
    """A checkpoint with its network and what was proven of it."""

    name: str
    checkpoint: "Checkpoint"
    model: "PixelModel"
    found: Any


def audit(source: Source, machine: Machine, sink: Sink) -> Audited:
    """A checkpoint's bound, proven."""
    from certcli.lipschitz.network import prove
    from certcli.models import build

    checkpoint = source.open(sink)
    model = build.load(checkpoint, machine.pick())
    found = prove(model, checkpoint.record.classes)
    return Audited(Path(source.ckpt).name, checkpoint, model, found)


def right_on(model: Any, images: "Images", labels: Any, batch_size: int) -> int:
    """How many labels the network meets."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        choices = [model(pixels.to(device)).argmax(1).cpu() for _, pixels, _ in images.batches(batch_size)]
    return int((torch.cat(choices) == labels).sum())


def lower_bound(audited: Audited, images: "Images", iterations: int, batch_size: int, seed: int, sink: Sink) -> float:
    """The largest slope that was found at images: measured, no bound."""
    return steepest(audited.model, images, iterations, batch_size, seed, sink)


def steepest(model: Any, images: "Images", iterations: int, batch_size: int, seed: int, sink: Sink) -> float:
    """The largest slope of the network at images, batch by batch, each batch by whoever is free; 0 but for the leader."""
    from certcli.images.labelled import sent
    from certcli.lipschitz.measured.estimate import measure

    device, best = next(model.parameters()).device, 0.0

    def find(start: int) -> float:
        pixels = sent(images.fetch(range(start, min(start + batch_size, len(images)))), device)
        images.expect_at(start + team().size * batch_size, batch_size)
        (found,) = measure(model, iter([pixels]), iterations, seed)
        return found.value

    starts = range(0, len(images), batch_size)
    with sink.progress("measured slope", total=len(starts)) as bar:
        for _, value in team().deal(starts, find):
            best = max(best, value)
            bar.advance(remark=f">= {best:.4g}")
    return best


def report_of(audited: Audited, lower: float | None) -> dict[str, Any]:
    """The report's keys that are always there."""
    from certcli.nn.residual import attention_weight

    found, model = audited.found, audited.model
    return {
        "schema": 1,
        "checkpoint": audited.checkpoint.digest,
        "arch": audited.checkpoint.record.arch,
        "input": list(audited.checkpoint.record.input.size),
        **stated("upper", found.upper),
        "lower": lower,
        "why": found.bound.why,
        "attention_weight": attention_weight(model),
        "layers": [
            {
                "path": charge.path,
                "kind": charge.kind,
                "shape": weight_shape(model, charge.path),
                **stated("upper", charge.constant),
                "log10_cumulative": stated("cumulative", charge.cumulative)["log10_cumulative"],
                "law": charge.law,
                "why": charge.why,
            }
            for charge in found.charges
        ],
    }


def show_bound(audited: Audited, layers: bool, worst: bool, sink: Sink) -> None:
    found, model = audited.found, audited.model
    if not found.charges:
        return
    charges = list(found.charges)
    if not layers:
        blocks.show(found, worst, sink)
        return
    total = sum(max(charge.constant.log10(), 0.0) for charge in charges if float(charge.constant) > 0) or 1.0
    if worst:
        charges.sort(key=lambda charge: charge.constant, reverse=True)
    sink.table(
        "Layers: proven constant, share of the logarithm, cumulative constant from the pixels",
        ["layer", "kind", "shape", "constant", "share", "cumulative", "why"],
        [
            (
                charge.path,
                charge.kind,
                "x".join(str(n) for n in weight_shape(model, charge.path) or ()),
                str(charge.constant),
                percent(max(charge.constant.log10(), 0.0) / total if float(charge.constant) > 0 else 0.0, 0),
                str(charge.cumulative),
                charge.why,
            )
            for charge in charges
        ],
    )


def weight_shape(model: Any, path: str) -> list[int] | None:
    """Shape of the layer's own weight, where it has one."""
    try:
        weight = getattr(model.net.get_submodule(path), "weight", None)
    except AttributeError:
        return None
    return None if weight is None else list(weight.shape)


def show_heads(model: Any, sink: Sink) -> list[dict[str, Any]]:
    """Proven norms head by head."""
    from certcli.lipschitz.heads import head_norms

    rows = head_norms(model)
    sink.table(
        "Spectral norms head by head (proven)",
        ["layer and map", "heads"],
        [(f"{row.path} {row.map}", "  ".join(f"{norm:.3g}" for norm in row.upper)) for row in rows],
    )
    return [{"path": row.path, "map": row.map, "upper": list(row.upper)} for row in rows]


def explain(audited: Audited, lower: float | None, share: float | None, sink: Sink) -> None:
    upper, why = audited.found.upper, audited.found.bound.why
    if upper.finite:
        sink.text(f"upper bound (proven, l2, pixels in [0, 1]):  {upper}")
    else:
        sink.text(f"upper bound: none. {why}")
    if lower is not None:
        sink.text(f"lower bound (measured):  {lower:.4g}")
    if upper.finite and float(upper) > 0:
        radius = 1 / (2**0.5 * float(upper))
        if radius >= USABLE:
            sink.text(
                f"an image whose margin is 1 is certified within r = {radius:.3g} at least; pair by pair, further"
            )
        else:
            sink.text(
                f"no usable proof: an image whose margin is 1 is certified within r = {radius:.1g}. That says little "
                "about the network; certvit certify --method smoothing, or local, takes it as it is"
            )
    if share is not None and share < 0.01:
        sink.text(f"attention has little weight here: at most {share:.2g} of a block's residual sum")


def labels(one: Audited, other: Audited | None) -> list[str]:
    """What the networks are called side by side: two files of one name are told apart."""
    names = [Path(audited.name).name.removesuffix(".safetensors") for audited in (one, other) if audited is not None]
    return [names[0], f"{names[1]} (compared)"] if len(set(names)) < len(names) else names


def draw(one: Audited, other: Audited | None, path: Path, sink: Sink) -> None:
    """Constants layer by layer, of both networks where there are two."""
    from certcli.report.layers import draw_layers

    drawn = {}
    for label, audited in zip(labels(one, other), [one] if other is None else [one, other], strict=True):
        rows = report_of(audited, None)["layers"]
        drawn[f"{label}: bound {audited.found.upper}"] = [(row["path"], row["log10_upper"]) for row in rows]
    draw_layers(drawn, path, "Where the bound comes from, layer by layer")
    sink.note(f"wrote {path}")


def compare(one: Audited, other: Audited, sink: Sink) -> dict[str, Any]:
    """Two audits side by side, block by block."""
    first, second = one.found, other.found
    blocks.side_by_side(dict(zip(labels(one, other), (first, second), strict=True)), sink)
    return {"other_log10_upper": second.upper.log10() if second.upper.finite else None, "other_why": second.bound.why}


def show_formula(name: str, audited: Audited, worst: bool, sink: Sink) -> dict[str, Any]:
    """A published formula, labelled for what it is."""
    from certcli.lipschitz.measured.formulas import formula_value

    result = formula_value(name, audited.model, audited.checkpoint.record.input.size)
    layers = sorted(result.layers, key=lambda row: -row[1]) if worst else result.layers
    sink.table(
        f"{result.name} (NOT a certificate): {result.source}",
        ["layer", "value"],
        [*((path, f"{value:.4g}") for path, value in layers), ("product", f"10^{result.log10_total:.2f}")],
    )
    sink.text(f"not a certificate: {result.flaw}")
    return {
        "name": result.name,
        "certificate": False,
        "source": result.source,
        "flaw": result.flaw,
        "log10_total": result.log10_total,
        "layers": [{"path": path, "value": value} for path, value in result.layers],
    }
