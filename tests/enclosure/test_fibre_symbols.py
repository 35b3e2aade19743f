"""Forms whose errors are symbols of one token each: nothing leaves them, and tokens stay apart."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor, fx, nn
from torch.nn import functional as F

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.enclosure.zonotopes.columns import Block, reach_of
from certcli.enclosure.zonotopes.domain import l2_ball, with_space
from certcli.enclosure.zonotopes.ellipsoids import by_fibres
from certcli.enclosure.zonotopes.fibre_attention import (
    Operand,
    attend_by_fibres,
    head_bounds,
)
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.network import LocalNetwork, fits_by_fibres
from certcli.enclosure.zonotopes.rules.arithmetic import negative
from certcli.enclosure.zonotopes.space import Space
from tests.enclosure.test_zonotope_networks import SIZE, image, network
from tests.helpers.enclosure_cases import (
    BALL,
    BOX,
    CASES,
    OWN,
    Case,
    evaluate_fibres,
    fibre_forms,
)
from tests.helpers.grids import EVERY, crossed

MIXING = {"scores", "average", "attention", "sum of tokens"}
"""Rules that a walk gives forms with common symbols."""
DRAWS = 300 if EVERY else 100
HEADS = 2
TOKENS = ((1, 5, 6),) * 3
SIZES = (1e-9, 1e-3, 0.1, 0.4)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = (x.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*split, scale=0.7).transpose(-3, -2).flatten(-2)


ATTENTION = [
    Case(
        f"attention, {token}",
        TOKENS,
        lambda q, k, v, token=token: attend_by_fibres(
            q if token is None else q.linear(lambda t: t[:, :, token : token + 1]),
            *(k, v),
            heads=HEADS,
            scale=0.7,
            token=token,
        ),
        lambda q, k, v, token=token: attended(
            q if token is None else q[..., token : token + 1, :], k, v
        ),
    )
    for token in (None, 0, 3)
]
ROWS = [case for case in CASES if case.name not in MIXING] + ATTENTION


def symbols_of_fibres(
    count: int, fibres: int, boxed: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """e on its sphere or at corners, n (b, box, fibres) at corners and on spheres; slack's signs."""
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(count, BALL, generator=generator).double()
    e = e.sign() if boxed else e / e.norm(dim=1, keepdim=True)
    e[: count // 4] *= torch.rand(count // 4, 1, generator=generator).double()
    n = torch.randn(count, BOX, fibres, generator=generator).double().sign()
    angle = torch.rand(count, 2, fibres, generator=generator).double() * 2 * torch.pi
    n[:, 4::2], n[:, 5::2] = angle.cos(), angle.sin()
    return e, n, torch.rand(count, generator=generator).double() * 2 - 1


def share(case: Case, size: float, boxed: bool, seed: int) -> float:
    """The largest distance from a form at some symbols, over what it leaves free."""
    inputs = fibre_forms(case.shapes, size, seed, positive=case.positive, boxed=boxed)
    fibres = inputs[0].centre.numel() // inputs[0].shape[-1]
    e, n, s = symbols_of_fibres(200, fibres, boxed, seed)
    given = [
        evaluate_fibres(form, e, n)[0] + form.slack * s.view(-1, *[1] * len(form.shape))
        for form in inputs
    ]
    truth = case.run(*(x.flatten(0, 1) for x in given))
    form = case.relax(*inputs)
    assert all(block.of_fibres or isinstance(block.name, tuple) for block in form.blocks)
    middle, free = evaluate_fibres(form, e, n)
    # float64 evaluates the truth and the form: 200 roundings, relative to the terms of both
    noise = 200 * 2.0**-52 * (1 + truth.abs() + form.size)
    far = case.excess(middle, truth.view(middle.shape)) - noise.view(middle.shape)
    return float((far / free.clamp_min(1e-300)).detach().max())


@pytest.mark.parametrize("boxed", [False, True], ids=["l2", "linf"])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_nothing_leaves_a_form_of_fibres(case: Case, boxed: bool) -> None:
    for size, seed in crossed(SIZES, range(3)):
        try:
            assert share(case, size, boxed, seed) <= 1, (size, seed)
        except Unbounded:
            assert size >= 0.1


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention_is_tight_near_its_centre(case: Case) -> None:
    """Of the image's ball alone, what it leaves free is of second order."""
    free = []
    for size in (1e-4, 1e-5):
        inputs = fibre_forms(case.shapes, size, 0, positive=False, boxed=False)
        for form in inputs:
            form.box.zero_()
        e, n, _ = symbols_of_fibres(4, 5, False, 0)
        free.append(evaluate_fibres(case.relax(*inputs), e, n)[1].max())
    assert 80 < free[0] / free[1] < 120


@pytest.mark.parametrize("token", [None, 3])
def test_no_head_is_too_sure_where_scores_are_far_apart(token: int | None) -> None:
    """Weights of 1 and 0, up to what float64 holds: the form stays above the rounding of softmax."""
    case = next(case for case in ATTENTION if case.name == f"attention, {token}")
    for factor in (10.0, 100.0, 1000.0):
        q, k, v = fibre_forms(TOKENS, 1e-6, 3, positive=False, boxed=False)
        q = q.scale(torch.tensor(factor).double())
        e, n, _ = symbols_of_fibres(100, 5, False, 3)
        given = [evaluate_fibres(x, e, n)[0].flatten(0, 1) for x in (q, k, v)]
        form = case.relax(q, k, v)
        middle, free = evaluate_fibres(form, e, n)
        noise = 200 * 2.0**-52 * factor * (1 + form.size)
        assert bool(((case.run(*given).view(middle.shape) - middle).abs() <= free + noise).all())


def of_one_number(scale: Tensor, centre: Tensor, column: int, boxed: bool = False) -> Form:
    """Tokens of one number each, moved by `scale` times a box symbol of each token's own.

    boxed: times an entry of the image each, of an linf ball.
    """
    count = len(centre)
    space = Space(3 * count if boxed else 1, squares=False, limit=1, boxed=boxed, by_fibres=True)
    gens = torch.zeros(space.ball + 3, 1, count, 1).double()
    if boxed:
        gens[column * count : (column + 1) * count, 0, :, 0].diagonal().copy_(scale)
    else:
        gens[1 + column, 0, :, 0] = scale
    block = Block(-3, 3, 1, of_fibres=True)
    return Form(space, centre.view(1, -1, 1), gens, torch.zeros(1, count, 1).double(), (block,))


def at_corners(seed: int, boxed: bool) -> tuple[float, float]:
    """Of attention of three tokens, each a number: how much of its bounds of e and of p - w the
    corners of all symbols fill.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, of_q, of_k = torch.randn(4, 3, generator=generator).double()
    zeros = torch.rand(4, 3, generator=generator) < (0.6, 0.6, 0.3, 0.3)[seed % 4]
    q, k, of_q, of_k = torch.stack([q, 2 * k, of_q, of_k]).masked_fill(zeros, 0.0)
    size = 10.0 ** -(0, 1, 2, 8)[seed // 4 % 4] / 2  # at the last one the linear part is all
    moves = [(size * of_q, q), (size * of_k, k), (0 * of_q, k)]
    queries, keys, values = (
        Operand.of(of_one_number(scale, centre, column, boxed))
        for column, (scale, centre) in enumerate(moves)
    )
    head = head_bounds(queries, keys, values, queries.form.blocks)
    n = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 6).view(-1, 2, 3)
    a, b = size * of_q * n[:, 0], size * of_k * n[:, 1]
    w = head.weight
    linear = q[:, None] * b[:, None] + a[..., None] * k
    z = linear - (w * linear).sum(-1, keepdim=True)
    p = ((q + a)[..., None] * (k + b)[:, None]).softmax(-1)
    e = (p - w * (1 + z)).abs().amax(0) - 1e-15
    change = (p - w).abs().amax(0) - 1e-15
    return float((e / head.error).max()), float((change / head.change).max())


@pytest.mark.parametrize("boxed", [False, True], ids=["tokens", "image"])
def test_what_probabilities_lose_is_bounded_and_nearly_reached(boxed: bool) -> None:
    shares = [at_corners(seed, boxed) for seed in range(DRAWS)]
    assert max(max(pair) for pair in shares) <= 1
    assert sorted(error for error, _ in shares)[-DRAWS // 10] > 0.9
    assert sorted(change for _, change in shares)[-DRAWS // 10] > 0.95


@pytest.mark.parametrize("moved", ["queries", "slack"])
def test_what_attention_makes_of_errors_is_bounded_and_felt(moved: str) -> None:
    """Three tokens of one number each, at all corners of their queries' symbols, or of all slack."""
    reached = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(3, 3, generator=generator).double()
        if moved == "queries":
            scale = torch.tensor([0.4, 0.0, 0.0]).double()[:, None].expand(3, 3)
            slack = torch.zeros(3, 3).double()
            n = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 3)
            signs = torch.zeros(8, 3, 3).double()
        else:
            scale = torch.zeros(3, 3).double()
            slack = torch.rand(3, 1, generator=generator).double().expand(3, 3) * 0.02
            n = torch.zeros(512, 3).double()
            signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 9).view(-1, 3, 3)
        forms = [
            replace(of_one_number(scale[i], numbers[i], i), slack=slack[i].view(1, 3, 1))
            for i in range(3)
        ]
        q, k, v = (numbers + slack * signs).unbind(-2)
        q = q + scale[0] * n
        truth = (q[..., None] * k[:, None]).softmax(-1) @ v[..., None]
        form = attend_by_fibres(*forms, 1, 1.0, None)  # type: ignore[arg-type]
        symbols_of_all = n[:, None].expand(-1, 3, 3)
        block = forms[0].blocks[0]
        middle = form.centre[0, :, 0] + torch.einsum(
            "bkf,kf->bf", symbols_of_all, form.box[: block.columns, 0, :, 0]
        )
        free = (form.slack + reach_of(form.box[block.columns :], form.blocks[1:]))[0, :, 0]
        reached.append(float(((truth[..., 0] - middle).abs() / free).max()))
    assert max(reached) <= 1
    assert max(reached) > 0.5


