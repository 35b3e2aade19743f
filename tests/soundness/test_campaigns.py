"""The short form of the long campaigns: every method is attacked, and what an inflated certificate hides is
found; the planter of faults makes every kind of change once, each means what its name says, and
leaves the file alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs
from scipy import stats
from torch import nn

from certcli.certify.certificate import Certifier
from certcli.certify.methods import METHODS
from certcli.certify.options import Arithmetic
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.evaluation.image_records import Certificate
from certcli.models.pixels import PixelModel
from tests.certify.test_certificate_law import PatchClaiming
from tests.helpers.grids import EVERY
from tests.soundness import attack_campaign, coverage_campaign
from tests.soundness.attack_campaign import (
    COUNTED_ELSEWHERE,
    ROWS,
    Row,
    attack_row,
    attacks_of,
    built_network,
)
from tests.soundness.edits import Found
from tests.soundness.mutants.__main__ import place_of
from tests.soundness.mutants.operators import mutants, mutated

BALLS = ("lipschitz", "box", "local", "local-lip", "bcp")


def test_every_method_and_arithmetic_has_a_row() -> None:
    assert {*(row.method for row in ROWS), *COUNTED_ELSEWHERE} == {*METHODS.names()}
    for method in BALLS:
        assert {row.name.split()[-1] for row in ROWS if row.method == method} == {
            *get_args(Arithmetic)
        }


@pytest.mark.parametrize("method", [*BALLS, "patch"])
def test_no_attack_succeeds_inside_a_certificate(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whatever is proven by then is attacked
    monkeypatch.setattr(attack_campaign, "BRANCHING", 3.0 if EVERY else 0.3)
    rows = [row for row in ROWS if row.method == method]
    seen = Found()
    step = 1 if EVERY else {"local": 11}.get(method, 3)
    first = 0 if EVERY or method == "patch" else BALLS.index(method) % 3
    for seed, row in enumerate(rows[first::step]):
        attack_row(replace(row, starts=4), seed, seen)
    assert not seen.broken
    assert attacks_of(seen, method)


def linear_row(seed: int) -> PixelModel:
    return built_network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), seed)


def inflated(row: Row, factor: float) -> Row:
    """The row's certifier, with radii that are too large."""

    def make(model: PixelModel) -> Certifier:
        certifier = row.make(model)
        found = certifier.batch

        def batch(*given: Any) -> list[Certificate]:
            return [structs.replace(claim, radius=claim.radius * factor) for claim in found(*given)]

        certifier.batch = batch  # type: ignore[method-assign]
        return certifier

    return replace(row, make=make, network=linear_row, starts=8)


@pytest.mark.parametrize("method", BALLS)
def test_an_inflated_radius_is_found(method: str) -> None:
    """A linear network, whose radii in the box are nearly exact: half as much again holds another
    class.
    """
    rows = [
        row for row in ROWS if row.method == method and row.name.split()[-1] in ("real", "float32")
    ]
    for row in rows[:: 3 if method == "local" else 1]:
        seen = Found()
        attack_row(inflated(row, 1.0), 1, seen)
        assert seen.tried
        assert not seen.broken
        attack_row(inflated(row, 1.5), 1, seen)
        assert seen.broken, row.name


def test_a_method_that_claims_every_patch_is_found() -> None:
    (row, *_), seen = [row for row in ROWS if row.method == "patch"], Found()

    def make(model: PixelModel) -> Certifier:
        honest: Any = row.make(model)
        return PatchClaiming(honest.procedure, honest.passes, honest.patches)

    attack_row(replace(row, make=make, starts=4), 0, seen)
    assert seen.broken


@pytest.mark.parametrize("arithmetic", ["bf16", "fp16"])
def test_rounding_that_is_left_out_is_found(arithmetic: str) -> None:
    """Radii of real arithmetic that claim to be of another one."""
    (row,) = [row for row in ROWS if (row.method, row.name) == ("lipschitz", "real")]

    def make(model: PixelModel) -> Certifier:
        certifier = row.make(model)
        certifier.arithmetic = arithmetic
        return certifier

    seen = Found()
    attack_row(replace(row, make=make, network=linear_row, starts=64), 1, seen)
    assert seen.broken


SETTINGS = coverage_campaign.Settled(**{**coverage_campaign.DRAWN, "batch_size": 256})


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_certificates_of_drawn_noise_are_wrong_no_more_often_than_alpha(
    precision: str, tmp_path: Path
) -> None:
    """Dealt to processes, broken off and resumed: no draw serves twice."""
    settings = replace(SETTINGS, precision=precision, seed=3)
    true = 0.2
    found, fault = coverage_campaign.arranged(settings, true, 300, tmp_path)
    assert not fault
    assert (
        stats.binom.sf(coverage_campaign.wrong_ones(found, true) - 1, len(found), settings.alpha)
        > 1e-6
    )
    assert max(row.radius for row in found) > 0.5 * true


