"""Small real things that many tests share: a plain digits ViT, its adapted form, and a certified net, all trained here."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from certcli.checkpoint.file import Checkpoint
from certcli.models import build

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


# workers of pytest-xdist are given a terminal's width, which they have not: outputs are then as wide as in a pipe
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints made by the command line itself, once: init, plain, adapted, constrained, certified."""
    folder = tmp_path_factory.mktemp("workshop")
    run = CliRunner()
    from certcli.cli.main import app

    def certvit(*words: object) -> None:
        outcome = run.invoke(app, [str(word) for word in words])
        assert outcome.exit_code == 0, (words, outcome.output, outcome.exception)

    arguments = [part for key, value in TINY.items() for part in ("--arch-arg", f"{key}={value}")]
    certvit("init", "certvit_vit_digits", *arguments, "-o", folder / "init.safetensors")
    certvit(
        "finetune", folder / "init.safetensors", "--dataset", "digits", "--loss", "ce", "--epochs", 6, "--lr", 5e-3,
        "-o", folder / "plain.safetensors",
    )  # fmt: skip
    certvit(
        "adapt", folder / "plain.safetensors", "--goal", "certify", "--norm", "fold", "--activation", "maxmin",
        "--head", "32,32",
        "--epochs", 1, "--limit", 300, "-o", folder / "adapted.safetensors",
    )  # fmt: skip
    certvit(
        "constrain",
        folder / "adapted.safetensors",
        "--beta",
        0.01,
        "--limit",
        200,
        "-o",
        folder / "constrained.safetensors",
    )
    certvit(
        "finetune", folder / "constrained.safetensors", "--loss", "margin", "--epsilon", 0.3, "--optimiser", "stiefel",
        "--lr", 0.01, "--epochs", 6, "-o", folder / "certified.safetensors",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def plain(workshop: Path) -> Checkpoint:
    return Checkpoint.read(workshop / "plain.safetensors")


@pytest.fixture(scope="session")
def certified(workshop: Path) -> Checkpoint:
    return Checkpoint.read(workshop / "certified.safetensors")


@pytest.fixture
def tiny() -> Checkpoint:
    """A fresh, untrained plain ViT for 8 x 8 images."""
    net = build.create("certvit_vit_digits", TINY, initialise=False)
    return build.initialise("certvit_vit_digits", TINY, build.spec_of(net), 10, seed=0)
