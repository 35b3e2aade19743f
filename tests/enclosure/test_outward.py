"""Every place of an enclosure that rounds up reaches a bound: rounded up further there alone, some
grows, none shrinks.
"""

import functools
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import certcli.enclosure
from certcli.certify.around import AroundImages
from certcli.enclosure.slopes.length import Parts, logits_length, reach, sum_of_sizes
from certcli.enclosure.slopes.network import SlopeNetwork
from certcli.enclosure.zonotopes import columns
from certcli.enclosure.zonotopes.ascent import hinges, proven
from certcli.enclosure.zonotopes.backward import (
    Hinge,
    HingeChoice,
    Node,
    ParabolaChoice,
    descend,
    lower,
)
from certcli.enclosure.zonotopes.cuts import Remainder
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.ellipsoids import by_fibres
from certcli.enclosure.zonotopes.fibre_attention import attend_by_fibres
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import lower_bounds
from certcli.enclosure.zonotopes.network import LocalNetwork, changed
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.pointwise import relu
from certcli.enclosure.zonotopes.rules.arithmetic import joined
from certcli.enclosure.zonotopes.rules.attention import average, softmax
from certcli.enclosure.zonotopes.rules.layers import relaxed as relaxed_curve
from certcli.enclosure.zonotopes.space import Coordinates, ZonotopeContext
from certcli.engine import activations
from certcli.nn.blocks import Spread
from tests.enclosure.test_backward import hinged, inputs
from tests.enclosure.test_every_rule import pixel_model
from tests.enclosure.test_slopes import ball
from tests.enclosure.test_slopes import network as slopes
from tests.enclosure.test_zonotope_networks import SIZE, image, network
from tests.helpers.enclosed import sample_images
from tests.helpers.enclosure_cases import CASES, draw, fibre_forms, forms
from tests.helpers.lipschitz_cases import build_row
from tests.helpers.reached import Site, Sites
from tests.helpers.slopes import IMAGE

FOLDER = Path(certcli.enclosure.__file__).parent
FILES = sorted(
    "/".join(file.parts[-2:])
    for file in FOLDER.rglob("*.py")
    if re.search(
        r"^def up|zonotopes.columns import (\([^)]*|.*)\b(up|gamma)\b", file.read_text(), re.M
    )
)
Numbers = list[float]


def of_form(x: Form) -> Numbers:
    """What only grows where a form is wider."""
    low, high = x.interval()
    found = [
        x.box_radius,
        x.rest_radius,
        x.radius,
        x.size,
        high - low,
        -lower_bounds(replace(x, node=None)),
    ]
    back = (
        []
        if x.node is None
        else [-lower(x.node, torch.eye(x.centre.numel()).double().view(-1, *x.shape))]
    )
    *sizes, deviation = x.bounds()
    return [*(float(part.sum()) for part in (*found, *back)), *sizes, -deviation]


def relaxed(place: int, squares: bool, size: float) -> Numbers:
    return of_form(CASES[place].relax(*forms(CASES[place], size, squares, place, size > 0.1)))


def taped(place: int, boxed: bool, in_box: bool) -> Numbers:
    return of_form(CASES[place].relax(*inputs(CASES[place], 0.05, boxed, in_box)[0]))


@functools.cache
def margins_of_hinges() -> Form:
    return hinged(0.06)[0]


def chosen() -> Numbers:
    """What is proven with given choices at the hinges."""
    form = margins_of_hinges()
    made: dict[Node, HingeChoice] = {}
    for hinge in hinges(form.node):
        half = torch.full((len(hinge.places),), 0.5).double()
        made[hinge] = HingeChoice(half, ParabolaChoice(half, half / 4, half))
    rows = torch.eye(3).double().view(3, *form.shape)
    return [-proven(descend(form.node, rows[j : j + 1], made), 1.0) for j in range(3)]


@functools.cache
def enclosed(kind: str) -> LocalNetwork:
    return LocalNetwork(network(kind), SIZE)


def margins(kind: str) -> Numbers:
    """As a proof asks for them."""
    local = enclosed(kind)
    local.coordinates = None
    start = l2_ball(image(), 1e-3, squares_up_to=0, limit=200)
    return [-float(local.margins(start, 0).sum())]


def averaged_as_executed() -> Numbers:
    (case,) = (case for case in CASES if case.name == "average")
    x, v = forms(case, 0.1, squares_on=True, seed=0)
    return of_form(average(softmax(x).doubted(1e-3), v))


def attended_by_fibres(size: float, factor: float, token: int | None, boxed: bool) -> Numbers:
    q, k, v = fibre_forms(((1, 4, 6),) * 3, size, 0, positive=False, boxed=boxed)
    q = q.scale(torch.tensor(factor).double())
    asked = q if token is None else q.linear(lambda t: t[:, :, token : token + 1])
    try:
        form = attend_by_fibres(asked, k, v, 2, 0.7, token)
    except Unbounded:  # rounded up until nothing is known
        return [math.inf] * 20
    beside = by_fibres(form).with_common_symbols()
    return [number for part in (form, beside) for number in of_form(part)]


