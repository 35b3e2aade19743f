"""Faults that smoothing behind a diffusion model does not show, since any function may stand there:
each is put into the source, and a law must fail.
"""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import certcli
from certcli.checkpoint.schema import convert_json
from certcli.models.diffusion import EPSILON, SAMPLE, VELOCITY, Prediction, Schedule
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError
from tests.helpers.diffusion import NETWORKS, STEPS, fill, noisy_images
from tests.helpers.guided_unet import Guided, Runner, random_tensors
from tests.models.diffusers_outputs import STORED

ROOT = Path(certcli.__file__).parent
ONE_SHOT = "certify/smoothing/pixel_denoiser.py"
UNET = "nn/unet.py"
GUIDED = "models/guided.py"
QUALITY = "finetune/validation.py"


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


def module(file: str, old: str = "", new: str = "") -> ModuleType:
    """Run a file of certcli with one text replaced, beside the imported one."""
    source = (ROOT / file).read_text(encoding="utf-8")
    if old:
        assert source.count(old) == 1, f"{file} has '{old}' {source.count(old)} times"
        source = source.replace(old, new)
    name = f"fault_{Path(file).stem}"
    fresh = ModuleType(name)
    sys.modules[name] = fresh  # dataclasses look their module up
    try:
        exec(compile(source, str(ROOT / file), "exec"), vars(fresh))
    finally:
        del sys.modules[name]
    return fresh


def cleans(faulty: ModuleType) -> None:
    """A perfect prediction gives the clean image, at each sigma, for each kind of prediction."""
    torch.manual_seed(0)
    clean = torch.rand(2, 3, 8, 8) * 0.8 + 0.1
    for sigma, kind, learned in itertools.product(SIGMAS, get_args(Prediction), (False, True)):
        schedule = Schedule(prediction_type=kind)
        noisy = clean + sigma * torch.randn_like(clean)
        shot = faulty.OneShot(Oracle(clean, schedule, learned), schedule, sigma, "")
        assert float((shot(noisy) - clean).square().mean()) <= (0.02 * sigma) ** 2


