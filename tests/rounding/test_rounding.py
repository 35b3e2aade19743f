"""The rounding of logits: never below the distance from what mpmath finds, and nothing is certified
within it.
"""

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from timm import list_models
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.certify.chains.bcp import BcpCertifier
from certcli.certify.chains.local_lip import LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Replacement
from certcli.engine.table import NoRule
from certcli.lipschitz.network import prove_network
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.activations import SOFTMAX_SLOPE, SoftMaxMin
from certcli.nn.l2_attention import l2_logits
from certcli.nn.surgery import REPLACEMENTS
from certcli.rounding import ErrorAnalysis

Exact = Any  # an array of mpmath's numbers
mpmath.mp.prec = 600


def exact(x: Tensor) -> Exact:
    return np.vectorize(lambda t: mpmath.mpf(float(t)), otypes=[object])(x.detach().numpy())


def each(function: Callable[[Any], Any]) -> Callable[[Exact], Exact]:
    return np.vectorize(function, otypes=[object])


def softmax(x: Exact) -> Exact:
    found = each(mpmath.exp)(x - x.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def norm(x: Exact, eps: float) -> Exact:
    centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
    return centred / each(mpmath.sqrt)(
        (centred * centred).sum(-1, keepdims=True) / x.shape[-1] + mpmath.mpf(eps)
    )


def gelu(x: Exact) -> Exact:
    return each(lambda t: t * (1 + mpmath.erf(t / mpmath.sqrt(2))) / 2)(x)


W = {
    n: torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    for n in range(4)
}
E_ = {n: exact(w) for n, w in W.items()}
SCALE = 6**-0.5


def attention(x: Tensor) -> Tensor:
    return ((x @ W[0]) @ (x @ W[1]).transpose(-1, -2) * SCALE).softmax(-1) @ (x @ W[2])


def attention_exact(x: Exact) -> Exact:
    scores = (x @ E_[0]) @ (x @ E_[1]).swapaxes(-1, -2) * mpmath.mpf(SCALE)
    return softmax(scores) @ (x @ E_[2])


def l2(x: Tensor) -> Tensor:
    return l2_logits(x @ W[0]).softmax(-1) @ (x @ W[0])


def l2_exact(x: Exact) -> Exact:
    q = x @ E_[0]
    logits = 2 * (q @ q.swapaxes(-1, -2)) - (q * q).sum(-1)[..., None, :]
    return softmax(logits / mpmath.sqrt(6)) @ q


def maxmin(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=-1)


def maxmin_exact(x: Exact) -> Exact:
    first = x[..., :3]
    second = x[..., 3:]
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], -1)


class Cancelling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 2.0**40) - 2.0**40


def soft_pairs(*between: nn.Module) -> nn.Module:
    net = (
        nn.Sequential(SoftMaxMin(), nn.Linear(6, 6, bias=False), *between, SoftMaxMin())
        .double()
        .eval()
    )
    net[0].log_temperature.data.fill_(-6.0)
    net[1].weight.data = W[0].T.clone()
    return net


def soft_pairs_exact(x: Exact, log_temperature: float) -> Exact:
    mean = (x[..., :3] + x[..., 3:]) / 2
    half = (x[..., :3] - x[..., 3:]) / 2
    scale = mpmath.exp(-mpmath.mpf(log_temperature))
    apart = half * each(mpmath.tanh)(half * scale) * mpmath.mpf(1 / SOFTMAX_SLOPE)
    return np.concatenate([mean + apart, mean - apart], -1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def flat_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (6,), eps=eps)


