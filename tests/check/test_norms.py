"""The checker's own norms: verified from both sides, tight enough to refute a norm that is 2^-20
too small. Certificates are found again from its own logits, or refuted, or left open.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from check.norms import Interval, convolution, length, of_product, root, rounded, spectral
from check.verdicts import AGREE, OPEN, REFUTE, judge
from tests.helpers.commands import certvit

rng = np.random.default_rng(7)
COLUMN, ROW = rng.integers(-9, 9, (40, 1)).astype(float), rng.integers(-9, 9, (1, 24)).astype(float)
EXACT = {
    "diagonal": (np.diag([3.0, -5.0, 0.0, 1.0]), Fraction(25)),
    "one row": (ROW, Fraction(int((ROW**2).sum()))),
    "rank one": (COLUMN @ ROW, Fraction(int((COLUMN**2).sum() * (ROW**2).sum()))),
    "hadamard": (
        np.array([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]),
        Fraction(64),
    ),
    "two equal": (np.eye(33, 70), Fraction(1)),
    "tiny": (np.diag([2.0**-100, 2.0**-105]), Fraction(1, 2**200)),
    "large": (np.full((5, 7), 2.0**250), Fraction(35 * 2**500)),
    "zero": (np.zeros((3, 4)), Fraction(0)),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_known_norm_lies_between_the_two_bounds_which_are_close(name: str) -> None:
    matrix, square = EXACT[name]
    for given in (matrix, matrix.T):
        found = spectral(given)
        assert found.low**2 <= square <= found.high**2
        assert found.high - found.low <= found.high / 10**9


@pytest.mark.parametrize("shape", [(1, 9), (2, 3), (17, 5), (64, 200), (150, 150)])
def test_a_norm_that_is_underestimated_by_2_to_the_minus_20_is_refuted(
    shape: tuple[int, int],
) -> None:
    matrix = rng.standard_normal(shape).astype(np.float32).astype(np.float64)
    own = spectral(matrix)
    claim = Fraction(float(np.linalg.norm(matrix, 2)))
    slightly = Fraction(1, 2**20)
    for stated, status in (
        (claim * (1 - slightly), REFUTE),
        (claim * (1 + slightly), AGREE),
        ((own.low + own.high) / 2, OPEN),
        (None, AGREE),  # infinity claims nothing
    ):
        assert judge("", stated, own).status == status


def test_an_error_of_the_matrix_widens_both_ends() -> None:
    plain = spectral(np.eye(4))
    off = spectral(np.eye(4), Fraction(1, 8))
    assert off.low <= plain.low - Fraction(1, 8)
    assert off.high >= plain.high + Fraction(1, 8)
    assert spectral(np.eye(4), Fraction(3)).low == 0


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_a_product_of_two_maps_lies_between_its_bounds(scale: float) -> None:
    a = rng.standard_normal((8, 30))
    b = scale * rng.standard_normal((8, 30))
    found = of_product(a, b, (Fraction(0), Fraction(0)))
    norm = Fraction(float(np.linalg.norm(a.T @ b, 2)))
    assert found.low <= norm * (1 + Fraction(1, 10**12))
    assert norm * (1 - Fraction(1, 10**12)) <= found.high <= norm * (1 + Fraction(1, 10**9))
    assert of_product(a, np.zeros_like(b), (Fraction(0), Fraction(0))).high < Fraction(1, 10**100)


@pytest.mark.parametrize(("out", "channels", "kernel", "stride", "side"), [
    (3, 2, 3, 1, 5), (2, 3, 4, 2, 6), (1, 1, 3, 1, 4), (1, 2, 3, 1, 6), (4, 1, 4, 2, 7), (2, 2, 3, 1, 2),
])  # fmt: skip
def test_a_convolution_lies_between_its_bounds(
    out: int, channels: int, kernel: int, stride: int, side: int
) -> None:
    import torch

    weight = rng.standard_normal((out, channels, kernel, kernel))
    basis = torch.eye(channels * side * side, dtype=torch.float64).view(-1, channels, side, side)
    dense = torch.conv2d(basis, torch.from_numpy(weight), stride=stride, padding=1).flatten(1)
    norm = float(torch.linalg.matrix_norm(dense, 2))
    found = convolution(weight, stride, (side, side))
    assert found.low <= norm * (1 + 1e-12)
    assert norm * (1 - 1e-12) <= found.high <= 1.7 * norm


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), 1e200])
def test_numbers_whose_squares_overflow_have_no_norm(entry: float) -> None:
    for norm in (spectral, length):
        with (
            pytest.raises((ValueError, ArithmeticError, np.linalg.LinAlgError)),
            np.errstate(all="ignore"),
        ):
            norm(np.full((2, 3), entry))


def test_numbers_whose_squares_vanish_have_a_wide_norm() -> None:
    for norm in (spectral, length):
        normalised = norm(np.full((2, 3), 1e-200))
        assert normalised.low**2 <= 6 * Fraction(1e-200) ** 2 <= normalised.high**2


def test_fractions_are_rounded_outward() -> None:
    for x in (Fraction(1, 3), Fraction(2, 7**300), Fraction(10**400, 3), Fraction(5), Fraction(0)):
        assert rounded(x, False) <= x <= rounded(x, True)
        assert rounded(x, True) - rounded(x, False) <= x / 2**150
        assert root(x, False) ** 2 <= x <= root(x, True) ** 2
        assert (root(x, True) - root(x, False)) ** 2 <= x / 2**150
    assert Interval.of(0.1).low == Fraction(0.1)  # the float, not one tenth


DIGITS = Path(__file__).parents[2] / "certcli" / "embedded" / "digits.npz"


@pytest.fixture(scope="module", params=["lip", "mean"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def records(
    family: str, case: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("records") / "records.jsonl"
    path = case(family).path
    certvit(
        "certify",
        path,
        "--dataset",
        "digits",
        "--limit",
        20,
        "--arithmetic",
        "real",
        "--records",
        file,
    )
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def check_records(
    family: str, records: Any, case: Any, run: Any, tmp_path: Path
) -> Callable[..., tuple[int, list[str]]]:
    """Return a function that checks these records with some fields of the header or of the third
    one changed.
    """

    def check(
        images: Path | None = DIGITS, header: dict[str, Any] | None = None, **row: Any
    ) -> tuple[int, list[str]]:
        changed = [
            {**records[0], **(header or {})},
            *records[1:3],
            {**records[3], **row},
            *records[4:],
        ]
        file = tmp_path / "records.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in changed))
        return run(*case(family), "--records", file, *(["--images", images] if images else []))

    return check


def test_certificates_are_found_again_from_its_own_logits(check_records: Any, records: Any) -> None:
    assert check_records() == (0, [])
    assert check_records(radius=0.0) == (0, [])
    for wrong in (records[3]["radius"] * (1 + 1e-6), "inf", 1e300):
        code, lines = check_records(radius=wrong)
        assert (code, len(lines)) == (1, 1), wrong
        assert lines[0].startswith(f"refute       image {records[3]['index']}")
    assert check_records(prediction=(records[3]["prediction"] + 1) % 10)[0] == 1
    assert len(check_records(prediction="0\nof the file")[1]) == 1  # a line is a verdict
    assert check_records(header={"checkpoint": "0" * 64})[0] == 1


def test_an_image_is_one_records_own(check_records: Any, records: Any) -> None:
    code, lines = check_records(**{**records[2], "index": 9})
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("cannot check image 9")


def test_certificates_that_it_cannot_compute_are_left_open(
    check_records: Any, records: Any, tmp_path: Path
) -> None:
    few = tmp_path / "few.npz"
    np.savez(few, images=np.load(DIGITS)["images"][:1])
    for given, code in (
        ({"images": None}, 2),
        ({"images": few}, 2),
        ({"header": {"norm": "linf"}}, 2),
        ({"method": "smoothing"}, 2),
        ({"header": {"parameters": {"arithmetic": "float32"}}}, 2),
        ({"label": 11}, 2),  # the digest is of label and pixels
        ({"radius": None}, 3),
    ):
        assert check_records(**given)[0] == code, given
    np.savez(few, images=np.array([["word"] * 64]))
    assert check_records(images=few)[0] == 3
    few.write_bytes(b"no archive")
    assert check_records(images=few)[0] == 3


def test_mnists_format_is_read_and_attention_is_not_followed(
    case: Any, check_records: Any, run: Any, tmp_path: Path
) -> None:
    pixels = (np.load(DIGITS)["images"]).tobytes()
    file = tmp_path / "digits-images-idx3-ubyte"
    file.write_bytes(bytes(16) + pixels)
    assert check_records(images=file) == (0, [])
    file.write_bytes(bytes(16) + pixels[:-1])
    assert check_records(images=file)[0] == 3
