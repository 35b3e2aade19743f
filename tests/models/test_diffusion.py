"""A folder of diffusers is read as diffusers itself reads it, or refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import Schedule, read_diffusers
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError, CheckpointError
from tests.helpers.commands import UNREADABLE
from tests.helpers.diffusion import (
    NETWORKS,
    SCHEDULES,
    SMALL,
    STEPS,
    diffusion_folder,
    fill,
    noisy_images,
)
from tests.models.diffusers_outputs import STORED


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_the_network_is_that_of_diffusers(name: str) -> None:
    net = UNet(convert_json(NETWORKS[name], UNetShape)).eval()
    fill(net)
    theirs = torch.tensor(json.loads(STORED.read_text())["networks"][name])
    ours = net(noisy_images(), torch.tensor(STEPS)).flatten()
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_that_of_diffusers(name: str) -> None:
    left = convert_json(SCHEDULES[name], Schedule).alpha_bars
    theirs = torch.tensor(json.loads(STORED.read_text())["schedules"][name])
    # diffusers multiplies a thousand factors in float32
    assert torch.allclose(left[:: max(1, len(left) // 8)].float(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True], ids=["flat", "unet and scheduler"])
def test_both_layouts_and_the_names_of_2022(tmp_path: Path, apart: bool) -> None:
    new = read_diffusers(diffusion_folder(tmp_path / "new", apart=apart), 1)
    old = read_diffusers(diffusion_folder(tmp_path / "old", apart=apart, old_names=True), 1)
    assert new[2] == old[2]
    assert torch.equal(
        new[0](noisy_images(), torch.tensor(STEPS)), old[0](noisy_images(), torch.tensor(STEPS))
    )


NETWORK_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel"),
    "classes": ({"num_class_embeds": 10}, "num_class_embeds"),
    "fourier": ({"time_embedding_type": "fourier"}, "time_embedding_type"),
    "an unknown field": ({"twist": 1}, "twist"),
    "an unknown block": ({"down_block_types": ["SkipDownBlock2D"] * 2}, "SkipDownBlock2D"),
    "levels": ({"block_out_channels": [8]}, "make no UNet"),
    "a type": ({"layers_per_block": "two"}, "layers_per_block"),
    "heads": ({"attention_head_dim": -1}, "attention_head_dim"),
    "heads of no width": ({"attention_head_dim": 0}, "attention_head_dim"),
    "groups of attention": ({"attn_norm_num_groups": -1}, "attn_norm_num_groups"),
    "a time": ({"time_embedding_dim": 10**9}, "time_embedding_dim"),
    "groups": ({"norm_num_groups": 3}, "is no UNet"),
    "channels": ({"in_channels": 3}, "3 channels"),
    "outputs": ({"out_channels": 3}, "gives 3"),
    "tensors": ({"block_out_channels": [8, 24]}, "disagree"),
}
SCHEDULE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a solver": ({"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
    "a prediction": ({"prediction_type": "flow"}, "flow"),
    "a schedule": ({"beta_schedule": "laplace"}, "laplace"),
    "thresholding": ({"thresholding": True}, "thresholding"),
    "an unknown field": ({"shift": 3.0}, "shift"),
    "no noise": ({"beta_start": 0.0, "beta_end": 0.0}, "does not grow"),
    "too many steps": ({"num_train_timesteps": 10**9}, "steps"),
}


@pytest.mark.parametrize("case", NETWORK_REFUSED)
def test_another_network_is_refused(tmp_path: Path, case: str) -> None:
    fields, words = NETWORK_REFUSED[case]
    with pytest.raises(CertvitError, match=words) as refused:
        read_diffusers(diffusion_folder(tmp_path, network=fields), 1)
    assert refused.value.code in (3, 4)


@pytest.mark.parametrize("case", SCHEDULE_REFUSED)
def test_another_schedule_is_refused(tmp_path: Path, case: str) -> None:
    fields, words = SCHEDULE_REFUSED[case]
    with pytest.raises(CertvitError, match=words) as refused:
        read_diffusers(diffusion_folder(tmp_path, schedule=fields), 1)
    assert refused.value.code in (3, 4)


@pytest.mark.parametrize("name", ["scheduler_config.json", "config.json"])
def test_a_missing_or_broken_description_is_refused(tmp_path: Path, name: str) -> None:
    path = diffusion_folder(tmp_path)
    (path / name).write_text("{")
    with pytest.raises(CertvitError, match="no JSON object"):
        read_diffusers(path, 1)
    (path / name).unlink()
    with pytest.raises(CertvitError, match=f"{name} is missing"):
        read_diffusers(path, 1)


@pytest.mark.parametrize("unreadable", UNREADABLE)
@pytest.mark.parametrize(
    "name", ["scheduler_config.json", "config.json", "model_index.json", "unet", "scheduler"]
)
def test_a_description_that_cannot_be_read_is_refused_unread(
    tmp_path: Path, name: str, unreadable: str
) -> None:
    """A terabyte, a pipe and a broken link are neither read nor taken for absent."""
    path = diffusion_folder(tmp_path)
    (path / name).unlink(missing_ok=True)
    UNREADABLE[unreadable](path / name)
    with pytest.raises(CheckpointError, match=name):
        read_diffusers(path, 1)


@pytest.mark.parametrize("part", ["vae", "vqvae", "text_encoder"])
def test_a_pipeline_of_latent_images_is_refused(tmp_path: Path, part: str) -> None:
    """Its UNet may well be an unconditional one for three channels."""
    path = diffusion_folder(tmp_path, apart=True)
    index = {"_class_name": "LDMPipeline", "unet": ["diffusers", "UNet2DModel"], part: ["a", "b"]}
    (path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CertvitError, match=f"LDMPipeline .it has a {part}"):
        read_diffusers(path, 1)


def test_a_pipeline_without_a_unet_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(CertvitError, match="FluxPipeline"):
        read_diffusers(tmp_path, 1)


def test_nan_and_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CertvitError, match="NaN"):
        read_diffusers(
            diffusion_folder(
                tmp_path / "nan", spoil=lambda state: state["conv_in.bias"].fill_(torch.nan)
            ),
            1,
        )
    path = diffusion_folder(tmp_path / "bin")
    weights = path / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(CertvitError, match="pickle"):
        read_diffusers(path, 1)


def test_every_field_of_a_case_is_a_field_of_the_network() -> None:
    assert SMALL.keys() <= UNetShape.__dataclass_fields__.keys()
