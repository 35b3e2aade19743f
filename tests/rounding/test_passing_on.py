"""How operations pass errors on: arguments moved by as much as their errors move no result by more
than the rule says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.rounding.running_error import PUT_TOGETHER, ROUNDED, RULES, Error, Running


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers that float32 has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).double()


def peak(*shape: int, height: float = 3.0) -> Tensor:
    """One entry above all others: there a bound by the largest entry is attained."""
    x = 0.125 * torch.ones(shape, dtype=torch.float64)
    x.view(-1)[1] = height
    return x


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def at(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).double()


def sorted_pairs(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([torch.maximum(x, y), torch.minimum(x, y)])


def pieces(x: Tensor, order: tuple[int, ...]) -> Tensor:
    parts = x.split(2)
    return torch.cat([parts[place] for place in order])


def exported_batch_norm(x: Tensor) -> Tensor:
    norm = torch.ops.aten._native_batch_norm_legit_no_training
    return norm(x, FLAT, FLAT, HIGH, FLAT, 0.1, 1e-5)[0]


INDEX = torch.tensor([0, 0, 0, 2])
HIGH, FLAT, CAP = peak(4), ones(4), 9 * ones(9)
CENTRE = 0.125 * ones(1, 1, 5, 5)
CENTRE[..., 2, 2] = 9.0
EVEN = 0.125 * ones(1, 1, 8, 8)
EVEN[..., 2, 2] = 9.0
# the operation, its arguments, the error of each, and how much of what the rule allows is found (1:
# the rule is tight)
Row = tuple[Callable[..., Tensor], tuple[Tensor, ...], float, float]
ROWS: dict[str, Row] = {
    "sum": (lambda x, y: x + y, (draw(4), draw(4)), 0.5, 0.99),
    "sum, alpha": (lambda x, y: torch.add(x, y, alpha=-3), (draw(4), draw(4)), 0.5, 0.99),
    "difference, alpha": (lambda x, y: torch.sub(x, y, alpha=2), (draw(4), draw(4)), 0.5, 0.99),
    "reversed difference": (lambda x, y: torch.rsub(x, y, alpha=0.25), (draw(4), draw(4)), 0.5, 0.99),
    "sum, copied": (lambda x, y: x + y, (draw(3, 1), draw(1, 5)), 0.5, 0.99),
    "centred": (lambda x: x - x.mean(-1, keepdim=True), (draw(2, 6),), 0.5, 0.99),
    "less another's mean": (lambda x, y: x - y.mean(-1, keepdim=True), (draw(1, 6), draw(1, 6)), 0.5, 0.99),
    "with its own mean": (lambda x: x + x.mean(-1, keepdim=True), (draw(1, 6),), 0.5, 0.99),
    "less three of its means": (lambda x: torch.sub(x, x.mean(-1, keepdim=True), alpha=3), (draw(1, 6),), 0.5, 0.49),
    "less a mean along another axis": (lambda x: x - x.mean(-1), (draw(6, 6),), 0.5, 0.7),
    "product": (lambda x, y: x * y, (peak(4), peak(4, height=-2)), 0.5, 0.99),
    "product, number": (lambda x: x * -3.7, (draw(4),), 0.5, 0.99),
    "product, exact": (lambda x: x * HIGH, (draw(4),), 0.5, 0.99),
    "product, copied": (lambda x, y: x * y, (draw(3, 1), draw(1, 5)), 0.5, 0.99),
    "square": (lambda x: x * x, (peak(4),), 0.5, 0.99),
    "sum of squares": (lambda x: (x * x).sum(-1, keepdim=True), (draw(1, 6),), 0.5, 0.99),
    "mean of squares": (lambda x: (x * x).mean(-1, keepdim=True), (draw(1, 6),), 0.5, 0.99),
    "sum of all": (lambda x: x.sum(), (draw(3, 6),), 0.5, 0.99),
    "mean along an axis": (lambda x: x.mean(0), (draw(3, 6),), 0.5, 0.99),
    "quotient": (lambda x, y: x / y, (at(3.0), at(1.5)), 0.5, 0.99),
    "quotient, copied": (lambda x, y: x / y, (draw(6), at(1.5)), 0.3, 0.9),
    "quotient, a small divisor": (lambda x: x / at(8.0, 0.01), (draw(2),), 0.3, 0.99),
    "inverse": (lambda x: 1.0 / x, (at(0.1, 2.0),), 0.01, 0.8),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=3), (peak(4), peak(4), peak(4)), 0.2, 0.99),
    "addcmul, copied": (lambda x, y, z: torch.addcmul(x, y, z), (ones(1), peak(4), peak(4)), 0.2, 0.7),
    "addcmul, its product copied": (lambda y, z: torch.addcmul(ones(9, 4), y, z), (peak(4), peak(4)), 0.2, 0.99),
    "matrix": (lambda x: x @ draw(6, 5), (draw(3, 6, seed=1),), 0.5, 0.99),
    "matrix before": (lambda x: draw(5, 6) @ x, (draw(6, 3, seed=1),), 0.5, 0.99),
    "two matrices": (lambda x, y: x @ y, (ones(3, 4), 2 * ones(4, 5)), 0.5, 0.99),
    "batches of matrices": (lambda x, y: x @ y, (ones(2, 3, 4), 0.1 * ones(2, 4, 5)), 0.5, 0.4),
    "matrix and vector": (lambda x, y: x @ y, (ones(3, 4), ones(4)), 0.5, 0.99),
    "inner product": (lambda x, y: torch.dot(x, y), (draw(4), draw(4, seed=1)), 0.5, 0.9),
    "addmm": (lambda z, x, y: torch.addmm(z, x, y, beta=0.5, alpha=3), (ones(3, 5), ones(3, 4), ones(4, 5)), 0.5, 0.99),
    "addmm, copied": (lambda z: torch.addmm(z, ones(3, 4), ones(4, 5)), (draw(5),), 0.5, 0.99),
    "convolution": (lambda x: F.conv1d(x, ones(1, 1, 3)), (draw(1, 1, 60),), 0.5, 0.97),
    "convolution, strided": (lambda x: F.conv2d(x, draw(3, 2, 2, 2), stride=2), (draw(1, 2, 4, 4),), 0.5, 0.99),
    "convolution, dilated": (lambda x: F.conv1d(x, ones(1, 1, 3), stride=2, dilation=2), (draw(1, 1, 60),), 0.5, 0.6),
    "convolution, its weight": (lambda w: F.conv1d(ones(1, 1, 4), w, stride=4), (ones(1, 1, 4),), 0.5, 0.99),
    "convolution, its bias": (lambda b: F.conv1d(ones(1, 1, 40), ones(2, 1, 4), b), (draw(2),), 0.5, 0.99),
    "convolution, transposed": (lambda x: F.conv_transpose1d(x, ones(1, 1, 3)), (draw(1, 1, 60),), 0.5, 0.9),
    "running sum": (lambda x: x.cumsum(-1), (draw(1, 8),), 0.5, 0.6),
    "pool": (lambda x: F.avg_pool2d(x, 2), (draw(1, 1, 4, 4),), 0.5, 0.4),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 3), (draw(1, 1, 4, 4),), 0.5, 0.3),
    "GELU": (F.gelu, (at(1.41421),), 1e-4, 0.99),
    "SiLU": (F.silu, (at(2.4),), 1e-4, 0.99),
    "Mish": (F.mish, (at(1.5),), 1e-4, 0.99),
    "hard swish": (F.hardswish, (at(2.999),), 1e-4, 0.99),
    "log sigmoid": (F.logsigmoid, (at(-30.0),), 1e-4, 0.99),
    "tanh": (torch.tanh, (at(0.0),), 1e-4, 0.99),
    "erf": (torch.erf, (at(0.0),), 1e-4, 0.99),
    "sine": (torch.sin, (at(0.0),), 1e-4, 0.99),
    "sigmoid": (torch.sigmoid, (at(0.0),), 1e-4, 0.99),
    "hard sigmoid": (F.hardsigmoid, (at(0.0),), 1e-4, 0.97),
    "leaky ReLU": (lambda x: F.leaky_relu(x, -4.0), (at(-1.0),), 0.5, 0.99),
    "leaky ReLU, flat": (F.leaky_relu, (at(1.0),), 0.5, 0.99),
    "ELU": (lambda x: F.elu(x, 3.0), (at(-0.001),), 1e-4, 0.99),
    "ELU, flat": (lambda x: F.elu(x, 0.1), (at(1.0),), 0.5, 0.99),
    "SELU": (F.selu, (at(-0.001),), 1e-4, 0.99),
    "exp": (torch.exp, (at(1.0, -1.0),), 0.1, 0.9),
    "square root": (torch.sqrt, (at(0.01),), 1e-5, 0.49),
    "inverse root": (torch.rsqrt, (at(0.01),), 1e-5, 0.49),
    "inverse root, a large error": (torch.rsqrt, (at(1.0),), 0.75, 0.16),
    "power": (lambda x: x**3, (at(2.0),), 1e-3, 0.99),
    "log_softmax": (lambda x: x.log_softmax(-1), (at(20.0, 0.0, 0.0),), 1e-3, 0.8),
    "softmax": (lambda x: x.softmax(-1), (at(0.0, 0.0),), 1e-3, 0.99),
    "length": (lambda x: x.norm(dim=-1), (draw(1, 5),), 0.5, 0.99),
    "LayerNorm": (lambda x: F.layer_norm(x, (2,), None, None, 1e-4), (at(1.0, 1.002),), 1e-5, 0.9),
    "LayerNorm, scaled": (lambda x: F.layer_norm(x, (4,), HIGH, FLAT, 0.1), (0.1 * draw(4),), 1e-3, 0.5),
    "GroupNorm": (lambda x: F.group_norm(x, 2, HIGH, None, 0.1), (0.1 * draw(1, 4, 3),), 1e-3, 0.3),
    "BatchNorm": (lambda x: F.batch_norm(x, FLAT, FLAT, HIGH, FLAT), (draw(1, 4),), 0.5, 0.99),
    "variance": (lambda x: x.var(-1, unbiased=False, keepdim=True), (draw(1, 6),), 0.1, 0.7),
    "deviation": (lambda x: x.std(-1), (draw(1, 6),), 1e-4, 0.3),
    "expanded": (lambda x: x.expand(3, 4), (draw(1, 4),), 0.5, 0.99),
    "repeated": (lambda x: x.repeat(3, 2), (draw(1, 4),), 0.5, 0.99),
    "repeated entries": (lambda x: x.repeat_interleave(3), (draw(4),), 0.5, 0.99),
    "an entry three times": (lambda x: x[INDEX], (draw(3),), 0.5, 0.99),
    "gathered": (lambda x: x.gather(0, INDEX), (draw(3),), 0.5, 0.99),
    "mirrored edge": (lambda x: F.pad(x, (2, 2), mode="reflect"), (draw(1, 1, 3),), 0.5, 0.99),
    "windows": (lambda x: x.unfold(0, 3, 1), (draw(9),), 0.5, 0.99),
    "moved": (lambda x: x.roll(1).view(2, 3).T.flip(0), (draw(6),), 0.5, 0.99),
    "chosen": (lambda x, y: torch.where(at(1, 0, 1, 0).bool(), x, y), (draw(4), draw(4)), 0.5, 0.99),
    "chosen, copied": (lambda x: torch.where(at(1, 1, 1, 0).bool(), x, draw(4)), (draw(1),), 0.5, 0.8),
    "filled": (lambda x: x.masked_fill(at(1, 0, 1, 0).bool(), 0.0), (draw(4),), 0.5, 0.99),
    "pieces": (lambda x: pieces(x, (2, 0, 1)), (draw(6),), 0.5, 0.99),
    "pieces that are rolled": (lambda x: torch.cat([part.roll(1).flip(0) for part in x.split(3)]), (draw(6),), 0.5, 0.99),
    "a piece twice, once rolled": (lambda x: torch.cat([x.split(6)[0], x.split(6)[0].roll(1)]), (draw(6),), 0.5, 0.99),
    "parts of a piece": (lambda x: torch.cat([y[1:] for y in [x.split(3)[0]] * 2] + [x[3:]]), (draw(6),), 0.5, 0.7),
    "a piece twice": (lambda x: pieces(x, (0, 0, 0)), (draw(6),), 0.5, 0.99),
    "joined": (lambda x, y: torch.cat([x, y, x]), (draw(4), draw(4)), 0.5, 0.99),
    "stacked": (lambda x, y: torch.stack([x, y]), (draw(4), draw(4)), 0.5, 0.99),
    "sorted pairs": (sorted_pairs, (draw(4), draw(4, seed=1)), 0.01, 0.99),
    "larger": (torch.maximum, (draw(4), draw(4) - 5), 0.5, 0.7),
    "larger, copied": (torch.maximum, (at(9.0), draw(4)), 0.5, 0.8),
    "ReLU": (torch.relu, (at(1.0, 2.0),), 0.5, 0.99),
    "least, copied": (lambda x: torch.clamp(x, max=CAP), (at(1.0),), 0.5, 0.99),
    "largest": (lambda x: x.amax(-1), (at(1.0, 9.0),), 0.5, 0.99),
    "largest of windows": (lambda x: F.max_pool2d(x, 3, 1), (CENTRE,), 0.2, 0.99),
    "largest of windows of one number": (lambda x: F.max_pool2d(x, (3,), (1,)), (CENTRE,), 0.2, 0.99),
    "largest of dilated windows": (lambda x: F.max_pool2d(x, 2, 2, 0, 2), (EVEN,), 0.2, 0.99),
    "largest of adaptive windows": (lambda x: F.adaptive_max_pool2d(x, 3), (peak(1, 1, 4, 4, height=9),), 0.2, 0.6),
    "sorted": (lambda x: x.sort().values, (draw(6),), 0.01, 0.99),
    "absolute value": (torch.abs, (at(3.0, -2.0),), 0.5, 0.99),
    "negative": (torch.neg, (draw(4),), 0.5, 0.99),
    "clipped": (lambda x: F.hardtanh(x, -9.0, 9.0), (draw(4),), 0.5, 0.99),
    "clipped below": (lambda x: x.clamp_min(-9.0), (draw(4),), 0.5, 0.99),
    "clipped above": (lambda x: x.clamp_max(9.0), (draw(4),), 0.5, 0.99),
    "least": (lambda x: x.amin(-1), (at(1.0, 9.0),), 0.5, 0.99),
    "largest with its place": (lambda x: x.max(-1).values, (at(1.0, 9.0),), 0.5, 0.99),
    "least with its place": (lambda x: x.min(-1).values, (at(1.0, 9.0),), 0.5, 0.99),
    "cosine": (torch.cos, (at(1.5708),), 1e-4, 0.99),
    "arc tangent": (torch.atan, (at(0.0),), 1e-4, 0.99),
    "addmv": (lambda z, x, y: torch.addmv(z, x, y), (ones(3), ones(3, 4), ones(4)), 0.5, 0.6),
    "baddbmm": (lambda z, x, y: torch.baddbmm(z, x, y), (ones(1, 3, 5), ones(1, 3, 4), ones(1, 4, 5)), 0.5, 0.9),
    "baddbmm of a negative factor": (
        lambda z, x, y: torch.baddbmm(z, x, y, beta=-1, alpha=-1), (ones(1, 3, 5), ones(1, 3, 4), ones(1, 4, 5)), 0.5, 0.9,
    ),
    "variance and mean": (lambda x: torch.cat(torch.var_mean(x, -1, unbiased=False)), (draw(1, 6),), 0.1, 0.5),
    "softmax of SDPA": (lambda x: torch.ops.aten._safe_softmax(x, -1), (at(0.0, 0.0),), 1e-3, 0.99),
    "squares": (torch.square, (peak(4),), 0.5, 0.99),
    "BatchNorm as torch.export writes it": (exported_batch_norm, (draw(1, 4),), 0.5, 0.99),
    "pool of sequences": (lambda x: F.avg_pool1d(x, 2), (draw(1, 1, 4),), 0.5, 0.4),
    "pool of volumes": (lambda x: F.avg_pool3d(x, 2), (draw(1, 1, 2, 2, 2),), 0.5, 0.3),
    "adaptive pool of volumes": (lambda x: F.adaptive_avg_pool3d(x, (1, 1, 2)), (draw(1, 1, 2, 2, 2),), 0.5, 0.3),
    "largest of volumes": (lambda x: F.max_pool3d(x, 2), (peak(1, 1, 2, 2, 2, height=9),), 0.2, 0.9),
    "largest of adaptive volumes": (lambda x: F.adaptive_max_pool3d(x, 1), (peak(1, 1, 2, 2, 2, height=9),), 0.2, 0.9),
    "diagonal": (lambda x: x.diagonal(), (draw(3, 3),), 0.5, 0.9),
    "on a diagonal": (torch.diag_embed, (draw(3),), 0.5, 0.99),
    "lower triangle": (torch.tril, (draw(3, 3),), 0.5, 0.9),
    "upper triangle": (torch.triu, (draw(3, 3),), 0.5, 0.9),
    "turned": (lambda x: x.t().rot90().transpose(0, 1).detach() + 0 * x, (draw(3, 3),), 0.5, 0.0),
    "another view": (lambda x: torch.ops.aten.alias(torch.ops.aten._reshape_alias(x, [4], [1])), (draw(2, 2),), 0.5, 0.99),
    "one of many": (lambda x: torch.stack([x.select(0, 1), x.unbind(0)[0]]), (draw(3, 4),), 0.5, 0.7),
    "without an axis": (lambda x: x.squeeze(0).unsqueeze(1), (draw(1, 4),), 0.5, 0.99),
    "written over": (lambda x: (CAP[:4] * 1.0).copy_(x), (draw(4),), 0.5, 0.99),
    "parts of sizes": (lambda x: x.split_with_sizes([1, 3])[1], (draw(4),), 0.5, 0.9),
    "beside zeros": (lambda x: F.pad(x, (1, 2)), (draw(4),), 0.5, 0.99),
    "beside numbers": (lambda x: torch.cat([x.new_full((2,), 1.0), x, x.new_ones(1), x.new_zeros(1)]), (draw(4),), 0.5, 0.99),
    "beside more numbers": (
        lambda x: x + torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2.0), (draw(4),), 0.5, 0.99
    ),
    "times a number read back": (lambda x: x * FLAT[0].item(), (draw(4),), 0.5, 0.99),
    "rows by number": (lambda x: F.embedding(INDEX, x), (draw(3, 2),), 0.5, 0.99),
    "rows that are selected": (lambda x: x.index_select(0, INDEX), (draw(3),), 0.5, 0.99),
    "windows of images": (lambda x: F.unfold(x, 2), (CENTRE,), 0.5, 0.9),
    "channels to places": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), (draw(1, 4, 2, 2),), 0.5, 0.99),
    "shuffled channels": (lambda x: F.channel_shuffle(x, 2), (draw(1, 4, 2, 2),), 0.5, 0.99),
    **{
        f"{mode} edge of {axes} axes": (
            lambda x, mode=mode, axes=axes: F.pad(x, (1, 1) * axes, mode=mode), (draw(1, 1, *[3] * axes),), 0.5, 0.9
        )
        for mode in ("reflect", "replicate") for axes in (1, 2, 3)
    },
    **{
        f"enlarged along {axes} axes": (lambda x: F.interpolate(x, scale_factor=2), (draw(1, 1, *[2] * axes),), 0.5, 0.99)
        for axes in (1, 2, 3)
    },
}  # fmt: skip


def allowed(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], size: float) -> float:
    """Return the error of the result, rounded up, where each argument has one of this size."""
    running = Running(nn.Identity(), frozenset(), {})
    for x in inputs:
        running.errors[x] = Error(torch.tensor(size, dtype=torch.float64))
    with torch.no_grad(), running:
        out = function(*inputs)
    assert torch.allclose(
        out, function(*inputs), rtol=1e-12
    )  # also where it is written out of other operations
    return float(running.errors[out].size) * ROUNDED


def ascended(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], size: float) -> float:
    """Return how far arguments that move by this size move the result, by ascent."""
    before = function(*inputs)
    farthest = 0.0
    for seed in range(3):
        moves = [draw(*x.shape, seed=seed + 7) for x in inputs]
        for _ in range(40):
            moves = [(m * (size / m.norm().clamp_min(1e-300))).requires_grad_(True) for m in moves]
            far = (function(*[x + m for x, m in zip(inputs, moves, strict=True)]) - before).norm()
            farthest = max(farthest, float(far.detach()))
            grads = torch.autograd.grad(far, moves)
            moves = [
                m.detach() if not bool(g.any()) else g + 1e-9 * m.detach()
                for m, g in zip(moves, grads, strict=True)
            ]
    return farthest


@pytest.mark.parametrize("name", ROWS)
def test_no_result_moves_farther_than_its_error(name: str) -> None:
    """Ascent from three starts; a rule that is wide by more than its row says has lost its sense."""
    function, inputs, size, tight = ROWS[name]
    most = allowed(function, inputs, size)
    farthest = ascended(function, inputs, size)
    assert farthest <= most
    assert farthest >= tight * most


ON_CUDA = {"cudnn_batch_norm"}
"""Operations that run on a GPU alone, put together in the same way as those of processors."""


@contextmanager
def noted_operations() -> Iterator[set[str]]:
    """Collect the operations whose rule returns a value while the block runs."""
    reached: set[str] = set()

    def noting(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            value = rule(*args, **kwargs)
            reached.add(name)
            return value

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for table in (RULES, PUT_TOGETHER):
            for name, rule in list(table.items()):
                patch.setitem(table, name, noting(name, rule))
        yield reached


def without_a_row() -> set[str]:
    with noted_operations() as reached:
        for function, inputs, size, _ in ROWS.values():
            allowed(function, inputs, size)
    return {*RULES, *PUT_TOGETHER} - reached - ON_CUDA


def test_a_row_reaches_every_operation() -> None:
    assert without_a_row() == set()
    assert all(PUT_TOGETHER[name] is PUT_TOGETHER["native_batch_norm"] for name in ON_CUDA)


N = 4096
LOST = torch.cat([at(1.0), 2.0**-53 * ones(N - 1)])
COLUMN, KERNEL = ones(N, 1), ones(1, 1, N)
# a sum of LOST, and how much of its sum is the result
SUMS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (lambda x: x.sum(), 1.0),
    "mean": (lambda x: x.mean(), 1 / N),
    "running sum": (lambda x: x.cumsum(0), 1.0),
    "matrix": (lambda x: x[None] @ COLUMN, 1.0),
    "matrix before": (lambda x: COLUMN.T @ x[:, None], 1.0),
    "matrix and bias": (lambda x: torch.addmm(FLAT[:1], x[None], COLUMN), 1.0),
    "matrix and a bias that counts": (lambda x: torch.addmm(x[:1], 0 * x[None], COLUMN), 2.0 / N),
    "inner product": (lambda x: torch.dot(x, COLUMN[:, 0]), 1.0),
    "convolution": (lambda x: F.conv1d(x[None, None], KERNEL), 1.0),
    "transposed convolution": (lambda x: F.conv_transpose1d(x.view(1, N, 1), COLUMN[:, None]), 1.0),
    "pool": (lambda x: F.avg_pool2d(x.view(1, 1, 1, N), (1, N)), 1 / N),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x.view(1, 1, N, 1), 1), 1 / N),
    "length": (lambda x: x.sqrt().norm(), 0.5),
}


@pytest.mark.parametrize("name", SUMS)
def test_terms_that_are_lost_one_after_another_are_covered(name: str) -> None:
    """1 + 2^-53 is 1: added in this order, all terms after the first are lost; no kernel promises
    another order.
    """
    function, share = SUMS[name]
    assert float(1 + LOST[1]) == 1
    running = Running(nn.Identity(), frozenset(), {})
    with torch.no_grad(), running:
        out = function(LOST)
    assert float(running.errors[out].size) * ROUNDED >= (N - 1) * 2.0**-53 * share