def test_rounding_counts_where_one_weight_is_1() -> None:
    """Scores so far apart that softmax is 1 at one token: its computed columns are still rounded."""
    q, k, v = fibre_forms(((1, 3, 1),) * 3, 1e-9, 0, positive=True, boxed=False)
    head = head_bounds(*(Operand.of(x) for x in (q.scale(torch.tensor(1e5).double()), k, v)), OWN)
    assert float(head.weight.amax()) == 1.0
    size = float((q.size[0] * 1e5 @ k.size[0].T).max())
    assert float(head.error[head.weight == 1].min()) > 2.0**-52 * size / 1e3


def test_scores_that_move_too_far_have_no_bound() -> None:
    q, k, v = fibre_forms(TOKENS, 1e3, 0, positive=False, boxed=False)
    with pytest.raises(Unbounded, match="scores"):
        attend_by_fibres(q, k, v, HEADS, 1.0, None)


def test_tokens_do_not_share_their_symbols() -> None:
    """x_0 - x_1 reaches as far as both, and x_0 - x_0 is 0."""
    (x,) = fibre_forms(((1, 3, 4),), 0.3, 0, positive=False, boxed=False)
    x = Form(x.space, x.centre, 0 * x.gens[:BALL], 0 * x.slack).solid() + x
    x = Form(x.space, 0 * x.centre, torch.cat([0 * x.ball, x.box]), 0 * x.slack, x.blocks)
    first, second = x.choose(0), x.choose(1)
    assert torch.allclose(
        (first + negative(second)).box_radius, first.box_radius + second.box_radius
    )
    assert float((first + negative(x.choose(0))).box_radius.max()) < 1e-12
    assert first.blocks[-1].name != second.blocks[-1].name


