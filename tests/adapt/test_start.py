"""Where adapted parts start: floors, folded and fitted norms, least squares.

Calibration images in shards: every image counts once, and the sums are the same bits whichever
process works on a shard.
"""

import threading

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn

from certcli.adapt.descend import Pairs, Shards
from certcli.adapt.start import compose_inputs, fit_layer, fold_center_norm
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.system.errors import UsageError
from certcli.system.processes import Team


def test_floor_norm_is_layer_norm_above_its_floor() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -2, 2, 50
    ).unsqueeze(1)
    norm = FloorNorm(6, floor=0.5)
    deviation = x.var(dim=1, correction=0).sqrt()
    normalised = norm(x)
    reference = nn.functional.layer_norm(x, (6,), eps=0.0)
    assert torch.allclose(
        normalised[deviation > 0.5], reference[deviation > 0.5], atol=1e-5
    )  # float32 rounding
    below = normalised[deviation < 0.5]
    assert torch.allclose(
        below, (x - x.mean(dim=1, keepdim=True))[deviation < 0.5] / 0.5, atol=1e-5
    )


def test_floor_norm_of_a_constant_token_has_a_finite_gradient() -> None:
    x = torch.full((2, 6), 0.3, requires_grad=True)
    FloorNorm(6, floor=0.5)(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


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
    shards = Shards(2, number=2)
    return shards, lambda shard: zip(x[shard::2].split(7), y[shard::2].split(7), strict=True)


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
