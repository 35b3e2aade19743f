"""Adaptation as it is run: interrupted and resumed to the same bytes, planned without work, and
told about bad input.
"""

import json
from pathlib import Path

import pytest
import torch

from certcli.adapt.descend import augment_for_distillation, compact
from certcli.adapt.run import Adapter, load_adaptation_state, save_adaptation_state
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import deviations
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.models import build as models
from certcli.system.errors import CheckpointError
from tests.helpers.commands import attempt

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
        save_adaptation_state(folder / f"{number}.safetensors", adapter.state())
    return adapter, folder


@pytest.mark.parametrize("stop", range(1, 6))
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    plain: Checkpoint, images: torch.Tensor, whole: tuple[Adapter, Path], stop: int
) -> None:
    """Resumed after each record in turn: the block, the end, and every epoch of the distillation."""
    adapter, folder = whole
    second = Adapter(plain, INTERRUPTIBLE, images, CPU)
    second.restore(load_adaptation_state(folder / f"{stop}.safetensors", second.identity))
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
    save_adaptation_state(tmp_path / "state.safetensors", adapter.state())
    tensors = {name: value + 1e-3 for name, value in plain.tensors.items()}
    other = {
        "settings": lambda: Adapter(
            plain, AdaptSettings(norm="keep", residual="weighted", epochs=0, lr=1e-4), images, CPU
        ),
        "images": lambda: Adapter(plain, settings, images[1:], CPU),
        "parent": lambda: Adapter(Checkpoint(tensors, plain.record), settings, images, CPU),
    }[change]()
    with pytest.raises(CheckpointError, match="other"):
        load_adaptation_state(tmp_path / "state.safetensors", other.identity)


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
