"""What stands beside the network of examples/proven_vit.sh: whether it needs its attention, and what
networks without attention are certified on the same images.

    python -m benchmarks.proven_vit proven-output/proven.safetensors [--limit 100] [--split test]
    python -m benchmarks.proven_vit mnist-output/proven.safetensors --dataset torch/mnist \
        --data-dir DATA --epochs 5 --batch-size 128 --attack-epsilon 0.8
    python -m benchmarks.proven_vit four.safetensors --dataset FOLDER --radius 0.1 --radius 0.141 \
        --augment warp --epochs 40 --attack-epsilon 0.3 --attack-ramp 0.5 --warmup 0.15 --clip-grad 1 \
        --patch 8

Frozen: clean accuracy with the probabilities of each attention at their mean over the images. The
controls, a linear classifier and an MLP of one layer of GELU units (128, or `--hidden`), are trained
on attacked images (PGD of two steps, as long and as far as the options say), and are certified by
`--method local` as the network is. With --patch P the only control is one that reads all patches of
P x P pixels with the same weights; with --filters N, a convolutional one of N and 2 N filters. Only the
controls are certified here: `certvit certify` does it for the network. Intervals are Clopper-Pearson,
95 %.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import certvit
from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.evaluation.intervals import share_interval
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel


class Patches(nn.Module):
    """Two layers of GELU units, the same for every patch; a third for the largest of each over the
    patches: (b, c, h, w) -> (b, 10)."""

    def __init__(self, channels: int, side: int, units: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, units, side, side)
        self.each = nn.Linear(units, units)
        self.joint = nn.Linear(units, units)
        self.head = nn.Linear(units, 10)
        self.curve = nn.GELU()

    def forward(self, images: Tensor) -> Tensor:
        patches = self.curve(self.embed(images).flatten(2).transpose(1, 2))
        largest = self.curve(self.each(patches)).amax(1)
        logits: Tensor = self.head(self.curve(self.joint(largest)))
        return logits


def controls(options: argparse.Namespace, load: Callable[[str], Images]) -> dict[str, PixelModel]:
    """Return the networks without attention, trained on attacked images.

    Args:
        load: split -> images.
    """
    torch.manual_seed(options.seed)
    spec = certvit.load(options.network).record.input
    pixels = math.prod(spec.size)
    nets: dict[str, nn.Module] = {"linear": nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10))}
    for units in options.hidden:
        nets[f"MLP of {units}"] = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, units), nn.GELU(), nn.Linear(units, 10)
        )
    if few := options.filters:
        convolutions = nn.Sequential(
            *(nn.Conv2d(spec.size[0], few, 4, 2, 1), nn.GELU()),
            *(nn.Conv2d(few, 2 * few, 4, 2, 1), nn.GELU(), nn.Flatten()),
            *(nn.Linear(few * math.prod(spec.size[1:]) // 8, 100), nn.GELU(), nn.Linear(100, 10)),
        )
        nets = {f"convolutions of {few}": convolutions}
    if options.patch:
        nets = {"patches": Patches(spec.size[0], options.patch, options.units)}
    settings = FinetuneSettings(
        loss="ce",
        lr=options.lr,
        epochs=options.epochs,
        batch_size=options.batch_size,
        adversarial="pgd",
        attack_norm="l2",
        attack_epsilon=options.attack_epsilon,
        attack_steps=2,
        augment=tuple(options.augment),
        attack_ramp=options.attack_ramp,
        warmup=options.warmup,
        clip_grad=options.clip_grad,
        seed=options.seed,
    )
    train = load("train")
    validation = load("val")
    models = {}
    for name, net in nets.items():
        model = PixelModel(spec, net)
        trainer = Trainer(model, settings, 10, name)
        for _ in trainer.run(train, validation):
            pass
        models[name] = model.double().eval().requires_grad_(False)
    return models


@torch.no_grad()
def frozen(model: PixelModel, images: Tensor) -> Tensor:
    """Return the logits with the probabilities of each attention at their mean over the images."""
    hooks = []
    for path, module in model.named_modules():
        if path.endswith(".attn"):
            attention: Any = module
            attention.fused_attn = False
            hooks.append(
                attention.attn_drop.register_forward_hook(
                    lambda _, __, out: out.mean(0, keepdim=True).expand_as(out)
                )
            )
    logits: Tensor = model(images)
    for hook in hooks:
        hook.remove()
    return logits


def shown(hits: Tensor) -> str:
    count = int(hits.sum())
    low, high = share_interval(count, len(hits))
    return f"{count} of {len(hits)} ({100 * low:.0f} to {100 * high:.0f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--split", default="test")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--attack-epsilon", type=float, default=0.35)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--augment", action="append", default=[])
    parser.add_argument("--attack-ramp", type=float, default=FinetuneSettings.attack_ramp)
    parser.add_argument("--warmup", type=float, default=FinetuneSettings.warmup)
    parser.add_argument("--clip-grad", type=float, default=FinetuneSettings.clip_grad)
    parser.add_argument("--hidden", type=int, action="append", default=[])
    parser.add_argument("--patch", type=int, metavar="P")
    parser.add_argument("--units", type=int, default=72, help="of each layer of it")
    parser.add_argument("--filters", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--radius", type=float, action="append", default=[])
    options = parser.parse_args()
    options.hidden = options.hidden or [128]
    radii = options.radius or [0.25, 0.5]
    torch.set_num_threads(1)

    def load(split: str) -> Images:
        return certvit.images(
            options.network, options.dataset, split=split, data_dir=options.data_dir
        )

    everything = load(options.split)
    images, labels = everything.tensors()
    model = certvit.network(options.network, double=True)
    images = images.double()
    with torch.no_grad():
        clean = model(images).argmax(1) == labels
    print(f"{options.network}: clean {shown(clean)}, frozen", end=" ")
    print(shown(frozen(model, images).argmax(1) == labels))
    few, truth = everything.limit(options.limit).tensors()
    few = few.double()
    for name, control in controls(options, load).items():
        with torch.no_grad():
            right = control(few).argmax(1) == truth
            clean = control(images).argmax(1) == labels
        certifier = LocalCertifier(control, control.input_size, Local(at=tuple(radii)))
        largest = torch.tensor(
            [
                certifier.radius(image[None], int(label)) if hit else 0.0
                for image, label, hit in zip(few, truth, right, strict=True)
            ]
        )
        proven = (f"at {radius} {shown(largest > radius)}" for radius in radii)
        print(f"{name}: clean {shown(clean)}, certified", ", ".join(proven))


if __name__ == "__main__":
    main()
