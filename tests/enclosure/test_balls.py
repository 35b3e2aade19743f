"""Balls of norms: nothing that stays near the image leaves them; they are not vacuous; big batches
change nothing.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.checkpoint.record import Evidence
from certcli.cli.log.run import evidence_sentence
from certcli.enclosure.balls import layers
from certcli.enclosure.balls.attention import heads, nonnegative_norm
from certcli.enclosure.balls.ball import BallContext, Near, Normalised, rules, settled
from certcli.enclosure.balls.layers import arranged, product
from certcli.enclosure.balls.network import NormsNetwork
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.nn.layers import MaxMin
from certcli.system.errors import NoBoundError, UsageError
from tests.enclosure.test_zonotope_networks import SIZE, directions, image, network, node_values
from tests.helpers.grids import EVERY


def context() -> BallContext:
    return BallContext(fx.Graph().placeholder("x"), None, {}, {})


def ruled(function: Any, *args: Any, **named: Any) -> Any:
    """Return what the rule of a function makes of balls."""
    return rules.functions[function](context(), *args, **named)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def module(kind: str) -> nn.Module:
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {
        "linear": nn.Linear(8, 5),
        "layer norm": nn.LayerNorm(8, eps=1e-3),
        "floor norm": FloorNorm(8, 0.9),
        "gelu": nn.GELU(),
        "tanh gelu": nn.GELU("tanh"),
        "relu": nn.ReLU(),
        "silu": nn.SiLU(),
        "sigmoid": nn.Sigmoid(),
        "tanh": nn.Tanh(),
        "attention": Attention(8, num_heads=2, qkv_bias=True),
        "after a norm": nn.Sequential(
            nn.LayerNorm(8, eps=1e-3), Attention(8, num_heads=2, qkv_bias=True)
        ),
    }
    found = made[kind].double().eval()
    for parameter in found.parameters():
        parameter.data = parameter.data + 0.5 * torch.randn_like(parameter)
        parameter.requires_grad_(False)
    return found


KINDS = (
    "linear",
    "layer norm",
    "floor norm",
    "gelu",
    "tanh gelu",
    "silu",
    "sigmoid",
    "tanh",
    "relu",
    "attention",
    "after a norm",
)


def enclosed(part: nn.Module, x: Near) -> Near:
    value: object = x
    for layer in part if isinstance(part, nn.Sequential) else [part]:
        value = rules.find(layer).apply(context(), layer, value)
    return settled(value)


W, G = draw(3, 1, 2, 3, seed=5), draw(8, seed=6)


def strided(t: Tensor) -> Tensor:
    return F.conv2d(t.flatten(0, 1)[:, None], W, None, 2, 1).unflatten(0, (len(t), 1))


def strided_near(x: Near) -> Near:
    conv = nn.Conv2d(1, 3, (2, 3), stride=2, padding=1, bias=False).double().requires_grad_(False)
    conv.weight.copy_(W)
    return enclosed(conv, arranged(torch.unsqueeze, x, 1))


STATISTICS = (draw(5), draw(5, seed=1).square(), draw(5, seed=2), draw(5, seed=3))
"""Mean, variance, weight and bias."""
MATRIX = draw(3, 8, seed=7)
CENTRED = CenterNorm(8).double().requires_grad_(False)
CENTRED.weight.data = draw(8, seed=8)
CENTRED.bias.data = draw(8, seed=9)
# an operation on balls, and the same on (b, 1, 5, 8)
OPERATIONS: dict[str, tuple[Callable[[Near], Near], Callable[[Tensor], Tensor]]] = {
    "product": (lambda x: product(x, x.scale(-G)), lambda t: -G * t * t),
    "scaled": (lambda x: x.scale(G), lambda t: G * t),
    "sum with itself": (lambda x: x + x, lambda t: 2 * t),
    "mean of tokens": (lambda x: ruled(torch.mean, x, 1), lambda t: t.mean(2)),
    "mean of entries": (lambda x: ruled(torch.mean, x, -1), lambda t: t.mean(-1)),
    "mean of both": (lambda x: ruled(torch.mean, x, (1, 2), True), lambda t: t.mean((2, 3), keepdim=True)),
    "tokens twice": (lambda x: ruled(torch.cat, [x, x], 1), lambda t: torch.cat([t, t], 2)),
    "entries twice": (lambda x: ruled(torch.cat, [x, x], -1), lambda t: torch.cat([t, t], 3)),
    "divided": (lambda x: ruled(torch.div, x, -0.3), lambda t: t / -0.3),
    "RMSNorm": (lambda x: settled(ruled(F.rms_norm, x, (8,), Constant(G), 0.1)), lambda t: F.rms_norm(t, (8,), G, 0.1)),
    "sum of tokens": (lambda x: ruled(torch.sum, x, 1), lambda t: t.sum(2)),
    "rows over their sums": (
        lambda x: ruled(torch.div, x.shift(20 * G), ruled(torch.sum, x.shift(4 + 0 * G), -1, keepdim=True)),
        lambda t: (t + 20 * G) / (t + 4).sum(-1, keepdim=True),
    ),
    "convolution": (strided_near, strided),
    "rows of length 1": (
        lambda x: ruled(F.normalize, x, dim=-1, eps=2.5), lambda t: F.normalize(t, dim=-1, eps=2.5)
    ),
    "BatchNorm": (
        lambda x: ruled(F.batch_norm, x, *STATISTICS, eps=0.2),
        lambda t: F.batch_norm(t.flatten(0, -3), *STATISTICS, eps=0.2).view(t.shape),
    ),
    "centred norm": (lambda x: rules.modules[CenterNorm].apply(context(), CENTRED, x), lambda t: CENTRED(t)),
    "linear function": (
        lambda x: ruled(F.linear, x, MATRIX, MATRIX[:, 0]), lambda t: F.linear(t, MATRIX, MATRIX[:, 0])
    ),
    "zeros around": (lambda x: layers.arranged(F.pad, x, (1, 0, 2, 0)), lambda t: F.pad(t, (1, 0, 2, 0))),
    "hard swish": (lambda x: ruled(F.hardswish, x), F.hardswish),
    "softsign": (lambda x: ruled(F.softsign, x), F.softsign),
    "exp": (lambda x: ruled(torch.exp, x), torch.exp),
    "log": (lambda x: ruled(torch.log, x.shift(40 + 0 * G)), lambda t: torch.log(t + 40)),
    "MaxMin": (lambda x: layers.maxmin(context(), MaxMin(), x), MaxMin()),
}  # fmt: skip


def of_kind(kind: str) -> tuple[Callable[[Near], Near], Callable[[Tensor], Tensor]]:
    if kind in OPERATIONS:
        return OPERATIONS[kind]
    part = module(kind)
    return lambda x: enclosed(part, x), lambda t: part(t.flatten(0, 1)).unflatten(0, (len(t), 1))


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("kind", [*KINDS, *OPERATIONS])
def test_ascent_does_not_leave_the_ball(kind: str, size: float) -> None:
    """Tokens moved within their radii, up the gradient of how far each token's result has come."""
    (near, run), tokens = of_kind(kind), draw(1, 1, 5, 8)
    fibre = size * torch.rand(1, 1, 5, generator=torch.Generator().manual_seed(3)).double()
    x = Near.of(tokens, fibre, torch.full((1,), 0.8 * float(fibre.norm())).double())
    found = near(x)
    before = run(tokens)
    delta = draw(40, 1, 5, 8, seed=2)
    best = 0.0
    for _ in range(25):
        delta = delta * (fibre[..., None] / delta.norm(dim=-1, keepdim=True)).clamp_max(1)
        delta = (
            delta * (x.whole / delta.flatten(1).norm(dim=1)).clamp_max(1).view(-1, 1, 1, 1)
        ).requires_grad_(True)
        out = run(tokens + delta) - before
        far = out.norm(dim=-1)
        noise = 1e-14 * (1 + found.centre.norm())
        share = (far - noise) / found.fibre[0]
        whole = (out.flatten(1).norm(dim=1) - noise) / found.whole
        best = max(best, float(share.detach().max()), float(whole.detach().max()))
        assert best <= 1
        (up,) = torch.autograd.grad((share.flatten(1).amax(1) + whole).sum(), delta)
        delta = delta.detach() + size * up / up.flatten(1).norm(dim=1).clamp_min(1e-300).view(
            -1, 1, 1, 1
        )
    assert best > (
        0.1 if size < 0.1 else 0.001
    )  # and the ball is no larger than it must be by more than this


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.1, 1.0])
def test_ascent_does_not_leave_the_ball_of_heads(size: float) -> None:
    """Queries, keys and values moved within their radii, up the gradient of how far each result has
    come.
    """
    parts = [draw(1, 1, 2, 4, 3, seed=seed) for seed in (1, 2, 3)]
    radii = [
        size * torch.rand(1, 1, 2, 4, generator=torch.Generator().manual_seed(seed)).double()
        for seed in (4, 5, 6)
    ]
    near = [
        Near.of(c, r, torch.full((1,), 9 * size).double())
        for c, r in zip(parts, radii, strict=True)
    ]
    found = heads(context(), *near, None, 0.7)
    moves = [draw(60, 1, 2, 4, 3, seed=seed) for seed in (7, 8, 9)]
    best = 0.0
    for _ in range(30):
        moves = [
            (m * (r[..., None] / m.norm(dim=-1, keepdim=True))).requires_grad_(True)
            for m, r in zip(moves, radii, strict=True)
        ]
        q, k, v = (c + m for c, m in zip(parts, moves, strict=True))
        out = ((0.7 * q @ k.mT).softmax(-1) @ v - found.centre).norm(dim=-1)
        share = (out - 1e-14) / found.fibre
        best = max(best, float(share.detach().max()))
        assert best <= 1
        grads = torch.autograd.grad(share.flatten(1).amax(1).sum(), moves)
        moves = [
            m.detach() + size * g / g.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            for m, g in zip(moves, grads, strict=True)
        ]
    assert best > (0.4 if size < 0.1 else 0.05)


