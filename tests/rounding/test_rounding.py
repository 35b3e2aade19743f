"""The rounding of logits: never below the distance from what mpmath finds, and nothing is certified
within it.
"""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from timm import list_models
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Replacement
from certcli.engine import curves
from certcli.engine.curves import Curve
from certcli.engine.table import NoRule
from certcli.engine.tracer import Untraceable
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.real import as_real
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.layers import SOFTMAX_SLOPE, SoftMaxMin
from certcli.nn.surgery import REPLACEMENTS
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.rounding.operation_errors import Steep
from tests.helpers.grids import EVERY, crossed

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


def attention(m: nn.Module, x: Tensor) -> Tensor:
    return ((x @ m.w0) @ (x @ m.w1).transpose(-1, -2) * SCALE).softmax(-1) @ (x @ m.w2)


def attention_exact(x: Exact) -> Exact:
    scores = (x @ E_[0]) @ (x @ E_[1]).swapaxes(-1, -2) * mpmath.mpf(SCALE)
    return softmax(scores) @ (x @ E_[2])


def maxmin(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=-1)


def maxmin_exact(x: Exact) -> Exact:
    first = x[..., :3]
    second = x[..., 3:]
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], -1)


def soft_pairs_exact(x: Exact, log_temperature: float) -> Exact:
    mean = (x[..., :3] + x[..., 3:]) / 2
    half = (x[..., :3] - x[..., 3:]) / 2
    scale = mpmath.exp(-mpmath.mpf(log_temperature))
    apart = half * each(mpmath.tanh)(half * scale) * mpmath.mpf(1 / SOFTMAX_SLOPE)
    return np.concatenate([mean + apart, mean - apart], -1)


def flat_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (6,), eps=eps)


def pairs(m: nn.Module, x: Tensor, shift: float) -> Tensor:
    mixed = m.soft(x) @ m.w0
    return m.second(mixed if shift == 0 else (mixed + shift) - shift)


# name: the network on (b, 5, 6) and the same in numbers of 600 bits
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Exact], Exact]]] = {
    "linear": (lambda m, x: F.linear(x, m.w0, m.w1[0]), lambda x: x @ E_[0].T + E_[1][0]),
    "two layers and GELU": (lambda m, x: F.gelu(x @ m.w0) @ m.w1, lambda x: gelu(x @ E_[0]) @ E_[1]),
    "a bias that cancels": (lambda m, x: (x @ m.w0 + 2.0**40) - 2.0**40, lambda x: x @ E_[0]),
    "a residual that cancels": (lambda m, x: (x + 1e12 * (x @ m.w0)) - 1e12 * (x @ m.w0), lambda x: x),
    "huge, then tiny": (lambda m, x: ((x @ m.w0) * 2.0**300 @ m.w1) * 2.0**-300, lambda x: x @ E_[0] @ E_[1]),
    "tiny, then huge": (lambda m, x: ((x @ m.w0) * 2.0**-1040 @ m.w1) * 2.0**500 * 2.0**500 * 2.0**40,
                        lambda x: x @ E_[0] @ E_[1]),
    "norm": (lambda m, x: flat_norm(x @ m.w0, 1e-5), lambda x: norm(x @ E_[0], 1e-5)),
    "norm of a huge mean": (lambda m, x: flat_norm(x @ m.w0 + 2.0**20, 1e-3), lambda x: norm(x @ E_[0], 1e-3)),
    "norm of a norm of a huge mean": (lambda m, x: flat_norm(flat_norm(x @ m.w0 + 2.0**20, 1e-9) @ m.w1, 1e-9),
                       lambda x: norm(norm(x @ E_[0], 1e-9) @ E_[1], 1e-9)),
    "attention": (attention, attention_exact),
    "attention of huge scores": (lambda m, x: attention(m, 30 * x), lambda x: attention_exact(30 * x)),
    "SDPA": (lambda m, x: F.scaled_dot_product_attention(x @ m.w0, x @ m.w1, x @ m.w2),
             lambda x: softmax((x @ E_[0]) @ (x @ E_[1]).swapaxes(-1, -2) / mpmath.sqrt(6)) @ (x @ E_[2])),
    "MaxMin": (lambda m, x: maxmin(maxmin(x @ m.w0) @ m.w1), lambda x: maxmin_exact(maxmin_exact(x @ E_[0]) @ E_[1])),
    "soft pairs": (lambda m, x: pairs(m, x, 0.0), lambda x: soft_pairs_exact(soft_pairs_exact(x, -6.0) @ E_[0], -2.0)),
    "soft pairs of what cancels": (
        lambda m, x: pairs(m, x, 2.0**40),
        lambda x: soft_pairs_exact(soft_pairs_exact(x, -6.0) @ E_[0], -2.0),
    ),
    "sigmoid and tanh": (lambda m, x: torch.sigmoid(x) * torch.tanh(x @ m.w0),
                         lambda x: each(lambda t: 1 / (1 + mpmath.exp(-t)))(x) * each(mpmath.tanh)(x @ E_[0])),
    "written in place, and cancels": (lambda m, x: (x @ m.w0).add_(2.0**40).sub_(2.0**40).relu_(),
                         lambda x: each(lambda t: max(t, mpmath.mpf(0)))(x @ E_[0])),
    "lengths": (lambda m, x: F.normalize(x, dim=-1) @ m.w0,
                lambda x: x / each(mpmath.sqrt)((x * x).sum(-1, keepdims=True)) @ E_[0]),
}  # fmt: skip


