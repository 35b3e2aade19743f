"""The short form of the long campaigns: every method is attacked, and what an inflated certificate hides is found."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.methods import METHODS
from certcli.certify.proof_options import ARITHMETICS
from certcli.models.build import PixelModel
from tests.helpers.grids import EVERY
from tests.soundness.attack_campaign import COUNTED_ELSEWHERE, ROWS, Row, Seen, attack, built

BALLS = ("lipschitz", "local", "local-lip", "bcp")


def test_every_method_and_arithmetic_has_a_row() -> None:
    assert {*(row.method for row in ROWS), *COUNTED_ELSEWHERE} == {*METHODS.names()}
    for method in BALLS:
        assert {row.name.split()[-1] for row in ROWS if row.method == method} == {*ARITHMETICS}


@pytest.mark.parametrize("method", [*BALLS, "patch"])
def test_no_attack_succeeds_inside_a_certificate(method: str) -> None:
    rows, seen = [row for row in ROWS if row.method == method], Seen()
    for seed, row in enumerate(rows if EVERY else rows[:: {"local": 11, "patch": 3}.get(method, 2)]):
        attack(replace(row, starts=4), seed, seen)
    assert not seen.broken
    assert seen.of(method)


def linear(seed: int) -> PixelModel:
    return built(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), seed)


def inflated(row: Row, factor: float) -> Row:
    """The row's certifier, with radii that are too large."""

    def make(model: PixelModel) -> Certifier:
        certifier = row.make(model)
        found = certifier.batch

        def batch(*given: Any) -> list[Certificate]:
            return [replace(claim, radius=claim.radius * factor) for claim in found(*given)]

        certifier.batch = batch  # type: ignore[method-assign]
        return certifier

    return replace(row, make=make, network=linear, starts=8)


@pytest.mark.parametrize("method", BALLS)
def test_an_inflated_radius_is_found(method: str) -> None:
    """A linear network, whose radii in the box are nearly exact: half as much again holds another class."""
    rows = [row for row in ROWS if row.method == method and row.name.split()[-1] in ("real", "float32")]
    for row in rows[:: 3 if method == "local" and not EVERY else 1]:
        seen = Seen()
        attack(inflated(row, 1.0), 1, seen)
        assert seen.attacks
        assert not seen.broken
        attack(inflated(row, 1.5), 1, seen)
        assert seen.broken, row.name
