"""Every attack by name: where it lives, what it does, where it comes from."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from certcli.attack.torchattacks_spec import PREFIX, Spec, signature
from certcli.evaluation.radii import Norm
from certcli.system.registry import Entry, Registry


@dataclass(frozen=True)
class Attack(Entry):
    """One attack.

    Args:
        norms: in which its results mean something.
        random: False for an attack that draws nothing at random: a restart would repeat the same
            work.
        weak: why it may miss an adversarial image of a linear network at 1.5 times the distance.
    """

    norms: tuple[Norm, ...] = ("l2", "linf")
    random: bool = True
    weak: str = ""


@dataclass(frozen=True)
class LibraryAttack(Attack):
    """An attack of torchattacks, with arguments; its name is its spelling."""

    spec: Spec | None = None

    def load(self) -> Any:
        return partial(super().load(), self.spec)


class AttackRegistry(Registry[Attack]):
    """The attacks of certvit, and those of torchattacks as "torchattacks:NAME,key=value"."""

    def __contains__(self, name: object) -> bool:
        return str(name).startswith(PREFIX) or super().__contains__(name)

    def __getitem__(self, name: str) -> Attack:
        if not name.startswith(PREFIX):
            return super().__getitem__(name)
        spec = Spec.read(name)
        craft = "certcli.attack.families.torchattacks:craft"
        return LibraryAttack(str(spec), craft, "", norms=signature(spec.name).norms, spec=spec)


ATTACKS = AttackRegistry(
    "attack",
    Attack(
        "fgsm",
        "certcli.attack.families.gradient:fgsm",
        "one step of the radius along the gradient (its sign for linf, its direction for l2)",
        "Goodfellow et al. 2015, Explaining and harnessing adversarial examples",
        random=False,
    ),
    Attack(
        "pgd",
        "certcli.attack.families.gradient:pgd",
        "projected gradient ascent of the cross entropy, then towards likely wrong classes (networks of at most 20)",
        "Madry et al. 2018, Towards deep learning models resistant to adversarial attacks",
    ),
    Attack(
        "eot-pgd",
        "certcli.attack.families.gradient:eot_pgd",
        "PGD on the gradient averaged over several draws, for networks that are random",
        "Athalye et al. 2018, Synthesizing robust adversarial examples; Zimmermann 2019, arXiv:1907.00895",
    ),
    Attack(
        "margin-pgd",
        "certcli.attack.families.margin:margin_pgd",
        "projected gradient ascent of the margin z_t - z_y, for several likely t where the classes are at most 20",
        "Carlini & Wagner 2017 (the loss), Madry et al. 2018 (the ascent)",
    ),
    Attack(
        "cw",
        "certcli.attack.families.carlini:carlini_wagner",
        "smallest l2 perturbation by Adam on distance and margin, with the binary search over c, image by image",
        "Carlini & Wagner 2017, Towards evaluating the robustness of neural networks",
        norms=("l2",),
        random=False,
    ),
    Attack(
        "fab",
        "certcli.attack.families.fab:fab",
        "smallest perturbation by projections onto linearised class boundaries, one run a target class",
        "Croce & Hein 2020, Minimally distorted adversarial examples with a fast adaptive boundary attack",
    ),
    Attack(
        "apgd-ce",
        "certcli.attack.families.apgd:apgd_ce",
        "PGD of the cross entropy that halves its own step size",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Attack(
        "apgd-dlr",
        "certcli.attack.families.apgd:apgd_dlr",
        "APGD of the scale-free difference of logits ratio (of the margin, below 3 classes)",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Attack(
        "apgd-t",
        "certcli.attack.families.apgd:apgd_targeted",
        "APGD of the targeted difference of logits ratio, one run a target class (of the margin, below 4 classes)",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Attack(
        "square",
        "certcli.attack.families.square:square",
        "random search over squares; needs no gradient, so it sees through masked ones",
        "Andriushchenko et al. 2020, Square attack",
        weak="a random search without gradients",
    ),
    Attack(
        "autoattack",
        "certcli.attack.families.apgd:autoattack",
        "APGD-CE, APGD-T, FAB-T, Square in turn; runs that are far from a success at their checkpoints are left",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Attack(
        "autoattack-full",
        "certcli.attack.families.apgd:autoattack_full",
        "the same with the whole of the published budgets for every image that withstands",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
)

PATCH_ATTACK = "margin-pgd"
"""What climbs on the pixels of a patch."""
