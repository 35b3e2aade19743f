"""Adaptation as it is run: interrupted and resumed to the same bytes, planned without work, and
told about bad input.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from certcli.adapt.descend import augment_for_distillation, compact
from certcli.adapt.fit import Adapter
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import deviations
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.models import build as models
from certcli.system.errors import ArchitectureError, CheckpointError
from tests.helpers.commands import attempt, certvit
from tests.helpers.runs import interrupted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(plain: Checkpoint) -> torch.Tensor:
    return datasets.load_dataset("digits", plain.record.input, "train").limit(60).tensors()[0]


INTERRUPTIBLE = AdaptSettings("certify", head=(16,), epochs=1, distill=3, batch_size=25)


@pytest.fixture(scope="module")
def whole(
    plain: Checkpoint, images: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Adapter, Path]:
    """A whole run, and a folder with the state after each of its records."""
    adapter = Adapter(plain, INTERRUPTIBLE, images, CPU)
    folder = tmp_path_factory.mktemp("states")
    for number, _ in enumerate(adapter.run(), start=1):
        adapter.store(folder / f"{number}.safetensors")
    return adapter, folder


@pytest.mark.parametrize("stop", range(1, 6))
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    plain: Checkpoint, images: torch.Tensor, whole: tuple[Adapter, Path], stop: int
) -> None:
    """Resumed after each record in turn: the block, the end, and every epoch of the distillation."""
    adapter, folder = whole
    second = Adapter(plain, INTERRUPTIBLE, images, CPU)
    second.restore(folder / f"{stop}.safetensors")
    list(second.run())
    assert second.result().digest == adapter.result().digest
    assert second.records == adapter.records
    assert len(list(folder.iterdir())) > stop


@pytest.mark.parametrize("change", ["settings", "images", "parent"])
def test_the_state_of_another_adaptation_is_refused(
    plain: Checkpoint, images: torch.Tensor, tmp_path: Path, change: str
) -> None:
    settings = AdaptSettings(norm="keep", residual="weighted", epochs=0)
    adapter = Adapter(plain, settings, images, CPU)
    next(adapter.run())
    adapter.store(tmp_path / "state.safetensors")
    tensors = {name: value + 1e-3 for name, value in plain.tensors.items()}
    other = {
        "settings": lambda: Adapter(
            plain, AdaptSettings(norm="keep", residual="weighted", epochs=0, lr=1e-4), images, CPU
        ),
        "images": lambda: Adapter(plain, settings, images[1:], CPU),
        "parent": lambda: Adapter(Checkpoint(tensors, plain.record), settings, images, CPU),
    }[change]()
    with pytest.raises(CheckpointError, match="other"):
        other.restore(tmp_path / "state.safetensors")


def test_ctrl_c_and_resume_on_the_command_line(workshop: Path, tmp_path: Path) -> None:
    """A real SIGINT once the first state is on disk; --resume ends in the bytes of a run that was
    left alone.
    """
    words = [
        workshop / "plain.safetensors",
        "--dataset",
        "digits",
        "--limit",
        20,
        "--epochs",
        1,
        "--distill",
        2,
    ]
    certvit("adapt", *words, "-o", tmp_path / "whole.safetensors")
    out = tmp_path / "stopped.safetensors"
    state = tmp_path / "stopped.state.safetensors"
    stopped = ["adapt", *map(str, words), "-o", str(out)]
    interrupted(tmp_path, stopped, Adapter, "store")
    assert state.exists()
    assert not out.exists()
    resumed = attempt("adapt", *words, "-o", out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert Checkpoint.read(out).digest == Checkpoint.read(tmp_path / "whole.safetensors").digest
    assert not state.exists()


def test_a_second_adaptation_is_refused_while_the_first_lives(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        workshop / "plain.safetensors",
        "--dataset",
        "digits",
        "--limit",
        20,
        "--epochs",
        1,
        "--distill",
        2,
    ]
    words += ["-o", tmp_path / "o.safetensors"]
    living = Adapter.run
    refused = []

    def run(self: Adapter) -> Any:
        for record in living(self):
            yield record
            if len(refused) < 2:
                with monkeypatch.context() as patch:
                    patch.setattr(Adapter, "run", living)
                    refused.append(
                        attempt("adapt", *words, *(["--resume"] if refused else [])).exception
                    )

    monkeypatch.setattr(Adapter, "run", run)
    certvit("adapt", *words)
    assert [
        ("another run" in str(failure), getattr(failure, "code", 0)) for failure in refused
    ] == [(True, 8)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"o.safetensors"}


def test_calibration_images_of_another_size_and_colour_are_resized_and_the_output_says_so(
    workshop: Path, tmp_path: Path
) -> None:
    told = attempt(
        "adapt", workshop / "plain.safetensors", "--dataset", _colour_folder(tmp_path / "photos"), "--epochs", 0,
        "-o", tmp_path / "a.safetensors",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    init = attempt("init", "vit_tiny_patch16_224", "--arch-arg", "depth=1", "--arch-arg", "img_size=32",
                   "--arch-arg", "embed_dim=12", "-o", tmp_path / "rgb.safetensors")  # fmt: skip
    assert init.exit_code == 0, init.output
    told = attempt(
        "adapt", tmp_path / "rgb.safetensors", "--dataset", "digits", "--limit", 20, "--epochs", 0,
        "-o", tmp_path / "b.safetensors",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "resized to 3x32x32" in told.stderr


def _colour_folder(folder: Path) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(4):
            shade = torch.randint(0, 255, (20, 30, 3), dtype=torch.uint8).numpy()
            Image.fromarray(shade).save(folder / label / f"{number}.png")
    return folder


def test_adapt_refuses_a_network_without_attention(tmp_path: Path, plain: Checkpoint) -> None:
    certvit("init", "certvit_4c3f", "-o", tmp_path / "cnn.safetensors")
    told = attempt("adapt", tmp_path / "cnn.safetensors", "--dataset", tmp_path)
    assert isinstance(told.exception, ArchitectureError)
    assert "no LayerNorm" in told.exception.message
    told = attempt(
        "adapt",
        tmp_path / "cnn.safetensors",
        "--goal",
        "certify",
        "--dataset",
        tmp_path,
    )
    assert isinstance(told.exception, ArchitectureError)
    assert "no attention" in told.exception.message


def test_pixels_are_kept_in_bytes_only_where_that_loses_nothing() -> None:
    exact = (
        torch.randint(0, 256, (4, 1, 3, 3), generator=torch.Generator().manual_seed(0)).float()
        / 255
    )
    odd = exact * 0.9
    assert compact([exact[:2], exact[2:]]).dtype == torch.uint8
    assert torch.equal(compact([exact]).float() / 255, exact)
    assert torch.equal(compact([exact, odd]), torch.cat([exact, odd]))


@pytest.mark.parametrize(("channels", "side"), [(3, 64), (3, 8), (1, 8)])
def test_varied_images_stay_pixels_and_depend_on_the_seed_alone(channels: int, side: int) -> None:
    images = torch.rand(6, channels, side, side, generator=torch.Generator().manual_seed(0))
    first, second = augment_for_distillation(images, 1), augment_for_distillation(images, 1)
    assert torch.equal(first, second)
    assert first.shape == images.shape
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    assert torch.equal(first, images) == (channels == 1)


@pytest.mark.parametrize("shape", [(3, 50, 16), (2, 5, 5, 8), (7, 4)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_deviations_are_those_of_float64_to_the_digits_of_float32(
    shape: tuple[int, ...], mean: float
) -> None:
    values = mean + torch.randn(shape) * torch.rand(*shape[:-1], 1).clamp_min(1e-2)
    expected = values.double().var(dim=-1, correction=0).sqrt().flatten()
    # a deviation of 1e-2 at a mean of 30 has lost three and a half of float32's seven digits
    torch.testing.assert_close(deviations(values), expected, rtol=1e-2, atol=0.0)


def test_floors_lie_below_every_deviation_that_was_seen(workshop: Path, tmp_path: Path) -> None:
    """On the calibration images and on blank ones the network is the same function, up to
    LayerNorm's eps.
    """
    source = workshop / "plain.safetensors"
    out = tmp_path / "out.safetensors"
    outcome = attempt("adapt", source, "--limit", 100, "--keep", 1, "--json", "-o", out)
    assert outcome.exit_code == 0, outcome.exception
    parts = json.loads(outcome.stdout)["replaced"]
    assert (
        0 < sum(part["error"] for part in parts) < 1e-2
    )  # a norm of this net has a floor near .02
    old, new = (models.load(Checkpoint.read(path), CPU) for path in (source, out))
    images = datasets.load_dataset("digits", Checkpoint.read(source).record.input, "train").limit(
        100, 0
    )
    seen = images.select([row for row in range(100) if row % 5]).tensors()[0]
    blank = torch.stack([torch.full((1, 8, 8), value) for value in (0.0, 0.5, 1.0)])
    with torch.no_grad():
        for pixels in (seen, blank):
            before = old(pixels)
            after = new(pixels)
            # each norm differs by eps / (2 floor^2) at most, which later layers may turn into ten
            # times as much
            assert float((after - before).norm() / before.norm()) < 10 * sum(
                part["error"] for part in parts
            )
    floors = [
        float(value)
        for name, value in Checkpoint.read(out).tensors.items()
        if name.endswith("floor")
    ]
    assert floors
    assert min(floors) > 1e-3  # no slope of 1,000 is left
