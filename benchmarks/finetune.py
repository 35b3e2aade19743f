r"""What a training step costs with a bound, a penalty or SAM, as ratios to the plain step in the same round.

    python benchmarks/finetune.py --rounds 15
    python benchmarks/finetune.py --arch certvit_lip_mnist --arch-arg patch=14 --arch-arg width=256 --arch-arg depth=1 \
        --variants recipe --batch-size 256 --steps 8   # that of examples/mnist.sh

The network is CertViT's Table 4 for CIFAR-10 (certvit_vit_cifar10): L2 attention, centre norms and convex residuals
(--network adapted), or as timm builds it (--network plain); --arch takes another. 'loop' is what anyone would write
without certvit: cross entropy, AdamW, images in memory. Weights and images are random: they do not decide the time.
In every round each variant makes --steps steps, one after the other in a random order; a ratio divides two times of one
round, and the table shows the median and quartiles over the rounds, so other work on the machine does not tilt it. On
a CPU the seconds are those of this process, all threads together; on a GPU they are those of the clock.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from certcli.checkpoint.record import Record, Replacement
from certcli.cli.shared.inputs import parse_arguments
from certcli.finetune import stiefel
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.models import build as models

ARCHITECTURE = "certvit_vit_cifar10"

VARIANTS: dict[str, tuple[str, dict]] = {
    "loop": ("loop", {}),
    "plain": ("plain", {"loss": "ce"}),
    "+ bound (margin)": ("plain", {"loss": "margin"}),
    "+ MSVP": ("plain", {"loss": "ce", "msvp": (1e-4, 1e-4, 1e-4)}),
    "+ SAM": ("plain", {"loss": "ce", "sam": 0.05}),
    "+ average": ("plain", {"loss": "ce", "ema": 0.999}),
    "+ all three": ("plain", {"loss": "margin", "msvp": (1e-4, 1e-4, 1e-4), "sam": 0.05}),
    "stiefel": ("plain", {"loss": "ce", "optimiser": "stiefel"}),
    "stiefel + bound": ("stiefel", {"loss": "margin", "optimiser": "stiefel"}),
    "recipe": ("loop", {"loss": "margin", "optimiser": "stiefel"}),
}
"""Name -> (the variant it is compared with, settings)."""


def surgery(depth: int) -> tuple[Replacement, ...]:
    """L2 attention, centre norms and convex residuals in every block."""
    replacements = []
    for block in (f"blocks.{index}" for index in range(depth)):
        replacements += [
            Replacement(f"{block}.norm1", "center-norm"),
            Replacement(f"{block}.norm2", "center-norm"),
        ]
        replacements += [
            Replacement(f"{block}.attn", "l2-attention"),
            Replacement(block, "convex-block"),
        ]
    return (*replacements, Replacement("norm", "center-norm"))


def build(
    arch: str, arch_args: dict, network: str, device: torch.device, seed: int
) -> models.PixelModel:
    torch.manual_seed(seed)
    net = models.create(arch, arch_args, initialise=True)
    record = Record(arch=arch, arch_args=arch_args, input=models.spec_of(net), classes=10)
    if network == "adapted" and hasattr(net, "blocks"):
        for replacement in surgery(len(net.blocks)):
            models.replace_module(net, replacement)
    return models.PixelModel(record.input, net).eval().to(device)


def random_images(count: int, size: tuple[int, int, int], seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, *size, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    classes = tuple(map(str, range(10)))
    return Images(
        "random",
        "train",
        classes,
        labels,
        torch.arange(count),
        lambda indices: pixels[list(indices)],
    )


def stepper(variant: str, options: argparse.Namespace, device: torch.device) -> Callable[[], float]:
    """A function that makes --steps steps and returns the seconds of one."""
    model = build(
        options.arch, parse_arguments(options.arch_arg), options.network, device, options.seed
    )
    images = random_images(options.batch_size, model.input_size, options.seed)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    step = (
        plain_loop(model, images)
        if variant == "loop"
        else certvit_step(variant, model, images, options)
    )

    def steps() -> float:
        started = clock()
        for _ in range(options.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (clock() - started) / options.steps

    return steps


def plain_loop(model: models.PixelModel, images: Images) -> Callable[[], None]:
    device = next(model.parameters()).device
    pixels, labels = images.fetch(range(len(images))).to(device), images.labels.to(device)
    optimiser = torch.optim.AdamW(model.requires_grad_(True).train().parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimiser.step()

    return step


def certvit_step(
    variant: str, model: models.PixelModel, images: Images, options: argparse.Namespace
) -> Callable[[], None]:
    settings = FinetuneSettings(
        batch_size=options.batch_size, precision=options.precision, **VARIANTS[variant][1]
    )
    trainer = Trainer(model, settings, 10, "benchmark")
    trainer.model.train()
    positions, number = torch.arange(options.batch_size), iter(range(10**9))

    def step() -> None:
        trainer.descent.step(images, positions, 0.5, "the benchmark", next(number))
        if trainer.average is not None:
            trainer.average.update(trainer.model.net)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=("adapted", "plain"), default="adapted")
    parser.add_argument("--arch", default=ARCHITECTURE)
    parser.add_argument("--arch-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help="no products in bfloat16: as on a CPU without AMX",
    )
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        help="comma-separated, and what they are compared with",
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.without_amx:
        stiefel.multiplies_bf16 = lambda device: False
    device = torch.device(options.device)
    names = [name for name in VARIANTS if name in options.variants.split(",")]
    names += [VARIANTS[name][0] for name in names if VARIANTS[name][0] not in names]
    run = {name: stepper(name, options, device) for name in VARIANTS if name in names}
    for steps in run.values():
        steps()  # a warm-up: cold power iterations, allocations
    order = random.Random(options.seed)
    seconds = {name: [] for name in run}
    for _ in range(options.rounds):
        for name in order.sample(list(run), len(run)):
            seconds[name].append(run[name]())
    print(
        f"{options.arch} ({options.network}), batch {options.batch_size}, {options.precision}, {options.device}, "
        f"{options.threads} thread(s), {options.rounds} rounds of {options.steps} steps"
    )
    print(f"{'step':22} {'seconds':>8}  {'compared with':14} {'ratio':>6}  quartiles")
    for name, times in seconds.items():
        base = VARIANTS[name][0]
        ratios = [mine / other for mine, other in zip(times, seconds[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"{name:22} {statistics.median(times):8.3f}  {base:14} {middle:6.3f}  {low:.3f} .. {high:.3f}"
        )


if __name__ == "__main__":
    main()
