"""A folder of diffusers is read as diffusers itself reads it, and a state dict of guided-diffusion or
improved-diffusion as those compute; or they are refused in a sentence.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import Diffusion
from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import Schedule, read_diffusers
from certcli.models.guided import PUBLISHED
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError
from tests.helpers.commands import UNREADABLE
from tests.helpers.diffusion import (
    NETWORKS,
    SCHEDULES,
    STEPS,
    diffusion_folder,
    fill,
    noisy_images,
)
from tests.helpers.guided_unet import Guided, Runner, random_tensors
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
    "a shifted image": ({"center_input_sample": True}, "center_input_sample"),
    "a scaled middle": ({"mid_block_scale_factor": 1.5}, "mid_block_scale_factor"),
    "channels": ({"in_channels": 3}, "3 channels"),
    "outputs": ({"out_channels": 3}, "gives 3"),
    "tensors": ({"block_out_channels": [8, 24]}, "disagree"),
}
SCHEDULE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a solver": ({"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
    "a prediction": ({"prediction_type": "flow"}, "flow"),
    "a schedule": ({"beta_schedule": "sigmoid"}, "sigmoid"),
    "trained betas": ({"trained_betas": [0.01, 0.1]}, "trained_betas"),
    "no signal at the end": ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
    "thresholding": ({"thresholding": True}, "thresholding"),
    "an unknown field": ({"shift": 3.0}, "shift"),
    "no noise": ({"beta_start": 0.0, "beta_end": 0.0}, "does not grow"),
    "too many steps": ({"num_train_timesteps": 10**9}, "steps"),
}


def with_tensor(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: state.update({name: value})


REFUSED_PARTS = {
    **{f"network: {name}": ({"network": row[0]}, row[1]) for name, row in NETWORK_REFUSED.items()},
    **{
        f"schedule: {name}": ({"schedule": row[0]}, row[1])
        for name, row in SCHEDULE_REFUSED.items()
    },
    "NaN": ({"spoil": with_tensor("conv_in.bias", torch.full((8,), torch.nan))}, "NaN"),
}


@pytest.mark.parametrize("case", REFUSED_PARTS)
def test_another_network_or_schedule_is_refused(tmp_path: Path, case: str) -> None:
    parts, words = REFUSED_PARTS[case]
    with pytest.raises(CertvitError, match=words) as refused:
        read_diffusers(diffusion_folder(tmp_path, **parts), 1)
    assert refused.value.code in (3, 4)


Spoil = Callable[[Path], object]
DESCRIPTIONS = ("scheduler_config.json", "config.json")


def unreadable_part(name: str, kind: str) -> Spoil:
    return lambda path: [(path / name).unlink(missing_ok=True), UNREADABLE[kind](path / name)]


def pipeline_index(name: str, **parts: list[str]) -> Spoil:
    text = json.dumps({"_class_name": name, **parts})
    return lambda path: (path / "model_index.json").write_text(text)


def as_pickle(path: Path) -> None:
    weights = path / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))


FOLDERS: dict[str, tuple[Spoil, str]] = {
    **{f"broken {n}": (lambda path, n=n: (path / n).write_text("{"), "cannot be used") for n in DESCRIPTIONS},
    **{f"no {n}": (lambda path, n=n: (path / n).unlink(), f"{n} is missing") for n in DESCRIPTIONS},
    # a terabyte, a pipe and a broken link are neither read nor taken for absent
    **{
        f"{n}: {kind}": (unreadable_part(n, kind), n)
        for n in (*DESCRIPTIONS, "model_index.json", "unet", "scheduler")
        for kind in UNREADABLE
    },
    # its UNet may well be an unconditional one for three channels
    **{
        part: (
            pipeline_index("LDMPipeline", unet=["diffusers", "UNet2DModel"], **{part: ["a", "b"]}),
            f"LDMPipeline .it has a {part}",
        )
        for part in ("vae", "vqvae", "text_encoder")
    },
    "pickle": (as_pickle, "pickle"),
    "a pipeline without a UNet": (
        lambda path: [
            *(part.unlink() for part in path.iterdir()),
            pipeline_index("FluxPipeline")(path),
        ],
        "FluxPipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_says_too_little_is_refused(tmp_path: Path, case: str) -> None:
    spoil, words = FOLDERS[case]
    path = diffusion_folder(tmp_path)
    spoil(path)
    with pytest.raises(CertvitError, match=words) as refused:
        read_diffusers(path, 1)
    assert refused.value.code in (3, 4)


NETWORKS_GUIDED: dict[str, Guided] = {
    "guided, old order": Guided(head_channels=16, updown=True, learn_sigma=True),
    "guided, new order": Guided(head_channels=16, updown=True, new_order=True),
    "improved, heads by number": Guided(heads=4, learn_sigma=True, attention=(0, 1)),
    "no scale and shift, one head": Guided(heads=1, scale_shift=False, attention=()),
    "two blocks, three levels": Guided(
        multiples=(1, 1, 2), blocks=2, attention=(1,), head_channels=32, updown=True
    ),
    "one level": Guided(multiples=(1,), attention=(0,), heads=2),
    "a first level wider than the waves": Guided(multiples=(2, 4), head_channels=64, updown=True),
    "colours": Guided(channels=3, learn_sigma=True, heads=2),
}


def described_denoiser(flags: Guided, **changes: Any) -> dict[str, Any]:
    """Return the flags that no tensor shows, as a user writes them."""
    values = {
        "noise_schedule": "linear",
        "diffusion_steps": 1000,
        "num_heads": flags.heads or None,
        "num_head_channels": flags.head_channels or None,
        "use_new_attention_order": flags.new_order,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def file(
    folder: Path,
    flags: Guided,
    spoil: Callable[[dict[str, Tensor]], Any] | None = None,
    name: str = "model.pt",
    **changes: Any,
) -> Path:
    """Write the network by torch.save, its flags beside it."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    tensors = random_tensors(flags)
    if spoil is not None:
        spoil(tensors)
    torch.save(tensors, folder / name)
    (folder / name).with_suffix(".json").write_text(
        json.dumps(described_denoiser(flags, **changes))
    )
    return folder / name