def test_fibres_that_are_joined_or_cut_keep_what_is_known_of_them() -> None:
    x = Near(
        draw(1, 1, 2, 4, 3), torch.rand(1, 1, 2, 4).double() + 0.1, torch.full((1,), 50.0).double()
    )
    joined = arranged(lambda t: t.transpose(1, 2).flatten(-2), x)
    assert torch.allclose(joined.fibre[0, 0], x.fibre[0, 0].norm(dim=0))
    cut = arranged(
        lambda t: t.unflatten(-1, (2, 3)).transpose(1, 2), joined
    )  # (1, 2, 4, 3), each of one fibre
    assert torch.allclose(cut.fibre, joined.fibre[:, :, None].expand(1, 1, 2, 4))
    twice = arranged(
        lambda t: torch.cat([t, t], -1), x
    )  # an entry twice in a fibre: only the whole is known
    assert (twice.fibre >= 2**0.5 * x.fibre).all()


@pytest.mark.parametrize("kind", ["plain", "mean", "relu", "tanh", "qk norm", "rms"])
def test_every_node_stays_near(kind: str) -> None:
    model = network(kind)
    pixels = image()
    local = NormsNetwork(model, SIZE)
    label = model(pixels).argmax(1)
    moves = directions(model, pixels, int(label), 8)
    for radius in (1e-9, 1e-5, 1e-3):
        balls: dict[fx.Node, tuple[Near, int | None]] = {}

        def watch(
            node: fx.Node,
            value: object,
            token: int | None,
            balls: dict[fx.Node, tuple[Near, int | None]] = balls,
        ) -> None:
            if isinstance(value, (Near, Normalised)):
                balls[node] = settled(value), token

        local.margins(pixels, torch.tensor([radius], dtype=torch.float64), label, watch=watch)
        for e in moves:
            values = node_values(local, pixels + radius * e.view_as(pixels))
            for node, (ball, token) in balls.items():
                truth = values[node] if token is None else values[node][:, token : token + 1]
                far = truth - ball.centre[0]
                noise = 1e-13 * (1 + ball.centre.norm())
                assert (far.norm(dim=-1) <= ball.fibre[0] + noise).all(), (node, radius)
                assert far.norm() <= ball.whole + noise, (node, radius)