# name: the network on (b, 5, 6) and the same in numbers of 600 bits; each is also run on inputs
# that cancel
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Exact], Exact]]] = {
    "linear": (lambda x: F.linear(x, W[0], W[1][0]), lambda x: x @ E_[0].T + E_[1][0]),
    "two layers and GELU": (lambda x: F.gelu(x @ W[0]) @ W[1], lambda x: gelu(x @ E_[0]) @ E_[1]),
    "a bias that cancels": (lambda x: (x @ W[0] + 2.0**40) - 2.0**40, lambda x: x @ E_[0]),
    "a residual that cancels": (lambda x: (x + 1e12 * (x @ W[0])) - 1e12 * (x @ W[0]), lambda x: x),
    "huge, then tiny": (lambda x: ((x @ W[0]) * 2.0**300 @ W[1]) * 2.0**-300, lambda x: x @ E_[0] @ E_[1]),
    "tiny, then huge": (lambda x: ((x @ W[0]) * 2.0**-1040 @ W[1]) * 2.0**500 * 2.0**500 * 2.0**40,
                        lambda x: x @ E_[0] @ E_[1]),
    "norm": (lambda x: flat_norm(x @ W[0], 1e-5), lambda x: norm(x @ E_[0], 1e-5)),
    "norm of a huge mean": (lambda x: flat_norm(x @ W[0] + 2.0**20, 1e-3), lambda x: norm(x @ E_[0], 1e-3)),
    "norm written out": (
        lambda x: centred(x) / (centred(x).square().mean(-1, keepdim=True) + 0.5).sqrt(),
        lambda x: norm(x, 0.5),
    ),
    "attention": (attention, attention_exact),
    "attention of huge scores": (lambda x: attention(30 * x), lambda x: attention_exact(30 * x)),
    "SDPA": (lambda x: F.scaled_dot_product_attention(x @ W[0], x @ W[1], x @ W[2]),
             lambda x: softmax((x @ E_[0]) @ (x @ E_[1]).swapaxes(-1, -2) / mpmath.sqrt(6)) @ (x @ E_[2])),
    "L2 attention": (l2, l2_exact),
    "MaxMin": (lambda x: maxmin(maxmin(x @ W[0]) @ W[1]), lambda x: maxmin_exact(maxmin_exact(x @ E_[0]) @ E_[1])),
    "soft pairs": (soft_pairs(), lambda x: soft_pairs_exact(soft_pairs_exact(x, -6.0) @ E_[0], -2.0)),
    "soft pairs of what cancels": (
        soft_pairs(Cancelling()),
        lambda x: soft_pairs_exact(soft_pairs_exact(x, -6.0) @ E_[0], -2.0),
    ),
    "sigmoid, tanh, exp": (lambda x: torch.sigmoid(x) * torch.tanh(x @ W[0]) - (-x).exp(),
                           lambda x: each(lambda t: 1 / (1 + mpmath.exp(-t)))(x) * each(mpmath.tanh)(x @ E_[0])
                           - each(mpmath.exp)(-x)),
    "written in place, and cancels": (lambda x: (x @ W[0]).add_(2.0**40).sub_(2.0**40).relu_(),
                         lambda x: each(lambda t: max(t, mpmath.mpf(0)))(x @ E_[0])),
    "lengths": (lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-3) @ W[0],
                lambda x: x / each(mpmath.sqrt)((x * x).sum(-1, keepdims=True)) @ E_[0]),
}  # fmt: skip


class Network(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).flatten(1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e3])
def test_real_arithmetic_is_within_the_error(name: str, spread: float) -> None:
    """Also of tokens that hardly differ, and of large ones; the error is one of each logit, of the
    whole batch's at most.
    """
    function, real = CASES[name]
    x = torch.rand(
        3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    ) * spread + (spread < 1)
    logits, errors = ErrorAnalysis(Network(function))(x)
    apart = np.abs(exact(logits) - real(exact(x)).reshape(3, -1))
    assert (apart <= exact(errors)).all()
    if spread == 1.0 and "cancel" not in name and "huge" not in name:
        assert float(errors.max()) < 1e-8  # and it says something


def test_an_error_is_found_where_the_logits_are_off_by_much() -> None:
    """2^40 + x - 2^40 keeps 12 bits of x behind the point."""
    x = torch.rand(1, 5, 6, dtype=torch.float64)
    logits, errors = ErrorAnalysis(Network(lambda x: (x + 2.0**40) - 2.0**40))(x)
    assert 0 < float((logits - x.flatten(1)).abs().max()) <= float(errors.min()) < 1


class Catching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.fft.fft(x).real.flatten(1)
        except Exception:
            return x.flatten(1)


@pytest.mark.parametrize(
    "network",
    [
        Network(lambda x: x @ W[0] * (x @ W[0] > 0)),
        Network(lambda x: (x @ W[0]).float().double()),
        Network(lambda x: (x @ W[0])[:, (x @ W[0])[0, :, 0].argsort()]),
        Network(lambda x: torch.special.gammaln(x @ W[0])),
        Network(lambda x: (x @ W[0]).abs() ** 1.5),
        Network(lambda x: (x @ W[0]) ** -2),
        Network(lambda x: 2.0 ** (x @ W[0])),
        Network(lambda x: torch.ops.aten.elu(x @ W[0], 1.0, 1.0, -1.0)),
        Catching(),
    ],
)
def test_what_has_no_rule_is_named(network: nn.Module) -> None:
    with pytest.raises(NoRule, match=r"^0: "):
        ErrorAnalysis(nn.Sequential(network))(torch.rand(1, 5, 6, dtype=torch.float64))


