"""One step of a diffusion model before the network: its formula, its digest, and what of it a
record states.
"""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import Diffusion
from certcli.checkpoint.file import Checkpoint
from certcli.system.errors import CertvitError
from tests.helpers.commands import attempt, certvit, console, document
from tests.helpers.diffusion import SMALL, diffusion_folder

RUN = ["--method", "smoothing", "--n0", "16", "--samples", "64", "--limit", "2", "-e", "0.05"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion.py"


@pytest.mark.parametrize(
    "schedule",
    [
        {"beta_end": 0.03},
        {"prediction_type": "v_prediction"},
        {"prediction_type": "sample"},
        {"beta_schedule": "scaled_linear"},
        {"rescale_betas_zero_snr": True},
    ],
)
def test_the_digest_covers_the_schedule(tmp_path: Path, schedule: dict[str, Any]) -> None:
    plain = read_denoiser(diffusion_folder(tmp_path / "plain"), 1)
    other = read_denoiser(diffusion_folder(tmp_path / "other", schedule=schedule), 1)
    assert isinstance(plain, Diffusion)
    assert isinstance(other, Diffusion)
    assert plain.digest == other.digest  # the tensors are the same
    assert plain.at(0.25).digest != other.at(0.25).digest


@pytest.mark.parametrize(
    "network",
    [
        {"flip_sin_to_cos": False},
        {"freq_shift": 1},
        {"norm_eps": 1e-6},
        {"norm_num_groups": 2},
        {"attention_head_dim": 8},
        {"downsample_padding": 0},
        {"center_input_sample": True},
    ],
)
def test_the_digest_covers_the_fields_of_the_network(
    tmp_path: Path, network: dict[str, Any]
) -> None:
    plain = read_denoiser(diffusion_folder(tmp_path / "plain"), 1)
    other = read_denoiser(diffusion_folder(tmp_path / "other", network=network), 1)
    assert plain.at(0.25).digest != other.at(0.25).digest
    # fields that decide nothing leave it as it is
    same = read_denoiser(diffusion_folder(tmp_path / "same", network={"dropout": 0.3}), 1)
    assert plain.at(0.25).digest == same.at(0.25).digest
    assert plain.at(0.25).digest != plain.at(0.5).digest


def test_records_are_of_one_schedule_and_sigma(workshop: Path, tmp_path: Path) -> None:
    net = workshop / "plain.safetensors"
    records = tmp_path / "r.jsonl"
    model = diffusion_folder(tmp_path / "model")
    other = diffusion_folder(tmp_path / "other", schedule={"beta_end": 0.03})
    run = ("--sigma", 0.1, "--denoiser", model)
    said = document("certify", net, *RUN, *run, "--records", records)
    assert said["parameters"]["denoiser"] == read_denoiser(model, 1).at(0.1).digest
    for path, code in ((model, (0, 7)), (other, (6,))):
        done = attempt("verify", records, net, "--denoiser", path)
        assert getattr(done.exception, "code", done.exit_code) in code


def pipeline(path: Path) -> Path:
    model = diffusion_folder(path, apart=True)
    parts = {"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    (model / "model_index.json").write_text(json.dumps(parts))
    return model


def without_schedule(path: Path) -> Path:
    (diffusion_folder(path) / "scheduler_config.json").unlink()
    return path


def too_deep(path: Path) -> Path:
    """Five levels halve an image four times, one of eight pixels three times."""
    blocks = {"down_block_types": ["DownBlock2D"] * 5, "up_block_types": ["UpBlock2D"] * 5}
    return diffusion_folder(path, base={**SMALL, **blocks, "block_out_channels": [8] * 5})


def saved(path: Path, content: Any) -> Path:
    path.mkdir()
    torch.save(content, path / "d.pt")
    return path / "d.pt"


BAD: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "a pipeline": (pipeline, 4, "StableDiffusionPipeline (it has a vae)"),
    "a conditional UNet": (
        lambda path: diffusion_folder(path, {"_class_name": "UNet2DConditionModel"}),
        4,
        "UNet2DConditionModel",
    ),
    "classes": (
        lambda path: diffusion_folder(path, {"num_class_embeds": 10}),
        4,
        "num_class_embeds",
    ),
    "channels": (lambda path: diffusion_folder(path, {"in_channels": 3}), 4, "for 3 channels"),
    "no schedule": (without_schedule, 3, "scheduler_config.json is missing"),
    "sizes": (too_deep, 4, "multiples of 16"),
    "NaN": (
        lambda path: diffusion_folder(
            path, spoil=lambda state: state["conv_in.bias"].fill_(torch.nan)
        ),
        3,
        "NaN",
    ),
    "a pickle": (lambda path: saved(path, {"net": Path("x")}), 3, "not tensors alone"),
    "another network": (lambda path: saved(path, {"a.weight": torch.ones(2)}), 4, "no denoiser"),
    "nothing": (lambda path: path, 3, "no denoiser"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_denoiser_is_one_line_and_an_exit_code(
    workshop: Path, tmp_path: Path, case: str
) -> None:
    make, code, words = BAD[case]
    done = attempt(
        "certify", workshop / "plain.safetensors", *RUN, "--denoiser", make(tmp_path / "d")
    )
    assert isinstance(done.exception, CertvitError)
    assert done.exception.code == code
    assert words in done.exception.message
    assert "\n" not in f"{done.exception.message}{done.exception.hint}"


def test_training_behind_a_denoiser_names_it_and_what_certifies_it(
    workshop: Path, tmp_path: Path
) -> None:
    net = workshop / "plain.safetensors"
    model = diffusion_folder(tmp_path / "model")
    tuned = tmp_path / "a name.safetensors"
    words = (
        "finetune",
        net,
        "--dataset",
        "digits",
        "--loss",
        "ce",
        "--steps",
        2,
        "--limit",
        64,
        "--validation-limit",
        32,
    )
    noisy = (*words, "--batch-size", 16, "--denoiser", model, "-o", tuned)
    said = console(*noisy, "--noise", 0.25).err
    [advised] = re.findall("smoothed: certvit (certify .*)", said)
    assert "--dataset digits --method smoothing --sigma 0.25 -e 0.25 --enough 0.25" in advised
    assert f"--denoiser {model}" in advised
    certvit(*shlex.split(advised), "--n0", 8, "--samples", 50, "--limit", 2, "--quiet")
    step = Checkpoint.read(tuned).record.lineage[-1]
    assert step.parameters["denoiser"] == read_denoiser(model, 1).at(0.25).digest
    certvit(*noisy, "--force", code=2)


def test_the_example_trains_goes_on_and_is_read(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(seconds: float) -> list[float]:
        words = [str(net), "digits", "--widths", "8", "16", "--batch", "8"]
        monkeypatch.setattr("sys.argv", ["diffusion.py", *words, "--seconds", str(seconds)])
        monkeypatch.setattr("sys.argv", [*sys.argv, "-o", str(tmp_path)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return load_file(tmp_path / "training.safetensors")["progress"].tolist()

    net = workshop / "plain.safetensors"
    steps, spent = train(0.3)
    more_steps, more_spent = train(spent + 0.3)
    assert more_steps > steps > 0
    assert more_spent >= spent + 0.3
    assert read_denoiser(tmp_path, 1).at(0.25).line.startswith("diffusers UNet2DModel")
    assert not list(tmp_path.glob("*.partial"))
