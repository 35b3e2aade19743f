"""An options dataclass' field on the command line; `cli.shared.command` makes Typer's option."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
