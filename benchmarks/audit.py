"""CPU time of a proven network bound against float64 singular values and (no bound) power iteration, in one run.

    python benchmarks/audit.py [ARCH ...] [--threads 1]

Random weights are written to a file and loaded through certvit's own loader; one JSON line an architecture.
`svd_over_bound`: how many times faster the bound is, all of it: tracing, running graph and network side by side, every
theorem; `svd_over_walk`: without running them side by side. `looseness`: the largest excess of a certified matrix norm
over float64 svdvals, over all weight matrices.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import RigorousArithmetic
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.lipschitz.propagate import propagate, trace_network
from certcli.models import build


def matrices(model: nn.Module) -> list[Tensor]:
    """Every weight of two or more dimensions of a linear layer or patch embedding, as a matrix."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return [layer.weight.detach().flatten(1) for layer in layers]


def power_iteration(matrix: Tensor, steps: int = 100) -> float:
    vector = torch.ones(matrix.shape[1])
    for _ in range(steps):
        vector = torch.nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    return float((matrix @ vector).norm())


def audit(arch: str, folder: Path) -> dict[str, Any]:
    net = build.create(arch, {}, initialise=True)
    spec, classes = build.spec_of(net), int(net.num_classes)  # type: ignore[arg-type]
    path = folder / f"{arch}.safetensors"
    build.initialise(arch, {}, spec, classes, seed=0).write(path)
    del net
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build.load(Checkpoint.read(path))
    started = time.process_time()
    result = bound_network(model, spec.size, classes)
    bound_seconds = time.process_time() - started
    started = time.process_time()
    with torch.no_grad():
        propagate(trace_network(model, spec.size), RigorousArithmetic())
    walk_seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = matrices(model)
    started = time.process_time()
    exact = [float(torch.linalg.svdvals(weight.double())[0]) for weight in weights]
    svd_seconds = time.process_time() - started
    started = time.process_time()
    for weight in weights:
        power_iteration(weight)
    power_seconds = time.process_time() - started
    looseness = max(upper / true - 1 for upper, true in zip(spectral_norms(weights), exact, strict=True) if true > 0)
    return {
        "arch": arch,
        "log10_upper": round(result.upper.log10(), 2),
        "matrices": len(weights),
        "bound_seconds": round(bound_seconds, 3),
        "walk_seconds": round(walk_seconds, 3),
        "svd_seconds": round(svd_seconds, 3),
        "power_seconds": round(power_seconds, 2),
        "svd_over_bound": round(svd_seconds / bound_seconds, 2),
        "svd_over_walk": round(svd_seconds / walk_seconds, 2),
        "looseness": looseness,
        "file_mib": round(path.stat().st_size / 2**20),
        "peak_mib_before_and_after": [before // 1024, peak // 1024],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        for arch in options.architectures:
            print(json.dumps(audit(arch, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
