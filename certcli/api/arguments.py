"""Arguments of the Python functions, read by parameter name: values, or UsageError."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from certcli.api.errors import require_known
from certcli.certify.certificate import Certificate
from certcli.checkpoint.arch_args import LARGEST_SIDE
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.radii import parse_radius
from certcli.evaluation.threat import Patch, Threat
from certcli.system.errors import UsageError
from certcli.system.options import choices
from certcli.system.registry import one_of

_RADII = frozenset(("radii", "sigma", "enough", "step_size"))
"""Options that hold radii or noise in pixel units, and may be written as a quotient."""
_AUTO = "auto"
_FIELDS = {"radii": "at"}
"""Names of Python for fields of options that are called otherwise."""
LARGEST = 2**63 - 1
"""Whole numbers beyond it fit into no seed, and into no count of images."""
_SHOWN = 40
"""Characters of a refused value in its message."""


def shown(value: object) -> str:
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


def whole_number(name: str, value: Any, smallest: int, largest: int = LARGEST) -> int:
    """Return an integer from `smallest` to `largest`."""
    number = plain_value(value)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if not is_whole or not smallest <= number <= largest:
        raise UsageError(f"{name}={shown(value)}: a whole number of at least {smallest} is needed")
    return number


def radius(name: str, value: Any) -> float:
    """Return a radius: a finite number >= 0, or a quotient such as "8/255"."""
    number = plain_value(value)
    try:
        if isinstance(number, (int, float, str)) and not isinstance(number, bool):
            return parse_radius(number if isinstance(number, str) else repr(number))
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name}={shown(value)}: {_A_RADIUS}")


_A_RADIUS = 'a radius is a finite number >= 0, or a quotient such as "8/255"'


def radii(name: str, value: Any) -> tuple[float, ...]:
    """Return radii: one, or several of them."""
    several = plain_value(value)
    if isinstance(several, (str, int, float)):
        several = [several]
    return tuple(radius(name, one) for one in _listed(name, several, "radii"))


def seconds(name: str, value: Any) -> float:
    """Return a finite time above 0."""
    number = plain_value(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not 0 < number <= LARGEST:
        raise UsageError(f"{name}={shown(value)}: a number of seconds above 0 is needed")
    return float(number)


def device(name: str, value: Any) -> str:
    """Return the name of a device that torch knows and this machine has."""
    try:
        if not isinstance(value, (str, torch.device)):
            raise TypeError
        torch.empty(1, device=value).tolist()  # "meta" holds no values
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as failure:
        raise UsageError(
            f"{name}={shown(value)}: no device of this machine", '"cpu" or "cuda"'
        ) from failure
    return str(value)


def word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}={shown(value)}: a string is needed")
    return value


def words(name: str, value: Any) -> tuple[str, ...]:
    """Return texts: one, or several of them."""
    several = [value] if isinstance(value, str) else value
    return tuple(word(name, one) for one in _listed(name, several, "texts"))


def answer(name: str, value: Any) -> bool:
    """Return True or False."""
    if plain_value(value) not in (True, False) or not isinstance(plain_value(value), (bool, int)):
        raise UsageError(f"{name}={shown(value)}: True or False is needed")
    return bool(value)


def share(name: str, value: Any) -> float:
    """Return a share of images."""
    number = plain_value(value)
    if not isinstance(number, (int, float)) or not 0 <= number <= 1:
        raise UsageError(f"{name} {shown(value)} is no share", "0.4 means 40 %")
    return float(number)


def source(name: str, value: Any) -> Any:
    """Return a network as `load` takes it."""
    if not isinstance(value, (nn.Module, ExportedProgram, str, os.PathLike, Checkpoint)):
        message = f"{shown(value)} is no network"
        raise UsageError(
            message, "an nn.Module, a path, a timm or hf-hub: name, or a result of load"
        )
    return value


def path(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name}={shown(value)}: a path is needed")
    return Path(value)


def checkpoint(name: str, value: Any) -> Checkpoint:
    if not isinstance(value, Checkpoint):
        raise UsageError(f"{name}={shown(value)}: a result of load is needed")
    return value


def statistics(name: str, value: Any) -> Any:
    """Return pixel statistics: one number, or one a channel."""
    numbers = plain_value(value)
    several = numbers if isinstance(numbers, (list, tuple)) else [numbers]
    numeric = all(isinstance(one, (int, float)) and abs(one) <= LARGEST for one in several)
    if not several or not numeric:
        raise UsageError(f"{name}={shown(value)}: one number, or one a channel, is needed")
    return numbers


def size(name: str, value: Any) -> tuple[int, ...]:
    """Return the size of an image as a tuple; `load` judges its length."""
    several = _listed(name, plain_value(value), "numbers, (channels, height, width),")
    return tuple(whole_number(name, one, 1) for one in several)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={shown(value)}: a dictionary of names and values is needed")
    return value


def threats(value: Any) -> dict[str, Threat]:
    """Return radii, patches and threats by their names, a quotient as it was typed."""
    single = isinstance(value, (str, int, float, Patch, Threat))
    several = [value] if single else _listed("radii", plain_value(value), "radii or patches")
    named = {}
    for one in several:
        is_size = isinstance(one, (Patch, Threat))
        threat = Threat.of(one if is_size else radius("radii", one))
        named[one if isinstance(one, str) else threat.key] = threat
    return named


def one_radius(value: Any) -> float:
    """Return the only one of radii; UsageError for several."""
    several = radii("radii", value)
    if len(several) != 1:
        raise UsageError(f"radii={shown(value)}: one radius is taken here", "call it for each")
    return several[0]


def choice(name: str, value: Any, names: Sequence[str]) -> str:
    """Return one of these names; UsageError says the nearest."""
    if word(name, value) not in names:
        raise UsageError(f"unknown {name} {shown(value)}", one_of(value, names))
    return str(value)


def certificates(value: Any) -> list[Certificate]:
    """Return what `certify` returned, as a list."""
    several = _listed("certificates", value, "certificates")
    if not all(isinstance(one, Certificate) for one in several):
        raise UsageError(f"certificates={shown(value)}: a result of certify is needed")
    return list(several)


def as_given(name: str, value: Any) -> Any:
    """Return what another place judges: images, labels, certificates."""
    return value


def denoiser(name: str, value: Any) -> Any:
    """Return a path as a Path, and an object that may be a denoiser as it is."""
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    holds_unet = hasattr(value, "unet") and hasattr(value, "scheduler")
    if not isinstance(value, (nn.Module, tuple, list)) and not holds_unet:
        raise UsageError(
            f"{name}={shown(value)}: no denoiser",
            "a module, a path, or diffusers' (unet, scheduler)",
        )
    return value


READERS: dict[str, Callable[[str, Any], Any]] = {
    "source": source,
    "mean": statistics,
    "std": statistics,
    "input_size": size,
    "arch": word,
    "arch_args": mapping,
    "as_stated": answer,
    "weights": word,
    "features": answer,
    "image_size": lambda name, value: whole_number(name, value, 1, LARGEST_SIDE),
    "checkpoint": checkpoint,
    "path": path,
    "force": answer,
    "double": answer,
    "device": device,
    "dataset": word,
    "split": word,
    "limit": lambda name, value: whole_number(name, value, 1),
    "seed": lambda name, value: whole_number(name, value, 0),
    "data_dir": path,
    "images": as_given,
    "labels": as_given,
    "iterations": lambda name, value: whole_number(name, value, 1),
    "batch_size": lambda name, value: whole_number(name, value, 1),
    "denoiser": denoiser,
    "certificates": as_given,
    "prove": answer,
    "top": lambda name, value: whole_number(name, value, 1),
    "radii": as_given,
    "around": lambda name, value: None if value is None else radius(name, value),
    "attacks": words,
    "return_examples": answer,
    "seconds": seconds,
    "fail_on": words,
    "at_least": share,
    "at_most": as_given,
}
"""Parameter of a public function -> how its value is read. None stands for the default where that is None; a
parameter whose type names its values is read by `choice`."""


def fields_of(kind: Any, offered: Any) -> dict[str, str]:
    """Return those keyword arguments of a TypedDict that an options class has, and their fields."""
    names = {item.name for item in fields(kind)}
    offers = offered.__annotations__
    pairs = {name: name if name in names else _FIELDS.get(name, name) for name in offers}
    return {name: field for name, field in pairs.items() if field in names}


def options(kind: Any, offered: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return values for fields of an options class, in the types that its annotations name.

    Args:
        offered: the TypedDict of the keyword arguments.

    Raises:
        UsageError: a name is not offered or no field, or a value has another type.
    """
    chosen = fields_of(kind, offered)
    require_known(values, chosen, where)
    hints = get_type_hints(kind)
    return {
        chosen[name]: _typed(name, value, hints[chosen[name]]) for name, value in values.items()
    }


