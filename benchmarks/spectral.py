"""Proven spectral norms against float64 SVD and against power iteration, on the matrices of a timm model.

    python benchmarks/spectral.py --model vit_base_patch16_224

The model is built without storage; its linear and convolution weights are drawn at random (they decide the time, not
the model's training). All methods see the same float32 matrices in the same run, one after the other per matrix, so the
ratios are fair on a busy machine. Looseness is bound / SVD - 1; power iteration's is negative, because it is no bound.
"""

import argparse
import time
from collections.abc import Callable

import torch

import certcli.compat  # noqa: F401  torchvision's operators must be declared before timm is imported

import timm  # isort: skip

from certcli.lipschitz.spectral import spectral_norm


def matrix_shapes(name: str) -> list[tuple[int, int]]:
    """Shapes (out, in) of all linear and convolution weights of a timm model, kernels reshaped."""
    with torch.device("meta"):
        model = timm.create_model(name)
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
        low, high = min(looseness[name]), max(looseness[name])
        print(f"{name:28} {seconds[name]:9.2f} {ratio:13.2f} {low:13.1e} {high:13.1e}")


if __name__ == "__main__":
    main()
