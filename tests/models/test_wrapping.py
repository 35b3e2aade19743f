"""State dicts are found by structure: wrapped, beside a normaliser, under any key; several that
differ are a question.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError

ARCH = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
HINTS = Hints(ARCH, SMALL, (0.5,), (0.5,))
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", name="tensors")
def network_tensors() -> Tensors:
    torch.manual_seed(0)
    return wrapped_network()


def wrapped_network(**arguments: Any) -> Tensors:
    arch = arguments.pop("arch", ARCH)
    arguments = {**SMALL, "num_classes": 10, **arguments}
    return dict(build.create(arch, arguments, initialise=True).state_dict())


def opened_wrapping(content: Any, folder: Path, hints: Hints = HINTS) -> build.OpenCheckpoint:
    torch.save(content, folder / "x.pth")
    return open_checkpoint(str(folder / "x.pth"), hints)


WRAPPINGS = {
    "model_state": lambda s: {"model_state": s, "config": {}, "image_size": 32},
    "a list of one": lambda s: {"state_dict": [s], "err": 0.1},
    "any key": lambda s: {"weights_of_mine": s},
    "two levels": lambda s: {"trainer": {"net": s}, "epoch": 3},
    "with an optimiser": lambda s: {
        "net": s,
        "optimizer": {"state": {0: {"exp_avg": s["pos_embed"]}}, "param_groups": [{"lr": 0.1}]},
    },
    "with a small loss": lambda s: {"net": s, "loss": {"center": torch.zeros(1, 24)}},
    "the same twice": lambda s: {"model": s, "best": {k: v.clone() for k, v in s.items()}},
    "any prefix": lambda s: {f"whatever.{k}": v for k, v in s.items()},
    "two prefixes": lambda s: {f"module.classifier_net.{k}": v for k, v in s.items()},
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_wrapped_weights_are_read(name: str, tensors: Tensors, tmp_path: Path) -> None:
    read = opened_wrapping(WRAPPINGS[name](tensors), tmp_path)
    assert all(torch.equal(read.tensors[key], value) for key, value in tensors.items())
    assert read.reading.doubts == ()


def test_two_networks_in_one_file_are_a_question(tensors: Tensors, tmp_path: Path) -> None:
    other = {key: 1.5 * value for key, value in tensors.items()}
    content = {"model": tensors, "model_state_dict": other, "epoch": 3}
    with pytest.raises(ArchitectureError, match="'model', 'model_state_dict': which") as caught:
        opened_wrapping(content, tmp_path)
    assert caught.value.hint == "--weights model"
    chosen = Hints(ARCH, SMALL, (0.5,), (0.5,), weights="model_state_dict")
    read = opened_wrapping(content, tmp_path, chosen)
    assert torch.equal(read.tensors["pos_embed"], other["pos_embed"])
    with pytest.raises(ArchitectureError, match="no weights 'x'"):
        opened_wrapping(content, tmp_path, Hints(ARCH, SMALL, weights="x"))


def test_a_file_without_tensors_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'epoch', 'a\?b', and none"):
        opened_wrapping({"epoch": 3, "a\x1bb": "text"}, tmp_path)


NORMALISED = {
    "buffers": ("", "mean", "std", "model."),
    "a module": ("", "normalize.mean", "normalize.std", "model."),
    "Sequential": ("", "0.mean", "0.std", "1."),
    "mu and sigma": ("", "mu", "sigma", ""),
    "within module.": ("module.", "normalizer.mean", "normalizer.std", "net."),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_the_normaliser_around_a_network_gives_the_statistics(
    name: str, tensors: Tensors, tmp_path: Path
) -> None:
    outer, mean_name, std_name, inner = NORMALISED[name]
    mean = torch.tensor([0.1, 0.2, 0.3])
    std = torch.tensor([0.25, 0.5, 0.75])
    content = {outer + mean_name: mean.view(1, 3, 1, 1), outer + std_name: std.view(1, 3, 1, 1)}
    content |= {outer + inner + key: value for key, value in tensors.items()}
    read = opened_wrapping(content, tmp_path, Hints(ARCH, SMALL))
    model = build.create(ARCH, {**SMALL, "num_classes": 10}, initialise=True)
    model.load_state_dict(tensors)
    pixels = torch.rand(2, 3, 16, 16)
    expected = model((pixels - mean.view(-1, 1, 1)) / std.view(-1, 1, 1))
    torch.testing.assert_close(build.load(read)(pixels), expected)
    assert f"the file's '{mean_name}'" in read.reading.line()
    other = opened_wrapping(content, tmp_path, HINTS)
    assert any("--mean says 0.5" in doubt for doubt in other.reading.doubts)
    assert other.record.input.mean == (0.5,) * 3


def test_a_normaliser_of_another_scale_is_named(tensors: Tensors, tmp_path: Path) -> None:
    content = {"mean": torch.full((3,), 127.5), "std": torch.full((3,), 127.5)}
    content |= {f"model.{key}": value for key, value in tensors.items()}
    with pytest.raises(ArchitectureError, match=r"normaliser.*127\.5.*another scale"):
        opened_wrapping(content, tmp_path)


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "dist_token": ({"arch": "deit_tiny_distilled_patch16_224"}, "deit_tiny_distilled_patch16_224"),
    "reg_token": ({"reg_tokens": 2}, "reg_tokens=2"),
    "fc_norm.weight": ({"global_pool": "avg"}, "global_pool=avg"),
    "ls1.gamma": ({"init_values": 0.1}, "init_values=1e-5"),
    "q_norm.weight": ({"qk_norm": True}, "qk_norm=true"),
    "patch_embed.proj.weight": ({"in_chans": 1}, "in_chans=1"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_hint_follows_from_the_tensors_and_reads_the_file(name: str, tmp_path: Path) -> None:
    """The hint of a file that does not fit is typed, and then it fits."""
    arguments, advised = ADVICE[name]
    with pytest.raises(ArchitectureError, match=name) as caught:
        opened_wrapping(wrapped_network(**copy.copy(arguments)), tmp_path)
    assert advised in caught.value.hint
    arch = ARCH
    given = dict(SMALL)
    for option in caught.value.hint.split("--")[1:]:
        kind, value = option.split()
        if kind == "arch":
            arch = value
        else:
            key, _, text = value.partition("=")
            given[key] = {"true": True, "avg": "avg"}.get(text) or float(text)
            given[key] = (
                int(given[key]) if key in ("reg_tokens", "in_chans", "embed_dim") else given[key]
            )
    opened_wrapping(wrapped_network(**arguments), tmp_path, Hints(arch, given, (0.5,), (0.5,)))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 110367416\n"
    for name in ("model.safetensors", "pytorch_model.bin", "x.pth"):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=r"git-lfs.*110,367,416") as caught:
            open_checkpoint(str(tmp_path / name), HINTS)
        assert "git lfs pull" in caught.value.hint