def names_with_values(values: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not None."""
    return [name for name, value in values.items() if value is not None]


def _typed(name: str, value: Any, hint: Any) -> Any:
    plain = plain_value(value)
    if name == "seed":
        return whole_number(name, value, 0)
    if "Path" in str(hint) and plain is not None:
        return path(name, value)
    if name in _RADII and plain is not None:
        plain = _read_quotients(name, plain)
    if isinstance(plain, str) and ("tuple" in str(hint) or "list" in str(hint)):
        plain = [plain]
    if isinstance(plain, str) and (names := choices(hint)):
        return choice(name, plain, names)
    try:
        return msgspec.convert(plain, hint)
    except (msgspec.ValidationError, TypeError) as failure:
        reason = str(failure).replace("`", "").partition(" - at")[0]
        message = f"{name}={shown(value)}: {reason[:1].lower()}{reason[1:]}"
        raise UsageError(message) from failure


def _read_quotients(name: str, value: Any) -> Any:
    if isinstance(value, str) and value != _AUTO:
        value = radius(name, value)
    if isinstance(value, (list, tuple)):
        return [radius(name, one) if isinstance(one, str) else plain_value(one) for one in value]
    return [value] if name == "radii" and isinstance(value, (int, float)) else value


def _listed(name: str, value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"{name}={shown(value)}: {what} are needed")
    try:
        return list(value)
    except TypeError as failure:  # an array of no dimension
        raise UsageError(f"{name}={shown(value)}: {what} are needed") from failure
