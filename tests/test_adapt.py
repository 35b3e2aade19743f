"""Adaptation: the closed forms keep what they claim to keep, the plan is what is done, the result is what is recorded."""

import pytest
import torch
from torch import nn

from certcli import data, models
from certcli.adapt.fit import Replaced, adapt
from certcli.adapt.plan import AdaptSettings, plan
from certcli.adapt.start import LeastSquares, center_norm_start, fold_center_norm, tie_queries
from certcli.checkpoint import Checkpoint
from certcli.errors import ArchitectureError, UsageError
from certcli.lipschitz.propagate import bound_network
from certcli.nn.l2_attention import L2Attention, build
from certcli.nn.norms import CenterNorm

CPU = torch.device("cpu")


def run(checkpoint: Checkpoint, settings: AdaptSettings, images: torch.Tensor) -> tuple[list[Replaced], Checkpoint]:
    *parts, result = list(adapt(checkpoint, settings, images, CPU))
    assert isinstance(result, Checkpoint)
    return [part for part in parts if isinstance(part, Replaced)], result


@pytest.fixture(scope="module")
def images(plain: Checkpoint) -> torch.Tensor:
    return data.load("digits", plain.record.input, "train").limit(200).tensors()[0]


def logits(checkpoint: Checkpoint, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return models.load(checkpoint, dtype=torch.float64)(images.double())


def test_reparametrisations_keep_the_function(plain: Checkpoint, images: torch.Tensor) -> None:
    """Weighted residuals start at a = 1, and a flat linear head copies pooling: nothing may change but rounding."""
    settings = AdaptSettings("keep", "keep", "weighted", "keep", head=(), epochs=-1)
    _, surgery_only = run(plain, settings, images)
    fitted = AdaptSettings("keep", "keep", "weighted", "keep", head=(), epochs=0, distill=0)
    _, result = run(plain, fitted, images)
    assert torch.allclose(logits(result, images), logits(plain, images), atol=1e-3)
    assert surgery_only.tensors.keys() == result.tensors.keys()


def test_folding_a_centre_norm_keeps_the_function() -> None:
    norm, layer = CenterNorm(6), nn.Linear(6, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(5, 6)
    with torch.no_grad():
        before = layer(norm(x))
        fold_center_norm(norm, layer)
        assert torch.allclose(layer(x), before, atol=1e-5)  # float32 weights are rounded once


def test_least_squares_finds_the_minimiser() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 5), torch.randn(50, 3)
    solver, layer = LeastSquares(5, 3, CPU), nn.Linear(5, 3)
    for part in range(0, 50, 7):
        solver.add(x[part : part + 7], y[part : part + 7])
    solver.solve_into(layer, ridge=0.0)
    with torch.no_grad():
        best = (layer(x) - y).square().sum()
        for _ in range(20):
            layer.weight += 0.01 * torch.randn_like(layer.weight)
            assert (layer(x) - y).square().sum() > best
            solver.solve_into(layer, ridge=0.0)


def test_centre_norm_start_beats_every_other_gain() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 4) * 3 + 1
    wanted = nn.functional.layer_norm(x, (4,))
    norm = CenterNorm(4)
    center_norm_start(norm, x, wanted)
    with torch.no_grad():
        best = (norm(x) - wanted).square().sum()
        for scale in (0.9, 1.1):
            norm.weight *= scale
            assert (norm(x) - wanted).square().sum() > best
            norm.weight /= scale


def test_tied_queries_reproduce_a_symmetric_positive_form(tiny: Checkpoint) -> None:
    """Where W_Q,h^T W_K,h is already symmetric, positive and of rank dh, the tied map reproduces it."""
    old = models.load(tiny, writable=True).net.blocks[0].attn
    heads, width = old.num_heads, old.head_dim
    inner = heads * width
    old.qkv.weight.data[inner : 2 * inner] = old.qkv.weight.data[:inner]
    new = build(old)
    tie_queries(new, old)
    for h in range(heads):
        rows = slice(h * width, (h + 1) * width)
        query = old.qkv.weight[:inner][rows].double()
        tied = new.query.weight[rows].double()
        wanted = query.T @ query
        # directions below 1 % of the largest eigenvalue are lifted to it, by design
        assert float((2 * tied.T @ tied - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("norm", ["center", "fold", "keep"])
@pytest.mark.parametrize("residual", ["convex", "weighted", "keep"])
@pytest.mark.parametrize("head", [None, (), (16, 16)])
def test_every_combination_runs_and_is_bounded(
    plain: Checkpoint, images: torch.Tensor, norm: str, residual: str, head: tuple[int, ...] | None
) -> None:
    settings = AdaptSettings("l2", norm, residual, "maxmin", head, epochs=0, distill=0)
    parts, result = run(plain, settings, images[:64])
    assert any(part.path == "blocks.0" for part in parts)
    model = models.load(result)
    found = bound_network(model, result.record.input.size, 10)
    assert found.upper.finite, found.bound.why
    assert isinstance(model.net.blocks[0].attn, L2Attention)
    assert {item.path for item in plan(plain.record, settings)} == {item.path for item in result.record.surgery}
    assert result.record.lineage[-1].command == "adapt"


def test_the_same_seed_gives_the_same_bytes(plain: Checkpoint, images: torch.Tensor) -> None:
    settings = AdaptSettings(head=(16,), epochs=1, distill=1)
    assert run(plain, settings, images[:64])[1].digest == run(plain, settings, images[:64])[1].digest


def test_refusals(plain: Checkpoint, images: torch.Tensor) -> None:
    _, adapted = run(plain, AdaptSettings(epochs=-1), images[:8])
    with pytest.raises(ArchitectureError, match="adapted network"):
        plan(adapted.record, AdaptSettings())
    net = models.create("certvit_4c3f", {}, initialise=False)
    small = models.initialise("certvit_4c3f", {}, models.spec_of(net), 10, 0)
    with pytest.raises(ArchitectureError, match="SmallConvNet"):
        plan(small.record, AdaptSettings())
    for wrong in ({"attention": "magic"}, {"norm": "magic"}, {"residual": "magic"}, {"epochs": -2}):
        with pytest.raises(UsageError):
            AdaptSettings(**wrong)  # type: ignore[arg-type]
