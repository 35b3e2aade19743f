"""Write a data set whose classes are seen by comparing patches: the largest of four real digits.

    python -m benchmarks.four_digits FOLDER [--train 12000] [--others 600]

Each image is 16 x 16, two rows of two digits of the 1,797 that come with certvit, those of train, val
and test apart. Its class is the largest of the four; classes are drawn evenly. FOLDER gets
train/CLASS/*.png, val and test, as `--dataset FOLDER` reads them. Deterministic.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from certcli.checkpoint.record import InputSpec
from certcli.images import datasets

SPEC = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))


def write(folder: Path, split: str, count: int, random: np.random.Generator) -> None:
    """Write `count` images of a split below folder / split."""
    pixels, labels = datasets.load_dataset("digits", SPEC, split).tensors()
    digits = (255 * pixels[:, 0].numpy()).round().astype(np.uint8)
    values = labels.numpy()
    for number in range(count):
        largest = random.integers(10)
        places = random.choice(np.flatnonzero(values <= largest), size=4)
        places[random.integers(4)] = random.choice(np.flatnonzero(values == largest))
        first, second, third, fourth = digits[places]
        target = folder / split / str(largest)
        target.mkdir(parents=True, exist_ok=True)
        image = np.block([[first, second], [third, fourth]])
        Image.fromarray(image).save(target / f"{number:05d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=12_000)
    parser.add_argument("--others", type=int, default=600)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already")
    random = np.random.default_rng(0)
    for split, count in {
        "train": options.train,
        "val": options.others,
        "test": options.others,
    }.items():
        write(options.folder, split, count, random)


if __name__ == "__main__":
    main()
