"""Every attack by name: where it lives, what it does, where it comes from; and those of
torchattacks, `-a torchattacks:NAME,key=value`, checked against the library's own signatures."""

import inspect
import re
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

from certcli.evaluation.threat import Norm, parse_number, radius_key
from certcli.system import errors, registry

PREFIX = "torchattacks:"
INSTALL = "pip install --no-deps torchattacks"
"""Its other dependencies are certvit's; it pins requests to a version of 2021 and never imports
it."""
DECIDED = frozenset({"model", "eps", "max_epsilon", "norm", "seed", "n_classes", "verbose"})
"""Arguments that --epsilon, --norm, --seed and the network decide."""
BUDGET = ("steps", "num_iter_set", "nb_iter", "max_iterations")
"""What --steps is called there."""


def torchattacks_library() -> ModuleType:
    """Return torchattacks, behind the shim for its torchvision import; UsageError without it."""
    import_module("certcli.system.compat")
    try:
        return import_module("torchattacks")
    except ModuleNotFoundError as failure:
        if failure.name != "torchattacks":
            raise
        hint = f"{INSTALL}; only torchattacks:NAME needs it"
        raise errors.UsageError(
            "this attack runs code of torchattacks, which is not installed", hint
        ) from failure


def _read_argument(name: str, default: Any, text: str) -> Any:
    """Return the value of the default's type that the text means; ValueError where it has another."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("it is true or false")
        return text.lower() == "true"
    if isinstance(default, str):
        if not re.fullmatch(r"[A-Za-z0-9_]{1,32}", text):
            raise ValueError("it is a word")
        return text
    if isinstance(default, tuple):
        return tuple(int(part) for part in text.split(":"))
    value = parse_number(text)
    if not 0 <= value < 1e9 or (name in BUDGET and (value < 1 or value != int(value))):
        raise ValueError("it is a number, 0 or more; a whole one above 0, for steps")
    return int(value) if isinstance(default, int) and value == int(value) else value


@dataclass(frozen=True)
class Signature:
    """What an attack takes.

    Args:
        measures: the norms in which the library measures it (l0, l1, l2, linf); empty where it
            names none.
        radius: its default radius, to which a default step size belongs; None for attacks without
            one.
        arguments: those that a person may give, with their defaults.
        takes: all arguments, those that certvit decides too.
        missing: required arguments that no option gives.
    """

    measures: tuple[str, ...]
    radius: float | None
    arguments: dict[str, Any]
    takes: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Norms in which images are judged; changes of few pixels or small l1 have an l2 norm."""
        l2 = not self.measures or bool({"l0", "l1", "l2"} & set(self.measures))
        linf = not self.measures or "linf" in self.measures
        return (*(("l2",) if l2 else ()), *(("linf",) if linf else ()))

    def words(self) -> str:
        """Spell out the arguments with their defaults, as `--list` shows them."""
        if self.missing:
            return f"not available here: it needs {', '.join(self.missing)}"
        return ", ".join(
            f"alpha={default / self.radius:g}*radius"
            if name == "alpha" and self.radius is not None
            else f"{name}={_spelled_argument(default)}"
            for name, default in self.arguments.items()
        )


def torchattacks_names() -> list[str]:
    return list(torchattacks_library().__all__)


