"""Checks of the evaluation itself: signs that a robust accuracy says more about the attack than
about the net.

The idea is auto-attack's (Croce & Hein 2020, `other_utils` and `checks`; Athalye et al. 2018,
Carlini et al. 2019).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.attack.crafting import undisturbed
from certcli.attack.run import AttackRecord, attack_images
from certcli.attack.settings import AttackSettings
from certcli.evaluation.radii import attacked_radius, proven_radius
from certcli.evaluation.region import Region


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong with an evaluation. fatal: it proves a bug, in the tool or in the
    certificate.
    """

    name: str
    raised_if: str
    explanation: str
    fatal: bool = False


@dataclass(frozen=True)
class Flag:
    """The outcome of a check: raised or not, and the measurement behind it."""

    check: Check
    raised: bool
    measured: str


_SUM_TOLERANCE = (
    1e-3  # k float32 softmax values rounded once each: 1,000 classes sum to 1 within 1e-4
)
_ZERO_SHARE = 0.05
_RISE_SHARE = 0.02
_RISE_IMAGES = 2

CHECKS = {
    check.name: check
    for check in (
        Check(
            "probabilities",
            "every output row lies in [0, 1] and sums to 1 (or all its exponentials do)",
            "The model seems to return (log) probabilities. The softmax of a confident net saturates in float32, its "
            "gradient vanishes, and attacks on it fail for no merit of the net. Remove the softmax.",
        ),
        Check(
            "zero gradients",
            f"the input gradient of the cross entropy is exactly 0 (or not finite) for more than {_ZERO_SHARE:.0%} of "
            "the images that are classified correctly",
            "Gradient attacks cannot move these images: the loss saturates, or something in the model (rounding, "
            "argmax, detach) masks gradients. Trust margin-pgd and square more than pgd and apgd-ce here.",
        ),
        Check(
            "randomness",
            "two forward passes of the same images differ by more than 1e-4 of the largest logit",
            "The model draws at random in eval mode. Single-draw gradients and verdicts are noise: use eot-pgd, and "
            "more than one sample for the verdict.",
        ),
        Check(
            "rising accuracy",
            f"robust accuracy at a larger radius exceeds that at a smaller one by more than {_RISE_SHARE:.0%} of the "
            f"images and by at least {_RISE_IMAGES} images, PGD run anew at each radius",
            "A larger ball contains the smaller one, so robust accuracy can only fall. That it rises means that the "
            "attack loses its way: fewer steps than the radius needs, or masked gradients.",
        ),
        Check(
            "weak iteration",
            f"PGD breaks fewer images than FGSM, both run alone at the same radius, by more than {_RISE_SHARE:.0%} of the "
            f"images and by at least {_RISE_IMAGES} images",
            "Many small steps should do no worse than one large one. That they do is the classical sign of masked "
            "gradients (Athalye et al. 2018, section 3.1), or of a step size that does not fit the radius.",
        ),
        Check(
            "certified above attacked",
            "an adversarial image lies strictly inside the certified radius of its image",
            "A certificate and a counterexample cannot both be right: this is a bug. Report it with the index.",
            fatal=True,
        ),
    )
}


def inspect_model(
    model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0
) -> tuple[Flag, ...]:
    """Flags about the net on one batch: probabilities, zero gradients, randomness. (b, c, h, w),
    (b,).

    Needs a few dozen images to mean anything. UsageError in training mode.
    """
    labels = labels.to(images.device)
    with undisturbed(model, images, seed):
        point = images.detach().clone().requires_grad_(True)
        logits = model(point)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        slope = (
            torch.autograd.grad(loss, point, allow_unused=True)[0] if loss.requires_grad else None
        )
        logits = logits.detach()
        with torch.no_grad():
            repeated = model(images)
    return (
        _probabilities(logits),
        _zero_gradients(slope, logits.argmax(dim=1) == labels),
        _randomness(logits, repeated),
    )


def _probabilities(logits: Tensor) -> Flag:
    def are_shares(values: Tensor) -> bool:
        sums = values.sum(dim=1)
        return bool(
            ((values >= 0) & (values <= 1)).all() and ((sums - 1).abs() < _SUM_TOLERANCE).all()
        )

    plain = are_shares(logits.double())
    logarithmic = are_shares(logits.double().exp())
    spread = f"outputs from {logits.min().item():.4g} to {logits.max().item():.4g}"
    return Flag(CHECKS["probabilities"], plain or logarithmic, spread)


