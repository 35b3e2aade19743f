"""Audit timm architectures with random weights: which have a finite bound, and does any measured
slope exceed it?

    python benchmarks/sweep.py run RECORDS [--only PATTERN ...] [--seconds N]    one JSON line an architecture, resumable
    python benchmarks/sweep.py table RECORDS > docs/architectures.md

Weights are timm's initialisation plus noise where it starts at zero (so that no branch is switched
off).
"""

import argparse
import csv
import json
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from certcli.lipschitz.bound import check_proof_laws
from certcli.lipschitz.estimate import jacobian_norms
from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.models.pixels import PixelModel

PER_FAMILY = 2
CELLS = Path(__file__).parents[1] / "docs" / "cells" / "architectures.csv"
MEASURE_BELOW = 1_000_000  # parameters: the slope of tiny networks is searched for
CORE = (
    "vision_transformer",
    "deit",
    "swin_transformer",
    "swin_transformer_v2",
    "beit",
    "mlp_mixer",
    "convnext",
    "resnet",
)
"""Families of which at least 90 % must be finite, by timm's module names."""


def sampled() -> list[tuple[str, str]]:
    """(family, name): the smallest variants of each family (module of timm), of the core families
    twice as many.
    """
    import timm

    chosen: list[tuple[int, str, str]] = []
    for family in timm.list_modules():
        names = timm.list_models(module=family, pretrained=False)
        small = sorted(names, key=lambda name: (_size_hint(name), len(name), name))
        limit = PER_FAMILY * (4 if family in CORE else 1)
        sample = [
            n for i, n in enumerate(small[:limit]) if i < 2 or _size_hint(n) <= _HINTS.index("base")
        ]
        chosen += [(number, family, name) for number, name in enumerate(sample)]
    # the smallest of every family first: an interrupted sweep has seen all of them
    return [(family, name) for _, family, name in sorted(chosen)]


_HINTS = (
    "test_", "zepto", "atto", "femto", "pico", "nano", "micro", "xxs", "xx_small", "050", "tiny", "_ti", "_t0", "_t8",
    "mini", "xs", "x_small", "_s0", "_a0", "_b0", "18", "002", "_t", "12", "small", "_s", "_b1", "26", "34", "11", "13",
    "medium", "50", "_m", "_b", "base", "", "_l", "large", "giant", "huge", "so400m", "xlarge", "enormous", "7b",
)  # fmt: skip


def _size_hint(name: str) -> int:
    large = next(
        (
            i
            for i, hint in enumerate(_HINTS)
            if i > _HINTS.index("") and hint in name and "small" not in name
        ),
        0,
    )
    return large or next(i for i, hint in enumerate(_HINTS) if hint in name)


