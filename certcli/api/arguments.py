"""Arguments of the Python functions, read by parameter name: values, or UsageError. Errors in
Python's words.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.export import ExportedProgram

from certcli.checkpoint import file, record
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.threat import Patch, Threat, parse_radius
from certcli.system import errors, options, registry
from certcli.system.errors import UsageError

_WORDS = re.compile(
    r"certvit [a-z]+\b[^,;()]*|(?<![\w=])'[^']*'(?!\w)"
    r"|(?<![\w-])(?:--|-(?=[aeo]\b))(?P<option>[a-z][a-z0-9-]*)"
    r"(?:[ =](?P<value>'[^']*'(?!\w)|\"[^\"]*\"|[A-Z0-9.][^\s,;()]*))?"
)
"""A command to type, a quotation, or an option with its value."""
_NAMES = {
    "arch_arg": "arch_args",
    "epsilon": "radii",
    "attack": "attacks",
    "patch": "patches",
    "min_certified": "at_least",
    "time_budget": "seconds",
    "budget": "seconds",
    "gates": "fail_on",
    "as_stated": "as_stated=True",
    "features": "features=True",
    "force": "force=True",
    "a": "attacks",
    "e": "radii",
    "o": "path",
}
_LISTS = frozenset(("attacks", "patches", "fail_on"))


def in_python(text: str) -> str:
    """Return a message with keyword arguments for options; commands to type stay."""

    def argument(match: re.Match[str]) -> str:
        if match["option"] is None:
            return match[0]
        name = match["option"].replace("-", "_")
        name = _NAMES.get(name, name)
        value = match["value"]
        if value and name in _LISTS:
            value = '["{}"]'.format(value.strip("'\""))
        return f"{name}={value}" if value else name

    return _WORDS.sub(argument, text)


def require_option_names(passed: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise UsageError for a keyword argument that `where` lacks; it says the nearest name."""
    names = sorted(allowed)
    for name in sorted(set(passed) - set(names)):
        ours = _NAMES.get(name)
        hint = f"did you mean '{ours}'?" if ours in names else registry.one_of(name, names)
        raise errors.UsageError(
            f"{where} has no option '{name}'", hint if names else "it takes none"
        )


_RADII = frozenset(("radii", "sigma", "enough"))
"""Options that hold radii or noise in pixel units, and may be written as a quotient."""
LARGEST = 2**63 - 1
"""Whole numbers beyond it fit into no seed, and into no count of images."""
_SHOWN = 40
"""Characters of a refused value in its message."""


def shown_value(value: object) -> str:
    """Return a value for a message: short, or its type where it is large."""
    if isinstance(value, (Tensor, nn.Module)) or hasattr(value, "__array__"):
        return f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, (str, int, float, list, tuple, type(None))) else ""
    return text if 0 < len(text) <= _SHOWN else f"a {type(value).__name__}"


def plain_value(value: Any) -> Any:
    """Return numbers and arrays of numpy and torch as Python's numbers, lists and nested lists."""
    if isinstance(value, Tensor) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value.tolist()
    return value


@dataclass(frozen=True)
class Reader:
    """Reads the value of a parameter, or says what it has to be.

    Args:
        kind: a type of msgspec with its range, or the classes that it may be of.
        needed: the words of a refusal after the parameter and the value.
        hint: of the refusal.
        make: what the value becomes.
        form: of the refusal: the parameter, its value, what is needed.
    """

    kind: Any
    needed: str
    hint: str = ""
    make: Callable[[Any], Any] = lambda value: value
    form: str = "{}={}: {}"

    def __call__(self, name: str, value: Any) -> Any:
        """Raise UsageError for a value of another kind, or out of its range."""
        try:
            if isinstance(self.kind, tuple):
                if not isinstance(value, self.kind):
                    raise TypeError
                return self.make(value)
            return self.make(msgspec.convert(plain_value(value), self.kind))
        except (msgspec.ValidationError, TypeError, OverflowError) as failure:
            raise UsageError(
                self.form.format(name, shown_value(value), self.needed), self.hint
            ) from failure