class Network(nn.Module):
    """f(spread x + shift) on images (b, 5, 6)."""

    def __init__(
        self, function: Callable[[Any, Tensor], Tensor], spread: float = 1.0, shift: float = 0.0
    ) -> None:
        super().__init__()
        self.function, self.spread, self.shift = function, spread, shift
        for number, weight in W.items():
            self.register_buffer(f"w{number}", weight.clone())
        self.soft, self.second = SoftMaxMin(), SoftMaxMin()
        self.soft.log_temperature.data.fill_(-6.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x * self.spread + self.shift).flatten(1)


def analysed(network: nn.Module) -> NeighbourErrors:
    return NeighbourErrors(network.double().eval(), (5, 6), PRECISIONS["float64"])


@pytest.mark.parametrize(
    ("name", "spread"), [*((name, 1.0) for name in CASES), *crossed([*CASES], [1e-3, 1e3])]
)
def test_real_arithmetic_is_within_the_error(name: str, spread: float) -> None:
    """Also of tokens that hardly differ, and of large ones: each logit, and each margin."""
    function, real = CASES[name]
    shift = float(spread < 1)
    analysis = analysed(Network(function, spread, shift))
    x = torch.rand(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    logits, of_margins, of_logits = analysis.evaluated(x)
    expected = real(exact(x) * mpmath.mpf(spread) + mpmath.mpf(shift)).reshape(3, -1)
    apart = exact(logits) - expected
    assert (np.abs(apart) <= exact(of_logits)).all()
    top = np.take_along_axis(apart, logits.argmax(1, keepdim=True).numpy(), 1)
    assert (np.abs(top - apart) <= exact(of_margins)).all()
    if spread == 1.0 and "cancel" not in name and "huge" not in name:
        # it says something; of pairs less, whose factors count as ones that may err apart
        assert float(of_logits.max()) < (1e-7 if "pairs" in name else 1e-8)


def test_an_error_is_seen_where_the_logits_are_off_by_much() -> None:
    """2^40 + x - 2^40 keeps 12 bits of x behind the point."""
    x = torch.rand(1, 5, 6, dtype=torch.float64)
    logits, _, errors = analysed(Network(lambda m, x: (x + 2.0**40) - 2.0**40)).evaluated(x)
    assert 0 < float((logits - x.flatten(1)).abs().max()) <= float(errors.min()) < 1


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("name", ["layer_norm", "normalize", "rms_norm"])
def test_a_slope_at_an_image_holds_for_all_rows_within_the_error(name: str, shift: float) -> None:
    """Against the largest singular value of the Jacobian, at the image and at what lies nearest to
    where the function jumps.
    """
    functions = {
        "layer_norm": lambda m, x: F.layer_norm(x, (6,), m.w0[0], None, 1e-12),
        "normalize": lambda m, x: F.normalize(x, dim=-1),
        "rms_norm": lambda m, x: F.rms_norm(x, (6,), m.w0[0], 1e-12),
    }
    net = Network(functions[name], shift=shift).double()
    analysis = analysed(net)
    image = torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (place,) = [i for i, step in enumerate(analysis._steps) if isinstance(step.rounding, Steep)]
    step = analysis._steps[place]
    before = analysis._measured(analysis._sizes(image[None])[1][0].tolist())[step.sources[0]]
    rows = image + shift
    centre = rows.mean(1, keepdim=True) if name == "layer_norm" else torch.zeros_like(rows)
    away = (rows - centre).norm(dim=1, keepdim=True).amin()
    for share in (0.0, 0.5, 0.99):  # of the way to where the row has no deviation, or no length
        near = before.within_reach(as_real(float(away) * share))
        slope = float(step.rounding.slope(lambda _, near=near: near))
        at = rows + (centre - rows) * (away * share / (rows - centre).norm(dim=1, keepdim=True))
        largest = max(
            float(torch.linalg.matrix_norm(jacobian, 2))
            for jacobian in (
                torch.autograd.functional.jacobian(lambda x: functions[name](net, x), row)
                for row in at
            )
        )
        assert largest <= slope * (1 + 1e-9)
        assert slope < 12 * largest  # a row's own gains, and the deviation of another row


def test_the_slope_at_an_image_is_taken_where_it_is_less() -> None:
    """1 / sqrt(eps) on the box, the inverse deviation at the image."""
    analysis = analysed(Network(lambda m, x: F.layer_norm(x @ m.w0 + 2.0**20, (6,), eps=1e-14)))
    image = torch.rand(1, 5, 6, dtype=torch.float64)
    _, _, errors = analysis.evaluated(image)
    assert float(errors) < 2.0**-20 * float(
        analysis(image, torch.zeros(1), torch.tensor([0])).max()
    )


class Catching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.fft.fft(x).real.flatten(1)
        except Exception:
            return x.flatten(1)


@pytest.mark.parametrize(
    "network",
    [
        Network(lambda m, x: x @ m.w0 * (x @ m.w0 > 0)),
        Network(lambda m, x: (x @ m.w0).float().double()),
        Network(lambda m, x: (x @ m.w0)[:, (x @ m.w0)[0, :, 0].argsort()]),
        Network(lambda m, x: torch.special.gammaln(x @ m.w0)),
        Network(lambda m, x: (x @ m.w0).abs() ** 1.5),
        Network(lambda m, x: 2.0 ** (x @ m.w0)),
        Catching(),
    ],
)
def test_what_has_no_rule_is_named(network: nn.Module) -> None:
    with pytest.raises((NoRule, Untraceable)):
        analysed(network)


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
    real = ((model.net[:3](pixels) @ hidden.weight.T) @ model.net[5].weight.T).argmax(1).tolist()
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


REFERENCES = (
    list_models(["certvit_lip_*", "certvit_sort_*", "certvit_mix_*"])
    if EVERY
    else [
        "certvit_lip_mnist",
        "certvit_lip_pyramid_cifar10_small",
        "certvit_sort_mnist",
        "certvit_mix_mnist",
    ]
)


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        *((name, {}) for name in REFERENCES),
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
    size = net.pretrained_cfg["input_size"]
    analysis = NeighbourErrors(net.eval(), size, PRECISIONS["float64"])
    _, _, errors = analysis.evaluated(torch.rand(4, *size, dtype=torch.float64))
    assert float(errors.max()) < (1e-5 if "vit_digits" in arch else 1e-8)


@pytest.mark.parametrize(
    "kind", [name for name in REPLACEMENTS.names() if name not in ("flat-head", "identity")]
)
def test_every_replacement_has_rules(kind: str, tiny: Checkpoint) -> None:
    """The flat head is one of the reference networks."""
    modules = {"attention": "Attention", "norm": "LayerNorm", "eps": "LayerNorm", "block": "Block"}
    wanted = modules.get(kind.rpartition("-")[2], "GELU")
    net = build.build(tiny.record, initialise=True)
    arguments = {
        "orthogonal-attention": {"tokens": net.pos_embed.shape[1]},
        "norm-eps": {"eps": 1e-4},
    }.get(kind, {})
    places = [path for path, module in net.named_modules() if type(module).__name__ == wanted]
    for path in places:
        build.replace_module(net, Replacement(path=path, kind=kind, args=arguments))
    net = net.double().eval()
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    logits, _, errors = NeighbourErrors(net, (1, 8, 8), PRECISIONS["float64"]).evaluated(images)
    assert places
    assert float(errors.max()) < 1e-3
    assert bool(
        ((logits - net(images)).abs() <= errors).all()
    )  # fused kernels sum in another order


RECIPROCAL_ROOT = lambda t: 1 / mpmath.sqrt(t)  # noqa: E731
STEEP_CURVES: dict[str, tuple[Curve, Callable[[Any], Any]]] = {
    "exp": (curves.EXP, mpmath.exp),
    "log": (curves.LOG, mpmath.log),
    "sqrt": (curves.SQRT, mpmath.sqrt),
    "1/sqrt": (curves.RSQRT, RECIPROCAL_ROOT),
    "1/x": (curves.RECIPROCAL, lambda t: 1 / t),
}


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "bf16", "fp16"])
@pytest.mark.parametrize("name", STEEP_CURVES)
def test_steep_curves_are_computed_within_their_units(name: str, arithmetic: str) -> None:
    """Over the normal range, near 1, and by kernels of long and of single rows."""
    curve, function = STEEP_CURVES[name]
    p = PRECISIONS[arithmetic]
    most = math.log2(p.largest) - 2
    powers = torch.linspace(-most if name != "exp" else -12, most, 399, dtype=torch.float64)
    x = torch.cat([2**powers, 1 + torch.linspace(-1e-2, 1e-2, 100, dtype=torch.float64)])
    x = torch.cat([x, -x]).clamp(-0.6 * most, 0.6 * most) if name == "exp" else x
    x = x.to(p.dtype)
    real = each(function)(exact(x.double()))
    long = curve.value(x)
    single = torch.cat([curve.value(row) for row in x.split(1)])
    for computed in (long, single, curve.value(x[::2]).repeat_interleave(2)[: len(x)]):
        same = slice(None, None, 2)
        off = np.abs(exact(computed.double())[same] - real[same])
        assert (off <= curve.units * p.function * np.abs(real[same]) + p.tiny).all()
