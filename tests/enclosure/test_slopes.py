"""Every pull of the way back, as laws: each rule has one, and no gradient lies outside its form."""

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import certcli.enclosure.slopes  # noqa: F401 (for its pulls)
import certvit
from certcli.certify.around import steepest_slopes
from certcli.enclosure.slopes.length import Parts, largest, norm, reach, sum_of_sizes
from certcli.enclosure.slopes.network import Neighbourhood, SlopeNetwork
from certcli.enclosure.slopes.pulls import pulls
from certcli.enclosure.zonotopes import space as zonotopes
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.ellipsoids import Gram
from certcli.enclosure.zonotopes.form import Form
from certcli.engine.curves import NAMED, STEEP
from certcli.engine.table import ModuleRule, NoRule
from certcli.rounding import PRECISIONS, NeighbourErrors
from tests.enclosure.test_every_rule import QUICK, pixel_model
from tests.helpers.enclosed import ball_places, sample_images
from tests.helpers.grids import EVERY
from tests.helpers.lipschitz_cases import Function, build_row, of_tokens
from tests.helpers.reached import Entry, entries_of_table, entries_without_row, recorded, title
from tests.helpers.slopes import IMAGE
from tests.helpers.spellings import calls_on_images, seeded_tensor

WITHOUT = {"modules certcli.nn.layers.Rounded": "a staircase has slopes 0, and jumps"}
"""Rules of the zonotopes without a derivative, with the reason."""
REFUSED = {"rounded": "no rule for the derivative of"}
"""Rows without a derivative, and what the refusal says."""
OWN = {
    "averages": lambda: calls_on_images(
        lambda m, x: functional.avg_pool2d(x, 3, 2, 1),
        lambda m, x: torch.avg_pool1d(x.flatten(2), 3, 2, 1),
        lambda m, x: torch.adaptive_avg_pool1d(x.flatten(2), 3),
        lambda m, x: functional.adaptive_avg_pool3d(x[:, :, None], (1, 3, 2)),
        parts=(nn.UpsamplingBilinear2d(scale_factor=2), nn.UpsamplingNearest2d(scale_factor=2)),
    ),
    "convolutions": lambda: calls_on_images(
        lambda m, x: torch.conv1d(x.flatten(2), seeded_tensor(3, 2, 3)),
        lambda m, x: torch.conv3d(x[:, :, None], seeded_tensor(3, 2, 1, 2, 2)),
    ),
}
"""Linear maps of images, which other rows have beside what has no derivative."""
COARSE = {"spelled-rounded-hard": 1e-6}
"""Rows whose backward pass in torch is less exact: hardsigmoid's multiplies by 1/6 in float32."""
RADIUS = 0.05
KINDS = ("squares", "l2", "linf")
CASES = [(name, kind) for number, name in enumerate(QUICK) for kind in (KINDS if EVERY else [KINDS[number % 3]])]  # fmt: skip
CASES += [(name, kind) for name in OWN for kind in KINDS]
ROUNDED = 1e-12
"""Of gradients by autograd in float64, some thousand units of their size."""


def ball(kind: str, pixels: Tensor, radius: float = RADIUS) -> Form:
    if kind == "linf":
        return linf_ball(pixels, radius, limit=1000, in_box=True)
    return l2_ball(pixels, radius, squares_up_to=128 * (kind == "squares"), limit=1000, in_box=True)


