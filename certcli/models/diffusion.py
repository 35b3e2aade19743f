"""A folder of diffusers becomes a UNet and its noise schedule. diffusers itself is never imported.

The folder holds `config.json`, `diffusion_pytorch_model.safetensors` and `scheduler_config.json`,
or the first two in `unet/` and the third in `scheduler/`. Each field is read, or must have the one
value that leaves the function as it is.
A field that is unknown here is refused: it may change the function.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import torch
from msgspec import Meta
from torch import Tensor

from certcli.checkpoint.file import read_tensors, tensors_digest
from certcli.checkpoint.schema import convert_json, decode_json
from certcli.models.converters.base import read_config
from certcli.models.converters.prefixes import without_wrapping
from certcli.models.converters.wrapping import TORCH_SUFFIXES, Bare, read_torch
from certcli.models.hub import DIFFUSERS as WEIGHTS
from certcli.models.weights import load_weights
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import is_absent

T = TypeVar("T")

EPSILON: Final = "epsilon"
SAMPLE: Final = "sample"
VELOCITY: Final = "v_prediction"
Prediction = Literal["epsilon", "sample", "v_prediction"]
SCHEDULERS = ("DDPMScheduler", "DDIMScheduler", "PNDMScheduler")
MOST_STEPS = 100_000
Steps = Annotated[int, Meta(ge=2, le=MOST_STEPS)]
Beta = Annotated[float, Meta(ge=0, le=1)]

FIXED: Mapping[str, tuple[Any, ...]] = {
    "act_fn": ("silu", "swish"),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "mid_block_type": ("UNetMidBlock2D",),
    "time_embedding_type": ("positional",),
    "center_input_sample": (False,),
    "mid_block_scale_factor": (1.0,),
}
"""Fields of a UNet -> the values that certvit's has; absent is the first."""
IDLE = ("sample_size", "dropout", "num_train_timesteps")
"""Fields of a UNet that its function does not depend on."""
IDLE_OF_SCHEDULE = (
    "variance_type",
    "clip_sample",
    "sample_max_value",
    "dynamic_thresholding_ratio",
    "timestep_spacing",
    "steps_offset",
    "set_alpha_to_one",
    "skip_prk_steps",
)
"""Fields of a schedule that decide later steps of sampling; one step has none. x0 is always clipped."""
FIXED_OF_SCHEDULE: Mapping[str, tuple[Any, ...]] = {
    "thresholding": (False,),
    "clip_sample_range": (1.0,),
    "trained_betas": (None,),
    "rescale_betas_zero_snr": (False,),
}
LATENT = ("vae", "vqvae", "text_encoder")
"""Parts of a pipeline whose UNet takes no pixels, or texts beside them."""
_PIXELS = "certvit reads unconditional diffusion models of pixels"
_UNET = "a UNet2DModel; models of text or of latent images are no denoisers of pixels"
_FIRST = re.compile(r"((?:\w+\.)*?)(conv_in|input_blocks\.0\.0|dncnn\.0)\.weight")
"""The first map of each kind of denoiser."""
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Linear maps of an attention in files of 2022 -> their names today."""


@dataclass(frozen=True)
class Schedule:
    """The noise of each step, and what the network predicts. Names and defaults are diffusers'.

    Source: Ho, Jain & Abbeel 2020 (linear); Nichol & Dhariwal 2021 (cosine).
    """

    num_train_timesteps: Steps = 1000
    beta_start: Beta = 0.0001
    beta_end: Beta = 0.02
    beta_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    prediction_type: Prediction = EPSILON

    @property
    def alpha_bars(self) -> Tensor:
        """Return alpha_bar of each step, the share of the image's variance that is left: prod_{s <=
        t} (1 - beta_s), (steps,) float64. The cosine reads the number of steps alone.
        """
        steps = self.num_train_timesteps
        if self.beta_schedule == "linear":
            betas = torch.linspace(self.beta_start, self.beta_end, steps, dtype=torch.float64)
        else:
            times = torch.arange(steps + 1, dtype=torch.float64) / steps
            left = torch.cos((times + 0.008) / 1.008 * math.pi / 2).square()
            betas = (1 - left[1:] / left[:-1]).clamp_max(0.999)
        return (1 - betas).cumprod(0)

    @property
    def name(self) -> str:
        """Return the schedule's name, for a person."""
        return self.beta_schedule.replace("squaredcos_cap_v2", "cosine")

    def time_of(self, step: int) -> float:
        """Return the number that the network gets for this step."""
        return step


def unwrapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return a denoiser's tensors without what programs put around its names.

    Raises:
        ArchitectureError: the file holds two sets of weights, or a normaliser of its images.
    """
    by_torch = path.suffix in TORCH_SUFFIXES
    bare = read_torch(path, None) if by_torch else Bare(read_tensors(path)[0])
    bare = without_wrapping(bare, path, None, _FIRST)
    names = () if bare.normaliser is None else bare.normaliser.names
    raise_if(
        names,
        ArchitectureError,
        f"{path} holds {' and '.join(names)} beside its network, and certvit's denoisers take pixels",
        "write the network alone",
    )
    return bare.tensors


def read_diffusers(path: Path, channels: int) -> tuple[UNet, Schedule, str]:
    """Return the UNet, its schedule and the digest of its tensors.

    Raises:
        CheckpointError: a file is missing or broken.
        ArchitectureError: the network is another one than an unconditional UNet for this number of
        channels.
    """
    inner = path if is_absent(path / "unet") else path / "unet"
    scheduler_folder = path if is_absent(path / "scheduler") else path / "scheduler"
    _require_pixel_pipeline(path)
    config = _json_fields(inner / "config.json")
    rule = _json_fields(scheduler_folder / "scheduler_config.json")

    def stored() -> dict[str, Tensor]:
        file = inner / WEIGHTS
        raise_if(
            is_absent(file) and not is_absent(file.with_suffix(".bin")),
            CheckpointError,
            f"{inner} holds its weights as a pickle",
            "diffusers writes safetensors: "
            "UNet2DModel.from_pretrained(FOLDER).save_pretrained(OTHER)",
        )
        return unwrapped_tensors(file)

    return assembled(config, rule, stored, channels, str(path))


def _require_pixel_pipeline(path: Path) -> None:
    """Raise ArchitectureError for a pipeline of latent images, or one without a UNet."""
    index = path / "model_index.json"
    if is_absent(index):
        return
    parts = _json_fields(index)
    latent = [part for part in LATENT if part in parts]
    name = one_line(str(parts.get("_class_name", "pipeline")))
    if latent or all(is_absent(path / name) for name in ("unet", "config.json")):
        why = f"it has a {latent[0]}" if latent else "it has no UNet"
        raise ArchitectureError(f"{path} is a {name} ({why}): {_PIXELS}", _UNET)


def assembled(
    config: Mapping[str, Any],
    rule: Mapping[str, Any],
    tensors_of: Callable[[], Mapping[str, Tensor]],
    channels: int,
    where: str,
) -> tuple[UNet, Schedule, str]:
    """Return the UNet of a config and its tensors, the schedule of a rule, and the digest.

    Args:
        config, rule: as `config.json` and `scheduler_config.json` hold them.
        tensors_of: reads the tensors, once both are understood.
        where: names the denoiser in a message.
    """
    shape = _diffusers_shape(config, where)
    schedule = _diffusers_schedule(rule, where)
    require_channels(shape, channels, where)
    old = re.compile(rf"\b(attentions\..*\.)({'|'.join(OLD_NAMES)})(?=\.[^.]+$)")
    tensors = {
        old.sub(lambda match: match[1] + OLD_NAMES[match[2]], name): value
        for name, value in tensors_of().items()
    }
    try:
        with torch.device("meta"):
            net = UNet(shape)
    except (ValueError, RuntimeError) as failure:
        raise ArchitectureError(f"{where} is no UNet: {one_line(str(failure))}") from failure
    load_weights(net, tensors)
    return net.eval().requires_grad_(False), schedule, tensors_digest(tensors)


def require_channels(shape: UNetShape, channels: int, where: str) -> None:
    """Raise ArchitectureError unless the UNet maps such images to such, or with variances."""
    raise_if(
        shape.in_channels != channels or shape.out_channels not in (channels, 2 * channels),
        ArchitectureError,
        f"the denoiser {where} is for {shape.in_channels} channels "
        f"(and gives {shape.out_channels}), the network for {channels}",
    )


def _json_fields(path: Path) -> dict[str, Any]:
    raise_if(
        is_absent(path),
        CheckpointError,
        f"{path} is missing: without it the denoiser's function is not known",
        "a folder of diffusers has config.json, scheduler_config.json and " + WEIGHTS,
    )
    return read_config(path, partial(decode_json, kind=dict[str, Any]), "fetch it again, whole")


def _diffusers_shape(config: Mapping[str, Any], path: str) -> UNetShape:
    name = config.get("_class_name", "UNet2DModel")
    raise_if(
        name != "UNet2DModel",
        ArchitectureError,
        f"{path} is a {one_line(str(name))}: {_PIXELS}",
        _UNET,
    )
    shape = _closed(config, UNetShape, FIXED, IDLE, path)
    levels = [shape.block_out_channels, shape.down_block_types, shape.up_block_types]
    raise_if(
        len(set(map(len, levels))) > 1 or shape.block_out_channels[0] // 2 == shape.freq_shift,
        ArchitectureError,
        f"{path}: the levels and widths that it states make no UNet",
    )
    return shape


def _diffusers_schedule(config: Mapping[str, Any], path: str) -> Schedule:
    name = config.get("_class_name", SCHEDULERS[0])
    raise_if(
        name not in SCHEDULERS,
        ArchitectureError,
        f"{path} is a {one_line(str(name))}",
        f"certvit reads {', '.join(SCHEDULERS)}",
    )
    schedule = _closed(config, Schedule, FIXED_OF_SCHEDULE, IDLE_OF_SCHEDULE, path)
    signal = schedule.alpha_bars
    raise_if(
        not bool((signal.diff() < 0).all() and signal[0] < 1 and signal[-1] >= 0),
        ArchitectureError,
        f"{path}: the noise does not grow from step to step",
    )
    return schedule


def _closed(
    config: Mapping[str, Any],
    kind: type[T],
    fixed: Mapping[str, tuple[Any, ...]],
    idle: tuple[str, ...],
    path: str,
) -> T:
    """Return the fields as the dataclass; every other one is fixed, idle, private or refused."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in config.items():
        is_known = name in names or name in idle or name.startswith("_")
        usual = fixed.get(name, (value,))
        other = f"{path}: {name} is {one_line(value)}, and certvit has {usual[0]} alone"
        raise_if(value not in usual, ArchitectureError, other)
        raise_if(
            not is_known and name not in fixed,
            ArchitectureError,
            f"{path} has the field '{one_line(name)}', which may change the function and is not known here",
        )
    try:
        return convert_json({name: config[name] for name in names & config.keys()}, kind)
    except Refused as refusal:
        raise ArchitectureError(f"{path}: {refusal}") from refusal
