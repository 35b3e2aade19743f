"""A small diffusion model in a folder of diffusers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import OLD_NAMES, WEIGHTS
from certcli.nn.unet import UNet, UNetShape
from tests.helpers.diffusion_cases import SMALL, fill


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
