"""What `certvit constrain` says and does where a network is a Swin, images are few, or activations
overflow.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.constrain import network, settings
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.models import build
from certcli.system.errors import CertvitError, DataError, UsageError
from tests.helpers import commands, constrain_layers

IMAGES = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def swin() -> nn.Module:
    """Shifted windows of 4 x 4 tokens, one patch merging."""
    torch.manual_seed(0)
    size = {
        "img_size": 32,
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 1),
        "num_heads": (2, 4),
    }
    return timm.create_model("swin_tiny_patch4_window7_224", **size, num_classes=5).eval()


def test_every_matrix_of_a_swin_is_constrained_against_its_own_inputs(swin: nn.Module) -> None:
    """The error in the report is that of the outputs themselves, in windows, after merging, and
    pooled.
    """
    paths = constrain_layers.constrainable(swin)
    blocks = ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]
    expected = {"patch_embed.proj", "layers.1.downsample.reduction", "head.fc"}
    expected |= {
        f"{block}.{part}"
        for block in blocks
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert set(paths) == expected
    seen: dict[str, Tensor] = {}
    hooks = [
        swin.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: seen.update({path: args[0]})
        )
        for path in paths
    ]
    with torch.no_grad():
        swin(IMAGES)
    for hook in hooks:
        hook.remove()
    calibration = network.LayerCalibration(swin, paths, [IMAGES[:3], IMAGES[3:]])
    results = list(network.constrain_to(calibration, settings.ConstrainSettings(ridge=None)))
    assert [result.path for result in results] == paths
    before = bound_network(swin, (3, 32, 32), 5).upper
    for result in results:
        module: Any = swin.get_submodule(result.path)
        inputs, old, new = (
            value.detach().double() for value in (seen[result.path], module.weight, result.weight)
        )
        apply = (
            nn.functional.linear
            if old.dim() == 2
            else lambda x, w: nn.functional.conv2d(x, w, stride=4)
        )
        change, size = (apply(inputs, weight).norm() for weight in (new - old, old))
        # the inputs here come from a batch of 6, there from two of 3: float32 kernels may differ by
        # some 1e-6
        assert result.error == pytest.approx(float(change / size), rel=1e-4)
        assert result.error <= 0.1
        assert result.after < result.before
        if old.dim() == 2:
            assert (result.before, result.after) == (spectral_norm(old), spectral_norm(new))
    originals = {path: swin.get_submodule(path).weight.detach().clone() for path in paths}
    network.write(swin, {result.path: result.weight for result in results})
    after = bound_network(swin, (3, 32, 32), 5).upper
    network.write(swin, originals)
    assert before.finite
    assert after < before


def test_activations_that_overflow_are_refused_by_name(tiny: Checkpoint, tmp_path: Path) -> None:
    """The weights are finite: only a forward pass shows it, of a black image when the file is
    opened or of the images.
    """
    model = build.load(tiny, torch.device("cpu"), writable=True)
    model.get_submodule("net.blocks.0.mlp.fc1").weight.data.fill_(3e38)
    with pytest.raises(DataError, match=r"'net\.blocks\.0\.mlp\.fc2' holds NaN or infinite"):
        constrain_layers.collect(
            model, [torch.rand(2, *tiny.record.input.size)], constrain_layers.constrainable(model)
        )
    broken = replace(tiny, tensors=build.tensors_of(model))
    source = tmp_path / "huge.safetensors"
    out = tmp_path / "out.safetensors"
    broken.write(source)
    outcome = commands.attempt("constrain", source, "--limit", 20, "-o", out)
    assert isinstance(outcome.exception, CertvitError)
    assert "not finite" in outcome.exception.message
    assert not out.exists()


def test_patterns_of_layers_may_be_repeated(tmp_path: Path) -> None:
    source = tmp_path / "net.safetensors"
    out = tmp_path / "out.safetensors"
    commands.certvit("init", "certvit_vit_digits", "-o", source)
    patterns = commands.words_typed("--layers blocks.0.attn.* --layers blocks.1.attn.qkv")
    found = commands.document("constrain", source, *patterns, "--limit", 40, "-o", out)
    paths = {layer["path"] for layer in found["layers"]}
    assert paths == {"blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.1.attn.qkv"}


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_a_preset_is_the_papers_problem_and_takes_no_other_aim(tmp_path: Path, preset: str) -> None:
    source = tmp_path / "m.safetensors"
    target = tmp_path / "c.safetensors"
    commands.certvit("init", "certvit_vit_digits", "--arch-arg", "depth=1", "-o", source)
    words = ("constrain", source, "--preset", preset, "--dataset", "digits", "--limit", 20)
    commands.certvit(*words, "-o", target)
    parameters = Checkpoint.read(target).record.lineage[-1].parameters
    assert parameters["prox"] == "l1"
    assert parameters["mean_squared"] == settings.PRESETS[preset].mean_squared
    assert parameters["tokens"] is None
    bounds = []
    for beta in (0.1, 0.001):  # ten iterations do not converge, and beta is their strength
        free = commands.words_typed(f"--beta {beta} --relaxation 1.3 --force")
        bounds.append(commands.document(*words, *free, "-o", target)["log10_upper_after"])
        parameters = Checkpoint.read(target).record.lineage[-1].parameters
        assert (parameters["beta"], parameters["relaxation"]) == (beta, 1.3)
    assert bounds[0] < bounds[1] - 0.1
    for other in ("--eta 0.1", "--keep 0.9", "--prox l1"):
        with pytest.raises(UsageError, match="--preset sets"):
            _raised(commands.attempt(*words, *commands.words_typed(other)))
    with pytest.raises(UsageError, match="unknown preset"):
        _raised(commands.attempt("constrain", source, "--preset", "other"))


def _raised(outcome: Any) -> None:
    raise outcome.exception
