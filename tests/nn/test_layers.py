"""MaxMin's own backward pass: the slopes that autograd finds by itself, under every transform.

Token mixing with a constant of 1: its function, and the constant of the reference networks.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from certcli.finetune.stiefel import orthogonal_parameters, orthogonalise
from certcli.lipschitz.network import propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.models import build
from certcli.nn.layers import (
    SOFTMAX_SLOPE,
    ChannelRoll,
    L2Pool,
    MaxMin,
    OrthogonalMixing,
    TokenMaxMin,
)
from certcli.nn.lipschitz_networks import LipschitzMixer, LipschitzPyramid, TokenMixer
from certcli.system.errors import ArchitectureError


def test_the_backward_pass_of_maxmin_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    act = MaxMin()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(act, x)
    assert torch.autograd.gradgradcheck(act, x)
    with torch.no_grad():
        plain = act(x)
    assert torch.equal(act(x), plain)
    columns = torch.func.vmap(torch.func.jacrev(act))(x.detach())
    ties = torch.func.jacrev(act)(torch.ones(8, dtype=torch.float64))
    for jacobian in (*columns, ties):  # a permutation, also where two entries are equal
        assert torch.equal(jacobian @ jacobian.mT, torch.eye(8, dtype=torch.float64))


def _tokens_of_norm(mixing: OrthogonalMixing) -> OrthogonalMixing:
    with torch.no_grad():
        for number, part in enumerate(mixing.maps):
            part.weight.copy_(torch.randn(4, 4) * (0.5 + number))
        mixing.shift.normal_()
    return mixing


def test_hard_attention_sorts_pairs_of_tokens_in_each_channel() -> None:
    mixing = TokenMaxMin(4, 1, 2)
    with torch.no_grad():
        mixing.shift.copy_(torch.tensor([[0.0], [0.0], [0.0], [9.0]]))
    tokens = torch.tensor([[[1.0], [5.0], [2.0], [3.0]]])
    assert mixing(tokens).flatten().tolist() == [2.0, 12.0, 1.0, 5.0]


def test_soft_pairs_are_softmax_averages_drawn_to_their_mean() -> None:
    torch.manual_seed(0)
    mixing = TokenMaxMin(2, 3, 1, soft=True).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    pair = (x + mixing.shift).transpose(1, 2)  # (b, channels, the pair)
    temperature = mixing.pair.log_temperature.exp()
    attended = torch.stack(
        [(sign * pair / temperature).softmax(-1).mul(pair).sum(-1) for sign in (1, -1)], dim=1
    )
    mean = pair.mean(-1).unsqueeze(1)
    torch.testing.assert_close(mixing(x), mean + (attended - mean) / SOFTMAX_SLOPE)
    assert abs(SOFTMAX_SLOPE * math.tanh(SOFTMAX_SLOPE) - 1) < 1e-6


def test_channels_that_do_not_meet_across_tokens_meet_within() -> None:
    mixing = TokenMaxMin(2, 4, 1, across=2)
    torch.nn.init.zeros_(mixing.shift)
    tokens = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 7.0, 6.0]]])
    assert mixing(tokens).tolist() == [[[5.0, 2.0, 4.0, 3.0], [1.0, 0.0, 7.0, 6.0]]]


@pytest.mark.parametrize("mixing", ["sort", "soft", "none"])
def test_attention_between_maps_of_each_place_keeps_a_constant_of_1(mixing: str) -> None:
    shape = {"img_size": 8, "patch": 4, "width": 8, "across": 4, "depth": 2, "mixing": mixing}
    net = build.create("certvit_lip_attention_mnist", shape, initialise=True).double()
    orthogonalise(net)
    outcome = propagate(trace_network(net, (1, 8, 8)), Arithmetic())
    assert (
        float(outcome.logits.base) <= 1 + 1e-8
    )  # proven norms of three matrices and the patches, each rounded up by 5e-10
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    tokens = []
    net.mixings[-1].register_forward_hook(lambda module, inputs, output: tokens.append(output))
    net(image)
    (gradient,) = torch.autograd.grad(tokens[0][:, 0].sum(), image)
    assert bool(gradient[..., 4:, 4:].any()) == (
        mixing != "none"
    )  # the last patch, seen by the first token


def test_orthogonal_mixing_applies_each_heads_matrix_to_its_channels() -> None:
    torch.manual_seed(0)
    mixing = _tokens_of_norm(OrthogonalMixing(4, 6, 3))
    x = torch.randn(2, 4, 6)
    expected = [part.weight @ x[..., 2 * h : 2 * h + 2] for h, part in enumerate(mixing.maps)]
    torch.testing.assert_close(mixing(x), torch.cat(expected, dim=-1) + mixing.shift)


def test_rolled_channels_show_a_linear_layer_its_window_of_tokens() -> None:
    tokens = torch.arange(9.0).view(1, 9, 1).expand(1, 9, 4)  # 0 1 2 / 3 4 5 / 6 7 8
    assert ChannelRoll(3, 4)(tokens)[0, 4].tolist() == [4, 1, 3, 0]
    assert ChannelRoll(3, 4, back=True)(tokens)[0, 8].tolist() == [8, 2, 6, 0]
    net = build.create("certvit_lip_digits", {"depth": 2, "rolls": True}, initialise=True).double()
    orthogonalise(net)
    base = propagate(trace_network(net, (1, 8, 8)), Arithmetic()).logits.base
    assert (
        1 <= float(base) <= 1 + 1e-8
    )  # seven proven norms, each rounded up by 5e-10; the last layer is pending


def test_a_pyramid_merges_neighbours_and_has_the_constant_1_while_orthogonal() -> None:
    shape = {"img_size": 16, "widths": [8, 12], "depths": [1, 2], "windows": 1, "head": [8]}
    net = build.create("certvit_lip_pyramid_cifar10", shape, initialise=True).double()
    orthogonalise(net)
    matrices = {id(parameter) for parameter in orthogonal_parameters(net)}
    assert {
        name for name, p in net.named_parameters() if p.dim() > 1 and id(p) not in matrices
    } == {
        *(f"stages.{stage}.position" for stage in range(2)),
        "head.out.weight",
    }
    base = propagate(trace_network(net, (3, 16, 16)), Arithmetic()).logits.base
    assert (
        1 <= float(base) <= 1 + 1e-8
    )  # six proven norms, each rounded up by 5e-10; the last layer is pending
    seen: list[torch.Tensor] = []
    net.stages[1].merge.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net.stages[0].register_forward_hook(
        lambda module, inputs, output: torch.arange(16.0).view(1, 16, 1).expand(1, 16, 8).double()
    )
    net(torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert seen[0][0, :, ::8].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_the_lengths_of_channels_have_a_gradient_everywhere() -> None:
    tokens = torch.randn(2, 16, 3, dtype=torch.float64, requires_grad=True)
    pool = L2Pool(4, 2)
    expected = torch.linalg.vector_norm(tokens.view(2, 2, 2, 2, 2, 3), dim=(2, 4)).view(2, 4, 3)
    torch.testing.assert_close(pool(tokens), expected)
    with torch.no_grad():
        torch.testing.assert_close(pool(tokens), expected)
    torch.autograd.gradcheck(pool, (tokens,))
    silent = torch.zeros(1, 16, 3, requires_grad=True)
    pool(silent).sum().backward()
    assert not silent.grad.any()


@pytest.mark.parametrize("arch", ["certvit_sort_mnist", "certvit_mix_mnist"])
def test_reference_nets_have_the_constant_of_their_pooling_while_orthogonal(arch: str) -> None:
    net = build.create(arch, {"width": 16, "head": [8], "depth": 2, "heads": 2}, initialise=True)
    orthogonalise(net)
    matrices = {id(parameter) for parameter in orthogonal_parameters(net)}
    assert all(
        id(part.weight) in matrices
        for mixing in net.mixings
        for part in getattr(mixing, "maps", [])
    )
    outcome = propagate(trace_network(net, (1, 28, 28)), Arithmetic())
    # sqrt(4 tokens) of the mean; 1e-5: the matrices are orthogonal in float32
    assert float(outcome.logits.base) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrthogonalMixing(4, 8, 3),
        lambda: TokenMaxMin(6, 8, 2),
        lambda: ChannelRoll(2, 6),
        lambda: LipschitzMixer(1, 8, 2, 8, 1, [8], 3, rolls="no"),
        lambda: L2Pool(4, 3),
        lambda: L2Pool(4, 0),
        lambda: LipschitzPyramid(1, 8, 2, [8, 8], [1], 1, [8], 3),
        lambda: LipschitzPyramid(1, 8, 2, [8, 8, 8, 8], [1, 1, 1, 1], 1, [8], 3),
        lambda: TokenMaxMin(4, 8, 2, across=5),
        lambda: TokenMixer(1, 8, 4, 8, 2, "softmax", 2, [8], 3),
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ArchitectureError):
        make()