@functools.cache
def network(name: str) -> SlopeNetwork:
    return SlopeNetwork(pixel_model(OWN[name]() if name in OWN else build_row(name)), IMAGE)


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let autograd follow `detach`, as the function that is enclosed does."""
    measured = Neighbourhood.measured

    def following(near: Neighbourhood, weights: Tensor, image: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "detach", Tensor.clone)
            return measured(near, weights, image)

    monkeypatch.setattr(Neighbourhood, "measured", following)


def faults(near: Neighbourhood, kind: str, pixels: Tensor) -> Iterator[float]:
    """Yield how far gradients of a random sum of logits lie outside their form, relative to them."""
    model = near.network.model
    count = model(pixels).shape[1]
    weights = torch.randn(count, generator=torch.Generator().manual_seed(1)).double()
    form = near.gradient(weights)
    reaching = near.tape.start.space.reach
    for place in ball_places(model, pixels, "linf" if kind == "linf" else "l2", 2):
        e = torch.maximum(torch.minimum(place, reaching[1]), -reaching[0])
        truth = near.measured(weights, near.tape.start.at(e))
        far = form.farthest(e, truth) - ROUNDED * (1 + truth.norm() + form.size.max())
        yield float(far.max())


@pytest.mark.parametrize("entry", sorted(entries_of_table(zonotopes.rules), key=title), ids=title)
def test_every_rule_has_a_derivative_or_a_reason(entry: Entry) -> None:
    assert (entry in entries_of_table(pulls)) is not (title(entry) in WITHOUT)


@functools.cache
def visited(name: str, kind: str) -> tuple[frozenset[Entry], tuple[float, ...]]:
    pixels = sample_images(1)[0]
    with recorded(pulls) as reached:
        far = tuple(faults(network(name).near(ball(kind, pixels)), kind, pixels))
    return frozenset(reached), far


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_gradient_leaves_its_form(name: str, kind: str) -> None:
    if name in REFUSED:
        with pytest.raises(NoRule, match=REFUSED[name]):
            visited(name, kind)
    else:
        assert max(visited(name, kind)[1]) <= COARSE.get(name, 0)


def test_a_row_reaches_every_pull() -> None:
    """All curves have one pull."""
    cases = [case for case in CASES if case[0] not in REFUSED]
    reached = {entry for case in cases for entry in visited(*case)[0]}
    of_curves = {
        (kind, key)
        for named in NAMED + STEEP
        for kind in ("modules", "functions", "methods")
        for key in getattr(named, kind)
    }
    assert of_curves & reached
    assert entries_without_row(pulls, reached | of_curves) == []


def test_a_gradient_that_autograd_does_not_follow_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    row = Function(lambda m, x: m.parts[0](x.detach() + x), nn.Linear(8, 3).double())
    near = SlopeNetwork(pixel_model(of_tokens(row)), IMAGE).near(ball("l2", sample_images(1)[0]))
    with pytest.raises(NoRule, match="derivative"):
        near.gradient(torch.ones(12).double())


def test_an_operation_without_a_derivative_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pulls.modules, nn.GELU)
    with pytest.raises(NoRule, match="derivative of GELU"):
        SlopeNetwork(pixel_model(build_row("gelu")), IMAGE)


def longest(centre: Tensor, linear: Tensor) -> float:
    """Return |c + A e| where it is nearly the largest over |e| <= 1, from below."""
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(linear.shape[1], 30, generator=generator, dtype=torch.float64)
    for _ in range(100):  # towards the largest, as power iteration does
        e = linear.T @ (centre[:, None] + linear @ (e / e.norm(dim=0)))
    return float((centre[:, None] + linear @ (e / e.norm(dim=0))).norm(dim=0).max())


def test_lengths_are_bounds_and_nearly_the_least() -> None:
    generator = torch.Generator().manual_seed(0)
    for count, far in ((3, 0.0), (5, 1.0), (5, 30.0)):
        centre = far * torch.randn(6, generator=generator, dtype=torch.float64)
        linear = torch.randn(6, count, generator=generator, dtype=torch.float64)
        far_enough = longest(centre, linear)
        bound = reach(centre, linear)  # its multipliers are a fifth apart
        assert far_enough * (1 - 1e-12) <= bound <= far_enough * (1 + 3e-4)
        spectral = float(torch.linalg.matrix_norm(linear, 2))
        assert spectral * (1 - 1e-12) <= norm(linear) <= spectral * (1 + 1e-9)
    whole = Gram(torch.full((1, 2, 2), math.nan).double(), 1)
    assert largest(whole) == math.inf


@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_an_integral_is_covered_no_farther_than_it_reaches(share: float) -> None:
    """Lengths over the ball of radius t are convex in t: midpoints lie below their integral."""
    generator = torch.Generator().manual_seed(1)
    centre = torch.randn(6, generator=generator, dtype=torch.float64)
    linear = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    square = torch.zeros(6, 15, dtype=torch.float64)
    square[0, 0] = 2.0
    parts = Parts(centre, linear, square, 0.1)

    def integral(end: float, cells: int = 40) -> float:
        middles = [(k + 0.5) / cells * end for k in range(cells)]
        lengths = [longest(centre, t * linear) + 2 * t * t + 0.1 for t in middles]
        return sum(lengths) * end / cells

    whole = integral(1.0)
    covered, above = parts.covered(share * whole)
    assert 0.97 * share * whole <= integral(covered) <= share * whole
    assert whole <= above <= 1.01 * whole
    assert parts.covered(share * whole, covered)[0] > covered
    rest = parts.covered(math.inf, 0.5)
    assert rest[0] == 1
    assert integral(0.5) + rest[1] == pytest.approx(whole, rel=0.01)
    assert parts.covered(-1e-9)[0] == 0
    assert replace(parts, rest=math.nan).covered(1.0)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_is_longer_than_its_bound(kind: str) -> None:
    pixels = sample_images(1)[0]
    near = network("layer-norm-linear").near(ball(kind, pixels, 0.01))
    weights = torch.randn(near.network.model(pixels).shape[1]).double()
    form = near.gradient(weights)
    bound = sum_of_sizes(form) if kind == "linf" else Parts.of(form).length
    p = 1 if kind == "linf" else 2
    lengths = [
        float(near.measured(weights, near.tape.start.at(e)).flatten().norm(p=p))
        for e in ball_places(near.network.model, pixels, "linf" if kind == "linf" else "l2", 8)
        if near.tape.start.at(e).clamp(0, 1).equal(near.tape.start.at(e))
    ]
    assert lengths
    assert max(lengths) <= bound <= 2 * max(lengths)


@pytest.mark.parametrize("name", ["attention", "layer-norm-linear", "silu", "chunks"])
def test_executing_moves_margins_by_no_more_than_its_bound(name: str) -> None:
    """In float32, whose results float64 measures: sums over nodes of rounding times gradient."""
    model = pixel_model(build_row(name))
    execution = NeighbourErrors(model, IMAGE, PRECISIONS["float32"], (zonotopes.rules,))
    pixels = sample_images(1)[0].float().double()
    near = SlopeNetwork(model, IMAGE, execution).near(ball("squares", pixels, 0.01))
    logits = model(pixels)[0]
    low = copy.deepcopy(model).float()
    with sdpa_kernel(SDPBackend.MATH):
        run = low(pixels.float())[0].double()
    moved = (run[0] - run) - (logits[0] - logits)
    behind = near.behind(0)
    for other in range(1, 4):
        weights = torch.zeros_like(logits)
        weights[0], weights[other] = 1.0, -1.0
        _, rounding = near.gradient_and_rounding(weights)
        bound = rounding + float(behind[other])
        assert abs(float(moved[other])) <= bound < math.inf
        assert bound < 1e5 * 2.0**-24 * float(logits.abs().max())


def test_the_shipped_network_is_bounded_nearly_as_low_as_its_slope() -> None:
    """certvit/digits-vit at R .1: a hundredth above a slope that it has there."""
    model = certvit.network("certvit/digits-vit", double=True)
    pixels = certvit.images("certvit/digits-vit", "digits", limit=1).tensors()[0].double()
    logits = model(pixels)[0]
    first, second = logits.topk(2).indices.tolist()
    weights = torch.zeros_like(logits)
    weights[first], weights[second] = 1.0, -1.0
    network = SlopeNetwork(model, tuple(pixels.shape[1:]))
    form = network.near(l2_ball(pixels, 0.1, squares_up_to=128, limit=500, in_box=True)).gradient(weights)  # fmt: skip
    measured = float(steepest_slopes(model, pixels, first, 0.1, "l2")[second])
    assert measured <= Parts.of(form).length <= 1.01 * measured


ROW_OF = {
    "GELU": "gelu-tanh",
    "LayerNorm": "layer-norm-linear",
    "FloorNorm": "floor-norm",
    "Attention": "attention-bare",
    "MaxMin": "maxmin",
    "SiLU": "silu",
    "Linear": "layer-norm-linear",
    "PixelNormalize": "chunks",
    "chunk": "chunks",
    "softmax": "softmax",
    "expand": "expand",
    "normalize": "l2-normalize",
}


@pytest.mark.parametrize("what", ROW_OF)
def test_a_wrong_derivative_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled by 1.5, at places of the law, and by the guard of every walk."""

    def wrong(rule):  # type: ignore[no-untyped-def]
        scale = torch.tensor(1.5).double()
        return lambda *args, **named: [(x, g.scale(scale)) for x, g in rule(*args, **named)]

    for kind in ("modules", "functions", "methods"):
        table = getattr(pulls, kind)
        for key, rule in list(table.items()):
            if getattr(key, "__name__", key) == what:
                planted = replace(rule, apply=wrong(rule.apply)) if isinstance(rule, ModuleRule) else wrong(rule)  # fmt: skip
                monkeypatch.setitem(table, key, planted)
    guard = Neighbourhood.require_holds
    monkeypatch.setattr(Neighbourhood, "require_holds", lambda near, weights, form: None)
    pixels = sample_images(1)[0]
    near = SlopeNetwork(pixel_model(build_row(ROW_OF[what])), IMAGE).near(
        ball("squares", pixels, 0.01)
    )
    assert max(faults(near, "squares", pixels)) > 0
    weights = torch.randn(near.network.model(pixels).shape[1]).double()
    with pytest.raises(NoRule, match="excludes"):
        guard(near, weights, near.gradient(weights))
