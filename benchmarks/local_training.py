"""Can a softmax transformer be trained so that local certificates stay tight? Plain, adversarial, and with a penalty.

    python benchmarks/local_training.py [--split test] [--arms plain adversarial ...] [--seed 0] [--images 30] [--mnist DIR]

Every arm trains the same network from the same weights on the embedded digits: `certvit_vit_digits` (pre-LN, softmax,
LayerNorm, depth 2, 4 heads) with patch 4 (5 tokens) and width 32; "linear" is the control, one linear layer of the pixels
trained like "adversarial". With --mnist DIR (torchvision's layout) it is 28 x 28 images, patch 7 (17 tokens), and the first
TRAINED_ON training images. Then the certifier of `certify --method local` is asked, image by image, whether a radius is
proven (`LocalCertifier.proven`, effort auto: zonotopes here). Shares are of all images named (the classes in turn), wrong
ones counting as not certified, with Clopper-Pearson intervals over the images; one seed is one network, and they say nothing
of other seeds. "frozen" is clean accuracy with every attention's probabilities replaced by their mean over the images: what
is left if attention may not depend on the image.

The penalty is added to the adversarial loss. An enclosure carries the linear part of every tensor exactly; what it loses,
it loses where the network is not linear, and there in proportion to squares of alpha, the row norms of the Jacobian A with
respect to the pixels (docs/local.md, 1.1 and 3 to 7). So the penalty is, summed over places and averaged over images and
entries,

    LayerNorm  |A_y|_F^2 / |y|^2     the move of the centred token y relative to its length
    softmax    alpha^2 of the scores less their mean over the keys
    GELU       alpha^2 of its inputs

estimated without bias in the limit h -> 0 by one random direction e an image: |A_i|_2^2 = n E (A_i . e)^2 for e uniform on
the sphere of R^n, and A e = (z(x + h e) - z(x)) / h. Differentiable through both passes; it is no bound, and proves nothing.
Choose on --split val; the table is of --split test.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.certify.local import LocalCertifier
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.intervals import share_interval
from certcli.evaluation.threat import Threat
from certcli.images import datasets
from certcli.models import build as models

DIGITS, MNIST = (InputSpec(size=(1, side, side), mean=(0.5,), std=(0.5,)) for side in (8, 28))
PATCH = {DIGITS: 4, MNIST: 7}
TRAINED_ON = 20_000
RADII = (0.05, 0.1, 0.25)
TRAINED_AT, TRAIN_STEPS, ATTACK_STEPS, ATTACKED = 0.25, 5, 40, 200
STEP = 0.02  # h of the penalty, in pixel units

ARMS: dict[str, tuple[bool, float]] = {
    "linear": (True, 0.0),
    "plain": (False, 0.0),
    "adversarial": (True, 0.0),
    **{f"penalty {weight}": (True, weight) for weight in (0.003, 0.03, 0.1, 0.3, 1.0)},
}
"""Name -> (trained on PGD images?, weight of the penalty)."""


def load(split: str, mnist: Path | None) -> tuple[Tensor, Tensor]:
    """The images of a split, the classes in turn, and their labels; of MNIST as many as are used."""
    if mnist is None:
        return datasets.load("digits", DIGITS, split).in_turn().tensors()
    images = datasets.load("torch/mnist", MNIST, split, mnist)
    return images.select(range(min(len(images), TRAINED_ON))).in_turn().tensors()


def build(linear: bool, seed: int, spec: InputSpec) -> models.PixelModel:
    torch.manual_seed(seed)
    size = {"img_size": spec.size[1], "embed_dim": 32, "patch_size": PATCH[spec]}
    net = models.create("certvit_vit_digits", size, initialise=True)
    if linear:
        net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(spec.size), 10))
    return models.PixelModel(spec, net).eval()


def climb(
    model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, steps: int, draws: torch.Generator
) -> Tensor:
    """PGD on the margin max_j z_j - z_y from a random start, steps of 2.5 r / steps: -> (b, c, h, w)."""
    moved = threat.random_start(images, draws)
    for _ in range(steps):
        moved.requires_grad_(True)
        logits = model(moved)
        own = functional.one_hot(labels, logits.shape[1]).bool()
        margins = logits.masked_fill(own, -math.inf).amax(1) - logits[own]
        (gradient,) = torch.autograd.grad(margins.sum(), moved)
        moved = threat.project(moved.detach() + 2.5 * threat.radius / steps * threat.steepest(gradient), images)
    return moved.detach()


def penalty(model: models.PixelModel, images: Tensor, draws: torch.Generator) -> Tensor:
    """What the module's docstring says, of the inputs of every nonlinear place: ()."""
    seen, hooks, pixels = [], [], images[0].numel()
    for path, module in model.net.named_modules():
        if isinstance(module, nn.LayerNorm | nn.GELU):
            place = "norm" if isinstance(module, nn.LayerNorm) else "gelu"
            hooks.append(module.register_forward_pre_hook(lambda _, args, p=place: seen.append((p, args[0]))))
        elif path.endswith(".attn"):
            into = lambda _, __, out, h=module.num_heads: seen.append(("softmax", scores(out, h)))  # noqa: E731
            hooks.append(module.qkv.register_forward_hook(into))
    directions = torch.randn(images.shape, generator=draws)
    directions /= directions.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    model(torch.cat([images, images + STEP * directions]))
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    for place, values in seen:
        if place != "gelu":
            values = values - values.mean(-1, keepdim=True)
        here, there = values.chunk(2)
        squares = (there - here).square() * (pixels / STEP**2)
        if place == "norm":
            squares = squares.sum(-1) / (here.square().sum(-1) + 1e-6)
        total = total + squares.mean()
    return total


