"""Branch and bound: against true minima by enumeration, at points of domains, replayed from
records, and interrupted.
"""

import functools
import itertools

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from scipy.optimize import linprog
from torch import Tensor, nn

from certcli.certify.branched import Branched, Splits, replay
from certcli.certify.certificate import RecheckSettings
from certcli.certify.local import NOTHING_OPEN, LocalCertifier
from certcli.certify.options import Local
from certcli.enclosure.zonotopes.ascent import Ascent, proven
from certcli.enclosure.zonotopes.backward import Node, descend, least
from certcli.enclosure.zonotopes.branching import BranchSearch, Limit
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.margins import Further
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.search import Tree, Unit
from certcli.evaluation.image_records import Certificate
from certcli.system.errors import DataError, NoBoundError, UsageError
from tests.enclosure.test_zonotope_networks import SIZE as VIT_SIZE
from tests.enclosure.test_zonotope_networks import image, network, require_withstood
from tests.helpers.grids import EVERY

SIZE = (1, 1, 3)
LONG = 1e6
"""Seconds that no test takes."""


def small(seed: int, widths: tuple[int, int] = (4, 4)) -> tuple[nn.Sequential, Tensor]:
    """A network of two hidden layers, and an image near which most of its units are open."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (3, *widths, 2)
    layers: list[nn.Module] = [nn.Flatten()]
    for first, second in itertools.pairwise(sizes):
        layer = nn.Linear(first, second).double()
        layer.weight.data = torch.randn(second, first, generator=generator).double()
        layer.bias.data = 0.1 * torch.randn(second, generator=generator).double()
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).eval().requires_grad_(False)
    return model, 0.2 * torch.randn(1, *SIZE, generator=generator).double()


def least_margin(model: nn.Sequential, pixels: Tensor, radius: float) -> float:
    """The true minimum of z_0 - z_1 over a linf ball: the least of linear programs, one a sign
    pattern of all units.
    """
    first, second, last = (layer for layer in model if isinstance(layer, nn.Linear))
    centre = pixels.flatten().numpy()
    bounds = [(x - radius, x + radius) for x in centre]
    best = np.inf
    shapes = [range(2)] * (first.out_features + second.out_features)
    for pattern in itertools.product(*shapes):
        signs = 2 * np.array(pattern) - 1
        rows = []
        offsets = []
        weight = np.eye(3)
        bias = np.zeros(3)
        start = 0
        for layer in (first, second):
            weight = layer.weight.numpy() @ weight
            bias = layer.weight.numpy() @ bias + layer.bias.numpy()
            own = signs[start : start + len(bias)]
            rows.append(-own[:, None] * weight)
            offsets.append(own * bias)
            weight = weight * (own > 0)[:, None]
            bias = bias * (own > 0)
            start += len(bias)
        margin = (last.weight[0] - last.weight[1]).numpy()
        found = linprog(
            margin @ weight, np.concatenate(rows), np.concatenate(offsets), bounds=bounds
        )
        if found.status == 0:
            best = min(best, found.fun + margin @ bias + float(last.bias[0] - last.bias[1]))
    return best


def moved(model: nn.Sequential, by: float) -> nn.Sequential:
    """The network with z_0 larger by so much."""
    model[-1].bias.data = model[-1].bias.data + torch.tensor([by, 0.0]).double()
    return model


@pytest.mark.parametrize("seed", [1, *range(2, 2 + 8 * EVERY)])
def test_the_tree_is_below_the_true_minimum_and_reaches_it(seed: int) -> None:
    model, pixels = small(seed, (6, 6) if EVERY else (4, 4))
    radius = 0.4
    truth = least_margin(model, pixels, radius)
    found: list[Tensor] = []

    def further(node: Node, rows: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="2 trees for 1 margins"):
            BranchSearch(node, rows, Limit(), [Tree(), Tree()])
        found.append(BranchSearch(node, rows, Limit()).prove())
        return found[-1]

    for gap in (-1e-6, 1e-2):
        local = LocalNetwork(moved(small(seed, (6, 6) if EVERY else (4, 4))[0], gap - truth), SIZE)
        start = linf_ball(pixels, radius, limit=99, tape=True)
        bound = float(local.margins(start, 0, further=further))
        assert found
        assert bound <= gap
        assert (bound > 0) == (gap > 0)


@pytest.mark.parametrize("boxed", [True, False])
def test_whatever_is_chosen_in_a_domain_is_below_its_points(boxed: bool) -> None:
    """Random signs, slopes, multipliers and parabolas: no point of the domain has a margin below
    the bound.
    """
    model, pixels = small(3)
    ball = linf_ball if boxed else l2_ball
    more = {} if boxed else {"squares_up_to": 0}
    radius = 0.4
    nodes = []

    def further(node: Node, rows: Tensor) -> Tensor:
        nodes.append((node, rows))
        return rows.new_full((len(rows),), -1.0)

    moved(model, -9.0)
    LocalNetwork(model, SIZE).margins(
        ball(pixels, radius, limit=99, tape=True, **more), 0, None, further
    )
    ascent = Ascent(*nodes[0])
    assert len(ascent.units) >= 6
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(20_000, 3, generator=generator).double()
    e = e.clamp(-1, 1) if boxed else e / e.norm(dim=1, keepdim=True).clamp_min(1)
    points = pixels + radius * e.view(-1, *SIZE)
    inner = model[:2](points), model[:4](points)
    logits = model(points)
    margins = logits[:, 0] - logits[:, 1]
    values = torch.stack([inner[unit.hinge][:, unit.entry] for unit in ascent.units], 1)
    start = ascent.start()[1]
    held = 0
    for _ in range(60):
        signs = torch.randint(-1, 2, (1, len(ascent.units)), generator=generator).double()
        signs = signs * (torch.rand(signs.shape, generator=generator) < 0.5)
        numbers = (start + 2 * torch.randn(start.shape, generator=generator).double())[None]
        numbers = ascent._inside(numbers)
        there = (values * signs >= 0).all(1)
        descent = descend(ascent.out, ascent.rows[:1], ascent.choices(signs, numbers))
        bound = float(least(descent)) if boxed else proven(descent, float(numbers[0, -1].exp()))
        held += int(there.any())
        assert not bool((margins[there] < bound).any())
    assert held > 20


def test_bounds_of_signs_cannot_be_turned_by_rounding() -> None:
    """Where x >= 0 the row that goes back is never above the row that came, where x <= 0 never
    below 0.
    """
    model, pixels = small(3)
    nodes: list[tuple[Node, Tensor]] = []

    def further(node: Node, rows: Tensor) -> Tensor:
        nodes.append((node, rows))
        return rows.new_full((len(rows),), -1.0)

    start = linf_ball(pixels, 0.4, limit=99, tape=True)
    LocalNetwork(moved(model, -9.0), SIZE).margins(start, 0, None, further)
    ascent = Ascent(*nodes[0])
    signs, numbers = ascent.start()
    multipliers = numbers[None].clone()
    multipliers[:, len(ascent.units) :] = 1e-17
    for sign in (1.0, -1.0):
        plain = descend(
            ascent.out, ascent.rows[:1], ascent.choices(signs[None] + sign, numbers[None])
        )
        tiny = descend(ascent.out, ascent.rows[:1], ascent.choices(signs[None] + sign, multipliers))
        assert float(least(tiny)) <= float(least(plain)) + 1e-12
    for number, hinge in enumerate(ascent.all):  # a record's tree may name any number
        assert ascent.sign_of(Unit(number, hinge.low.numel())) == 1.0
    assert ascent.sign_of(Unit(len(ascent.all), 0)) == 1.0


def test_trees_have_a_text() -> None:
    tree = Tree(Unit(0, 17), Tree(Unit(1, 3), Tree(), Tree()), Tree())
    assert tree.text() == "0.17 1.3 - - -"
    assert Tree.read(tree.text()).text() == tree.text()
    deep = "0.1 " * 5000 + "- " * 5000 + "-"
    assert Tree.read(deep).text() == deep
    for text in ("", "0.1", "0.1 -", "- -", "0.1 - - -", "a", "1.2.3 - -", "-1.2 - -"):
        with pytest.raises(DataError, match="no tree of splits"):
            Tree.read(text)


@functools.cache
def certified() -> tuple[LocalCertifier, Certificate, Tensor]:
    """A record that needs splits."""
    model, pixels = small(1)
    model = moved(model, 0.02 - least_margin(model, pixels, 0.4))
    options = Local("branch", "linf", at=[0.4], seconds=LONG, arithmetic="real")
    certifier = LocalCertifier(model, SIZE, options)
    (row,) = certifier.batch([0], pixels, [0])
    return certifier, row, pixels


def test_a_record_holds_its_tree_and_is_replayed() -> None:
    certifier, row, pixels = certified()
    assert row.radius > 0.4
    assert row.rung == "branch"
    assert set(row.splits) == {"1"}
    assert msgspec.convert(row.to_json(), Certificate) == row
    assert certifier.confirm([row], pixels, RecheckSettings(0, 0.0))[0].status == "verified"
    wrong = replace(
        row, splits={"1": "0.999999 7.0 - - -"}
    )  # of no unit that is open: splits of its own must do
    assert certifier.confirm([wrong], pixels, RecheckSettings(0, 0.0))[0].status == "verified"
    assert (
        certifier.confirm([replace(row, radius=row.radius * 1.2)], pixels, RecheckSettings(0, 0.0))[
            0
        ].status
        == "refuted"
    )
    backward = LocalCertifier(certifier.model, SIZE, Local("backward", "linf", arithmetic="real"))
    assert not backward.proven(pixels, 0, 0.4)


def test_splits_that_are_taken_first_are_those_of_the_record() -> None:
    certifier, row, pixels = certified()
    again = Splits.read(row.splits)
    assert certifier.proven(
        pixels, 0, row.radius, again.further(0, Limit(domains=10**6), lambda: None)
    )
    assert again.to_json() == row.splits
    assert not certifier.proven(
        pixels, 0, row.radius, Splits().further(0, Limit(domains=0), lambda: None)
    )
    assert certifier.proven(pixels, 0, row.radius, replay(0, row.splits))


@pytest.mark.parametrize(("norm", "seed"), [("l2", 5), *[("linf", 1)] * EVERY])
def test_branching_reaches_further_and_no_attack_succeeds(norm: str, seed: int) -> None:
    model, pixels, size = *small(seed, (8, 8)), SIZE
    if norm == "linf":
        model = network("relu", 1)
        pixels = image(1)
        size = VIT_SIZE
    label = int(model(pixels).argmax())
    plain = LocalCertifier(model, size, Local("backward", norm, arithmetic="real"))
    found = plain.radius(pixels, label) * 2 ** (1 / 16)
    options = Local("branch", norm, at=[found], seconds=LONG, arithmetic="real")
    radius = LocalCertifier(model, size, options).radius(pixels, label)
    assert radius > found
    assert not plain.proven(pixels, label, radius)
    require_withstood(model, pixels, label, radius, norm)


def test_an_interrupted_search_keeps_its_best_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def proof(radius: float, further: Further) -> bool:
        tried.append(radius)
        if len(tried) == 6:
            raise KeyboardInterrupt
        return radius < 0.3

    found = Branched(0, proof, LONG, lambda part: None)
    found.search(0.1, 4, False)
    assert found.interrupted
    assert found.radius == max(radius for radius in tried[:5] if radius < 0.3)
    certifier, _, pixels = certified()
    monkeypatch.setattr(certifier, "_interrupted", True)
    with pytest.raises(KeyboardInterrupt):
        certifier.batch([0], pixels, [0])


def test_time_that_is_over_proves_nothing() -> None:
    found = Branched(0, lambda radius, further: True, 1e-9, lambda part: None)
    found.search(0.1, 4, False)
    found.at([0.1])
    assert found.radius == 0


def test_a_network_without_an_open_unit_is_told() -> None:
    parts = (nn.Flatten(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    model = nn.Sequential(*parts).double().eval().requires_grad_(False)
    parts[1].bias += 9.0
    certifier = LocalCertifier(
        model, SIZE, Local("branch", at=[1e-3], seconds=LONG, arithmetic="real")
    )
    pixels = torch.rand(1, *SIZE).double()
    (row,) = certifier.batch([0], pixels, [int(model(pixels).argmax())])
    assert row.radius > 0
    assert not row.splits
    assert certifier.remark == NOTHING_OPEN


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="--seconds"):
        Local("branch", seconds=seconds)


def test_seconds_are_of_branching_alone() -> None:
    with pytest.raises(UsageError, match="--effort branch"):
        Local("backward", seconds=9.0)


def test_branching_names_what_has_no_relaxation() -> None:
    model = (
        nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.Threshold(0.1, 20.0), nn.Linear(3, 2))
        .double()
        .eval()
    )
    with pytest.raises(NoBoundError, match=r"2.*threshold"):
        LocalCertifier(model, SIZE, Local("branch"))
