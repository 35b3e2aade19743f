"""What adaptation costs in accuracy and gains in bound, in one run a part.

    python benchmarks/adapt.py tiny --checkpoint DIR --data-dir FOLDER [--epochs 3 --distill 5]
    python benchmarks/adapt.py grid --checkpoint FILE --dataset NAME [--data-dir DIR]

tiny   A pre-trained network (meant for timm's ViT-Tiny and a folder with train/ and val/ of ImageNet synset folders):
       attention to l2, LayerNorm and residuals kept. Top-1 among all classes on val/, and agreement with the original,
       of the original, after surgery from the weights alone, after closed forms, after the blocks, after distillation.
grid   Every attention under every norm, on a small network: accuracy and log10 of the proven bound before and after.

Nothing is chosen on the images that are reported. CPU seconds are those of this process; --threads 1 by default.
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.adapt.pixels import as_pixels, compact
from certcli.adapt.run import Adapter
from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.images.labelled import Images
from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError

CPU = torch.device("cpu")
FEW = 250  # enough for the closed forms alone


def predictions(model: Any, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(as_pixels(part)).argmax(1) for part in pixels.split(50)])


def share(hits: Tensor) -> str:
    return f"{100 * float(hits.float().mean()):5.1f} %"


def images_of(checkpoint: Checkpoint, name: str, split: str, data_dir: Path | None, count: int) -> Images:
    loaded = datasets.load(name, checkpoint.record.input, split, data_dir)
    return datasets.require_classes(loaded, checkpoint.record.classes).limit(count)


def pixels_of(images: Images) -> Tensor:
    return compact(batch for _, batch, _ in images.batches(256))


def tiny(arguments: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(arguments.checkpoint)
    calibration = images_of(checkpoint, arguments.data_dir, "train", None, arguments.limit)
    test = images_of(checkpoint, arguments.data_dir, "val", None, arguments.test_limit)
    pixels, shown = pixels_of(calibration), pixels_of(test)
    original = build.load(checkpoint)
    before = predictions(original, shown)
    print(f"{len(calibration)} calibration images, {len(test)} test images, {checkpoint.record.classes} classes")
    print(f"{'':44}{'top-1':>8}{'agrees':>9}{'CPU s':>8}{'wall s':>8}")

    def row(name: str, model: Any, cpu: float, wall: float) -> None:
        found = predictions(model, shown)
        print(f"{name:44}{share(found == test.labels):>8}{share(found == before):>9}{cpu:8.0f}{wall:8.0f}", flush=True)

    row("original", original, 0, 0)
    for epochs in (-1, 0):
        started = time.process_time(), time.perf_counter()
        some = pixels[torch.linspace(0, len(pixels) - 1, min(len(pixels), FEW)).long()]
        adapter = Adapter(checkpoint, settings_of(arguments, "l2", "keep", epochs, 0), some, CPU)
        list(adapter.run())
        spent = time.process_time() - started[0], time.perf_counter() - started[1]
        name = "from the weights alone" if epochs < 0 else f"closed forms on {len(some)} images"
        row(f"surgery, {name}", adapter.student, *spent)
    del adapter
    started = time.process_time(), time.perf_counter()
    settings = settings_of(arguments, "l2", "keep", arguments.epochs, arguments.distill)
    adapter = Adapter(checkpoint, settings, pixels, CPU)
    excluded = [0.0, 0.0]  # time of the evaluations between
    for record in adapter.run():
        last = adapter.distiller is not None and adapter.distiller.epoch == arguments.distill
        if record.path == "head" or last:
            paused = time.process_time(), time.perf_counter()
            name = f"re-fitted, {arguments.epochs} epochs a block" if record.path == "head" else record.after
            row(name, adapter.student, paused[0] - started[0] - excluded[0], paused[1] - started[1] - excluded[1])
            excluded[0] += time.process_time() - paused[0]
            excluded[1] += time.perf_counter() - paused[1]
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB, this benchmark included")


def settings_of(arguments: argparse.Namespace, attention: str, norm: str, epochs: int, distill: int) -> AdaptSettings:
    residual = "keep" if arguments.part == "tiny" else arguments.residual
    return AdaptSettings(
        attention, norm, residual, epochs=epochs, distill=distill, lr=arguments.lr, batch_size=arguments.batch_size
    )


def grid(arguments: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(arguments.checkpoint)
    calibration = images_of(checkpoint, arguments.dataset, "train", arguments.data_dir, arguments.limit)
    test = images_of(checkpoint, arguments.dataset, "test", arguments.data_dir, arguments.test_limit)
    pixels, shown = pixels_of(calibration), pixels_of(test)
    original = build.load(checkpoint)

    def judge(model: Any) -> tuple[str, str]:
        accuracy = share(predictions(model, shown) == test.labels)
        bound = bound_network(model, checkpoint.record.input.size, checkpoint.record.classes)
        return accuracy, f"{bound.upper.log10():.1f}" if bound.upper.finite else "inf"

    accuracy, bound = judge(original)
    print(f"{len(calibration)} calibration images, {len(test)} test images; residuals {arguments.residual}")
    print(f"original: {accuracy}, log10 of the bound {bound}\n")
    print("| attention | norm | accuracy | log10 bound | CPU s |\n|---|---|---|---|---|")
    for attention in arguments.attentions:
        for norm in arguments.norms:
            started = time.process_time()
            try:
                settings = settings_of(arguments, attention, norm, arguments.epochs, arguments.distill)
                adapter = Adapter(checkpoint, settings, pixels, CPU)
                list(adapter.run())
                accuracy, bound = judge(adapter.student)
            except CertvitError as refusal:
                accuracy, bound = refusal.message, "-"
            print(
                f"| {attention} | {norm} | {accuracy.strip()} | {bound} | {time.process_time() - started:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {"tiny": tiny, "grid": grid}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--dataset")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--test-limit", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--distill", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--residual", default="convex")
    parser.add_argument("--attentions", nargs="+",
                        default=["keep", "l2", "l2-untied-value", "scsa", "lnorm", "conv", "orthogonal"])  # fmt: skip
    parser.add_argument("--norms", nargs="+", default=["keep", "center", "floor"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts[arguments.part](arguments)


if __name__ == "__main__":
    main()
