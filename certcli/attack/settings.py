"""What an attack may spend, a plan of attacks in the order in which they run, and the plans of
papers."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from certcli.attack.catalogue import ATTACKS
from certcli.evaluation import perturbation, threat
from certcli.system import errors, options, registry


@dataclass(frozen=True)
class AttackSettings:
    """Budget and choices of one attack; None: the attack's own default, in its docstring.

    Attributes:
        steps: gradient steps of one run.
        restarts: independent runs, made by `run`, on the images that are still unsolved.
        relative_step: every step is `relative_step * radius / steps` long; None: the steps fall
            from 2 radius to 0 (`step`).
        seed: of every draw.
        classes: number of classes k; None asks the model.
        targets: classes tried by targeted attacks, at most k - 1.
        queries: forward passes of the Square attack.
        samples: draws averaged by EOT-PGD and by the verdict on random nets.
        searches, confidence, initial_c, learning_rate: Carlini & Wagner's binary search, kappa,
            first c, and Adam's rate.
        restart: which of the restarts a run is, counted from 0; set by `run`.
        stop_early: rows that are solved cost nothing more; off for transfer, where the crafting
            model is not the judge.
        give_up: AutoAttack's parts leave a run that is less than half way to success at a
            checkpoint.
        precision: of the forward and backward passes that craft; the verdict is always taken on the
            network as it is.
        pixels: "8bit" rounds the images to 8 bits a value, and counts only adversarial images of
            that kind.
    """

    steps: int | None = None
    restarts: int = 1
    relative_step: float | None = None
    seed: int = 0
    classes: int | None = None
    targets: int = 9
    queries: int = 5000
    samples: int = 1
    searches: int = 9
    confidence: float = 0.0
    initial_c: float = 1.0
    learning_rate: float = 0.01
    restart: int = 0
    stop_early: bool = True
    give_up: bool = False
    precision: threat.Precision = "float32"
    pixels: threat.Pixels = "float"

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "targets", "queries", "samples", "searches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.UsageError(
                    f"{name} of an attack must be at least 1, not {value}",
                    "leave it out: the attack's own number",
                )
        options.require_choices(self)
        for name in ("relative_step", "initial_c", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise errors.UsageError(
                    f"{name} of an attack must be a finite number above 0, not {value}",
                    "leave it out: the attack's own",
                )

    @property
    def draw(self) -> int:
        """The seed of this restart, apart from the seeds 0, 1, 2, ... that people choose."""
        return self.seed + 1_000_003 * self.restart

    @property
    def classical(self) -> bool:
        """Whether all steps are equally long, as Madry et al. have them."""
        return self.relative_step is not None

    @property
    def stops(self) -> bool:
        """Whether a success ends a run; on a random net the end is judged, on the average."""
        return self.stop_early and self.samples == 1

    def step(self, region: perturbation.Region, turn: int, steps: int, images: Tensor) -> Tensor:
        """alpha_t = radius (1 + cos(pi t / steps)), or the constant that was chosen: (b, 1, 1, 1).

        Where gradients are steep, steps of one length leap over what the last, short ones reach.
        `relative_step` 2.5 is Madry et al.'s choice.
        Source: Loshchilov & Hutter 2017, Eq. 5 (the curve); docs/attack.md shows the choice.
        """
        radii = region.radii(images)
        if self.relative_step is not None:
            return perturbation.per_image(self.relative_step * radii / steps, images)
        return perturbation.per_image((1 + math.cos(math.pi * turn / steps)) * radii, images)


Craft = Callable[[nn.Module, Tensor, Tensor, perturbation.Region, AttackSettings], Tensor]
"""model, images (b, c, h, w), labels (b,), region, settings -> adversarial candidates (b, c, h, w),
to be judged."""


@dataclass(frozen=True)
class Planned:
    """One line of a result table: its label, the attack's registered name, and what it may
    spend."""

    label: str
    attack: str
    settings: AttackSettings


def planned_attacks(
    names: Sequence[str | Planned], settings: AttackSettings
) -> tuple[Planned, ...]:
    """("fgsm", "pgd-20") -> a plan, 20 a step count. UsageError: an unknown or repeated name."""
    planned = [
        name if isinstance(name, Planned) else _parse_attack(name, settings) for name in names
    ]
    labels = [entry.label for entry in planned]
    if not planned:
        raise errors.UsageError(
            "no attack was named", f"one or more of: {', '.join(ATTACKS.names())}"
        )
    if len(set(labels)) != len(labels):
        raise errors.UsageError(f"an attack is named twice: {', '.join(labels)}", "each once")
    for entry in planned:
        ATTACKS[entry.attack]  # raises with the known names
    return tuple(planned)


def _parse_attack(name: str, settings: AttackSettings) -> Planned:
    counted = re.fullmatch(r"(.+)-(\d+)", name)
    if name in ATTACKS or counted is None:
        label = ATTACKS[name].name
        return Planned(label, label, settings)
    return Planned(name, counted[1], replace(settings, steps=int(counted[2])))


@dataclass(frozen=True)
class PresetPart:
    """Attacks that share one region. `attack_images(..., part.plan, part.region, ...,
    independent=True)` runs them.
    """

    region: perturbation.Region
    plan: tuple[Planned, ...]


@dataclass(frozen=True)
class Preset:
    """A paper's evaluation, each attack alone (`independent`), as the papers report them.

    open_choices says what the paper leaves unsaid and what is done here.
    """

    name: str
    source: str
    parts: tuple[PresetPart, ...]
    open_choices: str


MADRY = 2.5
"""Radii over all steps, each as long as the others: the choice of Madry et al. 2018."""


def _preset_part(norm: perturbation.Norm, radius: float, *names: str | Planned) -> PresetPart:
    settings = AttackSettings(relative_step=MADRY)
    return PresetPart(perturbation.Region(norm, radius), planned_attacks(names, settings))


def _madry_pgd(steps: int, share: float) -> Planned:
    """PGD whose steps are this share of the radius each."""
    settings = AttackSettings(steps=steps, relative_step=share * steps)
    return Planned(f"pgd-{steps}", "pgd", settings)


_CAUCHY_L2 = _preset_part("l2", 2.0, _madry_pgd(7, 0.1), _madry_pgd(20, 0.1))
_CAUCHY_CW = Planned(
    "cw",
    "cw",
    AttackSettings(steps=100, searches=1, initial_c=1.0, confidence=0.0, learning_rate=0.01),
)

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "certvit",
            "CertViT: Certified Robustness of Pre-Trained Vision Transformers, experiments",
            (_preset_part("l2", 36 / 255, "pgd-50"),),
            "The paper names neither steps nor step size: 50 steps of 2.5 radius / 50.",
        ),
        Preset(
            "specformer-standard",
            "SpecFormer: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization, experiments",
            (_preset_part("linf", 2 / 255, "fgsm", "pgd-2"),),
            "The paper names no step size: 2.5 radius / steps.",
        ),
        Preset(
            "specformer-adversarial",
            "SpecFormer: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization, experiments",
            (
                _preset_part(
                    "linf",
                    8 / 255,
                    Planned("cw-20", "margin-pgd", AttackSettings(steps=20, relative_step=MADRY)),
                    "pgd-20",
                    "pgd-100",
                ),
            ),
            "The paper gives no step size (here 2.5 radius / steps), and CW a radius in linf: that is read as 20 steps of "
            "PGD on Carlini & Wagner's margin loss.",
        ),
        Preset(
            "cauchy",
            "Understanding Adversarial Robustness of Vision Transformers via Cauchy Problem, section 5",
            (
                _preset_part("linf", 2 / 255, "fgsm", _madry_pgd(7, 1.0)),
                _CAUCHY_L2,
                _preset_part("l2", 260.0, _CAUCHY_CW),
            ),
            "The paper prints 2/225 once for 2/255. CW: c = 1, kappa = 0, Adam at 0.01, 100 steps, no search over c; a "
            "success counts up to norm 260, as printed. Ours holds the box by projection, not by tanh.",
        ),
        Preset(
            "cauchy-l2",
            "the same, the PGDs in l2 alone",
            (_CAUCHY_L2,),
            "Steps of a tenth of the radius, as the paper's 0.2 at radius 2, at any radius.",
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name; UsageError with the known names when there is none."""
    if name not in PRESETS:
        raise errors.UsageError(f"unknown preset '{name}'", registry.one_of(name, PRESETS))
    return PRESETS[name]
