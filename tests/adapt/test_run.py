"""Adaptation as it is run: interrupted and resumed to the same bytes, planned without work, and
told about bad input.

Where adapted parts start: floors, folded and fitted norms, least squares.

Calibration images in shards: every image counts once, and the sums are the same bits whichever
process works on a shard.
"""

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn

from certcli.adapt.descend import Pairs, Shards, augment_for_distillation
from certcli.adapt.fit import Adapter
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import compose_inputs, deviations, fit_layer, fold_center_norm
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.models import build as models
from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.system.errors import CheckpointError, UsageError
from certcli.system.processes import Team
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
    options = ("--dataset", "digits", "--limit", 20, "--epochs", 1, "--distill", 2)
    words = [workshop / "plain.safetensors", *options]
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


@pytest.mark.parametrize(("channels", "side"), [(3, 64), (3, 8), (1, 8)])
def test_varied_images_stay_pixels_and_depend_on_the_seed_alone(channels: int, side: int) -> None:
    images = torch.rand(6, channels, side, side, generator=torch.Generator().manual_seed(0))
    first, second = augment_for_distillation(images, 1), augment_for_distillation(images, 1)
    assert torch.equal(first, second)
    assert first.shape == images.shape
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
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


def test_floor_norm_is_layer_norm_above_its_floor() -> None:
    """And linear below it; of a constant token it has a finite gradient."""
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-2, 2, 50).unsqueeze(1)
    norm = FloorNorm(6, floor=0.5)
    above = x.var(dim=1, correction=0).sqrt() > 0.5
    below = (x - x.mean(dim=1, keepdim=True)) / 0.5
    reference = nn.functional.layer_norm(x, (6,), eps=0.0)
    # float32 rounding
    assert torch.allclose(norm(x), torch.where(above[:, None], reference, below), atol=1e-5)
    constant = torch.full((2, 6), 0.3, requires_grad=True)
    norm(constant).square().sum().backward()
    assert torch.isfinite(constant.grad).all()


def test_folding_a_centre_norm_keeps_the_function() -> None:
    norm = CenterNorm(6)
    layer = nn.Linear(6, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(5, 6)
    with torch.no_grad():
        before = layer(norm(x))
        fold_center_norm(norm, layer)
        assert torch.allclose(layer(x), before, atol=1e-5)  # float32 weights are rounded once


def in_two_shards(x: Tensor, y: Tensor) -> tuple[Shards, Pairs]:
    return Shards(2, number=2), lambda shard: zip(
        x[shard::2].split(7), y[shard::2].split(7), strict=True
    )


def test_a_fitted_layer_is_the_minimiser() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 5)
    y = torch.randn(50, 3)
    layer = nn.Linear(5, 3)
    fit_layer(layer, *in_two_shards(x, y), ridge=0.0)
    with torch.no_grad():
        best = (layer(x) - y).square().sum()
        for _ in range(20):
            weight = layer.weight.clone()
            layer.weight += 0.01 * torch.randn_like(layer.weight)
            assert (layer(x) - y).square().sum() > best
            layer.weight.copy_(weight)


def test_a_layer_that_no_image_excites_keeps_its_prior() -> None:
    layer = nn.Linear(5, 3)
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().clone()
    fit_layer(layer, *in_two_shards(torch.zeros(4, 5), torch.ones(4, 3)), keep=True)
    assert torch.allclose(layer.weight, weight)
    assert not torch.allclose(layer.bias, bias)


def test_composed_inputs_undo_a_linear_change_of_them() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(4, 6)]
    old = torch.randn(60, 4)
    new = old @ torch.randn(4, 4) + torch.randn(4)
    with torch.no_grad():
        wanted = [layer(old) for layer in layers]
        compose_inputs(layers, *in_two_shards(new, old), ridge=1e-12)
        for layer, goal in zip(layers, wanted, strict=True):
            assert torch.allclose(layer(new), goal, atol=1e-4)


class Spoken(Team):
    """Processes that are threads: tensors go over the store, as decimals that say them exactly."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [torch.tensor(row, dtype=tensor.dtype) for row in self.everyone(tensor.tolist())]


def sums_by(size: int, count: int) -> list[list[Tensor]]:
    """The sums over shards, as each of `size` processes has them."""
    store = distributed.HashStore()
    results: list[list[Tensor]] = [[]] * size
    images = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))

    def one(rank: int) -> None:
        shards = Shards(count, Spoken(rank, size, store))

        def per_shard(shard: int) -> list[Tensor]:
            rows = images[shard :: shards.number]
            return [rows.sum(0), rows.T @ rows]

        results[rank] = shards.total(per_shard, [torch.zeros(5), torch.zeros(5, 5)])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    return results


@pytest.mark.parametrize("count", [5, 43])
def test_sums_over_shards_are_the_same_bits_for_any_number_of_processes(count: int) -> None:
    (sums,) = sums_by(1, count)
    images = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sums, [images.sum(0), images.T @ images])
    for size in (2, 3, 5):
        for shared in sums_by(size, count):
            assert all(map(torch.equal, shared, sums)), size


@pytest.mark.parametrize(("count", "batch_size"), [(43, 10), (3, 10), (64, 64), (20, 3)])
def test_an_epoch_meets_every_image_once_in_batches_of_the_size_asked_for(
    count: int, batch_size: int
) -> None:
    shards = Shards(count)
    met = []
    for batch in shards.batches(batch_size, torch.Generator().manual_seed(0)):
        met.append(
            [
                range(count)[shard :: shards.number][row]
                for shard, rows in batch.items()
                for row in rows.tolist()
            ]
        )
    assert sorted(image for images in met for image in images) == list(range(count))
    assert {len(images) for images in met[:-1]} <= {batch_size}
    assert len(met) == -(-count // batch_size)
    assert sum(shards.size(shard, 11) for shard in range(shards.number)) == min(11, count)


def test_fewer_images_than_processes_are_refused() -> None:
    with pytest.raises(UsageError, match="2 calibration images are too few for 3 processes"):
        Shards(2, Team(0, 3))
