"""Time of an evaluation with certvit against torchattacks called plainly on every image, both in
one run.

    python benchmarks/attack.py [--images 397] [--threads 1] [--device cpu]
    python benchmarks/attack.py --autoattack 128 [--radii 0.1 0.2 0.3]

The net is the reference ViT for the embedded digits, its training stopped early so that it has
about 75 % of the test images right. Each workload runs twice in turn, the shorter time counts.
certvit's time includes its verdicts; the plain
side only counts predictions. Robust accuracy: no attack of the workload changed the prediction of
an image that was classified correctly. The two sides draw other random starts, so single images may
differ.

With --autoattack: torchattacks' parts with the published budgets (100 steps, 9 targets, 5,000
queries), each on what withstood those before, against `autoattack-full` (the same budgets) and
`autoattack` (runs without prospects are left), on the first N test images, each once; and which
images one side broke and the other did not.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from certcli.attack.catalogue import torchattacks_library
from certcli.attack.judge import judge_points
from certcli.attack.run import RobustAccuracy, attack_images, robust_accuracy
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Region
from certcli.images import datasets
from certcli.images.labelled import Batch
from certcli.models import build
from certcli.models.pixels import PixelModel

RADIUS = 0.2
ENOUGH = 0.82  # on the 140 validation images; 75 % of the test images
BATCH = 128
Plain = Callable[[nn.Module, Region], list[Callable[[Tensor, Tensor], Tensor]]]


def train(seed: int) -> PixelModel:
    """The digits ViT, stopped once `ENOUGH` of the validation images are right."""
    torch.manual_seed(seed)
    checkpoint = build.initialise("certvit_vit_digits", {}, SPEC, 10, seed)
    net = build.load(checkpoint).train().requires_grad_(True)
    images, labels = datasets.load_dataset("digits", SPEC, "train").tensors()
    validation, truth = datasets.load_dataset("digits", SPEC, "val").tensors()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(2000):
        rows = torch.randint(len(images), (64,))
        loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 5 == 0:
            with torch.no_grad():
                if (net(validation).argmax(dim=1) == truth).float().mean() >= ENOUGH:
                    break
    return net.eval()


def pgd(net: nn.Module, region: Region) -> Callable[[Tensor, Tensor], Tensor]:
    return torchattacks_library().PGDL2(
        net, eps=region.radius, alpha=2.5 * region.radius / 20, steps=20
    )


def apgd(net: nn.Module, region: Region) -> Callable[[Tensor, Tensor], Tensor]:
    return torchattacks_library().APGD(net, norm="L2", eps=region.radius, steps=20)


WORKLOADS: dict[str, tuple[list[str], int, Plain]] = {
    "PGD-20, one run": (["pgd-20"], 1, lambda net, region: [pgd(net, region)]),
    "PGD-20, 5 restarts": (["pgd-20"], 5, lambda net, region: [pgd(net, region)] * 5),
    "PGD-20, then APGD-CE-20": (
        ["pgd-20", "apgd-ce-20"],
        1,
        lambda net, region: [pgd(net, region), apgd(net, region)],
    ),
}


def plainly(
    attacks: list[Callable[[Tensor, Tensor], Tensor]], net: nn.Module, batches: list[Batch]
) -> float:
    robust = total = 0
    torch.manual_seed(0)
    for _, images, labels in batches:
        with torch.no_grad():
            standing = net(images).argmax(dim=1) == labels
        for attack in attacks:
            adversarial = attack(images, labels)
            with torch.no_grad():
                standing &= net(adversarial).argmax(dim=1) == labels
        robust = robust + int(standing.sum())
        total = total + len(labels)
    return robust / total


def ensemble(net: nn.Module, region: Region, batches: list[Batch]) -> set[int]:
    """Standard AutoAttack from torchattacks' parts: indices of the images that withstand."""
    lib = torchattacks_library()
    common = {"norm": "L2", "eps": region.radius}
    robust: set[int] = set()
    for indices, images, labels in batches:
        with torch.no_grad():
            standing = (net(images).argmax(dim=1) == labels).nonzero().flatten()
        for attack in (
            lib.APGD(net, steps=100, **common),
            lib.APGDT(net, steps=100, **common),
            lib.FAB(net, steps=100, multi_targeted=True, **common),
            lib.Square(net, n_queries=5000, **common),
        ):
            if len(standing):
                adversarial = attack(images[standing], labels[standing])
                # FAB's points may lie beyond the radius: the verdict is ours on both sides
                verdict = judge_points(net, images[standing], labels[standing], adversarial, region)
                standing = standing[~verdict.success]
        robust |= set(indices[standing.cpu()].tolist())
    return robust


