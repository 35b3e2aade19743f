"""Small diffusion models of each kind that is read, with weights that a formula gives: no file has to hold
them; and in a folder of diffusers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import OLD_NAMES, WEIGHTS
from certcli.nn.unet import UNet, UNetShape

SMALL: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}
NETWORKS: Mapping[str, dict[str, Any]] = {
    "defaults": SMALL,
    "google": {
        **SMALL,
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    },
    "guided": {
        **SMALL,
        "out_channels": 2,
        "down_block_types": ["ResnetDownsampleBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "ResnetUpsampleBlock2D"],
        "downsample_type": "resnet",
        "upsample_type": "resnet",
        "resnet_time_scale_shift": "scale_shift",
        "attn_norm_num_groups": 4,
    },
    "without attention": {
        **SMALL,
        "down_block_types": ["DownBlock2D"] * 2,
        "up_block_types": ["UpBlock2D"] * 2,
        "add_attention": False,
        "time_embedding_dim": 12,
    },
}
SCHEDULES: Mapping[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 400},
}
STEPS = (7, 640)
SIDE = 8


def fill(net: nn.Module) -> None:
    """Set each weight to a wave of its index, of about the size that a trained weight has."""
    state = net.state_dict()
    for number, name in enumerate(sorted(state)):
        tensor = state[name]
        wave = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 1.7 + number)
        fan = max(1, tensor[0].numel()) if tensor.dim() > 1 else 4
        value = wave / fan**0.5 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        tensor.copy_(value.reshape(tensor.shape))


def noisy_images() -> Tensor:
    """Two noisy images, (2, 1, SIDE, SIDE)."""
    count = 2 * SIDE * SIDE
    return torch.sin(torch.arange(count, dtype=torch.float64) * 2.3).float().view(2, 1, SIDE, SIDE)


def diffusion_folder(
    path: Path,
    network: Mapping[str, Any] = {},
    schedule: Mapping[str, Any] = {},
    *,
    apart: bool = False,
    old_names: bool = False,
    spoil: Callable[[dict[str, Tensor]], Any] | None = None,
    base: Mapping[str, Any] = SMALL,
) -> Path:
    """Write the model of `base`, and descriptions that also state `network` and `schedule`."""
    inner = path / "unet" if apart else path
    beside = path / "scheduler" if apart else path
    for place in (inner, beside):
        place.mkdir(parents=True, exist_ok=True)
    net = UNet(convert_json(dict(base), UNetShape))
    with torch.no_grad():
        fill(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    if spoil is not None:
        spoil(state)
    if old_names:
        for old, new in OLD_NAMES.items():
            state = {name.replace(f".{new}.", f".{old}."): state[name] for name in state}
    save_file(state, inner / WEIGHTS)
    described = {"_class_name": "UNet2DModel", "sample_size": 8, **base, **network}
    (inner / "config.json").write_text(json.dumps(described))
    rule = {"_class_name": "DDPMScheduler", "clip_sample": True, **schedule}
    (beside / "scheduler_config.json").write_text(json.dumps(rule))
    return path
