"""Laws of measured slopes: on networks whose constant is known exactly, estimate <= constant <=
bound.

What stands beside the bound: published formulas (none a certificate), Jacobians of blocks,
comparisons.
"""

import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.formulas import FORMULAS, formula_value
from benchmarks.tables.jacobians import (
    block_jacobian_norms,
    block_paths,
    hoelder_bounds,
    module_inputs,
)
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.estimate import jacobian_norms, measure
from certcli.lipschitz.network import bound_network
from certcli.models import build
from tests.helpers.commands import certvit, document
from tests.helpers.grids import spaced

ROOM = Path(__file__).parents[2] / "certcli"
WIDTH = 16
"""Pixels of an image, (1, 4, 4)."""


class Linears(nn.Module):
    """Linear maps one after the other, each a block with a name."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(*m.T.shape, bias=False) for m in matrices))
        for layer, matrix in zip(self.blocks, matrices, strict=True):
            layer.weight.data = matrix.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.flatten(1))


class Cancelling(nn.Module):
    """(A + c B) x - c B x with c = 2^20: six digits cancel, what is left is A x."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        large = 2.0**20 * hadamard().roll(1, 0)
        self.sum = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sum.weight.data = matrix + large
        self.part = nn.Linear(WIDTH, WIDTH, bias=False)
        self.part.weight.data = large

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x.flatten(1)) - self.part(x.flatten(1))


class Narrow(nn.Module):
    """x -> float32(f(x)): the network itself rounds, so float64 copies of it do not differ."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


def hadamard() -> Tensor:
    """Return the matrix of +1 and -1 of norm 4."""
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return torch.kron(torch.kron(step, step), torch.kron(step, step))


def integers(draw: random.Random, count: int) -> Tensor:
    return torch.tensor([float(draw.randint(-9, 9)) for _ in range(count)])


def orthogonal(draw: random.Random) -> tuple[Tensor, Fraction]:
    """Return 2^k times a permutation with signs times Hadamard's matrix or not, and its norm's
    square.
    """
    power = draw.randint(-8, 8)
    order = torch.tensor(draw.sample(range(WIDTH), WIDTH))
    signs = torch.tensor([draw.choice([-1.0, 1.0]) for _ in range(WIDTH)])
    full = draw.random() < 0.5
    matrix = (hadamard() if full else torch.eye(WIDTH))[order] * signs
    return 2.0**power * matrix, Fraction(4) ** power * (16 if full else 1)


def known_network(seed: int) -> tuple[nn.Module, Fraction]:
    """Return a network and the square of its Lipschitz constant, exact."""
    draw = random.Random(seed)
    kind = seed % 3
    if kind == 0:  # orthogonal layers
        layers = [orthogonal(draw) for _ in range(draw.randint(1, 4))]
        square = Fraction(1)
        for _, norm in layers:
            square *= norm
        return Linears([matrix for matrix, _ in layers]), square
    row = integers(draw, WIDTH)
    row[0] += 10
    column = integers(draw, WIDTH)
    column[0] += 10
    square = Fraction(int(row @ row) * int(column @ column))
    if kind == 1:  # of rank one: its norm is the root of an integer, and rounding is everywhere
        return Linears([torch.outer(column, row)]), square
    # in float32 so much is lost that the replay refuses it
    return Cancelling(torch.outer(column, row)).double(), square


def images(seed: int) -> Tensor:
    return torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def assert_below(value: float, square: Fraction, seed: int, share: float = 1 - 1e-4) -> None:
    assert Fraction(value) ** 2 <= square, f"network {seed}: {value!r} is above the constant"
    assert value > share * float(square) ** 0.5, f"network {seed}: {value!r} says nothing"


@pytest.mark.parametrize("first", spaced(range(0, 180, 60), 3))
def test_no_estimate_is_above_the_exact_constant_nor_this_above_the_bound(first: int) -> None:
    for seed in range(first, first + 60):
        model, square = known_network(seed)
        pixels = images(seed).to(next(model.parameters()).dtype)
        *_, estimate = measure(model.eval(), iter([pixels]), 4, seed)
        assert_below(estimate.value, square, seed)
        assert_below(float(jacobian_norms(model, pixels, 4, seed).max()), square, seed)
        if seed % 5:  # proofs take most of the time
            continue
        upper = bound_network(model, (1, 4, 4), WIDTH).upper
        proven = Fraction(upper.mantissa) * Fraction(2) ** upper.exponent
        assert proven**2 >= square
        assert Fraction(estimate.value) <= proven


def test_no_estimate_of_a_network_that_rounds_by_itself_is_above_its_constant() -> None:
    for seed in range(1, 61, 3):  # of rank one
        inner, square = known_network(seed)
        *_, estimate = measure(Narrow(inner).eval(), iter([images(seed)]), 4, seed)
        # SAFETY times the error of float32
        assert_below(estimate.value, square, seed, 1 - 1e-3)


def test_every_estimate_comes_from_the_function_that_rounds_down() -> None:
    """`Estimate(...)` is written once, in `measure`, whose number is that of `slopes_below`."""
    makers = [
        str(path.relative_to(ROOM))
        for path in sorted(ROOM.rglob("*.py"))
        if re.search(r"(?<!class )\bEstimate\(", path.read_text())
    ]
    assert makers == ["lipschitz/estimate.py"]


def report(*words: object) -> dict:
    return document("lipschitz", *words, "--quiet")


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_labelled_and_are_no_bounds(plain: Checkpoint, name: str) -> None:
    result = formula_value(name, build.load(plain), plain.record.input.size)
    assert result.flaw
    assert result.source
    assert not isinstance(result, Bound)
    assert all(value >= 0 for _, value in result.layers)


def test_block_jacobians_against_the_dense_matrix(plain: Checkpoint) -> None:
    model = build.load(plain, dtype=torch.float64)
    images = (
        datasets.load_dataset("digits", plain.record.input, "val").limit(3).tensors()[0].double()
    )
    assert block_paths(model) == ["blocks.0"]
    measured = block_jacobian_norms(model, images, iterations=60)["blocks.0"]
    hoelder = hoelder_bounds(model, images)["blocks.0"]
    x, _ = module_inputs(model, images, {"block": model.net.blocks[0]})["block"]
    for position in range(3):
        dense = torch.autograd.functional.jacobian(model.net.blocks[0], x[[position]])
        exact = float(torch.linalg.matrix_norm(dense.reshape(x[0].numel(), -1), 2))
        assert float(measured[position]) <= exact * (1 + 1e-12)  # rounding of float64
        assert float(measured[position]) >= 0.99 * exact  # sixty power iterations
        assert exact <= float(hoelder[position]) * (1 + 1e-12)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_report_holds_what_was_asked_for(workshop: Path, tmp_path: Path) -> None:
    found = report(
        workshop / "certified.safetensors",
        "--compare",
        workshop / "plain.safetensors",
        "--limit",
        4,
    )
    assert found["compare"]["other_log10_upper"] > found["log10_upper"]
    assert found["lower"] <= found["upper"]
    layers = tmp_path / "layers.png"
    report(workshop / "plain.safetensors", "--no-estimate", "--plot", layers)
    assert layers.stat().st_size > 1000


@pytest.mark.parametrize("view", [[], ["--layers"]])
def test_views_for_a_person(workshop: Path, view: list[str]) -> None:
    words = ["lipschitz", str(workshop / "plain.safetensors"), "--no-estimate", "--quiet", *view]
    outcome = certvit(*words)
    for part in ("patch_embed", "blocks.0", "norm", "upper bound (proven", "certified within"):
        assert part in outcome.stdout
