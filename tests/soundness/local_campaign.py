"""A long campaign against certificates: random networks, images and radii; every node, and attacks at the radius.

    python -m tests.soundness.local_campaign --seconds 600 --seed 0
    python -m tests.soundness.local_campaign --programs --seconds 600 --seed 0

The first takes vision transformers, the second random programs of odd layouts (tests/soundness/local_laws.py). Prints one
line a seed, from which --seed goes on, and exits 1 at the first point found outside an enclosure or a certified ball.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.enclosure.zonotopes.domain import LocalNetwork
from certcli.enclosure.zonotopes.form import Unbounded
from certcli.lipschitz.network import prove
from certcli.models.build import PixelModel
from tests.enclosure.test_zonotope_networks import OPTIONS, SIZE, SPEC, image, largest_share, network
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosure_cases import CASES, forms
from tests.soundness.local_laws import Found, check


def relaxations(seed: int) -> float:
    """The laws of tests/enclosure/test_zonotopes.py at other seeds: the largest share of what a form leaves free."""
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


def attack(
    model: nn.Module, pixels: Tensor, label: int, radius: float, starts: int, seed: int, kind: str, boxed: bool = False
) -> float:
    """The least margin found within `radius` by 30 steps of descent from `starts` points.

    kind: "inside" (from anywhere in the ball, projected onto it) or "boundary" (every point exactly at the radius). boxed: in
    the linf ball.
    """
    generator = torch.Generator().manual_seed(seed)
    length = lambda t: (t.flatten(1).abs().amax(1) if boxed else t.flatten(1).norm(dim=1)).view(-1, 1, 1, 1)  # noqa: E731
    delta = torch.randn(starts, *SIZE, generator=generator).double()
    delta = delta / length(delta) * radius
    if kind == "inside":
        delta *= torch.rand(starts, 1, 1, 1, generator=generator).double() ** 0.1
    least = float("inf")
    classes = len(model(pixels)[0])
    aimed = [j for j in range(classes) if j != label]
    rows = torch.arange(starts)
    targets = torch.tensor(aimed)[rows % len(aimed)]
    for step in range(30):
        delta = ((pixels + delta).clamp(0, 1) - pixels).requires_grad_(True)  # certificates speak of [0, 1]
        logits = model(pixels + delta)
        margins = logits[:, [label]] - logits[:, aimed]
        chosen = logits[:, label] - logits[rows, targets] if step < 15 else margins.amin(1)
        least = min(least, float(margins.detach().min()))
        (gradient,) = torch.autograd.grad(chosen.sum(), delta)
        slope = gradient.sign() if boxed else gradient / length(gradient).clamp_min(1e-300)
        delta = delta.detach() - 0.4 * radius * (1 - step / 30) * slope
        if boxed:
            delta = delta.clamp(-radius, radius)
        elif kind == "boundary":
            delta = delta * (radius / length(delta))
        else:
            delta = delta * (radius / length(delta)).clamp_max(1)
    return least


def plain_network(seed: int) -> PixelModel:
    """A small convolutional network, whose global bound is within a small factor of the truth."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 6, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return PixelModel(SPEC, net).double().eval()


def certified(seed: int) -> Iterator[tuple[str, nn.Module, Tensor, int, float, bool]]:
    """What is attacked at one seed: name, network, image, class, certified radius, whether in linf."""
    model, pixels = plain_network(seed), image(seed)
    label = int(model(pixels).argmax())
    (row,) = LipschitzCertifier(model, prove(model, 4)).batch([0], pixels, [label])
    yield "lipschitz", model, pixels, label, row.radius, False
    kind = list(OPTIONS)[seed % len(OPTIONS)]
    model = network(kind, seed)
    label = int(model(pixels).argmax())
    for effort in ("norms", "zonotope", "backward"):
        for norm in ("l2", "linf"):
            if kind == "qk norm" and effort == "norms":
                continue  # has no theorem there
            certifier = LocalCertifier(model, SIZE, Local(effort, norm), symbols=(60, 1000)[seed % 3 > 0], steps=3)
            (row,) = certifier.batch([0], pixels, [label])
            yield f"{effort} {norm} {kind}", model, pixels, label, row.radius, norm == "linf"


def enclosed(seed: int) -> float:
    """The largest share of what forms leave free, over all nodes of a random network, at several radii and settings."""
    kind = list(OPTIONS)[seed % len(OPTIONS)]
    model, pixels = network(kind, seed), image(seed)
    label, local = int(model(pixels).argmax()), LocalNetwork(model, SIZE)
    return max(
        largest_share(local, pixels, label, r, squares, symbols, partial=True)
        for r in (0.03, 1e-3, 1e-7)
        for squares, symbols in ((128, 4000), (0, 4000), (128, 60))
    )


def programs(seconds: float, seed: int) -> int:
    """The laws over random programs: counts of what was tried, and what domains refuse."""
    found, stop, first = Found(), time.monotonic() + seconds, seed
    while time.monotonic() < stop and not found.broken:
        check(seed, found)
        seed += 1
        if seed % 20 == 0:
            print(f"seed {seed}: {dict(sorted(found.tried.items()))}", flush=True)
    for reason, count in found.refused.most_common(20):
        print(f"refused {count}: {reason}")
    for line in found.broken:
        print(f"VIOLATED: {line}")
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(found.tried.items()))
    print(f"seeds {first} to {seed - 1}: {told}; refused {found.refused.total():,}; broken {len(found.broken)}")
    return 1 if found.broken else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=400)
    parser.add_argument("--attacks-only", action="store_true")
    parser.add_argument("--programs", action="store_true")
    asked = parser.parse_args()
    if asked.programs:
        return programs(asked.seconds, asked.seed)
    stop, seed = time.monotonic() + asked.seconds, asked.seed
    tried: Counter[str] = Counter()
    while time.monotonic() < stop:
        for name, model, pixels, label, radius, boxed in certified(seed):
            if not 0 < radius < float("inf"):
                continue
            for kind in ("inside", "boundary"):
                margin = attack(model, pixels, label, radius, asked.starts, seed, kind, boxed)
                tried[name.split()[0] + (" linf" if boxed else " l2")] += asked.starts
                if not margin > 0:
                    print(f"VIOLATED: seed {seed} {name}, radius {radius:.6g}, {kind}: margin {margin:.3g}")
                    return 1
        shares, laws = (0.0, 0.0) if asked.attacks_only else (enclosed(seed), relaxations(seed + 1000))
        print(f"seed {seed}: {sum(tried.values()):,} attacks, nodes {shares:.3f}, laws {laws:.3f}", flush=True)
        if max(shares, laws) > 1:
            print("VIOLATED")
            return 1
        seed += 1
    each = ", ".join(f"{name} {count:,}" for name, count in sorted(tried.items()))
    print(f"nothing found: {seed - asked.seed} seeds, {sum(tried.values()):,} attacks of 30 steps ({each})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
