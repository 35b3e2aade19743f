"""Names that are nearly right are offered, and a hub that cannot be reached is one line, at once."""

import time
from pathlib import Path

import pytest

from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.models import hub
from certcli.models.build import create
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError, CheckpointError
from tests.helpers.commands import attempt


def test_what_was_probably_meant(plain: Checkpoint, workshop: Path) -> None:
    spec = plain.record.input
    asked = {
        "'digits'": lambda: datasets.load_dataset("digit", spec),
        "'torch/mnist'": lambda: datasets.load_dataset("torch/mnits", spec, data_dir=workshop),
        "'vit_tiny_patch16_224'": lambda: create("vit_tiny_patch16_244", {}, initialise=False),
        "'deit_tiny_patch16_224'": lambda: open_checkpoint("deit_tiny_patch16_24"),
        "plain.safetensors'": lambda: open_checkpoint(str(workshop / "plian.safetensors")),
    }
    for meant, ask in asked.items():
        with pytest.raises(CertvitError) as refused:
            ask()
        assert "did you mean '" in refused.value.hint
        assert meant in refused.value.hint.split("?")[0] + "?"


@pytest.mark.parametrize(
    ("typed", "meant"), [("certvit/mnst", "certvit/mnist"), ("reprot.json", "report.json")]
)
def test_verify_offers_the_file_that_was_probably_meant(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    refused = attempt("verify", typed).exception
    assert isinstance(refused, CheckpointError)
    assert refused.message == f"no file {typed}"
    assert f"did you mean '{meant}'?" in refused.hint


@pytest.mark.parametrize("source", ["hf-hub:nobody/nothing", "vit_base_patch8_224.dino"])
def test_no_network_is_one_line_at_once(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        constants, "ENDPOINT", "https://hub.invalid"
    )  # a name that no network has (RFC 2606)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not hub.reachable()
    monkeypatch.setattr(
        time,
        "sleep",
        lambda seconds: pytest.fail("the library's own retries wait, for a minute in all"),
    )
    with pytest.raises(CheckpointError, match=r"no network: hub.invalid cannot be reached"):
        open_checkpoint(source)
    assert constants.HF_HUB_OFFLINE is False