@cache
def signature(name: str) -> Signature:
    """Read an attack's signature, norms and types of arguments; UsageError: no attack."""
    if name not in torchattacks_names():
        raise errors.UsageError(
            f"torchattacks has no attack '{name}'", registry.one_of(name, torchattacks_names())
        )
    kind = getattr(torchattacks_library(), name)
    page = inspect.getdoc(kind) or ""
    parameters = inspect.signature(kind).parameters
    arguments = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in DECIDED and parameter.default is not inspect.Parameter.empty
    }
    measures = re.search(r"Distance Measure : (.*)", page)
    defaults = [p.default for n, p in parameters.items() if n in ("eps", "max_epsilon")]
    return Signature(
        measures=tuple(norm.lower() for norm in re.findall(r"L(?:inf|0|1|2)\b", measures[1])) if measures else (),
        radius=defaults[0] if defaults else None,
        arguments=arguments,
        takes=tuple(parameters),
        missing=tuple(
            n for n, p in parameters.items()
            if n != "model" and p.default is inspect.Parameter.empty and p.kind is not inspect.Parameter.VAR_KEYWORD
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One attack with the arguments that were given, in the order of its signature."""

    name: str
    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return PREFIX + ",".join(
            [self.name, *(f"{key}={_spelled_argument(value)}" for key, value in self.values)]
        )

    @staticmethod
    def read(text: str) -> "Spec":
        """Read "torchattacks:PGD,steps=5"; UsageError: unknown names, arguments, wrong types."""
        torchattacks_library()  # refuses where signatures are known from before
        name, *pairs = text.removeprefix(PREFIX).split(",")
        signature_of_attack = signature(name)
        if signature_of_attack.missing:
            raise errors.UsageError(
                f"{PREFIX}{name} needs {', '.join(signature_of_attack.missing)}, which no option gives",
                "another attack",
            )
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if key in DECIDED:
                raise errors.UsageError(
                    f"{text}: '{key}' follows --epsilon, --norm, --seed and the network",
                    "leave it out",
                )
            if not equals or key in values or key not in signature_of_attack.arguments:
                raise errors.UsageError(
                    f"{text}: '{pair}' is no argument of {name}",
                    f"it takes {signature_of_attack.words() or 'none'}",
                )
            try:
                values[key] = _read_argument(key, signature_of_attack.arguments[key], value)
            except ValueError as failure:
                raise errors.UsageError(
                    f"{text}: {key} cannot be '{value}'", str(failure)
                ) from failure
        return Spec(
            name,
            tuple((key, values[key]) for key in signature_of_attack.arguments if key in values),
        )


def _spelled_argument(value: Any) -> str:
    if isinstance(value, tuple):
        return ":".join(map(_spelled_argument, value))
    if isinstance(value, bool):
        return str(value).lower()
    return radius_key(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Attack(registry.Entry):
    """One attack.

    Args:
        norms: in which its results mean something.
        random: False for an attack that draws nothing at random: a restart would repeat the same
            work.
        needs_attention: it looks at the attention maps of a vision transformer, and refuses other
            networks.
        weak: why it may miss an adversarial image of a linear network at 1.5 times the distance.
    """

    norms: tuple[Norm, ...] = ("l2", "linf")
    random: bool = True
    needs_attention: bool = False
    weak: str = ""


@dataclass(frozen=True)
class LibraryAttack(Attack):
    """An attack of torchattacks, with arguments; its name is its spelling."""

    spec: Spec | None = None

    def load(self) -> Any:
        return partial(super().load(), self.spec)


class AttackRegistry(registry.Registry[Attack]):
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
        "certcli.attack.families.ascent:fgsm",
        "one step of the radius along the gradient (its sign for linf, its direction for l2)",
        "Goodfellow et al. 2015, Explaining and harnessing adversarial examples",
        random=False,
    ),
    Attack(
        "pgd",
        "certcli.attack.families.ascent:pgd",
        "projected gradient ascent of the cross entropy, then towards likely wrong classes (networks of at most 20)",
        "Madry et al. 2018, Towards deep learning models resistant to adversarial attacks",
    ),
    Attack(
        "eot-pgd",
        "certcli.attack.families.ascent:eot_pgd",
        "PGD on the gradient averaged over several draws, for networks that are random",
        "Athalye et al. 2018, Synthesizing robust adversarial examples; Zimmermann 2019, arXiv:1907.00895",
    ),
    Attack(
        "margin-pgd",
        "certcli.attack.families.ascent:margin_pgd",
        "projected gradient ascent of the margin z_t - z_y, for several likely t where the classes are at most 20",
        "Carlini & Wagner 2017 (the loss), Madry et al. 2018 (the ascent)",
    ),
    Attack(
        "saga",
        "certcli.attack.families.ascent:saga",
        "PGD whose gradient is weighted by the attention rollout of the image; vision transformers only",
        "Mahmood et al. 2021, On the robustness of vision transformers to adversarial examples",
        needs_attention=True,
    ),
    Attack(
        "cw",
        "certcli.attack.families.smallest:carlini_wagner",
        "smallest l2 perturbation by Adam on distance and margin, with the binary search over c, image by image",
        "Carlini & Wagner 2017, Towards evaluating the robustness of neural networks",
        norms=("l2",),
        random=False,
    ),
    Attack(
        "fab",
        "certcli.attack.families.smallest:fab",
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
        "certcli.attack.families.square:square_attack",
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
