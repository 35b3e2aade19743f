"""certvit lipschitz: the proven upper bound, layer by layer, next to a measured lower bound."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.output import Sink
from certcli.errors import CheckpointError, GateError, NoBoundError, UsageError


def lipschitz(
    ckpt: Annotated[str | None, typer.Argument(metavar="CKPT", help="A checkpoint; not needed with --verify.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row a layer instead of one a block.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Largest constants first.")] = False,
    maximum: Annotated[
        float | None, typer.Option("--max", help="Exit 7 when the bound exceeds this; 5 if there is none.")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate/--no-estimate", help="Measure a lower bound on images.")] = True,
    iterations: Annotated[int, typer.Option(min=1, help="Power iterations an image.")] = 20,
    verify: Annotated[Path | None, typer.Option(help="Re-check the proof in a report written with --json.")] = None,
    output: options.Output = None,
    plot: options.Plot = None,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int, typer.Option("--limit", help="Images for the lower bound.")] = 16,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 8,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Audit a checkpoint: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1], proven; some pair has slope >= lower."""
    sink = Sink(as_json, quiet)
    if verify is not None:
        _verify(verify, sink)
        return
    if ckpt is None:
        raise UsageError("no checkpoint given", "certvit lipschitz CKPT, or certvit lipschitz --verify REPORT.json")
    from certcli import models
    from certcli.cli.inputs import check_evidence_path, hints, pick_device
    from certcli.foreign import open_checkpoint
    from certcli.lipschitz.propagate import bound_network

    check_evidence_path(output, ckpt, force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    model = models.load(checkpoint, pick_device(device))
    found = bound_network(model, record.input.size, record.classes)
    upper = found.upper
    lower = _lower(record, model, dataset, data_dir, limit, batch_size, iterations, seed, sink) if estimate else None
    share = attention_weight(model)
    report: dict[str, Any] = {
        "schema": 1,
        "checkpoint": checkpoint.digest,
        "arch": record.arch,
        "upper": float(upper) if float(upper) < float("inf") else "inf",
        "log10_upper": upper.log10() if upper.finite else None,
        "lower": lower,
        "why": found.bound.why,
        "attention_weight": share,
        "layers": [
            {
                "path": step.path.removeprefix("net."),
                "kind": step.kind,
                "upper": float(step.constant) if step.constant.finite else "inf",
                "log10_upper": step.constant.log10() if step.constant.finite and float(step.constant) > 0 else None,
                "law": step.law,
                "why": step.why,
            }
            for step in found.steps
        ],
    }
    sink.document({**report, "proof": found.bound.to_json()})
    _show(found, layers, worst, sink)
    _explain(upper, lower, found.bound.why, share, sink)
    if plot is not None:
        from certcli.report.layers import draw_layers

        draw_layers([(row["path"], row["log10_upper"]) for row in report["layers"]], plot)
        sink.note(f"wrote {plot}")
    if output is not None:
        result = {name: report[name] for name in ("upper", "log10_upper", "lower", "why", "attention_weight")}
        checkpoint.with_evidence("lipschitz", {"images": limit if estimate else 0}, result).write(output, force)
        sink.note(f"wrote {output}")
    if maximum is not None:
        if not upper.finite:
            raise NoBoundError(f"no finite bound: {found.bound.why}", "certvit adapt makes a plain ViT Lipschitz")
        if upper > maximum:
            raise GateError(f"the bound {upper} exceeds --max {maximum:g}")


def attention_weight(model: Any) -> float | None:
    """Largest weight of an attention branch in its residual sum: t if convex, |a| if weighted, 1 if plain."""
    from torch import sigmoid

    from certcli.nn.residual import ConvexResidual, ResidualBlock

    shares = []
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            residual = module.residual1
            value = sigmoid(residual.theta) if isinstance(residual, ConvexResidual) else residual.scale.abs()
            shares.append(float(value))
        elif hasattr(module, "attn") and hasattr(module, "norm1"):
            shares.append(1.0)
    return max(shares) if shares else None


def _lower(record, model, dataset, data_dir, limit, batch_size, iterations, seed, sink) -> float:  # type: ignore[no-untyped-def]
    from certcli.cli.inputs import calibration_images
    from certcli.lipschitz.estimate import measure

    images = calibration_images(record, dataset, data_dir, limit, seed, sink)
    device = next(model.parameters()).device
    best = 0.0
    with sink.progress("measured slope", total=-(-len(images) // batch_size)) as bar:
        for found in measure(model, (p.to(device) for _, p, _ in images.batches(batch_size)), iterations, seed):
            best = found.value
            bar.advance(remark=f">= {best:.4g}")
    return best


def _show(found: Any, layers: bool, worst: bool, sink: Sink) -> None:
    if not found.steps:
        return
    steps = list(found.steps)
    if not layers:
        rows = [
            (path.removeprefix("net.") or "(network)", kind, str(_ratio(before, after)), str(after))
            for path, kind, before, after in found.blocks
            if path.removeprefix("net.").count(".") <= 1
        ]
        if rows:
            sink.table(
                "Blocks: constant and cumulative constant from the pixels",
                ["block", "kind", "constant", "cumulative"],
                rows,
            )
        return
    total = sum(max(step.constant.log10(), 0.0) for step in steps if float(step.constant) > 0) or 1.0
    if worst:
        steps.sort(key=lambda step: step.constant, reverse=True)
    sink.table(
        "Layers: proven constant, share of the logarithm, cumulative constant from the pixels",
        ["layer", "kind", "constant", "share", "cumulative", "why"],
        [
            (
                step.path.removeprefix("net."),
                step.kind,
                str(step.constant),
                f"{100 * max(step.constant.log10(), 0.0) / total:.0f} %" if float(step.constant) > 0 else "0 %",
                str(step.cumulative),
                step.why,
            )
            for step in steps
        ],
    )


def _ratio(before: Any, after: Any) -> Any:
    return after / before if before.finite and after.finite and float(before) > 0 else after


def _explain(upper: Any, lower: float | None, why: str, share: float | None, sink: Sink) -> None:
    if upper.finite:
        sink.text(f"upper bound (proven, l2, pixels in [0, 1]):  {upper}")
    else:
        sink.text(f"upper bound: none. {why}")
    if lower is not None:
        sink.text(f"lower bound (measured):  {lower:.4g}")
    if upper.finite and float(upper) > 0:
        radius = float("inf") if float(upper) == 0 else 1 / (2**0.5 * float(upper))
        sink.text(f"an image whose margin is 1 is certified within r = {radius:.3g} at least; pair by pair, further")
    if share is not None and share < 0.01:
        sink.text(f"attention has little weight here: at most {share:.2g} of a block's residual sum")


def _verify(path: Path, sink: Sink) -> None:
    """Every composition in a report's proof, checked again without torch."""
    from certcli.lipschitz.bound import check_proof

    try:
        proof = json.loads(path.read_text())["proof"]
        problems = check_proof(proof)
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise CheckpointError(
            f"{path} is not a report of `certvit lipschitz --json`", "write one, then verify it"
        ) from failure
    sink.document({"verified": not problems, "nodes": len(proof), "problems": problems})
    for problem in problems:
        sink.text(problem)
    if problems:
        raise GateError(f"the proof in {path} does not hold: {len(problems)} of {len(proof)} steps fail")
    theorems = sum(row["law"] == "theorem" for row in proof)
    sink.text(f"{len(proof)} steps hold; {theorems} of them are theorems about weights, which a re-audit checks")
