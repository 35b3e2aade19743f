"""Boxes and balls of chains against exact arithmetic: errors lie within their bounds, and bounds
count every columns.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from certcli.certify.chains import sequential
from certcli.certify.chains.sequential import Activation, AffineStep, Moves, SequentialNetwork
from certcli.enclosure.zonotopes import columns
from certcli.lipschitz.chain import LinearLayer, read_chain
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from tests.certify.test_local_lip import SIZE, images, network
from tests.helpers.reached import Site, Sites

Numbers = list[float]


def doubles(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def exactly(found: SequentialNetwork, pixels: Tensor) -> list[list[Fraction]]:
    """Every affine step's results at one image, without rounding: of a chain of linear layers and
    ReLU.
    """
    x = [Fraction(value) for value in pixels.flatten().tolist()]
    seen = []
    for step in (*found.body, found.last):
        if isinstance(step, Activation):
            x = [max(value, Fraction(0)) for value in x]
        elif isinstance(step, AffineStep):
            biases = [0.0] * len(step.weight) if step.bias is None else step.bias.flatten().tolist()
            x = [
                sum((Fraction(w) * value for w, value in zip(row, x, strict=True)), Fraction(bias))
                for row, bias in zip(step.weight.tolist(), biases, strict=True)
            ]
            seen.append(x)
    return seen


@pytest.mark.parametrize("bias", [0.0, 1e6, -1e6])
def test_no_value_is_off_by_more_than_is_said(bias: float) -> None:
    """Differences of nearly equal numbers: what they have lost is as large as the numbers were, and
    never negative.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    net = net.double().requires_grad_(False)
    net[1].bias *= bool(bias)  # without one, products alone lose something
    net[1].bias += bias
    net[3].weight[:, 6:] = -net[3].weight[:, :6]
    found = SequentialNetwork(net.eval(), SIZE)
    image = torch.rand(1, *SIZE).double()
    values = found.values(image)
    for centre, error, exact in zip(
        values.centre, values.error, exactly(found, image), strict=True
    ):
        for value, most, truth in zip(centre[0].tolist(), error[0].tolist(), exact, strict=True):
            assert abs(Fraction(value) - truth) <= Fraction(most)
            assert 0 < most < 1e-12 * (1 + abs(bias))


def test_a_step_has_its_proven_norm() -> None:
    body, last = read_chain(network("conv"), SIZE)
    for step in (*body, last):
        if isinstance(step, LinearLayer):
            assert AffineStep.of(step).norm == float(step.norm(Arithmetic()))


def largest(*reach: float, gain: float = 4.0) -> Tensor:
    """max 3 s + 4 t for s and t within these, on the ball of radius 2."""
    gains = doubles(3.0, gain)[None]
    return sequential._largest_product(gains, doubles(*reach)[None], doubles(2.0))


def test_the_largest_product_is_not_rounded_down() -> None:
    """The ball alone gives 10, the box 7, both together 3 + 4 sqrt(3)."""
    for reach, exact in (((9.0, 9.0), 10.0), ((1.0, 1.0), 7.0), ((1.0, 9.0), 3 + 4 * math.sqrt(3))):
        assert exact <= float(largest(*reach)) <= exact * (1 + 1e-3)
    # a gain that overflows, and a value that does not move: 0 times infinity is no bound
    assert largest(1e200, 0.0, gain=1e300) == math.inf


@pytest.mark.parametrize("slope", [1.0, 0.0])
def test_a_box_behind_an_activation_has_its_units(slope: float) -> None:
    """A ReLU that just opens: its rise is the difference of two large numbers, and what they may
    have lost.
    """
    found = []
    for s in (1.0, 2.0**40):
        move = s * (1 + 2.0**-30)
        start = Moves(-slope * doubles(move), doubles(move), torch.ones(1).double())
        activated = sequential._box_behind_activation(
            start, Activation(torch.relu), doubles(-s), doubles(s * 2.0**-40)
        )
        assert float(activated.hi) >= s * (2.0**-30 + 2.0**-40)
        found.append([float(activated.hi), float(activated.lo)])
    assert found[1] == pytest.approx([x * 2.0**40 for x in found[0]], rel=1e-9)


def test_a_box_behind_an_activation_holds_what_its_rounding_is_far_above() -> None:
    """Of the identity: units move by 2^-60 around -1 and 1."""
    move = doubles(2.0**-60, 2.0**-60)
    activated = sequential._box_behind_activation(
        Moves(-move, move, move[0]), Activation(lambda x: x), doubles(-1.0, 1.0), 0 * move
    )
    assert bool((activated.hi >= move).all())
    assert bool((activated.lo <= -move).all())


