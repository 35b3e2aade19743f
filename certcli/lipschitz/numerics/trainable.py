"""The trainable arithmetic of the rules: tensors with gradients, for losses, never shown."""

from collections import Counter

import torch
from torch import Tensor

from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.numerics.convolution_estimate import (
    COLD,
    Geometry,
    convolution_estimate,
    estimated_block_norms,
    leading,
    warm_vectors,
)


class TrainableArithmetic(Arithmetic):
    """Differentiable estimates of the same numbers. Power iteration approaches spectral norms from
    below.

    Matrices stay in the network's precision, scalars are float64: the bound of an untrained network
    is a product of many factors, beyond float32. Without gradients (an evaluation, once an epoch) a
    norm gets at least 30 iterations, because the vectors of training lag behind weights that move
    fast.

    Attributes:
        vectors: Singular vectors by name, kept between steps, so that one iteration a step is
            enough.
        orthogonal: id() of the parameters that the optimiser keeps orthogonal: their norm is 1,
            without a useful gradient.
    """

    rigorous = False

    def __init__(
        self, device: torch.device, iterations: int = 1, orthogonal: frozenset[int] = frozenset()
    ) -> None:
        self.device = device
        self.iterations = iterations
        self.orthogonal = orthogonal
        self.vectors: dict[str, Tensor] = {}
        self._constants: dict[float, Tensor] = {}
        self._uses: Counter[str] = Counter()

    def begin(self) -> None:
        self._uses.clear()

    def _own(self, name: str) -> str:
        """Return a name of this matrix: a module may call a function several times."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}#{self._uses[name]}"

    @property
    def _steps(self) -> int:
        return max(1 if torch.is_grad_enabled() else COLD, self.iterations)

    def const(self, value: float) -> Tensor:
        value = float(value)
        if value not in self._constants:
            self._constants[value] = torch.tensor(value, dtype=torch.float64, device=self.device)
        return self._constants[value]

    def matrix(self, tensor: Tensor) -> Matrix:
        return Matrix(tensor.float() if tensor.dtype != torch.float64 else tensor, 0.0, id(tensor))

    def matmul(self, a: Matrix, b: Matrix) -> Matrix:
        left, right = _in_one_precision(a.tensor, b.tensor)
        return Matrix(left @ right)

    def add(self, a: Matrix, b: Matrix) -> Matrix:
        left, right = _in_one_precision(a.tensor, b.tensor)
        return Matrix(left + right)

    def sigma(self, matrix: Matrix, name: str = "") -> Tensor:
        if matrix.key in self.orthogonal:
            return self.const(1.0)
        w = matrix.tensor
        name = self._own(name)
        steps = self._steps
        with torch.no_grad():
            fixed = w.detach()
            u = warm_vectors(self.vectors.get(name), w.shape[:1], w)
            u = leading(fixed.unsqueeze(0)).flatten() if u is None else u
            for _ in range(steps):
                v = torch.nn.functional.normalize(fixed.T @ u, dim=0)
                u = torch.nn.functional.normalize(fixed @ v, dim=0)
            self.vectors[name] = u
        return torch.dot(u, w @ v).double()

    def sigmas(self, matrices: list[Matrix], name: str) -> list[Tensor]:
        tensors = [matrix.tensor for matrix in matrices]
        if len({tensor.shape for tensor in tensors}) > 1:
            return [self.sigma(one, f"{name}.{number}") for number, one in enumerate(matrices)]
        norms = estimated_block_norms(
            torch.stack(tensors), self.vectors, self._own(name), self._steps
        )
        return list(norms.double().unbind())

    def sigma_products(self, pairs: list[tuple[Matrix, Matrix]], name: str) -> list[Tensor]:
        left, right = ([pair[place].tensor for pair in pairs] for place in (0, 1))
        if len({(a.shape, b.shape) for a, b in zip(left, right, strict=True)}) > 1:
            names = [f"{name}.{number}" for number in range(len(pairs))]
            return [
                self.sigma_product(*pair, label) for pair, label in zip(pairs, names, strict=True)
            ]
        products = torch.stack(left).mT @ torch.stack(right)
        return list(
            estimated_block_norms(products, self.vectors, self._own(name), self._steps)
            .double()
            .unbind()
        )

    def convolution(
        self, weight: Tensor, error: float, geometry: Geometry, name: str = ""
    ) -> Tensor:
        return convolution_estimate(weight, geometry, self.vectors, self._own(name), self._steps)

    def length(self, vector: Matrix | None) -> Tensor:
        return self.const(0.0) if vector is None else vector.tensor.norm().double()

    def sqrt(self, value: Tensor) -> Tensor:
        return value.clamp_min(1e-30).sqrt()

    def total(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).sum()

    def root_sum_of_squares(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        # squares of 1e200 would overflow
        largest = stacked.detach().abs().max().clamp(1e-300, 1e300)
        return (stacked / largest).norm() * largest

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def absolute(self, parameter: Tensor) -> Tensor:
        return parameter.double().abs()

    def _norm(self, tensor: Tensor) -> float:
        return 0.0  # errors are not tracked: these numbers are never called bounds

    def _largest(self, gains: Tensor) -> float:
        return 0.0

    def _error(self, products: int, *terms: tuple[float, ...]) -> float:
        return 0.0

    def sigma_product(self, a: Matrix, b: Matrix, name: str = "") -> Tensor:
        return self.sigma(self.matmul(self.transpose(a), b), name)


def _in_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in one precision on one device: float64 constants meet float32."""
    b = b.to(a.device)
    return (a, b) if a.dtype == b.dtype else (a.float(), b.float())
