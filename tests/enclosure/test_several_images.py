"""Several images in one walk: row by row what each of them gives alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from certcli.certify import local
from certcli.certify.certificate import RecheckSettings
from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.enclosure.zonotopes import ellipsoids, products
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import ONE_BY_ONE, Form, Unbounded
from certcli.enclosure.zonotopes.margins import lower_bounds
from certcli.engine.table import NoRule
from certcli.evaluation.image_records import Certificate
from tests.enclosure.test_every_rule import BACK, QUICK, ROWS, enclosed
from tests.enclosure.test_zonotope_networks import SIZE, image, network
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosed import STARTS, Walked, sample_images, witnesses_near
from tests.helpers.enclosure_cases import CASES, Case, draw, forms
from tests.helpers.grids import EVERY

IMAGES = 3
NEAR = 1e-9
"""Of sizes: other images' symbols add columns of 0, whose number counts in what is rounded up, and
sums are added in another order. Both are some thousand units of 2^-53, and as many times larger
where terms cancel."""
ALONE = {
    "attention-fused", "attention-windows", "attention-written", "attention-pool",
    "attention-qk-norm", "attention-masked", "attention-talking", "spelled-rounded-views",
    "spelled-rounded-moves", "sort-in-windows", "unfold",
}  # fmt: skip
"""Rows that move the axis of images, or name their number: each image is walked alone."""


def batch_form(each: Sequence[Form]) -> Form:
    """Return the form of several images whose rows are these."""
    reaches = [x.space.reach for x in each if x.space.reach is not None]
    pairs = [torch.stack(ends, 1) for ends in zip(*reaches, strict=True)]
    reach = (pairs[0], pairs[1]) if pairs else None
    return Form(
        replace(each[0].space, images=len(each), reach=reach),
        torch.cat([x.centre for x in each]),
        torch.cat([x.gens for x in each], 1),
        torch.cat([x.slack for x in each]),
        each[0].blocks,
    )


def inputs_of(case: Case, size: float, squares_on: bool, start: int) -> list[list[Form]]:
    """Return a case's forms for each image, that of a place with a reach of its own."""
    images = []
    for place in range(IMAGES):
        made = forms(case, size, squares_on, start + 2 * place, mixed=place == 1)
        reach = made[0].space.reach
        if reach is not None:
            reach = reach[0].roll(place), reach[1].roll(place)
        images.append([replace(x, space=replace(x.space, limit=999, reach=reach)) for x in made])
    return images


def facts(x: Form) -> list[Tensor]:
    """Return bounds of a form's entries, and of sums of them, which see what entries share."""
    flat = x.with_common_symbols().linear(lambda t: t.reshape(len(t), 1, -1))
    weight = draw(7, flat.shape[-1], seed=1)
    sums = flat.linear(lambda t: t @ weight.T, lambda t: t @ weight.abs().T, flat.shape[-1])
    return [*x.interval(), *sums.interval(), x.rest_radius, lower_bounds(sums)]


def gaps_between(row: Form, alone: Form) -> list[float]:
    """Return how far facts of a row are from those of its image alone, relative to sizes."""
    pairs = zip(facts(row), facts(alone), strict=True)
    size = 1e-300 + float(alone.size.detach().amax())
    return [float((one - other).detach().abs().amax()) / size for one, other in pairs]