def sees(faulty: ModuleType) -> None:
    """The network is given sqrt(alpha_bar) (2 x - 1), beyond [-1, 1] too: an oracle would forgive."""
    schedule = Schedule()
    inputs = []

    class Spy(Oracle):
        def forward(self, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            inputs.append((noisy, self.left[steps[0]]))
            return noisy

    pixels = torch.tensor([-3.0, 0.0, 1.0, 4.0]).expand(1, 3, 4, 4).contiguous()
    for sigma in SIGMAS:
        faulty.OneShot(Spy(pixels, schedule, False), schedule, sigma, "")(pixels)
        noisy, alpha = inputs.pop()
        assert torch.allclose(noisy, alpha.sqrt() * (2 * pixels - 1), rtol=0.02)


def clips(faulty: ModuleType) -> None:
    schedule = Schedule(prediction_type=SAMPLE)
    bright = torch.full((1, 3, 4, 4), 1.5)
    shot = faulty.OneShot(Oracle(bright, schedule, False), schedule, 0.25, "")
    assert bool((shot(bright) == 1).all())


def names(faulty: ModuleType) -> None:
    """Digests differ where the function does."""
    clean = torch.rand(1, 3, 4, 4)

    def digest(sigma: float = 0.25, **fields: Any) -> str:
        schedule = Schedule(**fields)
        return str(faulty.OneShot(Oracle(clean, schedule, False), schedule, sigma, "").digest)

    others = {digest(beta_end=0.03), digest(prediction_type=SAMPLE), digest(0.5)}
    other = Oracle(clean, Schedule(), False)
    other.shape = convert_json({"norm_eps": 1e-6}, type(other.shape))
    others.add(faulty.OneShot(other, Schedule(), 0.25, "").digest)
    assert len(others | {digest()}) == 5


def refuses(faulty: ModuleType) -> None:
    schedule = Schedule()
    for sigma in (1e-4, 1e4):
        with pytest.raises(CertvitError, match="outside the denoiser's schedule"):
            faulty.step_of(schedule, sigma)
    shot = faulty.OneShot(Oracle(torch.rand(1, 3, 4, 4), schedule, False), schedule, 0.25, "")
    shot.require_size((3, 8, 6))
    with pytest.raises(CertvitError, match="multiples of 2"):
        shot.require_size((3, 8, 7))


@torch.no_grad()
def equals_diffusers(faulty: ModuleType) -> None:
    stored = json.loads(STORED.read_text())["networks"]
    for name, fields in NETWORKS.items():
        net = faulty.UNet(convert_json(fields, faulty.UNetShape)).eval()
        fill(net)
        theirs = torch.tensor(stored[name])
        ours = net(noisy_images(), torch.tensor(STEPS)).flatten()
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def normalises(faulty: ModuleType) -> None:
    shape = convert_json({**NETWORKS["defaults"], "norm_eps": 0.5}, faulty.UNetShape)
    norms = [part for part in faulty.UNet(shape).modules() if isinstance(part, torch.nn.GroupNorm)]
    assert {part.eps for part in norms} == {0.5}


@torch.no_grad()
def equals_guided(faulty: ModuleType) -> None:
    flags = Guided(head_channels=16, updown=True, learn_sigma=True)
    torch.manual_seed(0)
    tensors = random_tensors(flags)
    for end in ("weight", "bias"):  # small maps, in whose norms the epsilon takes part
        tensors[f"input_blocks.0.0.{end}"] *= 0.01
    stated = {"num_head_channels": 16, "use_new_attention_order": False}
    flags_here = faulty.Flags("cosine", 4000, rescale_timesteps=True, **stated)
    faulty.PUBLISHED["here.pt"] = flags_here
    net, schedule, _ = faulty.read_guided(tensors, Path("here.pt"), 1)
    noisy = torch.randn(2, 1, 8, 8)
    steps = torch.tensor([3, 700])
    expected = Runner(tensors, flags)(noisy, steps)
    assert float((net(noisy, steps) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert schedule.time_of(400) == 100
    assert schedule.prediction_type == EPSILON


def chooses(faulty: ModuleType) -> None:
    assert faulty.Quality(0.9, None, None, noisy=0.2).score == 0.2


@dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    law: Callable[[ModuleType], None]


FAULTS: dict[str, Fault] = {
    "t of sigma, not of 2 sigma": Fault(
        ONE_SHOT, "ratios.log() - math.log(2 * sigma)", "ratios.log() - math.log(sigma)", cleans
    ),
    "t off by 60": Fault(ONE_SHOT, ".abs().argmin())", ".abs().argmin()) + 60", cleans),
    "pixels in [0, 1] fed as [-1, 1]": Fault(
        ONE_SHOT, "(2 * pixels.float() - 1)", "pixels.float()", cleans
    ),
    "noisy pixels clipped": Fault(ONE_SHOT, "pixels.float() - 1", "pixels.float().clamp(0, 1) - 1", sees),
    "no sqrt of alpha_bar": Fault(
        ONE_SHOT, "self.signal * (2 * pixels.float() - 1)", "2 * pixels.float() - 1", sees
    ),
    "noise not doubled": Fault(ONE_SHOT, "self.noise = 2 * sigma", "self.noise = sigma", cleans),
    "the wrong half of a learned variance": Fault(
        ONE_SHOT, "[:, : pixels.shape[1]]", "[:, -pixels.shape[1] :]", cleans
    ),
    "the sign of v": Fault(
        ONE_SHOT, "self.signal * noisy - self.noise", "self.signal * noisy + self.noise", cleans
    ),
    "back to [-1, 1]": Fault(ONE_SHOT, ".clamp(-1, 1) + 1) / 2", ".clamp(-1, 1))", cleans),
    "x0 not clipped": Fault(ONE_SHOT, ".clamp(-1, 1) + 1) / 2", " + 1) / 2", clips),
    "a digest without the schedule": Fault(ONE_SHOT, '"schedule": asdict(schedule)', '"schedule": 0', names),
    "a digest without t": Fault(ONE_SHOT, '"step": self.step,', "", names),
    "a digest without the network's fields": Fault(ONE_SHOT, '"network": asdict(net.shape)', '"network": 0', names),
    "a sigma outside the table": Fault(ONE_SHOT, "if not low <= sigma <= high:", "if False:", refuses),
    "sides that the levels do not divide": Fault(
        ONE_SHOT, "if height % factor or width % factor:", "if height % factor:", refuses
    ),
    "padding on both sides": Fault(UNET, "self.uneven = padding == 0", "self.uneven = False", equals_diffusers),
    "another epsilon of norms": Fault(
        UNET, "nn.GroupNorm(shape.norm_num_groups, inputs, shape.norm_eps)",
        "nn.GroupNorm(shape.norm_num_groups, inputs, 1e-6)", normalises,
    ),
    "cosine after sine": Fault(UNET, "            parts.reverse()", "            pass", equals_diffusers),
    "thirds for the old order": Fault(GUIDED, "is False:", "is None:", equals_guided),
    "another width of heads": Fault(
        GUIDED, "attention_head_dim=flags.num_head_channels", "attention_head_dim=32", equals_guided
    ),
    "no group norm before the middle attention": Fault(
        GUIDED, "attn_norm_num_groups=GROUPS", "attn_norm_num_groups=None", equals_guided
    ),
    "the epsilon of diffusers' norms": Fault(
        GUIDED, "attn_norm_num_groups=GROUPS", "attn_norm_num_groups=GROUPS, norm_eps=1e-6", equals_guided
    ),
    "steps told as they are": Fault(
        GUIDED, "step * 1000 / self.num_train_timesteps if self.rescale_timesteps else step",
        "step", equals_guided,
    ),
    "an epoch by clean accuracy": Fault(
        QUALITY, "(self.masked, self.certified, self.noisy, self.clean)",
        "(self.masked, self.certified, self.clean, self.noisy)", chooses,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_noticed(name: str) -> None:
    fault = FAULTS[name]
    faulty = module(fault.file, fault.old, fault.new)
    with pytest.raises((AssertionError, CertvitError, RuntimeError, pytest.fail.Exception)):
        fault.law(faulty)


@pytest.mark.parametrize("file", [ONE_SHOT, UNET, GUIDED, QUALITY])
def test_the_laws_hold_without_a_fault(file: str) -> None:
    sound = module(file)
    for law in {fault.law for fault in FAULTS.values() if fault.file == file}:
        law(sound)
