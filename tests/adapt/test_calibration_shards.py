"""Calibration images in shards: whoever works on a shard, the sums are the same bits, and every image
is met once.
"""

import threading

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from certcli.adapt.descend import Shards
from certcli.system.errors import UsageError
from certcli.system.processes import Team


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
            rows = images[shards.images(shard)]
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
                range(count)[shards.images(shard)][row]
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
