"""A command line once more, from what was given on it, as it can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

WRITTEN = frozenset(("output", "shard_size", "force", "records", "resume", "plot", "html", "as_json", "quiet"))
"""Parameters that say what is written and shown, not what is found."""


def again(context: Any, leave: frozenset[str] = frozenset()) -> str:
    """The command of this context with all that was typed, but WRITTEN and `leave`.

    For documents that others read: of a path that is here only the name is told.
    """
    words = ["certvit", context.command.name]
    for parameter in context.command.params:
        if parameter.name in WRITTEN | leave or context.get_parameter_source(parameter.name).name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += _spelled(parameter, one)
    return shlex.join(words)


def _spelled(parameter: Any, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [(parameter.opts if value else parameter.secondary_opts)[0]]
    text = repr(value) if isinstance(value, float) else _name(str(value))
    return [text] if parameter.param_type_name == "argument" else [parameter.opts[0], text]


def _name(text: str) -> str:
    return Path(text).resolve().name if Path(text).exists() else text
