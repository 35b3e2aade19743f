"""Proven spectral norms against float64 SVD and against power iteration, on the matrices of a timm
model.

    python benchmarks/spectral.py --model vit_base_patch16_224
    python benchmarks/spectral.py --model vit_base_patch16_224 --bound
    python benchmarks/spectral.py --growth

The model is built without storage; its linear and convolution weights are drawn at random (they
decide the time, not the model's training). All methods see the same float32 matrices in the same
run, one after the other per matrix, so the ratios are fair on a busy machine. Looseness is bound /
SVD - 1; power iteration's is negative, because it is no bound.

--bound: the network's proven bound against the float64 SVD of every matrix, CPU seconds, the least
of three: as it is shown, replayed beside the network, and without that (one forward pass, the rules
and their norms). One matrix of each shape is decomposed, and counts for all of its shape. --growth:
the exponents of the bound's time in depth (3 to 24 blocks of width 192) and width (192 to 768, 4
blocks).
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import certcli.system.compat  # noqa: F401  torchvision's operators must be declared before timm is imported

import timm  # isort: skip

from certcli.lipschitz.network import bound_network, propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.spectral import spectral_norm


def matrix_shapes(name: str) -> list[tuple[int, int]]:
    """Shapes (out, in) of all linear and convolution weights of a timm model, kernels reshaped."""
    with torch.device("meta"):
        model = timm.create_model(name)
    weights = [
        m.weight
        for m in model.modules()
        if isinstance(m, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)
    ]
    return [tuple(weight.flatten(1).shape) for weight in weights]


def power_iteration(matrix: torch.Tensor, steps: int = 100) -> float:
    matrix = matrix.double()
    vector = torch.ones(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for _ in range(steps):
        vector = matrix.T @ (matrix @ vector)
        vector /= vector.norm()
    return float((matrix @ vector).norm())


def svd(matrix: torch.Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


def svd_of_the_tall_side(matrix: torch.Tensor) -> float:
    """LAPACK is several times faster on tall matrices than on wide ones: the SVD at its best."""
    return svd(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T.contiguous())


METHODS: dict[str, Callable[[torch.Tensor], float]] = {
    "certvit": spectral_norm,
    "svdvals": svd,
    "svdvals, tall": svd_of_the_tall_side,
    "power iteration, 100 steps": power_iteration,
}


SIZE = (3, 224, 224)
"""The images of `--bound` and `--growth`."""


def least(work: Callable[[], Any], times: int = 3) -> float:
    """Return the least CPU seconds of several runs."""
    fastest = math.inf
    for _ in range(times):
        start = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - start)
    return fastest


def alone(model: torch.nn.Module) -> Any:
    """The bound of the trace, not replayed."""
    with torch.no_grad():
        return propagate(trace_network(model, SIZE), Arithmetic())


def against_svd(name: str) -> None:
    """The whole network's bound, with and without the replay, and every matrix's SVD."""
    model = timm.create_model(name).eval()
    layers = [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)
    ]
    matrices = [layer.weight.detach().flatten(1) for layer in layers]
    whole = least(lambda: bound_network(model, SIZE, 1000))
    bare = least(lambda: alone(model))
    norms = least(lambda: [spectral_norm(matrix) for matrix in matrices])
    shapes = {matrix.shape: matrix for matrix in matrices}
    count = Counter(matrix.shape for matrix in matrices)
    svds = sum(count[shape] * least(lambda: svd(matrix), 2) for shape, matrix in shapes.items())  # noqa: B023
    print(f"{name}, {len(matrices)} matrices: float64 SVD of each {svds:.2f} CPU seconds")
    for what, seconds in (
        ("bound", whole),
        ("without replay", bare),
        ("proven norms of the same matrices", norms),
    ):
        print(f"  {what:36} {seconds:8.2f} {svds / seconds:8.2f} times faster")


def growth() -> None:
    """Slopes in log-log of the bound's CPU seconds, by least squares."""
    for what, sizes in (("depth", (3, 6, 12, 24)), ("width", (192, 384, 768))):
        points = []
        for size in sizes:
            depth, width = (size, 192) if what == "depth" else (4, size)
            model = timm.create_model(
                "vit_tiny_patch16_224", depth=depth, embed_dim=width, num_heads=width // 64
            ).eval()
            points.append(
                (math.log(size), math.log(least(lambda: bound_network(model, SIZE, 1000))))  # noqa: B023
            )
        x, y = (torch.tensor(column) for column in zip(*points))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        print(
            f"{what} {sizes}: {', '.join(f'{math.exp(log):.2f}' for log in y.tolist())} s, power {slope:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.bound or options.growth:
        against_svd(options.model) if options.bound else growth()
        return
    generator = torch.Generator().manual_seed(options.seed)
    seconds = dict.fromkeys(METHODS, 0.0)
    looseness: dict[str, list[float]] = {name: [] for name in METHODS}
    shapes = matrix_shapes(options.model)
    for shape in shapes:
        matrix = (0.02 * torch.randn(shape, generator=generator)).to(options.device)
        values = {}
        for name, method in METHODS.items():
            start = time.perf_counter()
            values[name] = method(matrix)
            seconds[name] += time.perf_counter() - start
        for name, value in values.items():
            looseness[name].append(value / values["svdvals"] - 1.0)
    print(f"{options.model}: {len(shapes)} matrices, {options.device}, {options.threads} thread(s)")
    print(f"{'method':28} {'seconds':>9} {'over certvit':>13} {'looseness, least and most':>27}")
    for name in METHODS:
        ratio = seconds[name] / seconds["certvit"]
        low = min(looseness[name])
        high = max(looseness[name])
        print(f"{name:28} {seconds[name]:9.2f} {ratio:13.2f} {low:13.1e} {high:13.1e}")


if __name__ == "__main__":
    main()