@pytest.mark.parametrize("name", NETWORKS_GUIDED)
@torch.no_grad()
def test_the_function_is_that_of_guided_diffusion(tmp_path: Path, name: str) -> None:
    flags = NETWORKS_GUIDED[name]
    read = read_denoiser(file(tmp_path, flags), flags.channels)
    assert isinstance(read, Diffusion)
    torch.manual_seed(0)
    theirs = Runner(random_tensors(flags), flags)
    noisy = torch.randn(2, flags.channels, 8, 8)
    for steps in (torch.tensor([3, 700]), torch.tensor([0.25, 173.5])):
        expected = theirs(noisy, steps)
        difference = float((read.net(noisy, steps) - expected).abs().max())
        assert difference <= 1e-5 * float(expected.abs().max())


@torch.no_grad()
def test_a_step_of_four_thousand_is_told_in_a_thousand(tmp_path: Path) -> None:
    """x0, with everything before and after the network, by formulas of the paper."""
    flags = replace(NETWORKS_GUIDED["improved, heads by number"], attention=())
    changes = {"noise_schedule": "cosine", "diffusion_steps": 4000, "rescale_timesteps": True}
    read = read_denoiser(file(tmp_path, flags, **changes), 1)
    sigma = 0.25
    shot = read.at(sigma)
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    times = (torch.arange(4001, dtype=torch.float64) / 4000 + 0.008) / 1.008
    left = torch.cos(times * torch.pi / 2).square()
    left = left[1:] / left[0]
    step = int((((1 - left) / left).sqrt() - 2 * sigma).abs().argmin())
    torch.manual_seed(0)
    noisy = (2 * pixels - 1) / (1 + 4 * sigma**2) ** 0.5
    answer = Runner(random_tensors(flags), flags)(noisy, torch.full((2,), step / 4))[:, :1]
    clean = ((2 * pixels - 1) - 2 * sigma * answer).clamp(-1, 1)
    assert float((shot(pixels) - (clean + 1) / 2).abs().max()) <= 1e-5
    assert bool((shot(pixels) > 0).any())


def test_the_flags_of_published_files_are_told_by_their_names(tmp_path: Path) -> None:
    flags = Guided(head_channels=64, multiples=(2, 4), updown=True, learn_sigma=True, channels=3)
    path = file(tmp_path, flags, name="256x256_diffusion_uncond.pt")
    stated = read_denoiser(path, 3).at(0.25).digest
    path.with_suffix(".json").unlink()
    assert read_denoiser(path, 3).at(0.25).digest == stated
    path.rename(tmp_path / "renamed.pt")
    with pytest.raises(CertvitError, match="no published name") as refused:
        read_denoiser(tmp_path / "renamed.pt", 3)
    assert "renamed.json" in (refused.value.hint or "")
    assert len(PUBLISHED) == 11