@pytest.mark.parametrize("rho", [2.0**-8, 1.0, 2.0**8])
def test_a_box_behind_a_linear_layer_is_the_ball_or_what_the_box_allows(rho: float) -> None:
    """Rows of length 1/4: of a ball of radius rho, and of what is left of it by a box without its
    first half.
    """
    layer = nn.Linear(16, 1).double().requires_grad_(False)
    layer.weight.fill_(1 / 16)
    step = AffineStep(layer.weight, None, nn.functional.linear, 0.25, 16, True)
    wide, narrow = (torch.full((1, 16), size * rho).double() for size in (1.0, 2.0**-8))
    for box, masked, exact in ((wide, 0, 1 / 4), (wide, 8, 8**0.5 / 16), (narrow, 0, 2.0**-8)):
        mask = torch.ones(1, 16).double()
        mask[:, :masked] = 0
        moved = sequential._box_behind_affine_step(
            Moves(-box, box, torch.full((1,), rho).double()), step, mask, True
        )
        assert rho * exact <= float(moved.hi) == -float(moved.lo) <= rho * exact * (1 + 1e-12)


@functools.cache
def chain(name: str) -> SequentialNetwork:
    return SequentialNetwork(network(name), SIZE)


def parts(name: str, drop: bool) -> Numbers:
    """Whatever only grows where a proof is weaker, at small and large radii."""
    found = chain(name)
    pixels = images(1)
    values = found.values(pixels)
    numbers = [float(part.sum()) for part in values.error]
    for radius in (0.0, 1e-3, 4.0):
        moves = found.moves(pixels, values, torch.full((1,), radius).double(), drop=drop)
        margins = found.margins(values, moves, values.centre[-1].argmax(1), drop=drop)
        finite = margins[torch.isfinite(margins)]
        numbers += [float(part.sum()) for part in (moves.hi, -moves.lo, moves.rho, -finite)]
    return numbers


def test_a_margin_of_large_logits_is_not_rounded_up() -> None:
    """2^54 + 4 less 1 is no number of float64; the next one is larger."""
    found = chain("conv")
    pixels = images(1)
    values = found.values(pixels)
    moves = found.moves(pixels, values, torch.zeros(1).double(), drop=False)
    values.centre[-1].zero_()[:, :2] = doubles(2.0**54 + 4, 1.0)
    values.error[-1].zero_()
    margins = found.margins(values, moves, torch.zeros(1, dtype=torch.long), drop=False)
    assert int(margins[0, 1]) <= 2**54 + 3


def opened(size: float, move: float) -> Numbers:
    start = Moves(-doubles(move), doubles(move), torch.ones(1).double())
    activated = sequential._box_behind_activation(
        start, Activation(torch.relu), doubles(size), doubles(0.0)
    )
    return [float(activated.hi), -float(activated.lo)]


ROWS: dict[str, Callable[[], Numbers]] = {
    "convolutions": lambda: parts("conv", False),
    "pairs, constant units dropped": lambda: parts("maxmin", True),
    "the ball": lambda: [float(largest(9.0, 9.0))],
    "the box": lambda: [float(largest(1.0, 1.0))],
    "both": lambda: [float(largest(1.0, 9.0))],
    "a unit that opens": lambda: opened(-1.0, 1.5),
    "a unit that closes": lambda: opened(1.0, 1.5),
}


@pytest.mark.parametrize("file", ["chains/sequential.py"])
def test_every_rounding_reaches_a_bound(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sequential.__file__.endswith(file)
    made = {name: Sites(getattr(columns, name)) for name in ("up", "gamma", "norm2")}
    for name, sites in made.items():
        monkeypatch.setattr(sequential, name, sites)
    plain = {}
    rows = defaultdict[tuple[str, Site], list[str]](list)
    for row, run in ROWS.items():
        for sites in made.values():
            sites.reached.clear()
        plain[row] = run()
        for name, sites in made.items():
            for site in sites.reached:
                rows[name, site].append(row)
    for name in made:
        lines = enumerate(Path(sequential.__file__).read_text().splitlines(), 1)
        written = {
            number
            for number, line in lines
            if f"{name}(" in line and not line.startswith(("from", "def"))
        }
        assert written == {site[1] for of, site in rows if of == name}, name
    for (name, site), names in rows.items():
        made[name].further = site
        known = [b for row in names for b in plain[row]]
        again = []
        for made[name].factor in (2.0**30, 1 + 2.0**-6):
            again.append([a for row in names for a in ROWS[row]()])
        pairs = [pair for found in again for pair in zip(found, known, strict=True)]
        assert any(a > b + 1e-9 * abs(b) for a, b in pairs), (
            name,
            site[:2],
        )  # float64 evaluates both
        # a little further, and none is less: but for the search of t, which ends elsewhere
        assert all(a >= b - 2.0**-8 * abs(b) for a, b in zip(again[1], known, strict=True)), (
            name,
            site[:2],
        )
        made[name].further = None