def _zero_gradients(slope: Tensor | None, correct: Tensor) -> Flag:
    check = CHECKS["zero gradients"]
    of = int(correct.sum())
    if slope is None:
        return Flag(check, True, "the output does not depend on the image by any gradient")
    length = slope.flatten(1).abs().amax(dim=1)
    dead = int((((length == 0) | ~length.isfinite()) & correct).sum())
    return Flag(check, dead > _ZERO_SHARE * of, f"{dead} of {of} correctly classified images")


def _randomness(logits: Tensor, repeated: Tensor) -> Flag:
    difference = (logits - repeated).abs().max().item()
    largest = logits.abs().max().item()
    return Flag(
        CHECKS["randomness"],
        difference > 1e-4 * largest,
        f"largest difference of logits {difference:.3g}",
    )


def inspect_attacks(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> tuple[Flag, ...]:
    """Flags about gradient attacks on one batch: FGSM and PGD alone at the radius, PGD at twice and
    half the radius.

    (b, c, h, w), (b,). Accuracy can only have risen from half the radius where images withstand a
    larger one: these are attacked there first, and the others where some of these fall. UsageError
    in training mode.
    """

    def standing(names: Sequence[str], factor: float, rows: Sequence[int]) -> list[set[int]]:
        wider = replace(region, radius=region.radius * factor)
        # a fixed step size would be another attack at another radius
        free = replace(settings, step_size=None if factor != 1.0 else settings.step_size)
        batch = [(torch.tensor(rows), images[rows], labels[rows])]
        records = list(attack_images(model, batch, names, wider, free, independent=True))
        return [
            {record.index for record in records if record.robust[name] is True} for name in names
        ]

    every = set(range(len(images)))
    single, at = standing(("fgsm", "pgd"), 1.0, sorted(every))
    beyond = (
        standing(("pgd",), 2.0, sorted(every))[0] if at != every else at
    )  # nothing rises above all
    firm = at | beyond
    largest = max(len(at), len(beyond))
    within = firm
    if _exceeds(largest, len(images)):
        (within,) = standing(("pgd",), 0.5, sorted(firm))
        if firm != every and _exceeds(largest - len(within), len(images)):
            within |= standing(("pgd",), 0.5, sorted(every - firm))[0]
    counts = {0.5: len(within), 1.0: len(at), 2.0: len(beyond)}
    return (
        rising_accuracy(
            {region.radius * factor: n / len(images) for factor, n in counts.items()}, len(images)
        ),
        weak_iteration(len(single), len(at), len(images)),
    )


def rising_accuracy(shares: Mapping[float, float], images: int) -> Flag:
    """max over r < r' of robust(r') - robust(r), independent runs at each radius, against the
    allowance.
    """
    radii = sorted(shares)
    rises = [
        (shares[large] - shares[small], small, large)
        for small in radii
        for large in radii
        if small < large
    ]
    rise, small, large = max(rises, default=(0.0, 0.0, 0.0))
    raised = _exceeds(round(rise * images), images)
    measured = (
        f"{rise:+.1%} from radius {small:.4g} to {large:.4g}" if rise > 0 else "falls or stays"
    )
    return Flag(CHECKS["rising accuracy"], raised, measured)


def weak_iteration(after_fgsm: int, after_pgd: int, images: int) -> Flag:
    """robust images after PGD - robust images after FGSM, each attack run alone, against the
    allowance.
    """
    measured = f"{after_fgsm} of {images} images withstand FGSM, {after_pgd} PGD"
    return Flag(CHECKS["weak iteration"], _exceeds(after_pgd - after_fgsm, images), measured)


def _exceeds(difference: int, images: int) -> bool:
    """More than the chance of single images: random starts may win or lose one."""
    return difference >= _RISE_IMAGES and difference > _RISE_SHARE * images


def certified_above_attacked(records: Iterable[AttackRecord], radii: Mapping[int, float]) -> Flag:
    """Is |x' - x|_2 < the certified l2 radius for some image? `radii`: image index -> certified
    radius, pixel l2.

    Records of either norm count, by the l2 norm of what they found. Misclassified images carry no
    counterexample.
    """
    broken: list[tuple[int, float, float]] = []
    for record in records:
        certified = radii.get(record.index, 0.0)
        if record.correct and record.l2 is not None and record.l2 < certified:
            broken.append((record.index, record.l2, certified))
    if not broken:
        return Flag(
            CHECKS["certified above attacked"], False, "no counterexample inside a certified radius"
        )
    index, norm, certified = max(broken, key=lambda entry: entry[2] - entry[1])
    worst = f"{len(broken)} images, worst: index {index} certified to {proven_radius(certified)}"
    worst += f", broken at {attacked_radius(norm)}"
    return Flag(CHECKS["certified above attacked"], True, worst)


def raised(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    return tuple(flag for flag in flags if flag.raised)