def without_tensors(*beginnings: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: [state.pop(name) for name in [*state] if name.startswith(beginnings)]


PLAIN = Guided(heads=2)
REFUSED: dict[str, tuple[Guided, Any, dict[str, Any], str]] = {
    "classes": (replace(PLAIN, classes=10), None, {}, "conditional"),
    "half a UNet": (PLAIN, without_tensors("output_blocks."), {}, "half a UNet"),
    "a tensor is missing": (
        PLAIN,
        without_tensors("middle_block.2.in_layers.2.weight"),
        {},
        "missing",
    ),
    "a tensor too many": (
        PLAIN,
        with_tensor("input_blocks.1.0.extra.weight", torch.ones(3)),
        {},
        "extra",
    ),
    "NaN": (PLAIN, with_tensor("out.2.bias", torch.full((1,), torch.nan)), {}, "NaN"),
    "a scalar": (PLAIN, with_tensor("input_blocks.0.0.weight", torch.ones(())), {}, "fit no UNet"),
    "another scalar": (PLAIN, with_tensor("out.2.bias", torch.ones(())), {}, "fit no UNet"),
    "rows of no head": (
        PLAIN,
        with_tensor("middle_block.1.qkv.weight", torch.ones(7, 64, 1)),
        {},
        "fit no UNet",
    ),
    "odd waves": (
        PLAIN,
        with_tensor("time_embed.0.weight", torch.ones(128, 31)),
        {},
        "fit no UNet",
    ),
    "a gap": (PLAIN, without_tensors("input_blocks.1.0.out_layers.3.bias"), {}, "fit no UNet"),
    "channels": (replace(PLAIN, channels=3), None, {}, "3 channels"),
    "no heads": (PLAIN, None, {"num_heads": None}, "num_heads or num_head_channels"),
    "two answers": (PLAIN, None, {"num_head_channels": 8}, "num_heads or num_head_channels"),
    "no order": (PLAIN, None, {"use_new_attention_order": None}, "use_new_attention_order"),
    "odd heads": (PLAIN, None, {"num_heads": 5}, "not cut into heads by 5"),
    "no steps": (PLAIN, None, {"diffusion_steps": None}, "diffusion_steps"),
    "a schedule": (PLAIN, None, {"noise_schedule": "sigmoid"}, "noise_schedule"),
    "a flag": (PLAIN, None, {"num_channels": 32}, "num_channels"),
    "how steps are told": (PLAIN, None, {"diffusion_steps": 4000}, "rescale_timesteps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_such_network_or_says_too_little_is_refused(tmp_path: Path, case: str) -> None:
    flags, spoil, changes, words = REFUSED[case]
    with pytest.raises(CertvitError) as refused:
        read_denoiser(file(tmp_path, flags, spoil, **changes), 1)
    assert refused.value.code in (3, 4)
    said = f"{refused.value} {refused.value.hint}"
    assert words in said
    assert "\n" not in said


Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


MADE: dict[str, Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]] = {
    "guided": lambda folder, spoil: file(folder, Guided(head_channels=16), spoil),
    "diffusers": lambda folder, spoil: diffusion_folder(folder, spoil=spoil),
}


def replace_by(state: dict[str, Tensor], rename: Rename) -> None:
    renamed = rename(dict(state))
    state.clear()
    state.update(renamed)


@pytest.mark.parametrize("make", MADE)
def test_what_programs_put_around_names_is_taken_off(tmp_path: Path, make: str) -> None:
    def read(folder: Path, rename: Rename) -> Diffusion:
        path = MADE[make](folder, lambda state: replace_by(state, rename))
        return cast(Diffusion, read_denoiser(path, 1))

    plain = read(tmp_path / "plain", lambda state: state)
    for prefix in ("model.", "module.", "ema.", "state_dict.", "model.module.", "_orig_mod."):
        wrapped = read(
            tmp_path / prefix, lambda state, at=prefix: {at + name: x for name, x in state.items()}
        )
        assert wrapped.digest == plain.digest, prefix
    statistics = {"norm.mean": torch.zeros(1), "norm.std": torch.ones(1)}
    with pytest.raises(CertvitError, match=r"norm\.mean and norm\.std beside"):
        read(tmp_path / "n", lambda state: {**state, **statistics})