def scores(qkv: Tensor, heads: int) -> Tensor:
    """What softmax is taken of, from timm's (b, n, 3 d): (b, heads, n, n)."""
    b, n, width = qkv.shape
    query, key, _ = qkv.view(b, n, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    return query @ key.transpose(-1, -2) * (width // 3 // heads) ** -0.5


def train(
    model: models.PixelModel, images: Tensor, labels: Tensor, adversarial: bool, weight: float, epochs: int, seed: int
) -> None:
    """AdamW, batch 64, one cycle to 3e-3; the attack and the penalty grow over the first half of the training."""
    draws = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    batches = len(images) // 64
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=epochs * batches)
    for step in range(epochs * batches):
        if step % batches == 0:
            order = torch.randperm(len(images), generator=draws)
        chosen = order[step % batches * 64 :][:64]
        x, y, grown = images[chosen], labels[chosen], min(1.0, 2 * step / (epochs * batches))
        if adversarial:
            x = climb(model, x, y, Threat("l2", grown * TRAINED_AT), TRAIN_STEPS, draws)
        loss = functional.cross_entropy(model(x), y)
        if weight:
            loss = loss + grown * weight * penalty(model, images[chosen], draws)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()


def share(hits: Tensor) -> str:
    low, high = share_interval(int(hits.sum()), len(hits))
    return f"{int(hits.sum())}/{len(hits)} ({100 * low:.0f}-{100 * high:.0f} %)"


@torch.no_grad()
def frozen(model: nn.Module, images: Tensor) -> Tensor:
    """Logits with the probabilities of every attention replaced by their mean over these images: (b, k)."""
    hooks = []
    for path, module in model.named_modules():
        if path.endswith(".attn"):
            module.fused_attn = False
            hooks.append(module.attn_drop.register_forward_hook(lambda _, __, out: out.mean(0, True).expand_as(out)))
    logits = model(images)
    for hook in hooks:
        hook.remove()
    return logits


def proven(model: models.PixelModel, images: Tensor, labels: Tensor) -> tuple[dict[float, Tensor], float]:
    """Which images are proven at each radius, radii rising until the first that is not proven; CPU seconds a call."""
    certifier, calls, started = LocalCertifier(model, model.input_size), 0, time.process_time()
    found = {radius: torch.zeros(len(labels), dtype=torch.bool) for radius in RADII}
    for index in (model(images).argmax(1) == labels).nonzero().flatten().tolist():
        for radius in RADII:
            calls += 1
            if not certifier.proven(images[index : index + 1], int(labels[index]), radius):
                break
            found[radius][index] = True
    return found, (time.process_time() - started) / max(1, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--images", type=int, default=30, help="images certified")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST in place of the digits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = DIGITS if options.mnist is None else MNIST
    for arm in options.arms:
        model, started = build(arm == "linear", options.seed, spec), time.process_time()
        train(model, *load("train", options.mnist), *ARMS[arm], options.epochs, options.seed)
        trained = time.process_time() - started
        model = model.double().requires_grad_(False)
        images, labels = load(options.split, options.mnist)
        images, some, few = images.double(), slice(ATTACKED), slice(options.images)
        right = {0.0: model(images[some]).argmax(1) == labels[some]}
        for radius in RADII:
            draws = torch.Generator().manual_seed(options.seed)
            moved = climb(model, images[some], labels[some], Threat("l2", radius), ATTACK_STEPS, draws)
            right[radius] = right[0.0] & (model(moved).argmax(1) == labels[some])
        found, seconds = proven(model, images[few], labels[few])
        print(f"{arm}: trained in {trained:.0f} s, {seconds:.2f} s a call of the certifier")
        print(f"  {'frozen':14} {share(frozen(model, images[some]).argmax(1) == labels[some])}")
        for radius, hits in right.items():
            print(f"  {f'PGD {radius}' if radius else 'clean':14} {share(hits)}")
        for radius, hits in found.items():
            broken = int((hits & ~right[radius][: len(hits)]).sum())
            print(f"  {f'certified {radius}':14} {share(hits)}, {broken} of them broken by PGD", flush=True)


if __name__ == "__main__":
    main()
