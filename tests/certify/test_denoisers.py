"""Smoothing behind a denoiser, from a file or from Python: what is certified is the network on
denoised images, records say of which denoiser, and everything else is refused.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import certvit
from certcli.certify.smoothing.denoiser import Denoiser, read_denoiser
from certcli.certify.smoothing.noise import DTYPES, Classifier
from certcli.certify.smoothing.pixel_denoiser import from_memory
from certcli.checkpoint.record import InputSpec
from certcli.models.hub import fetched_diffusers
from certcli.models.pixels import PixelModel
from certcli.nn.unet import UNet, UNetShape
from certcli.system.errors import CertvitError, CheckpointError
from tests.helpers.commands import attempt, document
from tests.helpers.diffusion import SMALL, diffusion_folder, fill

RUN = (
    "--method",
    "smoothing",
    "--sigma",
    0.1,
    "--n0",
    16,
    "--samples",
    64,
    "--limit",
    6,
    "-e",
    0.05,
)


def dncnn(path: Path, last: float, spoil: Any = None) -> Path:
    """A DnCNN of four layers; last: standard deviation of its last one, 0 for the identity."""
    torch.manual_seed(0)
    net = Denoiser(1, 4, 4)
    torch.nn.init.normal_(net.dncnn[-1].weight, std=last)
    tensors: dict[str, Tensor] = {
        f"module.{name}": value.clone() for name, value in net.state_dict().items()
    }
    if spoil is not None:
        spoil(tensors)
    save_file(tensors, path)
    return path


def test_the_denoiser_is_part_of_what_is_smoothed(workshop: Path, tmp_path: Path) -> None:
    net = workshop / "plain.safetensors"
    records = tmp_path / "r.jsonl"
    same = dncnn(tmp_path / "same.safetensors", 0.0)
    other = dncnn(tmp_path / "other.safetensors", 0.05)
    bare = document("certify", net, *RUN)
    silent = document("certify", net, *RUN, "--denoiser", same)
    spoilt = document("certify", net, *RUN, "--denoiser", other, "--records", records)
    assert silent["average_radius"] == bare["average_radius"] != spoilt["average_radius"] > 0
    assert bare["parameters"].keys() == silent["parameters"].keys() - {"denoiser"}
    assert (
        silent["parameters"]["denoiser"]
        != spoilt["parameters"]["denoiser"]
        == read_denoiser(other, 1).digest
    )
    for words, code, named in (
        (("--denoiser", other), 0, ""),
        (("--denoiser", same), 6, "another denoiser"),
        ((), 6, "behind a denoiser"),
    ):
        done = attempt("verify", records, net, *words)
        assert getattr(done.exception, "code", done.exit_code) in (
            code,
            7 * (code == 0 and not spoilt["average_radius"]),
        )
        assert named in str(done.exception or "")
    done = attempt("certify", net, *RUN, "--records", records, "--resume", "--denoiser", same)
    assert "parameters denoiser" in str(done.exception)


def test_the_published_network() -> None:
    """x - dncnn(x), written out."""
    torch.manual_seed(1)
    net = Denoiser(3, 5, 3).eval()
    net.dncnn[3].running_mean.normal_()
    x = torch.rand(2, 3, 6, 6)
    first = net.dncnn[0]
    norm = net.dncnn[3]
    last = net.dncnn[5]
    hidden = torch.conv2d(
        torch.conv2d(x, first.weight, first.bias, padding=1).relu(), net.dncnn[2].weight, padding=1
    )
    hidden = (hidden - norm.running_mean[:, None, None]) / (norm.running_var + 1e-4).sqrt()[
        :, None, None
    ]
    assert torch.allclose(
        net(x), x - torch.conv2d(hidden.relu(), last.weight, padding=1), atol=1e-6
    )


SPOILT: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "missing": lambda tensors: tensors.pop("module.dncnn.3.running_var"),
    "surplus": lambda tensors: tensors.update({"module.head.weight": torch.ones(2)}),
    "reshaped": lambda tensors: tensors.update({"module.dncnn.2.weight": torch.ones(4, 4, 5, 5)}),
    "deeper": lambda tensors: tensors.update({"module.dncnn.999.weight": torch.ones(1)}),
    "renamed": lambda tensors: tensors.update(conv=tensors.pop("module.dncnn.0.weight")),
    "flat": lambda tensors: tensors.update({"module.dncnn.0.weight": torch.ones(4)}),
    "broken": lambda tensors: tensors["module.dncnn.2.weight"].mul_(torch.nan),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_anything_else_is_refused(tmp_path: Path, spoil: Any) -> None:
    with pytest.raises(CertvitError) as refused:
        read_denoiser(dncnn(tmp_path / "d.safetensors", 1.0, spoil), 1)
    assert refused.value.code in (3, 4)


def test_a_published_pickle_of_tensors_is_read_and_another_pickle_is_not(tmp_path: Path) -> None:
    file = dncnn(tmp_path / "d.safetensors", 1.0)
    state = load_file(file)
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "d.pth.tar")
    assert read_denoiser(tmp_path / "d.pth.tar", 1).digest == read_denoiser(file, 1).digest
    torch.save({"state_dict": state, "run": Path("x")}, tmp_path / "code.pth.tar")
    with pytest.raises(CertvitError, match="not tensors alone"):
        read_denoiser(tmp_path / "code.pth.tar", 1)


SIZE = (1, 8, 8)
IN_PYTHON: dict[str, Any] = {"method": "smoothing", "sigma": 0.125, "n0": 8, "samples": 40}


class Mean(nn.Module):
    """Each pixel moved towards the mean of its image."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.weight * (
            pixels + self.share * (pixels.mean(dim=(1, 2, 3), keepdim=True) - pixels)
        )


class Told(Mean):
    """The share follows from the sigma."""

    def forward(self, pixels: Tensor, sigma: float) -> Tensor:
        return pixels + 7.2 * sigma * (pixels.mean(dim=(1, 2, 3), keepdim=True) - pixels)


def acting(act: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Return a module of this forward."""
    return type("Acting", (Mean,), {"forward": act})()


def drawing() -> nn.Module:
    return acting(lambda self, pixels: pixels + 1e-6 * torch.rand_like(pixels))


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
    return torch.rand(6, *SIZE, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def radii(network: Any, denoiser: Any) -> list[float]:
    rows = certvit.certify(network, *images(), denoiser=denoiser, **IN_PYTHON)
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
        from_memory(drawing(), 1).at(0.25).digest,
        told.at(0.25).digest,
        told.at(0.5).digest,
    ]
    assert len({*others, plain.at(0.25).digest}) == 6


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a row of the batch": (
        lambda: acting(lambda self, pixels: pixels - pixels.mean(dim=0, keepdim=True)),
        "beside it",
    ),
    "random numbers": (drawing, "another output each time"),
    "another shape": (lambda: acting(lambda self, pixels: pixels[:, :, ::2]), "returns"),
    "an error": (lambda: acting(lambda self, pixels: {}["no such thing"]), "KeyError"),
    "infinite": (lambda: acting(lambda self, pixels: pixels / 0), "infinite"),
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
        certvit.certify(network, *images(), denoiser=denoiser(), **IN_PYTHON)
    assert "--" not in f"{refused.value} {refused.value.hint}"


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
