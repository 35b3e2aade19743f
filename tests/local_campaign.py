"""A long campaign against local certificates: random networks, images and radii; every node and attacks at the radius.

    python -m tests.local_campaign --seconds 600 --seed 0

Prints one line a network and exits 1 at the first point found outside an enclosure or a certified ball.
"""

import argparse
import sys
import time

import torch
from torch import Tensor, nn

from certcli.certify.local import LocalCertifier
from certcli.enclosure.domain import LocalNetwork
from certcli.enclosure.form import Unbounded
from tests.enclosure_cases import CASES, forms
from tests.test_enclosure import outside, symbols
from tests.test_enclosure_networks import OPTIONS, SIZE, image, largest_share, network


def relaxations(seed: int) -> float:
    """The laws of tests/test_enclosure.py at other seeds: the largest share of what a form leaves free."""
    worst = 0.0
    for case in CASES:
        for size in (1e-6, 1e-2, 0.3, 0.8):
            for squares_on in (True, False):
                inputs = forms(case, size, squares_on, seed, mixed=seed % 2 == 1)
                try:
                    far, free = outside(case, inputs, *symbols(400, seed))
                except Unbounded:  # 1/x and its like of a form that reaches 0
                    continue
                worst = max(worst, float((far / free.clamp_min(1e-300)).max()))
    return worst


def attack(model: nn.Module, pixels: Tensor, label: int, radius: float, starts: int, seed: int) -> tuple[float, int]:
    """The least margin found within `radius` (descent from random starts, on the sphere and inside), and the attempts."""
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(starts, *SIZE, generator=generator).double()
    delta = delta / delta.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * radius
    delta[::3] *= torch.rand(len(delta[::3]), 1, 1, 1, generator=generator).double()
    least, attempts = float("inf"), 0
    for step in range(30):
        delta.requires_grad_(True)
        logits = model(pixels + delta)
        margins = logits[:, label : label + 1] - logits
        margins = margins + torch.nn.functional.one_hot(torch.tensor(label), logits.shape[1]) * 1e9
        chosen = margins[torch.arange(starts), torch.arange(starts) % logits.shape[1]] if step < 15 else margins.amin(1)
        least, attempts = min(least, float(margins.detach().min())), attempts + starts
        (gradient,) = torch.autograd.grad(chosen.sum(), delta)
        slope = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)
        delta = delta.detach() - 0.4 * radius * (1 - step / 30) * slope
        delta = delta * (radius / delta.flatten(1).norm(dim=1)).clamp_max(1).view(-1, 1, 1, 1)
    return least, attempts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=400)
    asked = parser.parse_args()
    stop, seed, total = time.monotonic() + asked.seconds, asked.seed, 0
    while time.monotonic() < stop:
        kind = list(OPTIONS)[seed % len(OPTIONS)]
        model, pixels = network(kind, seed), image(seed)
        label = int(model(pixels).argmax())
        local = LocalNetwork(model, SIZE)
        certifier = LocalCertifier(model, SIZE, symbols=(60, 4000)[seed % 3 > 0], steps=3)
        radius = certifier.radius(pixels, label)
        shares = [
            largest_share(local, pixels, label, r, squares, symbols, partial=True)
            for r in ((radius, radius / 30, 1e-7) if radius else (1e-7,))
            for squares, symbols in ((128, 4000), (0, 4000), (128, 60))
        ]
        margin, attempts = attack(model, pixels, label, radius, asked.starts, seed) if radius else (1.0, 0)
        total += attempts
        laws = relaxations(seed + 1000)
        print(
            f"seed {seed} {kind}: radius {radius:.4g}, nodes {max(shares):.3f}, laws {laws:.3f}, least margin {margin:.3g}"
        )
        if max(shares) > 1 or laws > 1 or not margin > 0:
            print("VIOLATED")
            return 1
        seed += 1
    print(f"nothing found: {seed - asked.seed} networks, {total:,} attacked images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
