"""How much each attack leaves standing, with AutoAttack beside it, and what it costs.

    python -m benchmarks.strength CKPT ... [--dataset digits] [--split test] [--limit 400]
        [--norm l2] [--device cpu] [--batch-size 128] -e 0.25 -e 0.5

Each attack runs alone on every image at every radius, from one seed; the last rows run two in turn.
A row says the share of images that withstand, how many points that lies above AutoAttack's, and
the CPU seconds, which hold on a busy machine too; on another device, seconds by the clock.
torchattacks' rows have its own step size, a constant share of the radius, and as many steps as
ours. `constant` is our own ascent with Madry et al.'s steps of 2.5 radius / steps.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from certcli.attack.run import attack_images, robust_accuracy
from certcli.attack.settings import MADRY, AttackSettings, Planned
from certcli.evaluation.perturbation import Region
from certcli.images import datasets
from certcli.images.labelled import Batch
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.pixels import PixelModel

REFERENCE = "autoattack"
LIBRARY = {"l2": "torchattacks:PGDL2", "linf": "torchattacks:PGD"}


@dataclass(frozen=True)
class Row:
    """One attack or several in turn, and how the table names them."""

    label: str
    attacks: tuple[str | Planned, ...]


def rows(steps: int, norm: str) -> list[Row]:
    """Return the rows of the table; the reference is the first."""
    constant = AttackSettings(steps=steps, relative_step=MADRY)
    names = (f"pgd-{steps}", f"margin-pgd-{steps}")
    half = (f"pgd-{steps // 2}", f"margin-pgd-{steps // 2}")
    return [
        Row(REFERENCE, (REFERENCE,)),
        *(Row(name, (name,)) for name in names),
        Row(f"{names[0]}, constant", (Planned("pgd", "pgd", constant),)),
        Row(f"{names[1]}, constant", (Planned("margin-pgd", "margin-pgd", constant),)),
        Row(f"{LIBRARY[norm]}, {steps} steps", (f"{LIBRARY[norm]},steps={steps}",)),
        Row(" + ".join(half), half),
        Row(" + ".join(names), names),
    ]


def measure(
    model: PixelModel, batches: Sequence[Batch], row: Row, region: Region, seed: int
) -> tuple[float, float]:
    """Return the share of images that withstand all attacks of the row, and the seconds."""
    clock = time.process_time if next(model.parameters()).device.type == "cpu" else time.monotonic
    start = clock()
    records = attack_images(model, batches, row.attacks, region, AttackSettings(seed=seed))
    robust = robust_accuracy(records).robust
    return robust, clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--norm", default="l2", choices=sorted(LIBRARY))
    parser.add_argument("-e", "--epsilon", type=float, action="append", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--without-reference", action="store_true", help="AutoAttack is slow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'network':24} {'radius':>7} {'attack':34} {'withstand':>9} {'above':>6} {'seconds':>8}"
    )
    for source in options.checkpoints:
        checkpoint = open_checkpoint(source)
        model = build.load(checkpoint).to(options.device)
        images = datasets.load_dataset(
            options.dataset, checkpoint.record.input, options.split, options.data_dir
        ).limit(options.limit)
        batches = [
            (indices, pixels.to(options.device), labels)
            for indices, pixels, labels in images.batches(options.batch_size)
        ]
        for radius in options.epsilon:
            region = Region(options.norm, radius)
            reference: float | None = None
            for row in rows(options.steps, options.norm)[options.without_reference :]:
                robust, seconds = measure(model, batches, row, region, options.seed)
                reference = robust if row.label == REFERENCE else reference
                above = "" if reference is None else f"{100 * (robust - reference):+.1f}"
                where = f"{Path(source).stem[:24]:24} {options.norm} {radius:<4g}"
                figures = f"{100 * robust:7.1f} % {above:>6} {seconds:8.1f}"
                print(f"{where} {row.label:34} {figures}", flush=True)


if __name__ == "__main__":
    main()