def joined_back() -> Numbers:
    (x,), _ = inputs(CASES[0], 0.05)
    return of_form(joined([x, x, torch.ones(1, 3, 4).double()], 1))


def poor_eigenvectors() -> Numbers:
    """What is proven of a square whose eigenvalues are off."""
    eigh = torch.linalg.eigh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", lambda m: eigh(m + 0.1 * torch.eye(m.shape[-1])))
        return [-float(lower_bounds(forms(CASES[0], 1.0, True, 0, mixed=True)[0]).sum())]


def poor_factors() -> Numbers:
    """What an ellipsoid holds without a Cholesky factor."""
    case = next(case for case in CASES if case.name == "reduction")
    with pytest.MonkeyPatch.context() as patch:
        failed = lambda m: (0 * m, torch.ones(m.shape[:-2], dtype=torch.int32))  # noqa: E731
        patch.setattr(torch.linalg, "cholesky_ex", failed)
        return of_form(case.relax(*forms(case, 0.1, True, 0)))


def left_by_cuts() -> Numbers:
    """What two walks with fixed weights leave of a ball."""
    (x,) = forms(CASES[0], 1.0, True, 0, mixed=True)
    pixels = torch.full((1, 1, 1, 6), 0.5).double()
    remainder = Remainder.near(pixels, 0.6, in_box=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remainder, "_weights", lambda *_: torch.tensor([1.0, 0.01]).double())
        remainder.add(pixels + 0.01, 0.5, x, 0)
        ball = remainder.ball()
    return [ball[1], float(remainder.high.sum()), *(-cut.level for cut in remainder.cuts)]


def in_coordinates(in_box: bool) -> Numbers:
    """What a first map to 3 numbers, of a basis that is not orthonormal, leaves; and the margins of
    hinges behind it.
    """
    pixels = (2 * image() - 0.5).clamp(0, 1)
    x = l2_ball(pixels, 0.3, squares_up_to=9, limit=99, in_box=in_box).linear(
        lambda t: t.flatten(2)
    )
    basis = torch.cat([draw(1, 16, 2), 1e-3 * draw(1, 16, 1, seed=1)], -1) / 4
    coordinates = Coordinates.of(torch.arange(16)[None], basis, 16)
    fewer = changed(x, coordinates)
    taped = l2_ball(pixels, 0.3, squares_up_to=0, limit=99, tape=True, in_box=in_box)
    half = torch.tensor(-0.5).double()
    opened = relu(changed(taped.linear(lambda t: t.flatten(2)).shift(half), coordinates))
    assert isinstance(opened.node, Hinge)
    return [*of_form(fewer), *of_form(opened), float(opened.node.rest.sum())]


def at_the_edge() -> Numbers:
    pixels = (2 * image() - 0.5).clamp(0, 1)
    both = (
        linf_ball(pixels, 0.3, limit=9, in_box=True),
        l2_ball(pixels, 0.3, squares_up_to=0, limit=9, in_box=True),
    )
    return [number for form in both for number in of_form(form)]


@functools.cache
def executed(name: str) -> SlopeNetwork:
    return AroundImages(pixel_model(build_row(name)), IMAGE).network


def gradients(name: str, kind: str, network: Callable[[str], SlopeNetwork] = slopes) -> Numbers:
    """Of the gradients of two logits near an image: their forms, lengths, and what rounding adds."""
    pixels = sample_images(1)[0]
    near = network(name).near(ball(kind, pixels))
    rows = torch.eye(near.network.model(pixels).shape[1]).double()[:2]
    forms, added = zip(*(near.gradient_and_rounding(row) for row in rows), strict=True)
    sizes = [float(part.sum()) for form in forms for part in (form.radius, form.size)]
    if kind == "linf":
        return [*sizes, *map(sum_of_sizes, forms), *added]
    parts = [Parts.of(form) for form in forms]
    return [*sizes, *(part.length for part in parts), logits_length(parts, 0), *added]


SLOPES = (
    ("attention-bare", "squares"),
    ("center-norm", "linf"),
    ("l2-normalize", "l2"),
    ("batch-norm-folded", "squares"),
    ("clamp", "squares"),
    ("spelled-rounded-jumps", "squares"),
    ("adaptive-max", "l2"),
)
"""Rows of networks whose gradients reach every rounding on the way back."""


def broken_line() -> Numbers:
    (x,) = forms(next(case for case in CASES if case.name == "LayerNorm"), 0.1, True, 0)
    context = ZonotopeContext(None, None)  # type: ignore[arg-type]
    return of_form(relaxed_curve(context, x, activations.clamped_curve(-0.1, 0.3)))


def along_one_axis() -> Numbers:
    """|c + A e|_2 where c lies along A's longest axis: |c| + |A|, below every multiplier of the grid."""
    return [
        reach(torch.tensor([1.0, 0.0]).double(), torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double())
    ]


def deviation() -> Numbers:
    """1 / deviation of a LayerNorm, which the way back of gradients divides by."""
    case = next(case for case in CASES if case.name == "LayerNorm")
    (x,) = forms(case, 0.1, True, 0)
    inner: dict[str, Form] = {}
    layer_norm(x, Spread(1e-2), None, None, inner=inner)
    return of_form(inner["factor"])


