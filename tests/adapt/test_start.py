"""Where adapted parts start: floors, folded and fitted norms, least squares."""

import torch
from torch import nn

from certcli.adapt.start import (
    LeastSquares,
    between_inputs,
    compose_inputs,
    fold_center_norm,
)
from certcli.nn.norms import CenterNorm, FloorNorm

CPU = torch.device("cpu")


def test_floor_norm_is_layer_norm_above_its_floor() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -2, 2, 50
    ).unsqueeze(1)
    norm = FloorNorm(6, floor=0.5)
    deviation = x.var(dim=1, correction=0).sqrt()
    normalised = norm(x)
    reference = nn.functional.layer_norm(x, (6,), eps=0.0)
    assert torch.allclose(
        normalised[deviation > 0.5], reference[deviation > 0.5], atol=1e-5
    )  # float32 rounding
    below = normalised[deviation < 0.5]
    assert torch.allclose(
        below, (x - x.mean(dim=1, keepdim=True))[deviation < 0.5] / 0.5, atol=1e-5
    )


def test_floor_norm_of_a_constant_token_has_a_finite_gradient() -> None:
    x = torch.full((2, 6), 0.3, requires_grad=True)
    FloorNorm(6, floor=0.5)(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_folding_a_centre_norm_keeps_the_function() -> None:
    norm = CenterNorm(6)
    layer = nn.Linear(6, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(5, 6)
    with torch.no_grad():
        before = layer(norm(x))
        fold_center_norm(norm, layer)
        assert torch.allclose(layer(x), before, atol=1e-5)  # float32 weights are rounded once


def test_least_squares_finds_the_minimiser() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 5)
    y = torch.randn(50, 3)
    solver = LeastSquares(5, 3, CPU)
    layer = nn.Linear(5, 3)
    for part in range(0, 50, 7):
        solver.add(x[part : part + 7], y[part : part + 7])
    solver.solve_into(layer, ridge=0.0)
    with torch.no_grad():
        best = (layer(x) - y).square().sum()
        for _ in range(20):
            layer.weight += 0.01 * torch.randn_like(layer.weight)
            assert (layer(x) - y).square().sum() > best
            solver.solve_into(layer, ridge=0.0)


def test_least_squares_without_images_keeps_the_prior() -> None:
    layer = nn.Linear(5, 3)
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().clone()
    solver = LeastSquares(5, 3, CPU)
    solver.add(torch.zeros(4, 5), torch.ones(4, 3))
    solver.solve_into(layer, keep=True)
    assert torch.allclose(layer.weight, weight)  # no image excites them
    assert not torch.allclose(layer.bias, bias)


def test_composed_inputs_undo_a_linear_change_of_them() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(4, 6)]
    old = torch.randn(60, 4)
    new = old @ torch.randn(4, 4) + torch.randn(4)
    with torch.no_grad():
        wanted = [layer(old) for layer in layers]
        solver = between_inputs(layers)
        for part in (slice(30), slice(30, None)):
            solver.add(new[part], old[part])
        compose_inputs(layers, solver, ridge=1e-12)
        for layer, goal in zip(layers, wanted, strict=True):
            assert torch.allclose(layer(new), goal, atol=1e-4)
