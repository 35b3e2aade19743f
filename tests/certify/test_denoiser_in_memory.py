"""A denoiser from Python: part of what is smoothed, named by a digest, refused in Python's words."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import certvit
from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.functions import DTYPES, Classifier
from certcli.certify.smoothing.in_memory import from_memory
from certcli.checkpoint.record import InputSpec
from certcli.models.hub import fetched_diffusers
from certcli.models.pixels import PixelModel
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError, CheckpointError
from tests.helpers.diffusion import SMALL, diffusion_folder, fill

SIZE = (1, 8, 8)
RUN: dict[str, Any] = {"method": "smoothing", "sigma": 0.125, "n0": 8, "samples": 40}


class Mean(nn.Module):
    """Each pixel moved towards the mean of its image."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, pixels: Tensor) -> Tensor:
        mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
        return self.weight * (pixels + self.share * (mean - pixels))


class Told(Mean):
    """The share follows from the sigma."""

    def forward(self, pixels: Tensor, sigma: float) -> Tensor:
        mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
        return pixels + 7.2 * sigma * (mean - pixels)


class AcrossBatch(Mean):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels - pixels.mean(dim=0, keepdim=True)


class Drawing(Mean):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels + 1e-6 * torch.rand_like(pixels)


class Halving(Mean):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels[:, :, ::2]


class Failing(Mean):
    def forward(self, pixels: Tensor) -> Tensor:
        raise KeyError("no such thing")


class Infinite(Mean):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels / 0


