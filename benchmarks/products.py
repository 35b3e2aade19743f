r"""What oneDNN's matrix products gain over PyTorch's own on this processor, as ratios of one run.

    python -m benchmarks.products [--rounds 5] [--threads 1]

Each row is run with PyTorch's products and with oneDNN's, one after the other, --rounds times; the table shows the
median of the CPU seconds of both, and of their ratios. On processors where certvit keeps PyTorch's own
(`certcli.system.torch_modes.is_faster`) the ratios say what the other choice would cost. Weights and images are random.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn import functional as F

from benchmarks.finetune import random_images
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system import torch_modes
from certcli.system.torch_modes import OneDnnProducts, is_faster

TIMM_TINY = ("vit_tiny_patch16_224", {}, 16)
CIFAR_VIT = (
    "vit_tiny_patch16_224",
    {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4},
    64,
)
LIPSCHITZ = ("certvit_lip_mnist", {"patch": 14, "width": 256, "depth": 1}, 256)


def network(arch: str, arguments: dict, classes: int = 10) -> PixelModel:
    torch.manual_seed(0)
    net = build.create(arch, {**arguments, "num_classes": classes}, initialise=True)
    spec = build.spec_of(net)
    if "img_size" in arguments:
        spec = replace(spec, size=(3, arguments["img_size"], arguments["img_size"]))
    return PixelModel(spec, net).eval()


def product(rows: int = 9850, inner: int = 192, columns: int = 768) -> Callable[[], object]:
    x = torch.randn(rows, inner)
    weight = torch.randn(columns, inner)
    return lambda: F.linear(x, weight)


def forward() -> Callable[[], object]:
    arch, arguments, batch = TIMM_TINY
    model = network(arch, arguments)
    pixels = torch.rand(batch, *model.input_size)

    def run() -> None:
        with torch.inference_mode():
            model(pixels)

    return run


def attack_step() -> Callable[[], object]:
    arch, arguments, batch = TIMM_TINY
    model = network(arch, arguments).requires_grad_(False)
    pixels = torch.rand(batch, *model.input_size, requires_grad=True)
    labels = torch.zeros(batch, dtype=torch.long)
    return lambda: torch.autograd.grad(F.cross_entropy(model(pixels), labels), pixels)


def training_step(
    arch: str, arguments: dict, batch: int, **settings: object
) -> Callable[[], object]:
    model = network(arch, arguments)
    trainer = Trainer(model, FinetuneSettings(batch_size=batch, **settings), 10, "benchmark")  # type: ignore[arg-type]
    trainer.model.train()
    images = random_images(batch, model.input_size, 0)
    positions = torch.arange(batch)
    return lambda: trainer.descent.step(images, positions, 0.5, "the benchmark", 0)


ROWS: dict[str, Callable[[], Callable[[], object]]] = {
    "a product, 9,850 x 192 x 768": product,
    "forward pass of a ViT-Tiny, 16 images": forward,
    "gradient of an attack on it": attack_step,
    "training step of a CIFAR-10 ViT, 64 images": lambda: training_step(*CIFAR_VIT, loss="ce"),
    "orthogonal step of examples/mnist.sh, 256 images": lambda: training_step(
        *LIPSCHITZ, loss="margin", epsilon=1.58
    ),
}


def seconds(work: Callable[[], object], onednn: bool) -> float:
    with OneDnnProducts() if onednn else nullcontext():
        started = time.process_time()
        work()
        return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = "oneDNN" if is_faster() else "PyTorch's own"
    torch_modes.is_faster = lambda: False  # type: ignore[assignment]  # the rows choose for themselves
    print(f"certvit multiplies by {chosen} here; {options.threads} thread(s), CPU seconds")
    print(f"{'work':<50} {'PyTorch':>8} {'oneDNN':>8} {'ratio':>6}")
    for name, make in ROWS.items():
        work = make()
        seconds(work, False)
        seconds(work, True)
        pairs = [(seconds(work, False), seconds(work, True)) for _ in range(options.rounds)]
        plain, onednn = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(onednn / plain for plain, onednn in pairs)
        print(f"{name:<50} {plain:8.3f} {onednn:8.3f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
