"""Labelled images in a fixed order, from any source."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, zip_longest

import torch
from torch import Tensor

from certcli.images.decoding import Ahead
from certcli.system.errors import DataError, raise_if

Batch = tuple[Tensor, Tensor, Tensor]
"""(indices (b,) int64, images (b, c, h, w) float32 in [0, 1], labels (b,) int64)"""

OWN = "own answer"
"""The split of images whose labels are the network's own answers: they do not measure its
accuracy."""
CACHE_BYTES = 2**22
"""Bytes of the images that a CPU runs at once (6 of 224 x 224 pixels): a layer's outputs then stay in the cache
(docs/trials.md, *Batches that fit the cache*).
"""
DIGESTED = 256
"""Images in memory at a time while digests are computed."""
SPLITS = ("train", "val", "validation", "test")
"""Folders of a dataset that hold class folders."""
VALIDATION_SHARE = 0.1
_SPLIT_SEED = (
    20260101  # fixed for ever: the validation images of a dataset must be the same in every run
)


def sent(pixels: Tensor, device: torch.device) -> Tensor:
    """Copy the pixels to the device; to a GPU from page-locked memory, while the caller
    continues."""
    if device.type != "cuda" or pixels.device.type != "cpu":
        return pixels.to(device)
    return pixels.pin_memory().to(device, non_blocking=True)


def at_once(batch_size: int, size: Sequence[int], device: torch.device | str) -> int:
    """Return how many images of `size` (c, h, w) run at once: `batch_size`, on a CPU at most
    CACHE_BYTES.

    It depends on nothing else, so that a run draws the same tokens with any number of threads.
    """
    if torch.device(device).type != "cpu":
        return batch_size
    return max(1, min(batch_size, CACHE_BYTES // (4 * math.prod(size))))


@dataclass(frozen=True)
class Images:
    """Labelled images in a fixed order. `fetch(positions)` returns pixel images (b, c, h, w) in [0,
    1].

    `expect(positions)` starts decoding all images that will be fetched next (`ahead`; None for
    images in memory). `file(position)` returns the image's file below the dataset's folder,
    printable; None without files.
    unlabelled: the labels are zeros; `answered` puts a network's own answers in their place.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: Tensor
    indices: Tensor
    fetch: Callable[[Sequence[int]], Tensor]
    note: str = ""
    expect: Callable[[Sequence[int]], None] = lambda positions: None
    ahead: Ahead | None = field(default=None, repr=False)
    file: Callable[[int], str] | None = field(default=None, repr=False)
    unlabelled: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"<{len(self)} images of {self.name} ({self.split}), {len(self.classes)} classes>"

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all images in order. `indices`: positions in the split, also after `limit`."""
        for start in range(0, len(self), batch_size):
            positions = list(range(start, min(start + batch_size, len(self))))
            pixels = self.fetch(positions)
            self.expect_at(start + batch_size, batch_size)
            yield self.indices[positions], pixels, self.labels[positions]

    def expect_at(self, start: int, count: int) -> None:
        """Call `expect` for `count` images from `start`, as far as there are any."""
        self.expect(range(start, min(start + count, len(self))))

    def answered(self, classes: Sequence[int], names: tuple[str, ...]) -> "Images":
        """Return the images with a network's answers as labels, as a split of its own name."""
        return replace(
            self, split=OWN, classes=names, labels=torch.tensor(classes).long(), unlabelled=False
        )

    def select(self, positions: Sequence[int]) -> "Images":
        """Return the images at these positions, in this order, with their indices."""
        chosen = list(positions)
        file = self.file
        part = replace(
            self,
            labels=self.labels[chosen],
            indices=self.indices[chosen],
            file=None if file is None else lambda row: file(chosen[row]),
            fetch=lambda rows: self.fetch([chosen[row] for row in rows]),
            expect=lambda rows: self.expect([chosen[row] for row in rows]),
        )
        if "_digested" in self.__dict__:
            part.__dict__["_digested"] = {
                index: self._digested[index] for index in part.indices.tolist()
            }
        return part

    def limit(self, count: int | None, seed: int = 0) -> "Images":
        """Return a seeded, class-balanced sample of `count` images, in the order of the split."""
        if count is None or count >= len(self):
            return self
        raise_if(count < 1, DataError, f"a limit of {count} images leaves none")
        return self.select(sorted(_balanced(self.labels, count, seed)))

    def in_turn(self, seed: int = 0) -> "Images":
        """Return all images, classes in turn: the first n are those of `limit(n, seed)`."""
        return self.select(_balanced(self.labels, len(self), seed))

    @cached_property
    def file_of(self) -> Mapping[int, str]:
        """Index of each image -> its file; empty for a dataset that is not made of files."""
        file = self.file
        return (
            {}
            if file is None
            else {index: file(position) for position, index in enumerate(self.indices.tolist())}
        )

    def named(self, index: int) -> str:
        """Return "image 7", with the file in parentheses where there is one."""
        return (
            f"image {index} ({self.file_of[index]})" if index in self.file_of else f"image {index}"
        )

    @cached_property
    def digests(self) -> dict[int, str]:
        """Index of each image -> the first 16 hex digits of the sha256 of its label and pixels."""
        return {index: labelled for index, (labelled, _) in self._digested.items()}

    @cached_property
    def pixel_digests(self) -> dict[int, str]:
        """Index of each image -> the same of its pixels alone."""
        return {index: alone for index, (_, alone) in self._digested.items()}

    @cached_property
    def _digested(self) -> dict[int, tuple[str, str]]:
        digests: dict[int, tuple[str, str]] = {}
        for start in range(0, len(self), DIGESTED):
            digests |= {
                row[0]: row[1:]
                for row in self.digests_at(range(start, min(start + DIGESTED, len(self))))
            }
        return digests

    def digests_at(self, positions: Sequence[int]) -> list[tuple[int, str, str]]:
        """Return (index, digest with label, digest of pixels) of the images there."""
        indices = self.indices[list(positions)].tolist()
        labels = self.labels[list(positions)].tolist()
        digests = []
        pixels = self.fetch(positions)
        self.expect_at(max(positions) + 1, DIGESTED)
        for index, label, row in zip(
            indices, labels, pixels.cpu().contiguous().numpy(), strict=True
        ):
            head = f"{row.dtype.str}\0{row.shape}\0".encode()
            sums = [hashlib.sha256(before + head) for before in (f"{label}\0".encode(), b"")]
            for each in sums:
                each.update(row)  # in place: an image has megabytes
            labelled, alone = (each.hexdigest()[:16] for each in sums)
            digests.append((index, labelled, alone))
        return digests

    def with_digests(self, digests: Sequence[tuple[int, str, str]]) -> "Images":
        """Return the same images with digests that are known already."""
        same = replace(self)
        same.__dict__["_digested"] = {
            index: (labelled, alone) for index, labelled, alone in digests
        }
        return same  # where `cached_property` looks first

    @cached_property
    def digest(self) -> str:
        """The sha256 over index, label and pixels of each image, in order; names do not count."""
        lines = (f"{index} {digest}\n" for index, digest in self.digests.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all images and labels, for sets that fit in memory."""
        return torch.cat([images for _, images, _ in self.batches(1024)]), self.labels


def _balanced(labels: Tensor, count: int, seed: int) -> list[int]:
    """Return positions of `count` images, the classes in turn, each class in a seeded random
    order."""
    generator = torch.Generator().manual_seed(seed)
    classes = labels.unique()
    queues = []
    # classes in a random order too: with one image a class, the first N would all be neighbouring
    # classes
    for label in classes[torch.randperm(len(classes), generator=generator)].tolist():
        members = (labels == label).nonzero().flatten()
        queues.append(members[torch.randperm(len(members), generator=generator)].tolist())
    in_turn = (member for turn in zip_longest(*queues) for member in turn if member is not None)
    return list(islice(in_turn, count))


def split_training(labels: Tensor, split: str) -> Tensor:
    """Return the fixed 90 % (train) or 10 % (val) of a training set without validation split."""
    count = max(1, round(VALIDATION_SHARE * len(labels)))
    validation = torch.zeros(len(labels), dtype=torch.bool)
    validation[_balanced(labels, count, _SPLIT_SEED)] = True
    return (validation if split == "val" else ~validation).nonzero().flatten()


def require_split(name: str, split: str, splits: Sequence[str]) -> None:
    raise_if(
        split not in splits,
        DataError,
        f"dataset '{name}' has no split '{split}'",
        f"--split {' or '.join(splits)}",
    )


def transform_each(images: Tensor, transform: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    """Return transform(image) of each image (b, c, h, w); torchvision draws from global generators."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([transform(image) for image in images])
