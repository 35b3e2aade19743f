"""The evaluations of the papers by name: which attacks, at which radius, with which budget."""

from dataclasses import dataclass

from certcli.attack.settings import AttackSettings, Planned, planned_attacks
from certcli.evaluation.perturbation import Norm, Region
from certcli.system.errors import UsageError
from certcli.system.registry import one_of


@dataclass(frozen=True)
class PresetPart:
    """Attacks that share one region. `attack_images(..., part.plan, part.region, ...,
    independent=True)` runs them.
    """

    region: Region
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


def _part(
    norm: Norm, radius: float, *names: str | Planned, step_size: float | None = None
) -> PresetPart:
    settings = AttackSettings(step_size=step_size, relative_step=MADRY)
    return PresetPart(Region(norm, radius), planned_attacks(names, settings))


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
            (_part("l2", 36 / 255, "pgd-50"),),
            "The paper names neither steps nor step size: 50 steps of 2.5 radius / 50.",
        ),
        Preset(
            "specformer-standard",
            "SpecFormer: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization, experiments",
            (_part("linf", 2 / 255, "fgsm", "pgd-2"),),
            "The paper names no step size: 2.5 radius / steps.",
        ),
        Preset(
            "specformer-adversarial",
            "SpecFormer: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization, experiments",
            (
                _part(
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
                _part("linf", 2 / 255, "fgsm", "pgd-7", step_size=2 / 255),
                _part("l2", 2.0, "pgd-7", "pgd-20", step_size=0.2),
                _part("l2", 260.0, _CAUCHY_CW),
            ),
            "The paper prints 2/225 once for 2/255. CW: c = 1, kappa = 0, Adam at 0.01, 100 steps, no search over c; a "
            "success counts up to norm 260, as printed. Ours holds the box by projection, not by tanh.",
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name; UsageError with the known names when there is none."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", one_of(name, PRESETS))
    return PRESETS[name]