def audit(family: str, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    record: dict[str, Any] = {"family": family, "name": name}
    try:
        net = build.create(name, {}, initialise=True)
    except Exception as failure:
        return record | {"state": "not built", "why": str(failure)[:160]}
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.add_(0.02 * torch.randn_like(parameter))
    parameters = sum(parameter.numel() for parameter in net.parameters())
    spec = build.spec_of(net)
    model = PixelModel(spec, net).eval()
    started = time.perf_counter()
    result = bound_network(model, spec.size, int(net.num_classes))  # type: ignore[arg-type]
    record |= {
        "size": list(spec.size),
        "parameters": parameters,
        "seconds": round(time.perf_counter() - started, 2),
        "state": "finite" if result.upper.finite else "inf",
        "log10": round(result.upper.log10(), 2) if result.upper.finite else None,
        "why": "" if result.upper.finite else result.bound.why,
        "proof_problems": len(check_proof_laws(result.bound.to_json())),
    }
    if parameters <= MEASURE_BELOW and result.upper.finite:
        record["slope"] = measured_slope(model.double(), spec.size)
        record["log10_slope"] = math.log10(record["slope"]) if record["slope"] > 0 else None
    return record


def measured_slope(model: torch.nn.Module, size: Iterable[int], steps: int = 3) -> float:
    """The largest Jacobian norm met: random, constant and steepened images, in float64."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, *size, generator=generator, dtype=torch.float64)
    images[1] = 0.5 + 1e-3 * (images[1] - 0.5)  # nearly constant: normalisation is steepest there
    best = 0.0
    for _ in range(steps):
        best = max(best, float(jacobian_norms(model, images, 6).max()))
        images = images.detach().requires_grad_(True)
        spread = model(images).std(dim=1).sum()
        (gradient,) = torch.autograd.grad(spread, images)
        scale = gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
        images = (images.detach() + gradient / scale).clamp(0, 1)
    return best


def _work(queue: Any, family: str, name: str) -> None:
    try:
        queue.put(audit(family, name))
    except Exception as failure:  # a traceback is what the sweep looks for
        queue.put(
            {
                "family": family,
                "name": name,
                "state": "crash",
                "why": f"{type(failure).__name__}: {failure}"[:300],
            }
        )


def run(path: Path, only: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    done = (
        {json.loads(line)["name"] for line in path.read_text().splitlines()}
        if path.exists()
        else set()
    )
    context = multiprocessing.get_context("fork")
    for family, name in sampled():
        if name in done or (only and not any(fnmatch(name, p) or fnmatch(family, p) for p in only)):
            continue
        queue = context.Queue()
        process = context.Process(target=_work, args=(queue, family, name))
        process.start()
        try:
            record = queue.get(timeout=seconds)
        except Empty:
            process.kill()
            record = {
                "family": family,
                "name": name,
                "state": "too slow",
                "why": f"more than {seconds:g} s",
            }
        process.join()
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        yield record


def table(path: Path) -> Iterator[str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    built = [r for r in records if r["state"] not in ("not built", "too slow")]
    finite = [r for r in built if r["state"] == "finite"]
    families = defaultdict(list)
    for record in built:
        families[record["family"]].append(record)
    slopes = [r for r in finite if r.get("slope")]
    core = [r for r in built if r["family"] in CORE]
    yield "# Architectures"
    yield ""
    yield "After this page you know for which of timm's architectures certvit proves a finite bound. Weights"
    yield "are random: the figures show that the rules cover the network, not how robust it is. Made with"
    yield "`python benchmarks/sweep.py run records.jsonl` and `python benchmarks/sweep.py table records.jsonl`;"
    yield "families are timm's modules."
    yield ""
    yield f"- {len(built)} architectures of {len(families)} families audited, {len(finite)} finite."
    share = f"{sum(r['state'] == 'finite' for r in core)} of {len(core)}"
    yield f"- ViT, DeiT, Swin, BEiT, Mixer, ConvNeXt, ResNet: {share} finite."
    crashes = [r for r in built if r["state"] == "crash"]
    yield f"- {len(crashes)} tracebacks, {sum(r.get('proof_problems', 0) > 0 for r in built)} proofs that do not re-check."
    above = [
        r for r in slopes if r["log10_slope"] is not None and r["log10_slope"] > r["log10"] + 1e-9
    ]
    yield f"- Slope searched on {len(slopes)} networks below {MEASURE_BELOW:,} parameters: {len(above)} exceed their bound."
    skipped = [r for r in records if r["state"] in ("not built", "too slow")]
    names = ", ".join(f"{r['name']} ({r['state']})" for r in skipped) or "none"
    yield f"- {len(skipped)} sampled but not audited: {names}."
    yield ""
    yield f"[cells/{CELLS.name}](cells/{CELLS.name})"
    with CELLS.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(cells(families))


def cells(families: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield the rows of the table beside the page, by family."""
    yield ["family", "architecture", "upper bound", "measured slope", "seconds", "why not"]
    for family in sorted(families):
        rows = families[family]
        share = sum(r["state"] == "finite" for r in rows)
        for number, record in enumerate(rows):
            label = f"{family} ({share}/{len(rows)})" if number == 0 else ""
            upper = f"10^{record['log10']}" if record["state"] == "finite" else record["state"]
            slope = f"{record['slope']:.3g}" if record.get("slope") else ""
            seconds = str(record.get("seconds", ""))
            yield [label, record["name"], upper, slope, seconds, record["why"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table", "list"])
    parser.add_argument("records", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.action == "list":
        print("\n".join(f"{family} {name}" for family, name in sampled()))
    elif options.action == "run":
        for record in run(options.records, options.only, options.seconds):
            print(json.dumps(record), flush=True)
    else:
        print("\n".join(table(options.records)))


if __name__ == "__main__":
    main()