def test_margins_at_radius_zero_are_those_of_the_network() -> None:
    """What is left at radius 0 is rounding alone."""
    model = network("plain")
    pixels = image()
    logits = model(pixels)[0]
    label = int(logits.argmax())
    found = NormsNetwork(model, SIZE).margins(
        pixels, torch.zeros(1).double(), torch.tensor([label])
    )[0]
    truth = torch.stack([logits[label] - logits[j] for j in range(4) if j != label])
    assert (found <= truth).all()
    assert torch.allclose(found, truth, atol=1e-6)


def test_rounding_of_a_linear_layer_is_covered() -> None:
    layer = nn.Linear(40, 3).double()
    layer.requires_grad_(False)
    tokens = 1e6 * draw(1, 1, 1, 40)
    found = enclosed(layer, Near.of(tokens, torch.zeros(1, 1, 1).double(), torch.zeros(1).double()))
    lost = 0.0
    for row, (weight, bias) in enumerate(
        zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    ):
        exact = sum(
            Fraction(w) * Fraction(t)
            for w, t in zip(weight, tokens.flatten().tolist(), strict=True)
        )
        lost += (
            float(abs(exact + Fraction(bias) - Fraction(found.centre[0, 0, 0, row].item()))) ** 2
        )
    assert 0 < lost**0.5 <= float(found.fibre)