def whole_number(smallest: int, largest: int = LARGEST) -> Reader:
    """Return the reader of an integer from `smallest` to `largest`."""
    return Reader(
        Annotated[int, Meta(ge=smallest, le=largest)],
        f"a whole number of at least {smallest} is needed",
    )


def read_radius(name: str, value: Any) -> float:
    """Return a radius: a finite number >= 0, or a quotient such as "8/255"."""
    number = plain_value(value)
    try:
        if isinstance(number, (int, float, str)) and not isinstance(number, bool):
            return parse_radius(number if isinstance(number, str) else repr(number))
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name}={shown_value(value)}: {_A_RADIUS}")


_A_RADIUS = 'a radius is a finite number >= 0, or a quotient such as "8/255"'


def read_radii(name: str, value: Any) -> tuple[float, ...]:
    """Return radii: one, or several of them."""
    several = plain_value(value)
    if isinstance(several, (str, int, float)):
        several = [several]
    return tuple(read_radius(name, one) for one in _list_of(name, several, "radii"))


def device(name: str, value: Any) -> str:
    """Return the name of a device that torch knows and this machine has."""
    try:
        if not isinstance(value, (str, torch.device)):
            raise TypeError
        torch.empty(1, device=value).tolist()  # "meta" holds no values
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as failure:
        raise UsageError(
            f"{name}={shown_value(value)}: no device of this machine", '"cpu" or "cuda"'
        ) from failure
    return str(value)


word = Reader(str, "a string is needed")
path = Reader((str, os.PathLike), "a path is needed", make=Path)
answer = Reader(bool | Annotated[int, Meta(ge=0, le=1)], "True or False is needed", make=bool)


def read_words(name: str, value: Any) -> tuple[str, ...]:
    """Return texts: one, or several of them."""
    several = [value] if isinstance(value, str) else value
    return tuple(word(name, one) for one in _list_of(name, several, "texts"))


def read_source(name: str, value: Any) -> Any:
    """Return a network as `load` takes it."""
    if not isinstance(value, (nn.Module, ExportedProgram, str, os.PathLike, file.Checkpoint)):
        raise UsageError(
            f"{shown_value(value)} is no network",
            "an nn.Module, a path, a timm or hf-hub: name, or a result of load",
        )
    return value


def read_size(name: str, value: Any) -> tuple[int, ...]:
    """Return the size of an image as a tuple; `load` judges its length."""
    several = _list_of(name, plain_value(value), "numbers, (channels, height, width),")
    return tuple(whole_number(1)(name, one) for one in several)


def threats(value: Any) -> dict[str, Threat]:
    """Return radii, patches and threats by their names, a quotient as it was typed."""
    several = (
        [value]
        if isinstance(value, (str, int, float, Patch, Threat))
        else _list_of("radii", plain_value(value), "radii or patches")
    )
    named = {}
    for one in several:
        threat = Threat.of(one if isinstance(one, (Patch, Threat)) else read_radius("radii", one))
        named[one if isinstance(one, str) else threat.key] = threat
    return named


def one_radius(value: Any) -> float:
    """Return the only one of radii; UsageError for several."""
    several = read_radii("radii", value)
    if len(several) != 1:
        raise UsageError(
            f"radii={shown_value(value)}: one radius is taken here", "call it for each"
        )
    return several[0]


def read_choice(name: str, value: Any, names: Sequence[str]) -> str:
    """Return one of these names; UsageError says the nearest."""
    if word(name, value) not in names:
        raise UsageError(f"unknown {name} {shown_value(value)}", registry.one_of(value, names))
    return str(value)


def certificates(value: Any) -> list[Certificate]:
    """Return what `certify` returned, as a list."""
    several = _list_of("certificates", value, "certificates")
    if not all(isinstance(one, Certificate) for one in several):
        raise UsageError(f"certificates={shown_value(value)}: a result of certify is needed")
    return list(several)


def read_denoiser(name: str, value: Any) -> Any:
    """Return a path as a Path, and an object that may be a denoiser as it is."""
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    holds_unet = hasattr(value, "unet") and hasattr(value, "scheduler")
    if not isinstance(value, (nn.Module, tuple, list)) and not holds_unet:
        raise UsageError(
            f"{name}={shown_value(value)}: no denoiser",
            "a module, a path, or diffusers' (unet, scheduler)",
        )
    return value


