"""A command line once more, as it can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from certcli.system.reading import is_absent

WRITTEN = frozenset(
    ("output", "shard_size", "force", "records", "resume", "plot", "html", "as_json", "quiet")
)
"""Parameters of what a command writes and shows, not of what it finds."""


def again(context: Any, leave: frozenset[str] = frozenset()) -> str:
    """Return the command of this context with its typed options, without WRITTEN and `leave`.

    Others read it in documents: a path that exists here is reduced to its name.
    """
    words = ["certvit", context.command.name]
    for parameter in context.command.params:
        if (
            parameter.name in WRITTEN | leave
            or context.get_parameter_source(parameter.name).name != "COMMANDLINE"
        ):
            continue
        value = context.params[parameter.name]
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, bool):
                words.append((parameter.opts if one else parameter.secondary_opts)[0])
                continue
            text = repr(one) if isinstance(one, float) else str(one)
            text = text if is_absent(Path(text)) else Path(text).resolve().name
            words += (
                [text] if parameter.param_type_name == "argument" else [parameter.opts[0], text]
            )
    return shlex.join(words)