def test_memory_that_is_shared_is_not_trusted() -> None:
    """A view is written to; the tensor that it is a view of has the numbers, and no known error."""

    def function(x: Tensor) -> Tensor:
        y = x @ W[0]
        y[:, 0].add_(2.0**40).sub_(2.0**40)
        return y

    assert (
        not ErrorAnalysis(Network(function))(torch.rand(1, 5, 6, dtype=torch.float64))[1]
        .isfinite()
        .any()
    )


def test_an_image_does_not_suffer_from_its_batch() -> None:
    analysis = ErrorAnalysis(Network(lambda x: x @ W[0]))
    x = torch.rand(4, 5, 6, dtype=torch.float64)
    x[2] *= 1e40
    logits, errors = analysis(x)
    assert float(errors[[0, 1, 3]].max()) < 1e-10
    assert torch.allclose(logits, (x @ W[0]).flatten(1))


def cancelling(power: int) -> tuple[PixelModel, nn.Linear]:
    """Features of some 2^(power - 53), a bias of 2^power that the head takes off again."""
    torch.manual_seed(1)
    hidden = nn.Linear(32, 24)
    head = nn.Linear(24, 10)
    with torch.no_grad():
        hidden.weight.mul_(2.0 ** (power - 50))
        hidden.bias.fill_(2.0**power)
        head.weight.zero_()
        head.bias.zero_()
        for row in head.weight:
            row[torch.randperm(24)[:2]] = torch.tensor([1.0, -1.0])
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), hidden, nn.ReLU(), head)
    return PixelModel(
        InputSpec(size=(1, 6, 6), mean=(0.0,), std=(1.0,)), net
    ).double().eval(), hidden


@pytest.mark.parametrize("power", [0, 10, 25, 50])
def test_biases_that_cancel_certify_nothing_wrong(power: int) -> None:
    """In real arithmetic the biases leave no trace, so the network without them, ReLU of hidden
    units left out, judges.
    """
    model, hidden = cancelling(power)
    pixels = torch.rand(64, 1, 6, 6, dtype=torch.float64)
    tops = model(pixels).argmax(1).tolist()
    body = model.net[:3](pixels)
    real = ((body @ hidden.weight.T) @ model.net[5].weight.T).argmax(1).tolist()
    assert tops != real  # the file is one that rounding decides
    bound = prove_network(model, 10)
    for certifier in (
        LipschitzCertifier(model, bound),
        *(k(model, 10, (1, 6, 6)) for k in (LocalLipCertifier, BcpCertifier)),
    ):
        rows = certifier.batch(range(64), pixels, tops)
        assert not [
            row.index
            for row, top in zip(rows, real, strict=True)
            if row.radius > 0 and row.prediction != top
        ]


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        *(
            (name, {})
            for kind in ("lip", "sort", "mix")
            for name in list_models(f"certvit_{kind}_*")
        ),  # by design, all
        ("certvit_vit_digits", {}),
        ("certvit_vit_pgd_2_3_16", {}),
        ("certvit_lip_digits", {"members": 2, "mirror": True}),
        ("certvit_lip_pyramid_cifar10_small", {"windows": 1}),
        ("certvit_lip_attention_mnist", {"mixing": "soft"}),
    ],
)
def test_reference_networks_lose_next_to_nothing(arch: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = build.create(arch, arguments, initialise=True).double()
    _, errors = ErrorAnalysis(net)(
        torch.rand(4, *net.pretrained_cfg["input_size"], dtype=torch.float64)
    )
    assert float(errors.max()) < (1e-5 if "vit_digits" in arch else 1e-8)


@pytest.mark.parametrize(
    "kind", [name for name in REPLACEMENTS.names() if name not in ("flat-head", "identity")]
)
def test_every_replacement_has_rules(kind: str, tiny: Checkpoint) -> None:
    """The flat head is one of the reference networks."""
    modules = {"attention": "Attention", "norm": "LayerNorm", "eps": "LayerNorm", "block": "Block"}
    wanted = modules.get(kind.rpartition("-")[2], "GELU")
    net = build.build(tiny.record, initialise=True)
    tokens = net.pos_embed.shape[1]
    arguments = {"orthogonal-attention": {"tokens": tokens}, "norm-eps": {"eps": 1e-4}}.get(
        kind, {}
    )
    places = [path for path, module in net.named_modules() if type(module).__name__ == wanted]
    for path in places:
        build.replace_module(net, Replacement(path=path, kind=kind, args=arguments))
    net = net.double().eval()
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    logits, errors = ErrorAnalysis(net)(images)
    assert places
    assert float(errors.max()) < 1e-3
    assert bool(
        ((logits - net(images)).abs() <= errors).all()
    )  # fused kernels sum in another order
