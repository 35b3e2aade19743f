"""Genuine proofs of each family of networks, and a function that checks them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from certcli.checkpoint.file import Checkpoint
from certcli.models.build import initialise
from check.__main__ import main
from tests.helpers.commands import document

SMALL = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
SWIN = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 24,
    "depths": [2, 1],
    "num_heads": [3, 6],
    "num_classes": 10,
}
TOKENS = {"img_size": 8, "patch": 2, "width": 16, "depth": 2, "head": [8]}
PYRAMID = {"img_size": 16, "widths": [8, 12], "depths": [1, 2], "windows": 1, "head": [8]}
PLACES = {"img_size": 8, "patch": 2, "width": 16, "depth": 2, "across": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lip": ("certvit_lip_digits", {}),
    "rolled": ("certvit_lip_digits", {"width": 16, "depth": 2, "rolls": True}),
    "mean": (
        "certvit_lip_digits",
        {"width": 16, "head": [12], "rolls": True, "members": 2, "mirror": True, "head_2": [8]},
    ),
    "pyramid": ("certvit_lip_pyramid_cifar10_base", PYRAMID),
    "mean of pyramids": (
        "certvit_lip_pyramid_cifar10",
        {**PYRAMID, "windows": 2, "members": 2, "mirror": True, "head_2": [4]},
    ),
    "sort": ("certvit_sort_mnist", TOKENS),
    "mix": ("certvit_mix_mnist", {**TOKENS, "heads": 4}),
    "no mixing": ("certvit_mix_mnist", {**TOKENS, "mixing": "none"}),
    "places": ("certvit_lip_attention_mnist", PLACES),
    "conv": ("certvit_4c3f", {"img_size": 20}),
    "digits": ("certvit_vit_digits", {"depth": 1}),
    "without norms": ("certvit_vit_ibp_3_3_8", {"depth": 1}),
    "timm": ("vit_tiny_patch16_224", {**SMALL, "norm_eps": 1e-3}),
    "layer scale": ("deit3_small_patch16_224", {**SMALL, "depth": 2}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
}


class Case(NamedTuple):
    path: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return a checkpoint of a family, no two of its weights alike, and the report about it."""
    import torch

    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            path = tmp_path_factory.mktemp("check") / "net.safetensors"
            fresh = initialise(*FAMILIES[name], classes=10)
            generator = torch.Generator().manual_seed(1)
            moved = {
                key: value + 0.05 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
                for key, value in fresh.tensors.items()
                if value.is_floating_point()
            }
            Checkpoint({**fresh.tensors, **moved}, fresh.record).write(path)
            made[name] = Case(path, document("lipschitz", path, "--no-estimate"))
        return made[name]

    return make


Lines = list[str]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Lines]]:
    """Return a function from a checkpoint, a report and options to the exit code and the lines that
    do not agree.
    """

    def check(path: Path, report: Any, *options: object) -> tuple[int, Lines]:
        proof = tmp_path / "proof.json"
        proof.write_text(report if isinstance(report, str) else json.dumps(report))
        code = main([str(path), str(proof), *map(str, options)])
        *lines, _ = capsys.readouterr().out.splitlines() or [""]
        return code, [line for line in lines if not line.startswith("agree")]

    return check