class Hooked(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    return certvit.load(module, mean=0.5, std=0.25, input_size=SIZE)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(6, *SIZE, generator=generator), torch.arange(6) % 3


def radii(network: Any, denoiser: Any) -> list[float]:
    rows = certvit.certify(network, *images(), denoiser=denoiser, **RUN)
    return [row.radius for row in rows]


def test_the_module_is_part_of_what_is_smoothed(network: Any) -> None:
    bare = radii(network, None)
    assert radii(network, Mean(0.0)) == bare
    assert radii(network, Mean(0.9)) != bare
    assert radii(network, Told()) == radii(network, Mean(0.9)) != bare


def test_a_copy_is_smoothed(network: Any) -> None:
    """Changes of the module after it was read do not count."""
    module = Mean()
    source = from_memory(module, 1)
    module.weight.data.zero_()
    assert bool((source.at(0.25)(torch.ones(1, *SIZE)) == 1).all())


def test_the_digest_covers_tensors_attributes_code_and_sigma() -> None:
    plain = from_memory(Mean(), 1)
    assert from_memory(Mean(), 1).at(0.25).digest == plain.at(0.25).digest == plain.at(0.5).digest
    moved = Mean()
    moved.weight.data += 1
    told = from_memory(Told(), 1)
    others = [
        from_memory(moved, 1).at(0.25).digest,
        from_memory(Mean(0.6), 1).at(0.25).digest,
        from_memory(Drawing(), 1).at(0.25).digest,
        told.at(0.25).digest,
        told.at(0.5).digest,
    ]
    assert len({*others, plain.at(0.25).digest}) == 6


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a row of the batch": (AcrossBatch, "beside it"),
    "random numbers": (Drawing, "another output each time"),
    "another shape": (Halving, "returns"),
    "an error": (Failing, "KeyError"),
    "infinite": (Infinite, "infinite"),
    "hooks": (Hooked, "hooks"),
    "a number": (lambda: 3, "denoiser=3"),
    "a bare UNet": (lambda: type("UNet2DModel", (Mean,), {})(), "schedule"),
    "no config": (lambda: (Mean(), Mean()), "no config"),
    "latents": (lambda: SimpleNamespace(unet=1, scheduler=1, vae=1), "vae"),
    "no file": (lambda: "nowhere.pt", "nowhere.pt"),
    "weights that are no numbers": (lambda: (spoilt(), DDPMScheduler()), "the denoiser.*NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused_in_pythons_words(network: Any, case: str) -> None:
    denoiser, words = REFUSED[case]
    with pytest.raises(CertvitError, match=words) as refused:
        certvit.certify(network, *images(), denoiser=denoiser(), **RUN)
    assert "--" not in f"{refused.value} {refused.value.hint}"


def test_another_method_has_none(network: Any) -> None:
    with pytest.raises(CertvitError, match="no denoiser"):
        certvit.certify(network, *images(), denoiser=Mean())


class UNet2DModel(UNet):
    """Stands for diffusers' class: its name, its config, its tensors."""

    def __init__(self) -> None:
        super().__init__(
            UNetShape(**{**SMALL, "down_block_types": tuple(SMALL["down_block_types"])})
        )
        self.config = {**SMALL, "sample_size": 8, "_use_default_values": []}
        with torch.no_grad():
            fill(self)


class DDPMScheduler:
    config: ClassVar[dict[str, Any]] = {
        "clip_sample": True,
        "beta_schedule": "linear",
        "_diffusers_version": "0.42",
    }


@torch.no_grad()
def spoilt() -> nn.Module:
    unet = UNet2DModel()
    next(unet.parameters()).view(-1)[0] = torch.nan
    return unet


@pytest.mark.parametrize("precision", DTYPES)
def test_pixels_reach_a_denoiser_in_the_precision_of_the_run(precision: str) -> None:
    """Diffusers' networks are handed float32."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = PixelModel(InputSpec(size=SIZE, mean=(0.5,), std=(0.25,)), net)
    kind = DTYPES[precision]
    module = from_memory(Mean(), 1).at(0.25)
    unet = from_memory((UNet2DModel(), DDPMScheduler()), 1).at(0.25)
    for denoiser, pixels in ((None, kind), (module, kind), (unet, torch.float32)):
        assert Classifier(model, precision, denoiser).prepare(images()[0]).dtype == pixels


@torch.no_grad()
def test_objects_of_diffusers_are_what_their_folder_is(tmp_path: Path) -> None:
    unet = UNet2DModel()
    pipeline = SimpleNamespace(unet=unet, scheduler=DDPMScheduler())
    stored = read_denoiser(diffusion_folder(tmp_path), 1).at(0.25)
    for objects in ((unet, DDPMScheduler()), pipeline):
        shot = from_memory(objects, 1).at(0.25)
        assert shot.digest == stored.digest
        pixels = images()[0]
        assert torch.equal(shot(pixels), stored(pixels))


def test_each_kind_is_said_in_one_line(tmp_path: Path) -> None:
    lines = {
        "folder": read_denoiser(diffusion_folder(tmp_path), 1).at(0.25).line,
        "module": from_memory(Told(), 1).at(0.25).line,
    }
    assert lines == {
        "folder": "diffusers UNet2DModel, 0.045M parameters, linear schedule, epsilon, t = 144 at sigma 0.25",
        "module": "Told in memory, 1 parameters, at sigma 0.25",
    }


@pytest.mark.parametrize("apart", [False, True], ids=["flat", "unet and scheduler"])
def test_the_hub_is_asked_for_what_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import EntryNotFoundError

    place = diffusion_folder(tmp_path, apart=apart)

    def download(repository: str, file: str, revision: str | None) -> str:
        assert (repository, revision) == ("owner/ddpm", "main")
        if not (place / file).exists():
            raise EntryNotFoundError(file)
        return str(place / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("certcli.models.hub.reachable", lambda: True)
    fetched = read_denoiser(Path("hf-hub:owner/ddpm@main"), 1)
    assert fetched.at(0.25).digest == read_denoiser(place, 1).at(0.25).digest
    (place / ("unet" if apart else "") / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot fetch"):
        fetched_diffusers("owner/ddpm@main")


def test_a_name_without_a_repository_is_said_so() -> None:
    with pytest.raises(CheckpointError, match="names no repository"):
        fetched_diffusers("")
