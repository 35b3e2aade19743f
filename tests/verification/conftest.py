"""A checkpoint with all kinds of evidence, and proofs that are made once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certcli.certify import methods
from certcli.checkpoint.file import Checkpoint
from certcli.verification import evidence
from certcli.verification import report as reports
from tests.helpers.commands import console


@pytest.fixture(scope="module")
def lab(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of evidence, and its report."""
    folder = tmp_path_factory.mktemp("lab")
    source = workshop / "certified.safetensors"
    done = console(
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
    assert console(*certify, folder=folder).code == 0
    return folder


@pytest.fixture(scope="module")
def proven_once() -> Iterator[None]:
    """Prove each network once: forgeries change what a file says of it."""
    prepared = methods.prepare
    proven = evidence.prove_checkpoint
    known: dict[Any, Any] = {}

    def prove(checkpoint: Checkpoint, device: Any) -> Any:
        key = checkpoint.digest
        known[key] = known.get(key) or proven(checkpoint, device)
        return known[key]

    def prepare(method: str, checkpoint: Checkpoint, device: Any, options: Any = None) -> Any:
        key = method, checkpoint.digest, repr(options)
        known[key] = known.get(key) or prepared(method, checkpoint, device, options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "prove_checkpoint", prove)
        patch.setattr(reports, "prove_checkpoint", prove)
        patch.setattr(methods, "prepare", prepare)
        yield
