"""The Python API: the code of its page runs, and says what the commands say."""

import re
from pathlib import Path

import pytest
import torch

from certcli import api, testing
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.system.errors import DataError, UsageError

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_the_code_of_the_page_runs(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes((workshop / "certified.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "copy.safetensors").exists()


def test_every_function_is_documented() -> None:
    own = {name for name, value in vars(api).items() if getattr(value, "__module__", "") == api.__name__}
    assert {name for name in own if name[0] != "_"} == set(api.FUNCTIONS)
    for name in api.FUNCTIONS:
        assert f"`{name}(" in PAGE.read_text()


def test_assertions_fail_with_figures(certified: Checkpoint) -> None:
    images, labels = datasets.load("digits", certified.record.input, "val").limit(20).tensors()
    share = testing.assert_certified(certified, images, labels, radius=0.05, at_least=0.1)
    assert share.images == 20
    wrong = (labels + 1) % 10
    with pytest.raises(AssertionError, match=r"\d+ of 20 images \(.* %, 95 % interval .*50 % were demanded"):
        testing.assert_certified(certified, images, wrong, radius=0.05, at_least=0.5)
    with pytest.raises(AssertionError, match="the proven bound is"):
        testing.assert_bound(certified, 1e-3)
    with pytest.raises(AssertionError, match="withstand fgsm"):
        testing.assert_robust(certified, images, wrong, radius=0.05, at_least=0.9, attacks=["fgsm"])
    with pytest.raises(UsageError, match="no share"):
        testing.assert_certified(certified, images, labels, at_least=40)


def test_what_does_not_fit_is_refused(certified: Checkpoint) -> None:
    images = torch.rand(2, 1, 8, 8)
    for pixels, labels, told in (
        (images * 255, [0, 1], r"\[0, 1\]"),
        (images[:, :, :4], [0, 1], "do not fit a network"),
        (images, None, "without labels"),
        (images, [0], "labels of shape"),
        (images, [0, 10], "10 classes"),
        (images / 0 * 0, [0, 1], r"\[0, 1\]"),
    ):
        with pytest.raises(DataError, match=told):
            api.certify(certified, pixels, labels)