def compare(
    net: nn.Module, batches: list[Batch], radii: list[float], clock: Callable[[], float]
) -> None:
    """AutoAttack, three ways."""
    print(
        f"{'radius':>6} {'attack':22} {'withstand':>9} {'seconds':>8} {'times':>6}  differs from torchattacks on"
    )
    for radius in radii:
        region, settings = Region("l2", radius), AttackSettings()

        def ours(
            name: str, region: Region = region, settings: AttackSettings = settings
        ) -> set[int]:
            rows = attack_images(net, batches, [name], region, settings)
            return {row.index for row in rows if row.withstood}

        slow, first = timed(lambda region=region: ensemble(net, region, batches), clock)
        print(f"{radius:6g} {'torchattacks':22} {len(first):9} {slow:8.1f} {1:6.2f}", flush=True)
        for name in ("autoattack-full", "autoattack"):
            seconds, fooled = timed(lambda name=name, ours=ours: ours(name), clock)
            differs = f"{len(first - fooled)} broken here only, {len(fooled - first)} there only"
            print(
                f"{radius:6g} {name:22} {len(fooled):9} {seconds:8.1f} {slow / seconds:6.2f}  {differs}",
                flush=True,
            )


def timed(work: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    start = clock()
    result = work()
    return clock() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=397)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--autoattack", type=int, metavar="N", help="compare AutoAttack on the first N test images"
    )
    parser.add_argument("--radii", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # seconds of CPU hold on a busy machine too; what a GPU does passes by the CPU's clock
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    net = train(0).to(options.device)
    images = datasets.load_dataset("digits", SPEC, "test").limit(
        options.autoattack or options.images
    )
    batches = [
        (index, x.to(options.device), y.to(options.device)) for index, x, y in images.batches(BATCH)
    ]
    if options.autoattack:
        compare(net, batches, options.radii, clock)
        return
    region = Region("l2", RADIUS)
    print(
        f"{len(images)} test images, l2 radius {RADIUS}, batches of {BATCH}, {options.threads} thread(s)"
    )
    print(
        f"{'workload':28} {'clean':>6} {'robust plain':>13} {'certvit':>8} {'plain s':>8} {'certvit s':>9} {'ratio':>6}"
    )
    for name, (names, restarts, plain) in WORKLOADS.items():
        settings = AttackSettings(restarts=restarts)

        def ours(names: list[str] = names, settings: AttackSettings = settings) -> RobustAccuracy:
            return robust_accuracy(attack_images(net, batches, names, region, settings))

        def theirs(plain: Plain = plain) -> float:
            return plainly(plain(net, region), net, batches)

        slow = []
        fast = []
        for _ in range(2):
            seconds, robust = timed(theirs, clock)
            slow.append(seconds)
            seconds, summary = timed(ours, clock)
            fast.append(seconds)
        ratio = min(slow) / min(fast)
        print(
            f"{name:28} {summary.clean:6.1%} {robust:13.1%} {summary.robust:8.1%} {min(slow):8.2f} {min(fast):9.2f} "
            f"{ratio:6.2f}"
        )


SPEC = build.spec_of(build.create("certvit_vit_digits", {}, initialise=False))

if __name__ == "__main__":
    main()
