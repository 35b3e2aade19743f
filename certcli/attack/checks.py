"""Checks of the evaluation: signs that robust accuracy says more of the attack than of the net.

The idea is auto-attack's (Croce & Hein 2020, `other_utils` and `checks`; Athalye et al. 2018,
Carlini et al. 2019).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from certcli.attack import judge, run, watched_model
from certcli.attack.families.ascent import log_odds
from certcli.attack.settings import AttackSettings, Planned
from certcli.evaluation import perturbation, threat
from certcli.evaluation.image_records import AttackRecord


@dataclass(frozen=True)
class Check:
    """A possible flaw of an evaluation. fatal: it proves a bug in the tool or the certificate."""

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
PAIR = _RISE_IMAGES
"""Images that are attacked together at twice the radius: fewer cannot raise the flag."""

CHECKS = {
    check.name: check
    for check in (
        Check(
            "probabilities",
            "every output row lies in [0, 1] and sums to 1 (or its exponentials do)",
            "The model seems to return (log) probabilities. The softmax of a confident net saturates in float32, its "
            "gradient vanishes, and attacks on it fail for no merit of the net. Remove the softmax.",
        ),
        Check(
            "zero gradients",
            f"the input gradient of the log odds is exactly 0 (or not finite) for more than {_ZERO_SHARE:.0%} of the "
            "images that are classified correctly",
            "Gradient attacks cannot move these images: something in the model (saturation, rounding, argmax, "
            "detach) masks gradients. Trust square more than attacks by gradients here.",
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
            f"images and by at least {_RISE_IMAGES} images; broken images are attacked again at twice the radius",
            "A larger ball contains the smaller one, so robust accuracy can only fall. That it rises means that the "
            "attack loses its way: fewer steps than the radius needs, or masked gradients.",
        ),
        Check(
            "weak iteration",
            f"the attacks break fewer images than FGSM alone at the same radius, by more than {_RISE_SHARE:.0%} of the "
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


First = tuple[Tensor, Tensor | None]
"""The first pass of an ascent: logits (b, k), and the slope of the log odds (b, c, h, w); None where
no gradient leads from the logits to the pixels."""


def first_pass(model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0) -> First:
    """Return logits and gradient at the images: (b, c, h, w), (b,). UsageError in training mode."""
    with watched_model.undisturbed(model, images, seed):
        point = images.detach().clone().requires_grad_(True)
        logits = model(point)
        loss = log_odds(logits, labels.to(images.device)).sum()
        slope = (
            torch.autograd.grad(loss, point, allow_unused=True)[0] if loss.requires_grad else None
        )
    return logits.detach(), slope


def inspect_model(
    model: nn.Module, images: Tensor, labels: Tensor, first: First, *, seed: int = 0
) -> tuple[Flag, ...]:
    """Flag probabilities, zero gradients and randomness on one batch (b, c, h, w), (b,)."""
    logits, slope = first
    # from another seed than the first pass, or a random net would draw the same twice
    with watched_model.undisturbed(model, images, seed + 1), torch.no_grad():
        repeated = model(images)
    return (
        _probabilities(logits),
        _zero_gradients(slope, logits.argmax(dim=1) == labels.to(images.device)),
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


@dataclass(frozen=True)
class Attacked:
    """Images that were attacked at one radius, (b, c, h, w), (b,), and what came of them.

    Attributes:
        records: of the same images, in order.
        plan: the attacks that ran.
    """

    images: Tensor
    labels: Tensor
    records: Sequence[AttackRecord]
    plan: Sequence[Planned]
    region: perturbation.Region


def inspect_attacks(
    model: nn.Module, attacked: Attacked, first: First, settings: AttackSettings, limit: int
) -> tuple[Flag, ...]:
    """Flags about the attacks: one step of FGSM from `first`, and what broke images anew at 2
    radii.

    Args:
        limit: passes of one image after which no more images are attacked at twice the radius.
    """
    passed: list[int] = []
    with model.register_forward_hook(lambda _, inputs, __: passed.append(len(inputs[0]))):
        return (
            _rising(model, attacked, settings, passed, limit),
            _weak(model, attacked, first, settings),
        )


def _rising(
    model: nn.Module, attacked: Attacked, settings: AttackSettings, passed: list[int], limit: int
) -> Flag:
    """Attack images that fell once more at 2 radii, two at a time; the others where these
    withstand."""
    wider = replace(attacked.region, radius=2 * attacked.region.radius)
    entries = {entry.label: entry for entry in attacked.plan}

    def withstood(rows: Sequence[int], first: Planned) -> int:
        # the whole plan, the attack that broke these images first: another one may break them where
        # that one, alone, steps too far
        plan = [first, *(entry for entry in attacked.plan if entry is not first)]
        part = torch.tensor(rows)
        batch = [(part, attacked.images[part], attacked.labels[part])]
        return sum(row.withstood for row in run.attack_images(model, batch, plan, wider, settings))

    broken: dict[str, list[int]] = {}
    standing: list[int] = []
    for row, record in enumerate(attacked.records):
        if record.withstood:
            standing.append(row)
        elif record.fell and record.broken_by is not None:
            broken.setdefault(record.broken_by, []).append(row)
    attempted = 0
    rises = 0
    for label, rows in broken.items():
        for start in range(0, len(rows), PAIR):
            if attempted and sum(passed) >= limit:
                break
            pair = rows[start : start + PAIR]
            attempted += len(pair)
            rises += withstood(pair, entries[label])
    falls = 0
    if _exceeds(rises, attempted):  # more images may fall at 2 radii than rise
        falls = len(standing) - withstood(standing, attacked.plan[0]) if standing else 0
    count = attempted + len(standing)
    shares = {
        attacked.region.radius: len(standing) / max(count, 1),
        wider.radius: (len(standing) + rises - falls) / max(count, 1),
    }
    return rising_accuracy(shares, count)


def _weak(model: nn.Module, attacked: Attacked, first: First, settings: AttackSettings) -> Flag:
    """Compare the attacks with one step of the radius along the first gradient."""
    images = attacked.images
    region = attacked.region
    exactly = settings.pixels == "8bit"
    logits, gradient = first
    slope = torch.zeros_like(images) if gradient is None else gradient
    point = images + perturbation.per_image(region.radii(images), images) * region.steepest(slope)
    if exactly:
        images = judge.rounded_to_8bit(images)
        point = judge.nearest_within(point, images, region)
    classes = logits.argmax(dim=1)
    verdict = judge.judge_points(
        model, images, attacked.labels, point, region, prediction=classes, exactly=exactly
    )
    after = sum(record.withstood for record in attacked.records)
    return weak_iteration(int(verdict.robust.sum()), after, len(images))


def rising_accuracy(shares: Mapping[float, float], images: int) -> Flag:
    """max over r < r' of robust(r') - robust(r), independent runs each, against the allowance."""
    radii = sorted(shares)
    rises = [
        (shares[large] - shares[small], small, large)
        for small in radii
        for large in radii
        if small < large
    ]
    rise, small, large = max(rises, default=(0.0, 0.0, 0.0))
    raised = _exceeds(round(rise * images), images)
    measured = "falls or stays"
    if rise > 0:
        measured = f"{rise:+.1%} of {images} images from radius {small:.4g} to {large:.4g}"
    return Flag(CHECKS["rising accuracy"], raised, measured)


def weak_iteration(after_fgsm: int, after_attacks: int, images: int) -> Flag:
    """robust images after the attacks - robust images after FGSM alone, against the allowance."""
    measured = f"{after_fgsm} of {images} images withstand FGSM, {after_attacks} the attacks"
    return Flag(CHECKS["weak iteration"], _exceeds(after_attacks - after_fgsm, images), measured)


def _exceeds(difference: int, images: int) -> bool:
    """More than the chance of single images: random starts may win or lose one."""
    return difference >= _RISE_IMAGES and difference > _RISE_SHARE * images


def certified_above_attacked(records: Iterable[AttackRecord], radii: Mapping[int, float]) -> Flag:
    """Is |x' - x|_2 < the certified radius for some image? `radii`: index -> radius, pixel l2.

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
    worst = (
        f"{len(broken)} images, worst: index {index} certified to {threat.proven_radius(certified)}"
    )
    worst += f", broken at {threat.attacked_radius(norm)}"
    return Flag(CHECKS["certified above attacked"], True, worst)


def raised(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    return tuple(flag for flag in flags if flag.raised)
