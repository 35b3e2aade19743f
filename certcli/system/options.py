"""An options dataclass' field on the command line; `cli.shared.command` makes Typer's option."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from certcli.system import errors, registry

NOTE = "option"
"""Key of an `Option` in the metadata of its field."""


@dataclass(frozen=True)
class Option:
    """What the command line says of a field. A field without one is no option.

    Args:
        names: spellings, where the field's own name is not the only one.
        read: text to value; ValueError says what is wrong with the text.
        panel: the panel of `--help`, where it is not that of the class.
        mark: whether the value names an input or an output; a `Path` names an input.
        min, max, callback, is_eager: as Typer has them.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    panel: str | None = None
    mark: Any = None
    min: float | None = None
    max: float | None = None
    callback: Callable[..., None] | None = None
    is_eager: bool = False


def option(default: Any, help: str, *names: str, **words: Any) -> Any:
    """Return a dataclass field with this default, or what makes it, that is an option."""
    metadata = {NOTE: Option(help, names, **words)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values that a type names: those of its Literal, without the None of a union."""
    parts = [hint] if get_origin(hint) is Literal else get_args(hint)
    names = (value for part in parts if get_origin(part) is Literal for value in get_args(part))
    return tuple(names)


def require_choices(options: object) -> None:
    """Raise UsageError where a field of a dataclass has none of the values that its type names.

    Types that allow other values too, as `float | Literal["auto"]`, are left to others. Values also
    come from records, which anyone may have written.
    """
    for name, names in _choices_of(type(options)).items():  # type: ignore[arg-type]
        value = getattr(options, name)
        if value not in names and value is not None:
            raise errors.UsageError(
                f"unknown {name} '{value!s:.40}'", registry.one_of(str(value), names)
            )


@cache
def _choices_of(kind: Any) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(kind)
    closed = {name: hint for name, hint in hints.items() if not set(get_args(hint)) & {float, int}}
    return {item.name: names for item in fields(kind) if (names := choices(closed.get(item.name)))}
