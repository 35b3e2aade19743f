"""Certificates are found again from the checker's own logits, or refuted, or left open."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import certvit

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
def judge(
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


def test_certificates_are_found_again_from_its_own_logits(judge: Any, records: Any) -> None:
    assert judge() == (0, [])
    assert judge(radius=0.0) == (0, [])
    for wrong in (records[3]["radius"] * (1 + 1e-6), "inf", 1e300):
        code, lines = judge(radius=wrong)
        assert (code, len(lines)) == (1, 1), wrong
        assert lines[0].startswith(f"refute       image {records[3]['index']}")
    assert judge(prediction=(records[3]["prediction"] + 1) % 10)[0] == 1
    assert len(judge(prediction="0\nof the file")[1]) == 1  # a line is a verdict
    assert judge(header={"checkpoint": "0" * 64})[0] == 1


def test_an_image_is_one_records_own(judge: Any, records: Any) -> None:
    code, lines = judge(**{**records[2], "index": 9})
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("cannot check image 9")


def test_certificates_that_it_cannot_compute_are_left_open(
    judge: Any, records: Any, tmp_path: Path
) -> None:
    few = tmp_path / "few.npz"
    np.savez(few, images=np.load(DIGITS)["images"][:1])
    for given in (
        {"images": None},
        {"images": few},
        {"header": {"norm": "linf"}},
        {"method": "smoothing"},
    ):
        assert judge(**given)[0] == 2, given
    assert judge(header={"parameters": {"arithmetic": "float32"}})[0] == 2
    assert judge(label=11)[0] == 2  # the digest is of label and pixels
    assert judge(radius=None)[0] == 3
    np.savez(few, images=np.array([["word"] * 64]))
    assert judge(images=few)[0] == 3
    few.write_bytes(b"no archive")
    assert judge(images=few)[0] == 3


def test_mnists_format_is_read_and_attention_is_not_followed(
    case: Any, judge: Any, run: Any, tmp_path: Path
) -> None:
    pixels = (np.load(DIGITS)["images"]).tobytes()
    file = tmp_path / "digits-images-idx3-ubyte"
    file.write_bytes(bytes(16) + pixels)
    assert judge(images=file) == (0, [])
    file.write_bytes(bytes(16) + pixels[:-1])
    assert judge(images=file)[0] == 3
