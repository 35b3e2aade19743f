"""State dicts of guided-diffusion and improved-diffusion are read as those compute, or refused in a
sentence.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import Diffusion
from certcli.models.diffusion import EPSILON, SAMPLE
from certcli.models.guided import PUBLISHED
from certcli.system.errors import CertvitError
from tests.helpers import diffusion
from tests.helpers.guided_unet import Guided, Runner, random_tensors

NETWORKS: dict[str, Guided] = {
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


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_the_function_is_that_of_guided_diffusion(tmp_path: Path, name: str) -> None:
    flags = NETWORKS[name]
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
def test_the_order_of_queries_keys_and_values_matters(tmp_path: Path) -> None:
    """Thirds where the file is head by head load without complaint, and are another function."""
    flags = NETWORKS["guided, old order"]
    right = read_denoiser(file(tmp_path / "right", flags), 1)
    wrong = read_denoiser(file(tmp_path / "wrong", flags, use_new_attention_order=True), 1)
    assert isinstance(right, Diffusion)
    assert isinstance(wrong, Diffusion)
    noisy = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    steps = torch.tensor([3, 700])
    outputs = right.net(noisy, steps)
    assert float((wrong.net(noisy, steps) - outputs).abs().max()) > 1e-3 * float(
        outputs.abs().max()
    )
    assert right.at(0.25).digest != wrong.at(0.25).digest


@torch.no_grad()
def test_a_step_of_four_thousand_is_told_in_a_thousand(tmp_path: Path) -> None:
    """x0, with everything before and after the network, by formulas of the paper."""
    flags = replace(NETWORKS["improved, heads by number"], attention=())
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


def test_safetensors_and_another_prediction(tmp_path: Path) -> None:
    flags = NETWORKS["one level"]
    path = file(tmp_path, flags, predict_xstart=True)
    stored = torch.load(path, weights_only=True)
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, tmp_path / "model.safetensors"
    )
    by_torch = read_denoiser(path, 1).at(0.25)
    assert by_torch.digest == read_denoiser(tmp_path / "model.safetensors", 1).at(0.25).digest
    assert by_torch.about["denoiser_prediction"] == SAMPLE
    plain = read_denoiser(file(tmp_path / "plain", flags), 1).at(0.25)
    assert plain.about["denoiser_prediction"] == EPSILON
    assert plain.digest != by_torch.digest


def no_edit(tensors: dict[str, Tensor]) -> None:
    pass


def without_outputs(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("output_blocks.")]:
        del tensors[name]


def one_missing(tensors: dict[str, Tensor]) -> None:
    del tensors["middle_block.2.in_layers.2.weight"]


def one_more(tensors: dict[str, Tensor]) -> None:
    tensors["input_blocks.1.0.extra.weight"] = torch.ones(3)


def not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["out.2.bias"][0] = torch.nan


def flattened(tensors: dict[str, Tensor]) -> None:
    tensors["input_blocks.0.0.weight"] = torch.ones(())


def gaps(tensors: dict[str, Tensor]) -> None:
    del tensors["input_blocks.1.0.out_layers.3.bias"]


def scalar(tensors: dict[str, Tensor]) -> None:
    tensors["out.2.bias"] = torch.ones(())


def odd_rows(tensors: dict[str, Tensor]) -> None:
    tensors["middle_block.1.qkv.weight"] = torch.ones(7, 64, 1)


def odd_waves(tensors: dict[str, Tensor]) -> None:
    tensors["time_embed.0.weight"] = torch.ones(128, 31)


PLAIN = Guided(heads=2)
REFUSED: dict[str, tuple[Guided, Any, dict[str, Any], str]] = {
    "classes": (replace(PLAIN, classes=10), no_edit, {}, "conditional"),
    "half a UNet": (PLAIN, without_outputs, {}, "half a UNet"),
    "a tensor is missing": (PLAIN, one_missing, {}, "missing"),
    "a tensor too many": (PLAIN, one_more, {}, "extra"),
    "NaN": (PLAIN, not_finite, {}, "NaN"),
    "a scalar": (PLAIN, flattened, {}, "fit no UNet"),
    "another scalar": (PLAIN, scalar, {}, "fit no UNet"),
    "rows of no head": (PLAIN, odd_rows, {}, "fit no UNet"),
    "odd waves": (PLAIN, odd_waves, {}, "fit no UNet"),
    "a gap": (PLAIN, gaps, {}, "fit no UNet"),
    "channels": (replace(PLAIN, channels=3), no_edit, {}, "3 channels"),
    "no heads": (PLAIN, no_edit, {"num_heads": None}, "num_heads or num_head_channels"),
    "two answers": (PLAIN, no_edit, {"num_head_channels": 8}, "num_heads or num_head_channels"),
    "no order": (PLAIN, no_edit, {"use_new_attention_order": None}, "use_new_attention_order"),
    "odd heads": (PLAIN, no_edit, {"num_heads": 5}, "not cut into heads by 5"),
    "no steps": (PLAIN, no_edit, {"diffusion_steps": None}, "diffusion_steps"),
    "a schedule": (PLAIN, no_edit, {"noise_schedule": "sigmoid"}, "holds no flags"),
    "a flag": (PLAIN, no_edit, {"num_channels": 32}, "holds no flags"),
    "how steps are told": (PLAIN, no_edit, {"diffusion_steps": 4000}, "rescale_timesteps"),
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


def by_guided(folder: Path, rename: Rename) -> Diffusion:
    made = file(folder, Guided(head_channels=16), lambda state: replace_by(state, rename))
    return cast(Diffusion, read_denoiser(made, 1))


def by_diffusers(folder: Path, rename: Rename) -> Diffusion:
    made = diffusion.diffusion_folder(folder, spoil=lambda state: replace_by(state, rename))
    return cast(Diffusion, read_denoiser(made, 1))


def replace_by(state: dict[str, Tensor], rename: Rename) -> None:
    renamed = rename(dict(state))
    state.clear()
    state.update(renamed)


@pytest.mark.parametrize("read", [by_guided, by_diffusers])
def test_what_programs_put_around_names_is_taken_off(
    tmp_path: Path, read: Callable[[Path, Rename], Diffusion]
) -> None:
    plain = read(tmp_path / "plain", lambda state: state)
    for prefix in ("model.", "module.", "ema.", "state_dict.", "model.module.", "_orig_mod."):
        wrapped = read(
            tmp_path / prefix, lambda state, at=prefix: {at + name: x for name, x in state.items()}
        )
        assert wrapped.digest == plain.digest, prefix
    statistics = {"norm.mean": torch.zeros(1), "norm.std": torch.ones(1)}
    with pytest.raises(CertvitError, match=r"norm\.mean and norm\.std beside"):
        read(tmp_path / "n", lambda state: {**state, **statistics})