def test_one_ellipsoid_a_fibre_holds_what_it_replaces() -> None:
    (x,) = fibre_forms(((1, 3, 4),), 0.3, 0, positive=False, boxed=False)
    fewer = by_fibres(x)
    assert [block.columns for block in fewer.blocks] == [4]
    assert fewer.has_fibres_own
    assert bool((fewer.box_radius >= x.box_radius).all())
    assert bool((fewer.box_radius <= 2 * x.box_radius).all())


def test_rules_that_mix_tokens_make_no_symbols_of_single_ones() -> None:
    (x,) = fibre_forms(((1, 3, 4),), 0.3, 0, positive=False, boxed=False)
    given, several = with_space([x, (x, 3)], by_fibres=False, limit=0)
    for form in (given, several[0]):
        assert not form.has_fibres_own
        assert form.worked().blocks == form.blocks
    assert several[1] == 3


class Mixing(nn.Module):
    """Tokens normalised, mixed by what `mix` does to them, and normalised."""

    def __init__(self, mix: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.mix = mix
        self.first = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        self.windows = Attention(6, num_heads=2)
        self.last = nn.Sequential(nn.Linear(width, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.mix(self.first(x[:, 0]))).mean(1))


MIXED: dict[str, tuple[Callable[[Mixing, Tensor], Tensor], int]] = {
    "transposed": (lambda m, x: x.transpose(1, 2), 4),
    "reversed": (lambda m, x: x[:, [3, 2, 1, 0]], 6),
    "joined": (lambda m, x: torch.cat([x, x], 1), 6),
    "windows": (lambda m, x: m.windows(x.reshape(2, 2, 6)).reshape(1, 4, 6), 6),
}


@pytest.mark.parametrize("name", MIXED)
def test_where_tokens_are_mixed_no_symbol_is_a_tokens_own(name: str) -> None:
    mix, width = MIXED[name]
    torch.manual_seed(0)
    model = Mixing(lambda x: x, width).double().eval().requires_grad_(False)
    model.mix = functools.partial(mix, model)
    values: list[tuple[str, Form]] = []

    def watch(node: fx.Node, value: object, token: int | None) -> None:
        if isinstance(value, Form):
            values.append((str(node.meta.get("path")), value))

    local = LocalNetwork(model, SIZE)
    local.margins(l2_ball(image(), 1e-3, squares_up_to=0, limit=1, by_fibres=True), 0, watch)
    by_path = dict(values)  # the last of each
    assert by_path["first.1"].has_fibres_own
    assert by_path["last.1"].has_fibres_own
    mixed = [form for path, form in values if path in ("None", "", "windows")]
    assert not any(form.has_fibres_own for form in mixed[1:])
    assert all(form.space.by_fibres and form.space.limit == 1 for _, form in values)


def test_more_symbols_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = fibre_forms(((1, 3, 4),), 0.3, 0, positive=False, boxed=False)
    monkeypatch.setattr("certcli.enclosure.zonotopes.form._LARGEST", 4 * 3 * 12 - 1)
    with pytest.raises(Unbounded, match="too many symbols"):
        x.with_common_symbols()


def test_auto_refutes_no_certificate_of_another_enclosure() -> None:
    """What `auto` takes depends on memory: a record of another way is left unverified, no more."""
    model = network("plain")
    pixels = image()
    certifier = LocalCertifier(model, SIZE, Local(), steps=0)
    (row,) = certifier.batch([0], pixels, [int(model(pixels).argmax())])
    statuses = {}
    for rung in ("tokens", certifier.walked, "nothing"):
        claim = structs.replace(row, radius=10.0, rung=rung)
        (outcome,) = certifier.confirm([claim], pixels, None)  # type: ignore[arg-type]
        statuses[rung] = outcome.status
    assert statuses == {"tokens": "unverified", certifier.walked: "refuted", "nothing": "refuted"}


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalNetwork(network("plain"), SIZE)
    assert fits_by_fibres(local, 1e9)
    assert not fits_by_fibres(local, 1e3)