def test_fibres_keep_their_radius_only_where_they_stay_together() -> None:
    x = Near.of(draw(2, 1, 3, 4), torch.rand(2, 1, 3).double(), torch.full((2,), 9.0).double())
    assert torch.equal(arranged(torch.flip, x, [1]).fibre, x.fibre.flip(2))
    turned = arranged(torch.transpose, x, 1, 2)
    assert torch.allclose(turned.fibre, x.whole.view(2, 1, 1).expand(2, 1, 4))
    assert torch.allclose(arranged(Tensor.repeat, x, 1, 2, 1).whole, x.whole * 2**0.5)


def test_norm_of_a_nonnegative_matrix() -> None:
    matrix = draw(3, 7, 5).abs()
    matrix[1, :, 2:] = 0
    truth = torch.linalg.matrix_norm(matrix, 2)
    found = nonnegative_norm(matrix)
    assert (found >= truth).all()
    assert (found <= 1.05 * truth).all()


def test_auto_takes_norms_where_zonotopes_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("plain")
    pixels = image()
    label = int(model(pixels).argmax())
    monkeypatch.setattr("certcli.certify.local.available", lambda device: 1e5)
    certifier = LocalCertifier(model, SIZE, Local())
    (row,) = certifier.batch([0], pixels, [label])
    assert row.rung == "norms"
    assert row.radius > 0
    assert "memory" in certifier.title
    with pytest.raises(NoBoundError, match="memory"):
        LocalCertifier(model, SIZE, Local(effort="zonotope"))


def test_what_has_no_theorem_is_named() -> None:
    with pytest.raises(NoRule, match=r"mlp\.act.*'cumsum'"):
        NormsNetwork(network("cumulative"), SIZE)
    with pytest.raises(NoBoundError, match=r"blocks\.0\.mlp\.act") as refused:
        LocalCertifier(network("cumulative"), SIZE, Local())
    assert "--method smoothing" in str(refused.value.hint)


def test_linf_balls_of_all_rungs_hold_and_are_not_mixed_with_l2() -> None:
    model = network("relu")
    pixels = image()
    label = model(pixels).argmax(1)
    signs = torch.cat(
        [draw(200, *SIZE).sign(), directions(model, pixels, int(label), 20).view(-1, *SIZE).sign()]
    )
    for effort in ("norms", "zonotope", "backward"):
        certifier = LocalCertifier(
            model, SIZE, Local(effort=effort, norm="linf"), symbols=200, steps=1
        )
        (row,) = certifier.batch([0], pixels, label.tolist())
        assert row.radius > 1e-8
        assert (model(pixels + row.radius * signs).argmax(1) == label).all()
        assert certifier.norm == "linf"
    with pytest.raises(UsageError, match="unknown norm 'l1'"):
        Local(norm="l1")  # type: ignore[arg-type]


