"""Token mixing with a constant of 1: what it computes, what is proven of it, and that no slope exceeds the bound."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from certcli.finetune.stiefel import orthogonal_parameters, orthogonalise
from certcli.lipschitz.bound import check_proof
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import RigorousArithmetic
from certcli.lipschitz.propagate import propagate, trace_network
from certcli.models import build
from certcli.nn.orthogonal_mixing import OrthogonalMixing, TokenMaxMin, TokenShift
from certcli.nn.reference import TokenMixer
from certcli.system.errors import ArchitectureError

IMAGE = (2, 4, 4)


class OnTokens(nn.Module):
    """Four tokens of width 8, scaled: (b, 2, 4, 4) -> (b, 4, 8), then the mixing."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts((x.reshape(x.shape[0], 4, 8) - 0.5) * 4.0)


def _scaled(mixing: OrthogonalMixing) -> OrthogonalMixing:
    with torch.no_grad():
        for number, part in enumerate(mixing.maps):
            part.weight.copy_(torch.randn(4, 4) * (0.5 + number))
        mixing.shift.normal_()
    return mixing


MIXINGS: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": lambda: OrthogonalMixing(4, 8, 4),
    "orthogonal-after-linear": lambda: nn.Sequential(nn.Linear(8, 8), _scaled(OrthogonalMixing(4, 8, 2))),
    "not-orthogonal": lambda: _scaled(OrthogonalMixing(4, 8, 2)),
    "sort": lambda: TokenMaxMin(4, 8, 1),
    "sort-far": lambda: nn.Sequential(nn.Linear(8, 8), TokenMaxMin(4, 8, 2), nn.Linear(8, 3)),
    "shift": lambda: TokenShift(4, 8),
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return OnTokens(MIXINGS[name]()).double().eval()


def _slope(net: nn.Module) -> float:
    """The largest singular value of the dense Jacobian at a few images."""
    images = torch.rand(4, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    jacobians = [torch.autograd.functional.jacobian(lambda x: net(x[None]).flatten(), image) for image in images]
    return max(float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)) for jacobian in jacobians)


@pytest.mark.parametrize("name", MIXINGS)
def test_no_slope_exceeds_the_bound(name: str) -> None:
    net = _build(name)
    result = bound_network(net, IMAGE, 3)
    # 1e-9: rounding of the measured singular value in float64
    assert _slope(net) <= float(result.upper) * (1 + 1e-9)
    assert check_proof(result.bound.to_json()) == []


@pytest.mark.parametrize("name", ["orthogonal", "not-orthogonal", "sort"])
def test_the_bound_is_the_slope(name: str) -> None:
    """Each head's matrix is attained, and a permutation loses nothing: the bound is no larger than the slope, up to 1e-6."""
    net = _build(name)
    assert float(bound_network(net, IMAGE, 3).upper) <= _slope(net) * (1 + 1e-6)


@pytest.mark.parametrize("name", MIXINGS)
def test_no_tensor_is_larger_than_its_size_bounds(name: str) -> None:
    net = _build(name)
    outcome = propagate(trace_network(net, IMAGE), RigorousArithmetic())
    size = outcome.context.settle(outcome.logits).size
    noise = torch.rand(8, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for image in torch.cat([noise, noise.round(), torch.zeros_like(noise[:1]), torch.ones_like(noise[:1])]):
        result = net(image[None]).detach()
        slack = 1 + 1e-12  # rounding of the measured norm
        assert float(result.norm()) <= float(size.total) * slack
        assert float(result.abs().max()) <= float(size.peak) * slack
        for axis in (-1, -2):
            assert float(result.norm(dim=axis).max()) <= float(size.fibre_along(axis)) * slack


def test_hard_attention_sorts_pairs_of_tokens_in_each_channel() -> None:
    mixing = TokenMaxMin(4, 1, 2)
    with torch.no_grad():
        mixing.shift.copy_(torch.tensor([[0.0], [0.0], [0.0], [9.0]]))
    tokens = torch.tensor([[[1.0], [5.0], [2.0], [3.0]]])
    assert mixing(tokens).flatten().tolist() == [2.0, 12.0, 1.0, 5.0]


def test_orthogonal_mixing_applies_each_heads_matrix_to_its_channels() -> None:
    torch.manual_seed(0)
    mixing, x = _scaled(OrthogonalMixing(4, 6, 3)), torch.randn(2, 4, 6)
    expected = [part.weight @ x[..., 2 * h : 2 * h + 2] for h, part in enumerate(mixing.maps)]
    torch.testing.assert_close(mixing(x), torch.cat(expected, dim=-1) + mixing.shift)


@pytest.mark.parametrize("arch", ["certvit_sort_mnist", "certvit_mix_mnist"])
def test_reference_nets_have_the_constant_of_their_pooling_while_orthogonal(arch: str) -> None:
    net = build.create(arch, {"width": 16, "head": [8], "depth": 2, "heads": 2}, initialise=True)
    orthogonalise(net)
    matrices = {id(parameter) for parameter in orthogonal_parameters(net)}
    assert all(id(part.weight) in matrices for mixing in net.mixings for part in getattr(mixing, "maps", []))
    outcome = propagate(trace_network(net, (1, 28, 28)), RigorousArithmetic())
    # sqrt(4 tokens) of the mean; 1e-5: the matrices are orthogonal in float32
    assert float(outcome.logits.base) <= 0.5 * (1 + 1e-5)


def test_without_mixing_no_token_depends_on_another() -> None:
    def reach(mixing: str) -> bool:
        torch.manual_seed(0)
        net = TokenMixer(1, 8, 4, 8, 2, mixing, 2, [8], 3).double()
        seen: list[torch.Tensor] = []
        net.layers[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
        image = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
        net(image)
        (gradient,) = torch.autograd.grad(seen[0][:, 0].sum(), image)
        return bool(gradient[..., 4:, 4:].any())  # the last patch, seen by the first token

    assert [reach(mixing) for mixing in ("sort", "orthogonal", "none")] == [True, True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrthogonalMixing(4, 8, 3),
        lambda: TokenMaxMin(6, 8, 2),
        lambda: TokenMixer(1, 8, 4, 8, 2, "softmax", 2, [8], 3),
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ArchitectureError):
        make()