_NUMBER = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_STATISTICS = Reader(
    _NUMBER | Annotated[list[_NUMBER], Meta(min_length=1)],
    "one number, or one a channel, is needed",
)
READERS: dict[str, Callable[[str, Any], Any]] = {
    "source": read_source,
    "mean": _STATISTICS,
    "std": _STATISTICS,
    "input_size": read_size,
    "arch": word,
    "arch_args": Reader(dict[str, Any], "a dictionary of names and values is needed"),
    "as_stated": answer,
    "weights": word,
    "features": answer,
    "image_size": whole_number(1, record.LARGEST_SIDE),
    "checkpoint": Reader((file.Checkpoint,), "a result of load is needed"),
    "path": path,
    "force": answer,
    "double": answer,
    "device": device,
    "dataset": word,
    "split": word,
    "limit": whole_number(1),
    "seed": whole_number(0),
    "data_dir": path,
    "iterations": whole_number(1),
    "batch_size": whole_number(1),
    "denoiser": read_denoiser,
    "prove": answer,
    "top": whole_number(1),
    "around": read_radius,
    "attacks": read_words,
    "return_examples": answer,
    "seconds": Reader(
        Annotated[float, Meta(gt=0, le=LARGEST)], "a number of seconds above 0 is needed"
    ),
    "fail_on": read_words,
    "at_least": Reader(
        Annotated[float, Meta(ge=0, le=1)], "is no share", "0.4 means 40 %", form="{} {} {}"
    ),
}
"""Parameter of a public function -> how its value is read; others (images, labels, certificates)
are judged where they are used. None stands for the default where that is None; a parameter whose
type names its values is read by `choice`.
"""


def fields_of(kind: Any, offered: Any) -> dict[str, str]:
    """Return those keyword arguments of a TypedDict that an options class has, and their fields."""
    names = {item.name for item in fields(kind)}
    offers = offered.__annotations__
    # the radii of method local have another name there
    pairs = {name: "at" if name == "radii" and name not in names else name for name in offers}
    return {name: field for name, field in pairs.items() if field in names}


def read_options(kind: Any, offered: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return values for fields of an options class, in the types that its annotations name.

    Args:
        offered: the TypedDict of the keyword arguments.

    Raises:
        UsageError: a name is not offered or no field, or a value has another type.
    """
    chosen = fields_of(kind, offered)
    require_option_names(values, chosen, where)
    hints = get_type_hints(kind)
    return {
        chosen[name]: _field_value(name, value, hints[chosen[name]])
        for name, value in values.items()
    }


def names_with_values(values: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not None."""
    return [name for name, value in values.items() if value is not None]


def _field_value(name: str, value: Any, hint: Any) -> Any:
    plain = plain_value(value)
    if name == "seed":
        return whole_number(0)(name, value)
    if "Path" in str(hint) and plain is not None:
        return path(name, value)
    if name in _RADII and plain is not None:
        plain = _read_quotients(name, plain)
    if isinstance(plain, str) and ("tuple" in str(hint) or "list" in str(hint)):
        plain = [plain]
    if isinstance(plain, str) and (names := options.choices(hint)):
        return read_choice(name, plain, names)
    try:
        return msgspec.convert(plain, hint)
    except (msgspec.ValidationError, TypeError) as failure:
        reason = str(failure).replace("`", "").partition(" - at")[0]
        raise UsageError(
            f"{name}={shown_value(value)}: {reason[:1].lower()}{reason[1:]}"
        ) from failure


def _read_quotients(name: str, value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        value = read_radius(name, value)
    if isinstance(value, (list, tuple)):
        return [
            read_radius(name, one) if isinstance(one, str) else plain_value(one) for one in value
        ]
    return [value] if name == "radii" and isinstance(value, (int, float)) else value


def _list_of(name: str, value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"{name}={shown_value(value)}: {what} are needed")
    try:
        return list(value)
    except TypeError as failure:  # an array of no dimension
        raise UsageError(f"{name}={shown_value(value)}: {what} are needed") from failure
