"""Calibration images in lots: whoever works on a lot, the sums are the same bits, and every image
is met once.
"""

import threading

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from certcli.adapt.calibration_shards import LOTS, Lots
from certcli.system.errors import UsageError
from certcli.system.processes import Team


class Spoken(Team):
    """Processes that are threads: tensors go over the store, as decimals that say them exactly."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [torch.tensor(row, dtype=tensor.dtype) for row in self.everyone(tensor.tolist())]


def found_by(size: int, count: int) -> list[tuple[list[Tensor], Tensor]]:
    """(sums over lots, rows of all lots) as each of `size` processes has them."""
    store = distributed.HashStore()
    found = [None] * size
    images = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))

    def one(rank: int) -> None:
        lots = Lots(count, Spoken(rank, size, store))

        def per_lot(lot: int) -> list[Tensor] | None:
            own = images[lots.images(lot)]
            return [own.sum(0), own.T @ own] if lot else None

        sums = lots.total(per_lot, [torch.zeros(5), torch.zeros(5, 5)])
        found[rank] = sums, lots.rows(lambda lot: images[lots.images(lot), 0])  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("count", [5, 43])
def test_sums_over_lots_are_the_same_bits_for_any_number_of_processes(count: int) -> None:
    ((sums, rows),) = found_by(1, count)
    images = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    rest = torch.cat([images[lot :: min(LOTS, count)] for lot in range(1, min(LOTS, count))])
    torch.testing.assert_close(sums, [rest.sum(0), rest.T @ rest])
    assert torch.equal(rows.sort().values, images[:, 0].sort().values)
    for size in (2, 3, 5):
        for found, side_by_side in found_by(size, count):
            assert all(torch.equal(mine, alone) for mine, alone in zip(found, sums, strict=True)), (
                size
            )
            assert torch.equal(side_by_side, rows)


@pytest.mark.parametrize(("count", "batch_size"), [(43, 10), (3, 10), (64, 64), (20, 3)])
def test_an_epoch_meets_every_image_once_in_batches_of_the_size_asked_for(
    count: int, batch_size: int
) -> None:
    lots = Lots(count)
    met = []
    for batch in lots.batches(batch_size, torch.Generator().manual_seed(0)):
        met.append(
            [
                range(count)[lots.images(lot)][row]
                for lot, rows in batch.items()
                for row in rows.tolist()
            ]
        )
    assert sorted(image for images in met for image in images) == list(range(count))
    assert {len(images) for images in met[:-1]} <= {batch_size}
    assert len(met) == -(-count // batch_size)
    assert sum(lots.size(lot, 11) for lot in range(lots.number)) == min(11, count)


def test_fewer_images_than_processes_are_refused() -> None:
    with pytest.raises(UsageError, match="2 calibration images are too few for 3 processes"):
        Lots(2, Team(0, 3))
