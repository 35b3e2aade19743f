"""Laws of what judges images: which points a region holds, how figures are rounded, what headers
and radii are let in.
"""

import itertools
import json
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from certcli.checkpoint import record, schema
from certcli.cli.shared.command import typed_share
from certcli.evaluation import (
    evidence,
    evidence_schema,
    image_records,
    perturbation,
    records,
    threat,
)
from certcli.system.errors import DataError, Refused, UsageError

NORMS: tuple[threat.Norm, ...] = ("l2", "linf")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", NORMS)
def test_a_length_is_that_of_the_change_whatever_its_sign(norm: threat.Norm) -> None:
    change = torch.tensor([[-3.0, 1.0], [0.0, 2.0]]).view(2, 1, 1, 2)
    assert perturbation.image_norms(change, norm).tolist() == (
        [10**0.5, 2.0] if norm == "l2" else [3.0, 2.0]
    )


@pytest.mark.parametrize("norm", NORMS)
def test_a_region_holds_its_edge_and_nothing_behind_it(norm: threat.Norm) -> None:
    image = torch.full((1, 1, 2, 2), 0.5).double()
    step = torch.zeros_like(image)
    step[..., 0, 1] = -0.25
    for region in (perturbation.Region(norm, 0.25), perturbation.Region.each(norm, [0.25])):
        assert bool(region.contains(image + step, image))
        assert not bool(region.contains(image + step * (1 + 1e-9), image))
    assert perturbation.Region.each(norm, [0.1, 0.3]).radii(image).tolist() == [
        0.1,
        0.3,
    ]  # and not the float32 above or below
    wide = perturbation.Region(norm, 9.0)
    for value, inside in ((0.0, True), (1.0, True), (-1e-12, False), (1 + 1e-12, False)):
        moved = image.clone()
        moved[..., 1, 1] = value
        assert bool(wide.contains(moved, image)) is inside
        assert threat.Threat(norm, 9.0).allows(moved[0], image[0]) is inside
    assert threat.Threat(norm, 0.25).allows((image + step)[0], image[0])
    assert not threat.Threat(norm, 0.25).allows((image + step * (1 + 1e-9))[0], image[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_projection_is_the_nearest_point_of_the_ball_then_of_the_box(norm: threat.Norm) -> None:
    images = draw(3, 1, 2, 2)
    region = perturbation.Region.each(norm, [0.1, 0.3, 5.0])
    assert region.radius == 5.0
    assert torch.equal(region.steepest(0 * images), 0 * images)
    assert torch.equal(region.project(images, images), images)
    near = images + 1e-3 * (draw(3, 1, 2, 2, seed=1) - 0.5)
    assert torch.allclose(region.project(near, images), near.clamp(0, 1), atol=1e-15)
    far = images + 4 * (draw(3, 1, 2, 2, seed=1) - 0.5)
    found = region.project(far, images)
    change = far - images
    if norm == "l2":
        change = change * (region.radii(images) / change.flatten(1).norm(dim=1)).clamp_max(1).view(
            -1, 1, 1, 1
        )
    else:
        change = torch.stack(
            [one.clamp(-r, r) for one, r in zip(change, (0.1, 0.3, 5.0), strict=True)]
        )
    assert torch.allclose(found, (images + change).clamp(0, 1), atol=1e-12)
    assert torch.equal(
        perturbation.Region.each(norm, [0.0, 0.0, 0.0]).project(images, images), images
    )
    places = perturbation.Region.within(threat.Patch(1, 1), [(0, 1), (1, 0), (1, 1)], images)
    rows = torch.tensor([2, 0])
    one = places.project(far, images)
    assert [int((a != b).sum()) for a, b in zip(one, images, strict=True)] == [1, 1, 1]
    for whole in (region, places):
        assert torch.equal(
            whole.of(rows).project(far[rows], images[rows]), whole.project(far, images)[rows]
        )


@pytest.mark.parametrize("norm", NORMS)
def test_random_points_fill_the_ball_and_are_drawn_from_the_generator(norm: threat.Norm) -> None:
    images = torch.full((4000, 1, 1, 2), 0.5).double()
    region = perturbation.Region(norm, 0.4)
    generators = [torch.Generator().manual_seed(3) for _ in range(3)]
    points, again = (region.random_point(images, generator) for generator in generators[:2])
    assert torch.equal(points, again)
    starts = region.random_start(images, generators[2])
    for found in (points, starts):
        assert bool((perturbation.image_norms(found - images, norm) <= 0.4 * (1 + 1e-12)).all())
        assert float((found - images).mean().abs()) < 0.02  # 4 standard deviations of 8,000 numbers
        assert float(((found - images) > 0).double().mean()) == pytest.approx(0.5, abs=0.03)
    # of a disc half the points lie beyond 0.71 of the radius, of a direction and a length half; of
    # a square 3/4 do
    share = {"l2": (0.5, 0.293), "linf": (0.5, 0.5)}[norm]
    for found, expected in zip((points, starts), share, strict=True):
        beyond = perturbation.image_norms(found - images, norm) > 0.4 * 0.5**0.5
        assert float(beyond.double().mean()) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("radii", [[-1.0], [-1e-300, 1.0], [math.nan], [math.inf], []])
def test_radii_are_finite_and_not_negative(radii: list[float]) -> None:
    with pytest.raises(UsageError):
        threat.require_radii(radii)
    with pytest.raises(UsageError):
        perturbation.Region.each("l2", radii or [-1.0])


def test_radii_ascend_and_shares_are_shares() -> None:
    assert threat.require_radii([0.5, 0.0, 0.5]) == (0.0, 0.5)
    assert [typed_share(text) for text in ("0", "1", "9/10")] == [0.0, 1.0, 0.9]
    for wrong in ("-1e-9", "1.0000001", "nan"):
        with pytest.raises(ValueError, match="share"):
            typed_share(wrong)


@pytest.mark.parametrize(
    ("text", "image", "fits"),
    [("4x6", (6, 4), True), ("5x1", (6, 4), False), ("1x7", (6, 4), False), ("4", (4, 4), True), ("5", (4, 9), False),
     ("100%", (4, 4), True), ("100%", (4, 6), False)],
)  # fmt: skip
def test_a_patch_fits_into_its_image(text: str, image: tuple[int, int], fits: bool) -> None:
    if not fits:
        with pytest.raises(UsageError, match="do not fit"):
            threat.Patch.read(text, image)
    else:
        assert threat.Patch.read(text, image).within(threat.Patch(*image))


@pytest.mark.parametrize("digits", [1, 3, 6])
def test_figures_are_rounded_to_what_holds(digits: int) -> None:
    figures = [*(10 ** float(x) for x in draw(40) * 9 - 6), 0.0, 1.0, 0.12, 1e12]
    for figure in figures:
        exact = Decimal(repr(figure))
        low = Decimal(threat.proven_radius(figure, digits))
        high = Decimal(threat.attacked_radius(figure, digits))
        assert low <= exact <= high
        assert high - low <= exact * Decimal(10) ** (1 - digits)
        assert all(len(shown.normalize().as_tuple().digits) <= digits for shown in (low, high))
    for log10 in (draw(400) * 800 - 400).tolist():
        assert float(threat.power_of_ten(log10).removeprefix("10^")) >= log10 - 1e-12 * abs(log10)


@pytest.mark.parametrize("failure", [0.3, 0.05, 1e-3, 2e-4, 3.3e-9, 7e-15, 1e-30])
def test_a_confidence_is_rounded_down_and_told_from_1(failure: float) -> None:
    for whole in (1, 100):
        shown = Decimal(threat.confidence(failure, whole))
        exact = whole * (1 - Decimal(repr(failure)))
        assert shown <= exact
        assert shown < whole
        assert exact - shown <= max(
            Decimal(repr(failure)) * whole / 10, Decimal(whole) * Decimal(10) ** -20
        )
        assert len(str(shown)) <= max(7, 3 - math.floor(math.log10(failure))) + 2


def header(**changes: Any) -> dict[str, Any]:
    images = {"name": "digits", "split": "test", "images": 4, "digest": "0" * 64}
    return {"schema": "certvit-records/1", "command": "certify", "checkpoint": "0" * 64, "dataset": images, "radii": [],
            "method": "lipschitz", "norm": "l2", "parameters": {}, "network": {}, **changes}  # fmt: skip


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else "a"


def test_a_header_is_bounded_and_of_one_command(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(header()) + "\n")
    assert records.read_records(file, "certify")[0].checkpoint == "0" * 64
    with pytest.raises(DataError, match="records of certify, not of attack"):
        records.read_records(file, "attack")
    for name, wrong in itertools.product(
        ("parameters", "network"), ({"a": "a" * 10**6}, {"a": nested(60)})
    ):
        with pytest.raises(DataError, match="not the header"):
            image_records.parse_records((json.dumps(header(**{name: wrong})) + "\n").encode(), file)


def test_a_line_may_be_long_and_a_file_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (json.dumps(header()) + "\n").encode()
    row = {
        "index": 0,
        "label": 1,
        "prediction": 1,
        "radius": 0.5,
        "method": "x",
        "failure": 0.0,
        "pixels": "0" * 16,
    }
    data = line + (json.dumps(row) + "\n").encode() * 9
    monkeypatch.setattr(image_records, "LONGEST_LINE", len(line) - 1)
    assert len(image_records.parse_records(data, tmp_path)[1]) == 9
    monkeypatch.setattr(image_records, "LONGEST_LINE", len(line) - 2)
    with pytest.raises(DataError, match="a line of"):
        image_records.parse_records(data, tmp_path)


def is_let_in(row: dict[str, Any], kind: type) -> bool:
    try:
        msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return False
    return True


def test_a_record_of_an_attack_says_one_thing() -> None:
    """Of class 1: withstood, broken by an attack, or wrong before it; a change has both lengths or
    none.
    """
    row = {"index": 0, "label": 1, "epsilon": 0.5, "kind": "l2", "task": 0, "pixels": "0" * 16}
    names = ("prediction", "adversarial_prediction", "robust", "norm", "l2", "broken_by")
    for told in itertools.product(
        (1, 2), (1, 2), (True, False), (None, 0.0, 0.5), (None, 0.5), (None, "pgd")
    ):
        true = (told[3] is None) is (told[4] is None) and (
            told == (1, 1, True, None, None, None)
            or (told[:3] == (1, 2, False) and told[3] is not None and told[5] == "pgd")
            or (told[0] == 2 and told[2:4] == (False, 0.0) and told[5] is None)
        )
        fields = dict(zip(names, (*told[:2], {"pgd": told[2]}, *told[3:]), strict=True))
        assert is_let_in({**row, **fields}, image_records.AttackRecord) is true, told


ATTACKED = {
    "norm": "l2", "images": 4, "clean": 0.75, "robust": 0.5, "attacks": {}, "median_norm": None,
    "epsilon": 0.5,
}  # fmt: skip
PRESERVED = {
    "images": 4, "logits_error": 0.5, "agreement": 0.75, "agreement_interval": (0.2, 1.0),
    "accuracy_before": None, "accuracy_before_interval": None, "accuracy_after": 0.5,
    "accuracy_after_interval": (0.1, 0.9), "dataset": "digits", "split": "val", "took_part": False,
    "trained_on": False,
}  # fmt: skip
TRAINED = {"clean": 0.75, "upper": 1.0, "log10_upper": 0.0, "upper_text": "1", "upper_finite": True}
OF_IMAGES = {"dataset": {"name": "digits", "split": "val", "images": 4, "digest": "0" * 64}}
# what is changed in evidence of a command, and whether it then contradicts itself
CHANGED: list[tuple[str, dict[str, Any], bool]] = [
    ("attack", {"curve": {"0.25": 0.75}}, False),
    ("attack", {"curve": {"0.25": 1.0}}, True),
    ("attack", {"curve": {"far": 0.5}}, True),
    # of several parts the curve may be about other images than the first
    ("attack", {"curve": {"0.25": 1.0}, "parts": [ATTACKED]}, False),
    # of four images three were right, and two withstood
    ("attack", {"fooled": 1, "fooled_8bit": 1}, False),
    ("attack", {"fooled": 1, "fooled_8bit": 0}, False),
    ("attack", {"fooled": 2, "fooled_8bit": 0}, True),
    ("attack", {"fooled": 0, "fooled_8bit": 1}, True),
    *[
        ("adapt", {figure: share}, share == 0.3)
        for figure in ("agreement", "accuracy_before", "accuracy_after")
        for share in (0.25, 0.3)
    ],
    *[
        ("finetune", {"certified": share, **images}, share == 1.0)
        for share in (0.5, 0.75, 1.0)
        for images in (OF_IMAGES, {})
    ],
]
HONEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attack": ({}, ATTACKED),
    "adapt": ({"calibration": "digits"}, PRESERVED),
    "finetune": ({"epsilon": 0.5}, TRAINED),
}


@pytest.mark.parametrize(("command", "change", "contradicts"), CHANGED, ids=str)
def test_evidence_does_not_contradict_itself(
    command: str, change: dict[str, Any], contradicts: bool
) -> None:
    about, result = HONEST[command]
    entry = record.Evidence(command, about, {**result, **change}, "0" * 64)
    assert (evidence.understood(entry) is None) is contradicts
    assert evidence.understood(replace(entry, command="divination")) is None


def test_a_record_of_an_attack_by_patches_says_one_thing() -> None:
    """Of class 1: withstood, broken into another class or into none, or wrong before it."""
    said = {
        (1, 1, True, None),
        (1, 2, False, (0, 0)),
        (1, None, False, (0, 0)),
        (2, 2, False, None),
        (None, None, False, None),
    }
    row = {"index": 0, "label": 1, "kind": "patch", "patch": "2x2", "pixels": "0" * 16}
    for told in itertools.product((1, 2, None), (1, 2, None), (True, False), (None, (0, 0))):
        names = ("prediction", "adversarial_prediction", "robust", "corner")
        fields = dict(zip(names, (told[0], told[1], {"2x2": told[2]}, told[3]), strict=True))
        assert is_let_in({**row, **fields}, image_records.PatchRecord) is (told in said)


PATCHES = {
    "procedure": "double-masking",
    "patches": ["1x1", "2x2"],
    "hide": "pixels",
    "cell": [1, 1],
    "rows": 8,
    "masks": 3,
}
# what is changed in evidence of `certify`, and the contradiction that is found
CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, []),
    "other patches": ({"certified": {"1x1": 0.5, "3x3": 0.25}}, ["other patches"]),
    "fewer patches": ({"certified": {"1x1": 0.5}}, ["other patches"]),
    "a mean radius": ({"average_radius": 0.1}, ["mean radius"]),
    "another promise": ({"promise": "probability 0.999"}, ["promise"]),
    "a chance of failure": ({"failure": 0.001}, ["promise"]),
    "more than are right": ({"clean": 0.25}, ["more images"]),
    "another number of images": ({"images": 8}, ["numbers of images"]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_evidence_of_patches_does_not_contradict_itself(name: str) -> None:
    change, found = CONTRADICTIONS[name]
    result = {
        "dataset": {"name": "digits", "split": "test", "images": 4, "digest": "0" * 64}, "clean": 0.75, "images": 4,
        "certified": {"1x1": 0.5, "2x2": 0.25}, "method": "patch", "failure": 0.0, "promise": "proof",
        "arithmetic": "float32", "parameters": PATCHES,
    }  # fmt: skip
    about = {"dataset": "digits", "split": "test", "limit": None, "seed": 0, "method": "patch"}
    said = list(
        evidence._certify_contradictions(
            msgspec.convert(about, evidence_schema.CertifyParameters),
            msgspec.convert({**result, **change}, evidence_schema.CertifyResult),
        )
    )
    assert len(said) == len(found)
    assert all(words in line for words, line in zip(found, said, strict=True))


def test_a_seed_is_below_two_to_the_64() -> None:
    options = {
        "sigma": 0.25,
        "n0": 10,
        "samples": 100,
        "alpha": 0.001,
        "enough": None,
        "precision": "float32",
        "noise": "gaussian",
    }
    assert (
        schema.convert_json({**options, "seed": 2**64 - 1}, evidence_schema.SmoothingOptions).seed
        == 2**64 - 1
    )
    with pytest.raises(Refused, match="seed"):
        schema.convert_json({**options, "seed": 2**64}, evidence_schema.SmoothingOptions)
