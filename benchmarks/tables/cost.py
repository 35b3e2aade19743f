"""What a training step costs beside a plain ViT's, plain and on attacked images (PGD-10), in CPU
time; one JSON document.

    python -m benchmarks.tables.cost [--method specformer]

Every round makes a step of each kind one after the other; a ratio divides two times of one round,
the result is the median. The network is certvit_vit_cifar10, images and weights are random.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from certcli.checkpoint.record import Record, Replacement
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.models import build as models

ATTENTION = {
    "l2former": "l2-attention",
    "lnformer": "lnorm-attention",
    "lipsformer": "scsa-attention",
}
ATTACKED = {"adversarial": "pgd", "attack_epsilon": 8 / 255, "attack_steps": 10}
SIZE = (3, 32, 32)


def build(method: str) -> models.PixelModel:
    torch.manual_seed(0)
    net = models.create("certvit_vit_cifar10", {}, initialise=True)
    record = Record(arch="certvit_vit_cifar10", arch_args={}, input=models.spec_of(net), classes=10)
    if method in ATTENTION:
        for index in range(len(net.blocks)):
            models.replace_module(net, Replacement(f"blocks.{index}.attn", ATTENTION[method]))
    return models.PixelModel(record.input, net).eval()


def stepper(method: str, attacked: bool, batch: int) -> Callable[[], float]:
    """A function that makes one step and returns its CPU seconds."""
    penalty = {"msvp": (1e-4, 1e-4, 1e-4)} if method == "specformer" else {}
    settings = FinetuneSettings(
        loss="ce", batch_size=batch, **penalty, **(ATTACKED if attacked else {})
    )
    trainer = Trainer(build(method), settings, 10, "benchmark")
    trainer.model.train()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(batch, *SIZE, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    classes = tuple(map(str, range(10)))
    images = Images(
        "random",
        "train",
        classes,
        labels,
        torch.arange(batch),
        lambda indices: pixels[list(indices)],
    )
    positions, number = torch.arange(batch), iter(range(10**9))

    def step() -> float:
        started = time.process_time()
        trainer.descent.step(images, positions, 0.5, "the benchmark", next(number))
        return time.process_time() - started

    return step


def ratio(method: str, attacked: bool, batch: int, rounds: int) -> float:
    plain = stepper("vit", attacked, batch)
    other = stepper(method, attacked, batch)
    plain(), other()  # a warm-up: cold power iterations, allocations
    return statistics.median(other() / plain() for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=("specformer", *ATTENTION), default="specformer")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                "standard": ratio(options.method, False, options.batch_size, options.rounds),
                "adversarial": ratio(options.method, True, options.batch_size, 3),
                "rounds": options.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