def test_log_says_which_shares_are_of_linf() -> None:
    about = {"dataset": "digits", "split": "test", "limit": 4, "seed": 0, "method": "local"}
    result = {
        "dataset": {"name": "digits", "split": "test", "images": 4, "digest": "0" * 64},
        "clean": 1.0,
        "certified": {"0.004": 0.5},
        "images": 4,
        "method": "local",
        "average_radius": 0.01,
        "failure": 0.0,
        "promise": "proof",
        "arithmetic": "real",
    }
    given = {"effort": "norms", "symbols": 0, "steps": 4}
    plain, boxed = ({**result, "parameters": {**given, "norm": norm}} for norm in ("l2", "linf"))
    entries = [Evidence("certify", about, entry, "0") for entry in (plain, boxed)]
    told = [evidence_sentence(entry) for entry in entries]
    assert "linf" not in told[0]
    assert "radii linf" in told[1]


def _one_rare_key(size: float) -> tuple[Near, Near, Near]:
    """A query that sees one key of value 0; another of value 1, which it hardly sees, comes nearer
    as that one goes.
    """
    parts = [
        torch.tensor(part, dtype=torch.float64).view(1, 1, 1, -1, 1)
        for part in ([3.0], [-1.0, 1.0], [1.0, 0.0])
    ]
    radii = [0 * parts[0][..., 0], torch.full((1, 1, 1, 2), size).double(), 0 * parts[2][..., 0]]
    return tuple(Near.of(c, r, r.flatten(1).norm(dim=1)) for c, r in zip(parts, radii, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [0.05, 0.2, 0.4])
def test_a_rare_key_gains_what_the_others_lose(size: float) -> None:
    """Its probability grows by nearly e^(2 T), T the most that a score moves: half of it since the
    sum shrinks.
    """
    q, k, v = _one_rare_key(size)
    found = heads(context(), q, k, v, None, 1.0)
    keys = k.centre + size * torch.tensor([1.0, -1.0]).double().view(1, 1, 1, 2, 1)
    far = ((q.centre @ keys.mT).softmax(-1) @ v.centre - found.centre).norm()
    assert 0.4 < float(far / found.fibre) <= 1


@pytest.mark.parametrize("size", [0.05, 0.2])
def test_a_rare_token_gains_what_the_others_lose(size: float) -> None:
    """The same within an attention, whose first token asks and stays where it is."""
    part = Attention(3, num_heads=1, qkv_bias=False).double().eval()
    for parameter in part.parameters():
        parameter.requires_grad_(False).zero_()
    part.qkv.weight[[0, 3, 6], [0, 1, 2]] = (
        1.0  # the first entry asks, the second answers, the third is the value
    )
    part.proj.weight[0, 0] = 1.0
    root = 3**0.5
    tokens = torch.tensor([[3 * root, -20, 0], [0, -1, 1e6], [0, 1, 0]], dtype=torch.float64).view(
        1, 1, 3, 3
    )
    fibre = torch.tensor([0.0, size, size], dtype=torch.float64).view(1, 1, 3)
    found = enclosed(part, Near.of(tokens, fibre, torch.full((1,), 9 * size).double()))
    moved = tokens.clone()
    moved[0, 0, 1, 1] += size
    moved[0, 0, 2, 1] -= size
    far = (part(moved[0]) - part(tokens[0]))[0, 0].norm()
    assert 0.05 < float(far / found.fibre[0, 0, 0]) <= 1


@pytest.mark.parametrize("kind", ["plain", *["relu"] * EVERY])
def test_no_attack_succeeds_within_the_radius(kind: str) -> None:
    model = network(kind)
    pixels = torch.cat([image(seed) for seed in range(2)])
    labels = model(pixels).argmax(1)
    certifier = LocalCertifier(model, SIZE, Local(effort="norms"))
    radii = certifier.by_norms(pixels, labels)
    assert (radii > 1e-7).all()
    alone = torch.cat(
        [certifier.by_norms(x[None], y[None]) for x, y in zip(pixels, labels, strict=True)]
    )
    assert torch.allclose(alone, radii, rtol=1e-9)
    for x, y, radius in zip(pixels, labels, radii, strict=True):
        moved = x + radius * directions(model, x[None], int(y), 30).view(-1, *SIZE)
        assert (model(moved).argmax(1) == y).all()
