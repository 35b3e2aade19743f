"""A checkpoint with all kinds of evidence, and proofs that are made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import commands, proven


@pytest.fixture(scope="module")
def lab(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of evidence, and its report."""
    folder = tmp_path_factory.mktemp("lab")
    source = workshop / "certified.safetensors"
    done = commands.console(
        "lipschitz", source, "--limit", 4, "--json", "-o", "a.safetensors", folder=folder
    )
    (folder / "report.json").write_text(done.out)
    certify = [
        "certify",
        "a.safetensors",
        "-e",
        "0.1",
        "-e",
        "0.3",
        "--limit",
        "80",
        "-o",
        "m.safetensors",
    ]
    assert commands.console(*certify, folder=folder).code == 0
    return folder


@pytest.fixture(scope="module")
def proven_once() -> Iterator[None]:
    with proven.proofs_made_once():
        yield
