"""`-a torchattacks:NAME,key=value`, checked against the library's own signatures."""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from certcli.evaluation.radii import Norm, parse_number, radius_key
from certcli.system.errors import UsageError
from certcli.system.registry import one_of

PREFIX = "torchattacks:"
INSTALL = "pip install --no-deps torchattacks"
"""Its other dependencies are certvit's; it pins requests to a version of 2021 and never imports it."""
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
        raise UsageError(
            "this attack runs code of torchattacks, which is not installed", hint
        ) from failure


@dataclass(frozen=True)
class Argument:
    """An attack's argument: its default, its values' type, and the words that it lists, if any."""

    default: Any
    kind: type
    words: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Return the value that the text means; ValueError where it has another type."""
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError("it is true or false")
            return text.lower() == "true"
        if self.kind is tuple:
            return tuple(self._number(part, int) for part in text.split(":"))
        if self.kind is str:
            if not re.fullmatch(r"[A-Za-z0-9_]{1,32}", text) or (
                self.words and text not in self.words
            ):
                raise ValueError(
                    f"it is one of: {', '.join(self.words)}" if self.words else "it is a word"
                )
            return text
        return self._number(text, self.kind)

    @staticmethod
    def _number(text: str, kind: type) -> Any:
        value = parse_number(text)
        if kind is float and 0 <= value < float("inf"):
            return value
        if kind is int and 1 <= value < 1e9 and value == int(value):
            return int(value)
        raise ValueError(
            "it is a whole number above 0" if kind is int else "it is a finite number, 0 or more"
        )


@dataclass(frozen=True)
class Signature:
    """What an attack takes.

    Args:
        measures: the norms in which the library measures it (l0, l1, l2, linf); empty where it
            names none.
        radius: its default radius, to which a default step size belongs; None for attacks without
            one.
        arguments: those that a person may give.
        takes: all arguments, those that certvit decides too.
        missing: required arguments that no option gives.
    """

    measures: tuple[str, ...]
    radius: float | None
    arguments: dict[str, Argument]
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
            f"alpha={argument.default / self.radius:g}*radius"
            if name == "alpha" and self.radius is not None
            else f"{name}={_spelled_argument(argument.default)}"
            for name, argument in self.arguments.items()
        )


def torchattacks_names() -> list[str]:
    return list(torchattacks_library().__all__)


@cache
def signature(name: str) -> Signature:
    """Read an attack's signature, norms and types of arguments; UsageError: no attack."""
    if name not in torchattacks_names():
        raise UsageError(f"torchattacks has no attack '{name}'", one_of(name, torchattacks_names()))
    kind = getattr(torchattacks_library(), name)
    page = inspect.getdoc(kind) or ""
    arguments: dict[str, Argument] = {}
    parameters = inspect.signature(kind).parameters
    for argument, parameter in parameters.items():
        if argument in DECIDED or parameter.default is inspect.Parameter.empty:
            continue
        line = re.search(rf"^\s*{argument} \((\w+)\)(.*)$", page, re.MULTILINE)
        is_float = (
            line is not None
            and line[1] == "float"
            and type(parameter.default) is int
            and argument not in BUDGET
        )
        words = (
            tuple(re.findall(r"'(\w+)'", line[2]))
            if line and type(parameter.default) is str
            else ()
        )
        arguments[argument] = Argument(
            parameter.default, float if is_float else type(parameter.default), words
        )
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
            raise UsageError(
                f"{PREFIX}{name} needs {', '.join(signature_of_attack.missing)}, which no option gives",
                "another attack",
            )
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if key in DECIDED:
                raise UsageError(
                    f"{text}: '{key}' follows --epsilon, --norm, --seed and the network",
                    "leave it out",
                )
            if not equals or key in values or key not in signature_of_attack.arguments:
                raise UsageError(
                    f"{text}: '{pair}' is no argument of {name}",
                    f"it takes {signature_of_attack.words() or 'none'}",
                )
            try:
                values[key] = signature_of_attack.arguments[key].read(value)
            except ValueError as failure:
                raise UsageError(f"{text}: {key} cannot be '{value}'", str(failure)) from failure
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
