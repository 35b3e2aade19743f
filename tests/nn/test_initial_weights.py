"""Initial weights by name: each has the norms or variances of its source, or is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from certcli.models import build
from certcli.nn.initialisation import INITIALISATIONS
from certcli.system.errors import ArchitectureError, UsageError
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.workshop import TINY

WIDE = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 2}
ARGUMENTS = {"vit_tiny_patch16_224": WIDE | {"init_values": 1.0, "num_classes": 10}}


def weights(arch: str, initialisation: str | None, seed: int = 0) -> dict[str, Tensor]:
    checkpoint = build.initialise(
        arch, ARGUMENTS.get(arch, {}), seed=seed, initialisation=initialisation
    )
    assert build.load(checkpoint) is not None
    return dict(checkpoint.tensors)


@pytest.mark.parametrize("entry", INITIALISATIONS, ids=lambda entry: entry.name)
def test_a_seed_gives_one_network_which_is_not_the_architectures_own(entry) -> None:
    name = "vit_tiny_patch16_224"
    first = weights(name, entry.name)
    again = weights(name, entry.name)
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    for other in (weights(name, None), weights(name, entry.name, seed=1)):
        assert any(not torch.equal(value, other[key]) for key, value in first.items())


@pytest.mark.parametrize(
    "arch", ["vit_tiny_patch16_224", "certvit_vit_digits", "certvit_lip_digits"]
)
def test_spectral_weights_have_norm_one_outside_attention(arch: str) -> None:
    plain = weights(arch, None)
    spectral = weights(arch, "spectral")
    net = build.create(arch, ARGUMENTS.get(arch, {}), initialise=False)
    layers = {
        f"{path}.weight"
        for path, part in net.named_modules()
        if isinstance(part, (nn.Linear, nn.Conv2d))
    }
    outside = {path for path in layers if ".attn." not in path}
    assert len(outside) > 2
    for path in outside:
        norm = torch.linalg.matrix_norm(spectral[path].flatten(1).double(), 2)
        assert float(norm) == pytest.approx(1, abs=1e-6), path  # float32 weights
        frobenius = spectral[path].double().norm() / min(spectral[path].flatten(1).shape) ** 0.5
        assert frobenius < 0.99, path  # not orthogonal: the singular values differ
    for path in plain.keys() - outside:
        if path.endswith("weight") and path in layers:
            assert torch.std(spectral[path]) == pytest.approx(
                float(torch.std(plain[path])), rel=0.1
            )


def test_deepnet_scales_values_output_maps_and_mlps() -> None:
    tensors = weights("vit_tiny_patch16_224", "deepnet")
    gain = (8 * 2) ** -0.25  # two blocks
    for block in range(2):
        path = f"blocks.{block}"
        query, key, value = tensors[f"{path}.attn.qkv.weight"].chunk(3)
        scaled = [value, tensors[f"{path}.attn.proj.weight"]]
        scaled += [tensors[f"{path}.mlp.{name}.weight"] for name in ("fc1", "fc2")]
        for weight in scaled:
            xavier = (2 / sum(weight.shape)) ** 0.5
            # 9,216 draws: the deviation is known to 1 %
            assert float(weight.std()) == pytest.approx(gain * xavier, rel=0.04)
        pair = torch.cat([query, key])
        assert float(pair.std()) == pytest.approx((2 / sum(pair.shape)) ** 0.5, rel=0.04)
        for name in ("ls1", "ls2"):
            scale = tensors[f"{path}.{name}.gamma"]
            assert torch.equal(scale, torch.full_like(scale, (2 * 2) ** -0.25))


@pytest.mark.parametrize(
    ("arch", "initialisation", "why"),
    [
        ("certvit_4c3f", "spectral", "windows overlap"),
        ("certvit_4c3f", "deepnet", "no block"),
        ("certvit_l2_vit_mnist", "deepnet", "without qkv"),
    ],
)
def test_weights_without_meaning_are_refused(arch: str, initialisation: str, why: str) -> None:
    with pytest.raises(ArchitectureError, match=why):
        build.initialise(arch, {}, initialisation=initialisation)


@pytest.mark.parametrize("spelling", ["--initialisation", "--initialization"])
def test_init_takes_each_and_the_lineage_names_it(spelling: str, tmp_path: Path) -> None:
    small = [word for key, value in TINY.items() for word in ("--arch-arg", f"{key}={value}")]
    for entry in INITIALISATIONS:
        path = tmp_path / f"{entry.name}.safetensors"
        certvit("init", "certvit_vit_digits", *small, spelling, entry.name, "-o", path, "--force")
        (step,) = document("log", path)["lineage"]
        assert step["parameters"]["initialisation"] == entry.name


@pytest.mark.parametrize(
    "words", [("--pretrained",), ("--member", "certvit/digits"), ("--initialisation", "best")]
)
def test_init_refuses_them_beside_weights_that_exist(words: tuple[str, ...]) -> None:
    done = attempt("init", "certvit_vit_digits", "--initialisation", "spectral", *words)
    assert isinstance(done.exception, UsageError)


def test_the_page_names_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    assert all(f"`{entry.name}`" in page for entry in INITIALISATIONS)
