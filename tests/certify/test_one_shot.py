"""One step of a diffusion model before the network: its formula, its digest, and what of it a
record states.
"""

import itertools
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import Diffusion, OneShot, step_of
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import EPSILON, SAMPLE, VELOCITY, Prediction, Schedule
from certcli.models.guided import PUBLISHED, Flags, read_guided
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError
from tests.helpers.commands import attempt, certvit, console, document
from tests.helpers.diffusion import NETWORKS, SMALL, diffusion_folder
from tests.helpers.guided_unet import Guided, Runner, random_tensors

RUN = ["--method", "smoothing", "--n0", "8", "--samples", "24", "--limit", "2", "-e", "0.05"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion.py"


SIGMAS = (0.06, 0.25, 0.5, 1.0)


class Oracle(UNet):
    """Predicts without an error, knowing the clean image; right only at the step and the scale that
    training had.
    """

    def __init__(self, clean: Tensor, schedule: Schedule, learned: bool) -> None:
        super().__init__(
            UNetShape(
                block_out_channels=(8, 8),
                norm_num_groups=4,
                down_block_types=("DownBlock2D",) * 2,
                up_block_types=("UpBlock2D",) * 2,
            )
        )
        self.clean = 2 * clean - 1
        self.kind = schedule.prediction_type
        self.left = schedule.alpha_bars.float()
        self.learned = learned

    def forward(self, noisy: Tensor, steps: Tensor) -> Tensor:
        alpha = self.left[steps][:, None, None, None]
        noise = (noisy - alpha.sqrt() * self.clean) / (1 - alpha).sqrt()
        answers = {
            EPSILON: noise,
            SAMPLE: self.clean + 0 * noise,
            VELOCITY: alpha.sqrt() * noise - (1 - alpha).sqrt() * self.clean,
        }
        mean = answers[self.kind]
        return torch.cat([mean, mean + 9], dim=1) if self.learned else mean


def test_a_perfect_prediction_gives_the_clean_image() -> None:
    """A perfect prediction gives the clean image, at each sigma, for each kind of prediction."""
    torch.manual_seed(0)
    clean = torch.rand(2, 3, 8, 8) * 0.8 + 0.1
    for sigma, kind, learned in itertools.product(SIGMAS, get_args(Prediction), (False, True)):
        schedule = Schedule(prediction_type=kind)
        noisy = clean + sigma * torch.randn_like(clean)
        shot = OneShot(Oracle(clean, schedule, learned), schedule, sigma, "")
        assert float((shot(noisy) - clean).square().mean()) <= (0.02 * sigma) ** 2


def test_the_network_is_given_scaled_pixels_beyond_the_range_too() -> None:
    """The network is given sqrt(alpha_bar) (2 x - 1), beyond [-1, 1] too: an oracle would forgive."""
    schedule = Schedule()
    inputs = []

    class Spy(Oracle):
        def forward(self, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            inputs.append((noisy, self.left[steps[0]]))
            return noisy

    pixels = torch.tensor([-3.0, 0.0, 1.0, 4.0]).expand(1, 3, 4, 4).contiguous()
    for sigma in SIGMAS:
        OneShot(Spy(pixels, schedule, False), schedule, sigma, "")(pixels)
        noisy, alpha = inputs.pop()
        assert torch.allclose(noisy, alpha.sqrt() * (2 * pixels - 1), rtol=0.02)


def test_x0_is_clipped() -> None:
    schedule = Schedule(prediction_type=SAMPLE)
    bright = torch.full((1, 3, 4, 4), 1.5)
    shot = OneShot(Oracle(bright, schedule, False), schedule, 0.25, "")
    assert bool((shot(bright) == 1).all())


def test_sigmas_and_sizes_outside_the_schedule_are_refused() -> None:
    schedule = Schedule()
    for sigma in (1e-4, 1e4):
        with pytest.raises(CertvitError, match="outside the denoiser's schedule"):
            step_of(schedule, sigma)
    shot = OneShot(Oracle(torch.rand(1, 3, 4, 4), schedule, False), schedule, 0.25, "")
    shot.require_size((3, 8, 6))
    with pytest.raises(CertvitError, match="multiples of 2"):
        shot.require_size((3, 8, 7))


def test_norms_have_the_epsilon_of_the_config() -> None:
    shape = convert_json({**NETWORKS["defaults"], "norm_eps": 0.5}, UNetShape)
    norms = [part for part in UNet(shape).modules() if isinstance(part, torch.nn.GroupNorm)]
    assert {part.eps for part in norms} == {0.5}


@torch.no_grad()
def test_a_guided_network_has_its_own_epsilon_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small maps, in whose norms the epsilon takes part."""
    flags = Guided(head_channels=16, updown=True, learn_sigma=True)
    torch.manual_seed(0)
    tensors = random_tensors(flags)
    for end in ("weight", "bias"):
        tensors[f"input_blocks.0.0.{end}"] *= 0.01
    stated = {"num_head_channels": 16, "use_new_attention_order": False}
    published = Flags("cosine", 4000, rescale_timesteps=True, **stated)
    monkeypatch.setitem(PUBLISHED, "here.pt", published)
    net, schedule, _ = read_guided(tensors, Path("here.pt"), 1)
    noisy = torch.randn(2, 1, 8, 8)
    steps = torch.tensor([3, 700])
    expected = Runner(tensors, flags)(noisy, steps)
    assert float((net(noisy, steps) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert schedule.time_of(400) == 100
    assert schedule.prediction_type == EPSILON


@pytest.mark.parametrize(
    "schedule",
    [
        {"beta_end": 0.03},
        {"prediction_type": "v_prediction"},
        {"prediction_type": "sample"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"num_train_timesteps": 900},
    ],
)
def test_the_digest_covers_the_schedule(tmp_path: Path, schedule: dict[str, Any]) -> None:
    plain = read_denoiser(diffusion_folder(tmp_path / "plain"), 1)
    other = read_denoiser(diffusion_folder(tmp_path / "other", schedule=schedule), 1)
    assert isinstance(plain, Diffusion)
    assert isinstance(other, Diffusion)
    assert plain.digest == other.digest  # the tensors are the same
    assert plain.at(0.25).digest != other.at(0.25).digest


def test_a_digest_of_a_record_stays_what_it_was() -> None:
    """Of shape, schedule and step, the digest of the tensors given: records hold it."""
    net = UNet(convert_json(SMALL, UNetShape))
    digest = "7143c73bdd520396291b9e4fb997735aaf05baa85b10f8bc43945c6c4847ae9a"
    assert OneShot(net, Schedule(), 0.25, "0" * 64).digest == digest


@pytest.mark.parametrize(
    "network",
    [
        {"flip_sin_to_cos": False},
        {"freq_shift": 1},
        {"norm_eps": 1e-6},
        {"norm_num_groups": 2},
        {"attention_head_dim": 8},
        {"downsample_padding": 0},
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
    assert (
        Checkpoint.read(tuned).record.lineage[-1].parameters["denoiser"]
        == read_denoiser(model, 1).at(0.25).digest
    )
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
