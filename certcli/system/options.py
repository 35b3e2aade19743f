"""An options dataclass' field on the command line; `cli.shared.command` makes Typer's option."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """An annotation of a field. A field without one is no option. A `Path` names an input file.

    Args:
        names: spellings, where the field's own name is not the only one.
        read: text to value; ValueError says what is wrong with the text.
        panel: the panel of `--help`, where it is not that of the class.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    panel: str | None = None