@pytest.mark.parametrize("squares_on", [True, False], ids=["squares", "linear"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_is_what_its_image_gives_alone(case: Case, squares_on: bool) -> None:
    for size, start in ((1e-3, 0), (0.1, 1)):
        images = inputs_of(case, size, squares_on, start)
        joint = case.relax(*map(batch_form, zip(*images, strict=True)))
        for place, inputs in enumerate(images):
            row = joint.of_image(place)
            assert max(gaps_between(row, case.relax(*inputs))) < NEAR
            as_row = replace(case, relax=lambda *_, row=row: row)
            far, free = outside(as_row, inputs, *symbols(60, start))
            assert (far <= free).all()


def test_symbols_are_not_reduced_for_several_images() -> None:
    """Which ones are dropped is another choice for each."""
    images = inputs_of(CASES[0], 0.1, True, 0)
    (joint,) = map(batch_form, zip(*images, strict=True))
    few = replace(joint, space=replace(joint.space, limit=14))
    with pytest.raises(Unbounded, match=ONE_BY_ONE):
        reduced(few)
    assert reduced(few.of_image(1)).consistent


def shared(x: Form, root: Tensor, places: Tensor | None) -> tuple[Tensor, int]:
    """All fibres of an image in one group of symbols."""
    numbers, groups = numbered(x, root, places)
    return 0 * numbers, groups


def of_the_next(first: Any, second: Any, shape: Any) -> Any:
    """The ellipsoid of the image beside."""
    right = of_matrix_products(first, second, shape)
    return right._replace(matrix=right.matrix.roll(1, 0))


numbered = ellipsoids._columns_at
of_matrix_products = products.of_matrix_products
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "two fibres with the same symbols": (ellipsoids, "_columns_at", shared, "LayerNorm, mixed"),
    "symbols of another image": (products, "of_matrix_products", of_the_next, "scores"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong, which = FAULTS[fault]
    case = next(case for case in CASES if case.name == which)
    images = inputs_of(case, 0.1, True, 1)
    alone = [case.relax(*inputs) for inputs in images]
    monkeypatch.setattr(module, name, wrong)
    joint = case.relax(*map(batch_form, zip(*images, strict=True)))
    gaps = [gaps_between(joint.of_image(place), alone[place]) for place in range(IMAGES)]
    assert max(map(max, gaps)) > 100 * NEAR


def row_forms(value: Any, place: int) -> list[Form]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part.of_image(place) for part in parts if isinstance(part, Form)]


def values_of(walk: Callable[[Any], Form]) -> tuple[dict[Any, tuple[Any, int | None]], Tensor]:
    """Return the values of a walk's nodes, and its lower bounds on margins."""
    values: dict[Any, tuple[Any, int | None]] = {}
    with torch.no_grad():
        margins = walk(lambda node, value, token: values.update({node: (value, token)}))
        return values, lower_bounds(margins)


FORWARD = [kind for kind in STARTS if kind not in (BACK, "l2 with few symbols")]
NETWORKS = [
    (name, kind)
    for number, name in enumerate(ROWS if EVERY else QUICK[::2])
    for kind in (FORWARD if EVERY else [FORWARD[number % len(FORWARD)]])
]


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_no_image_of_a_walk_sees_another(name: str, kind: str) -> None:
    """At every node, and at the margins; and no run near an image leaves its own row."""
    row = enclosed(name)
    pixels = torch.cat(sample_images(IMAGES))
    labels = torch.cat([row.model(x).argmax(1) for x in pixels.split(1)])
    radius = 0.02

    def walk(part: slice, label: Any) -> tuple[dict[Any, tuple[Any, int | None]], Tensor]:
        start = STARTS[kind](pixels[part], radius)
        return values_of(lambda watch: row.network.margin_form(start, label, watch))

    if name in ALONE:
        with pytest.raises(NoRule):
            walk(slice(None), labels)
        return
    values, bounds = walk(slice(None), labels)
    for place in range(IMAGES):
        part = slice(place, place + 1)
        alone, margins = walk(part, int(labels[place]))
        assert torch.allclose(bounds[place], margins[0], rtol=NEAR, atol=NEAR)
        for node, (value, _) in values.items():
            pairs = zip(row_forms(value, place), row_forms(alone[node][0], 0), strict=True)
            for one, other in pairs:
                size = float(other.size.amax())
                gaps = zip(one.interval(), other.interval(), strict=True)
                assert all(float((a - b).abs().amax()) < NEAR * (1 + size) for a, b in gaps)
        near = witnesses_near(row.model, STARTS[kind](pixels[part], radius), 1)
        own = {
            node: (row_forms(value, place) if isinstance(value, (list, tuple)) else one, token)
            for node, (value, token) in values.items()
            for one in row_forms(value, place)[:1]
        }
        found = Walked(int(labels[place]), near, row.network.ending.trace, own, bounds[place])
        assert list(found.faults(row.model)) == []


def decider(at: Sequence[float] = (4e-3,), **options: Any) -> LocalCertifier:
    return LocalCertifier(network("plain"), SIZE, Local(at=at, **options))


def stated(rows: Sequence[Certificate]) -> list[Certificate]:
    return [msgspec.structs.replace(row, seconds=0.0) for row in rows]


PIXELS = torch.cat([image(seed) for seed in range(IMAGES)])


@pytest.mark.parametrize("effort", ["zonotope", "auto"])
def test_a_batch_has_the_certificates_of_its_images(effort: Any) -> None:
    """And they are proven again from each image alone."""
    certifier = decider((1e-3, 4e-3), effort=effort)
    tops = certifier.model(PIXELS).argmax(1).tolist()
    labels = [(tops[0] + 1) % 4, *tops[1:]]  # one is misclassified
    rows = certifier.batch(range(IMAGES), PIXELS, labels)
    certifier.at_once = 1
    assert stated(rows) == stated(certifier.batch(range(IMAGES), PIXELS, labels))
    assert [row.radius > 0 for row in rows] == [False, True, True]
    claims = certifier.confirm(rows, PIXELS, RecheckSettings(0, 1e-4))
    assert {claim.status for claim in claims} == {"verified"}


def test_images_that_share_no_walk_are_walked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    certifier = decider()
    tops = certifier.model(PIXELS).argmax(1).tolist()
    expected = stated(certifier.batch(range(IMAGES), PIXELS, tops))
    form_of = certifier.network.margin_form
    failures = [Unbounded("too far"), NoRule("no rule"), MemoryError()]
    waiting = list(failures)

    def alone(start: Form, *named: Any) -> Form:
        if start.space.images > 1:
            raise waiting.pop()
        return form_of(start, *named)

    monkeypatch.setattr(certifier.network, "margin_form", alone)
    for _ in (*failures, "no walk of several is tried any more"):
        assert stated(certifier.batch(range(IMAGES), PIXELS, tops)) == expected
    assert waiting == []


def test_several_images_share_a_walk_where_radii_are_asked_for_and_memory_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decider().at_once == 8
    assert [decider((), effort=effort).at_once for effort in ("zonotope", "auto")] == [1, 1]
    assert decider(effort="backward").at_once == 1
    most = local.available(torch.device("cpu"))
    monkeypatch.setattr(local, "available", lambda device: min(most, 5e7))
    assert decider().at_once == 1