def alike(self: SmoothingCertifier, indices: Any, *given: Any) -> Any:
    return COUNT(self, [0] * len(indices), *given)


def from_zero(
    self: SmoothingCertifier,
    indices: Any,
    pixels: Any,
    ranges: Mapping[int, tuple[int, int]],
    *given: Any,
) -> Any:
    """The samples that chose the class bound its probability, too."""
    skipped = self.settings.n0
    return COUNT(
        self,
        indices,
        pixels,
        {i: (max(0, a - skipped), b - skipped * (a > 0)) for i, (a, b) in ranges.items()},
        *given,
    )


def by_place(self: SmoothingCertifier, indices: Any, *given: Any) -> Any:
    """Noise by the place in the batch, which begins anew with each."""
    return COUNT(self, range(len(indices)), *given)


COUNT = SmoothingCertifier._count


@pytest.mark.parametrize("fault", [alike, from_zero, by_place])
def test_draws_that_serve_twice_are_found(
    fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmoothingCertifier, "_count", fault)
    assert "used twice" in coverage_campaign.arranged(SETTINGS, 0.2, 100, tmp_path)[1]


def test_a_network_that_runs_in_another_precision_than_it_says_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = coverage_campaign.shifted_classes("float32")
    monkeypatch.setattr(coverage_campaign, "shifted_classes", lambda precision: classify)
    found, _ = coverage_campaign.arranged(replace(SETTINGS, precision="bf16"), 0.2, 24, tmp_path)
    assert coverage_campaign.wrong_ones(found, 0.2) > 12


SOURCE = """
def up(x):
    return math.nextafter(x, math.inf)

def f(x, y=(2.0, 3.0), alpha=0.5, notes=None):
    if x < 0 or x > 50:
        raise ValueError(f"{x * 2}")
    notes.append(not x)
    return round(up(math.sqrt(x)) * len(y) + y[1] + max(alpha, x / 4) + gamma(9) + norm(y), ndigits=9)
"""
# a change of f or up, and what f(9) is then
CHANGES = {
    "up(math.sqrt(x)) * len(y) => (up(math.sqrt(x)), len(y))[0]": 3 + 3 + 2.25 + 13,
    "up(math.sqrt(x)) * len(y) => up(math.sqrt(x)) * len(y) ** 0.5": 3 * 2**0.5 + 3 + 2.25 + 13,
    "math.sqrt(x) => (x, math.sqrt(x))[0]": 18 + 3 + 2.25 + 13,
    "y[1] => y[0]": 6 + 2 + 2.25 + 13,
    "max(alpha, x / 4) => min(alpha, x / 4)": 6 + 3 + 0.5 + 13,
    "max(alpha, x / 4) => (alpha, max(alpha, x / 4))[0]": 6 + 3 + 0.5 + 13,
    "x / 4 => x * 2.0 ** (-10) / 4": 6 + 3 + 0.5 + 13,
    "x / 4 => (x, 4)[0]": 6 + 3 + 9 + 13,
    "alpha => alpha * 2.0": 6 + 3 + 2.25 + 13,
    "norm(y) => norm(y) * 0.9999990463256836": 6 + 3 + 2.25 + 13 * 0.9999990463256836,
    "notes.append(not x) => lambda: notes.append(not x)": 24.25,
    "x < 0 or x > 50 => x > 50": 24.25,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mutant_does_what_its_name_says(change: str, tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(SOURCE)
    (mutant,) = [found for found in mutants(file, tmp_path) if found.key.endswith(f": {change}")]
    scope: dict[str, Any] = {
        "math": math,
        "gamma": lambda terms: 0.0,
        "norm": lambda y: math.hypot(*y) ** 2,
    }
    exec(compile(SOURCE, str(file), "exec"), scope)
    assert scope["f"](9, notes=[]) == 24.25
    assert place_of(compile(mutated(mutant), str(file), "exec"), [scope["f"], scope["up"]])
    assert scope["f"](9, notes=[]) == round(CHANGES[change], 9)
    assert file.read_text() == SOURCE


def test_every_kind_of_change_is_made_and_messages_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    found = mutants(tmp_path / "m.py", tmp_path)
    assert len({mutant.key for mutant in found}) == len(found)
    assert not [mutant for mutant in found if "x * 2 " in mutant.key]
    assert {mutant.operator for mutant in found} == {
        *(
            "factor dropped",
            "term dropped",
            "sign turned",
            "power or divisor dropped",
            "root of a count",
        ),
        *(
            "root, abs or clamp dropped",
            "rounding dropped",
            "rounding turned",
            "max, min or sum",
            "alpha doubled",
            "term scaled",
            "constant scaled",
            "one of two, not the larger",
        ),
        *(
            "underestimated by 2^-20",
            "option ignored",
            "index lost",
            "check skipped",
            "condition dropped",
        ),
        *("call skipped", "negation dropped", "end of a range"),
    }