ROWS: dict[str, Callable[[], Numbers]] = {
    "deviation": deviation,
    "broken line": broken_line,
    "along one axis": along_one_axis,
    "slopes as executed": functools.partial(gradients, "attention-bare", "l2", executed),
    **{f"slopes of {name}": functools.partial(gradients, name, kind) for name, kind in SLOPES},
    **{
        f"{c.name} {s}": functools.partial(relaxed, i, s, 0.1)
        for i, c in enumerate(CASES)
        for s in (True, False)
    },
    **{f"{c.name}, wide": functools.partial(relaxed, i, True, 0.5) for i, c in enumerate(CASES)},
    "softmax, wider": functools.partial(
        relaxed, [case.name for case in CASES].index("softmax"), False, 2.0
    ),
    **{f"{c.name} back": functools.partial(taped, i, False, False) for i, c in enumerate(CASES)},
    **{
        f"{c.name} in the box": functools.partial(taped, i, True, True) for i, c in enumerate(CASES)
    },
    "averaged as executed": averaged_as_executed,
    **{
        f"by fibres {size} {factor} {token} {boxed}": functools.partial(
            attended_by_fibres, size, factor, token, boxed
        )
        for size, factor in ((0.1, 1.0), (0.3, 1.0), (0.0, 1.0), (1e-3, 60.0))
        for token, boxed in ((None, False), (2, True))
    },
    "joined, back": joined_back,
    "poor eigenvectors": poor_eigenvectors,
    "poor factors": poor_factors,
    "cuts": left_by_cuts,
    "at the edge": at_the_edge,
    "in coordinates": functools.partial(in_coordinates, False),
    "in coordinates, in the box": functools.partial(in_coordinates, True),
    "chosen": chosen,
    "a network": functools.partial(margins, "plain"),
    "a network without norms": functools.partial(margins, "relu"),
}
FACTORS = (2.0**30, 1 + 2.0**-6)
"""So much further: what is rounding alone is then seen; where that is hidden by another bound, a little further is seen."""


@contextmanager
def watched() -> Iterator[dict[str, Sites]]:
    """`up` and `gamma` of all modules of the room note their callers."""
    made = {name: Sites(getattr(columns, name)) for name in ("up", "gamma")}
    with pytest.MonkeyPatch.context() as patch:
        for module in [
            module for name, module in sys.modules.items() if name.startswith("certcli.enclosure")
        ]:
            for name, sites in made.items():
                if getattr(module, name, None) is sites.function:
                    patch.setattr(module, name, sites)
        yield made


@functools.cache
def plain() -> tuple[dict[str, Numbers], dict[tuple[str, Site], list[str]]]:
    """The numbers of every row, and the rows that reach each site."""
    numbers: dict[str, Numbers] = {}
    rows: dict[tuple[str, Site], list[str]] = defaultdict(list)
    with watched() as made:
        for row, run in ROWS.items():
            for sites in made.values():
                sites.reached.clear()
            numbers[row] = run()
            for name, sites in made.items():
                for site in sites.reached:
                    rows[name, site].append(row)
    return numbers, rows


CHOSEN = ("rules/attention.py", "zonotopes/direction.py")
"""Of two enclosures the narrower one is taken: the other may have less slack."""
FITTED = ("rows of length 1, wide", "norm with a floor, wide")
"""At a floor the fit of less error is taken: the other may be narrower elsewhere."""


def grows(site: Site, sites: Sites, names: list[str]) -> bool:
    """Tell whether some number of these rows grows with this site. None may become less."""
    sites.further = site
    try:
        for sites.factor in FACTORS:
            for row in names:
                try:
                    pairs = [*zip(ROWS[row](), plain()[0][row], strict=True)]
                except Unbounded:  # rounded up until nothing is known
                    return True
                # float64 evaluates both; NaN and an overflow are larger than any bound
                less = any(a < b - 1e-9 * abs(b) for a, b in pairs)
                assert not less or site[0].endswith(CHOSEN) or row in FITTED, (row, site[:2])
                if any(not a <= b + 1e-9 * abs(b) for a, b in pairs):
                    return True
    finally:
        sites.further = None
    return False


def test_every_file_rounds_in_some_row() -> None:
    numbers, rows = plain()
    assert all(number == number for found in numbers.values() for number in found)
    for file in FILES:
        assert any(site[0].endswith(file) for _, site in rows), file


@pytest.mark.parametrize("file", FILES)
def test_every_rounding_reaches_a_bound(file: str) -> None:
    _, rows = plain()
    sites = Counter(row for names in rows.values() for row in names)
    with watched() as made:
        for (name, site), names in rows.items():
            if site[0].endswith(file):
                # those that round in few places first, in little time; wide ones, of which another
                # branch may become the narrower, last and in their order
                ordered = sorted(names, key=lambda row: math.inf if "wide" in row else sites[row])
                assert grows(site, made[name], ordered), (name, site[:2])
