"""Defaults from the current folder's `certvit.toml`, or `[tool.certvit]` of `pyproject.toml`.

    [audit]                                     [tool.certvit.audit]
    time-budget = "90s"                         fail-on = ["certified@0.25<0.4"]

An option on the command line comes before `certvit.toml`, which comes before `pyproject.toml`, key
by key. A key is a long option without its dashes; options of written files and of talk belong to
the command line alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from certcli.system import errors, reading, registry

FILES = (("pyproject.toml", ("tool", "certvit")), ("certvit.toml", ()))
"""File -> the place of certvit's table in it, in ascending order of precedence."""
COMMANDS = ("audit",)
NOT_FROM_FILES = frozenset(("output", "force", "report", "html", "json", "quiet", "help"))
LARGEST = 2**20
"""Bytes of a settings file."""


def take_settings(context: Any) -> None:
    """Give the called command its defaults. context: of the group, before the command's."""
    name = context.invoked_subcommand
    if name in COMMANDS:
        context.default_map = {
            name: defaults_in_files(name, context.command.commands[name].params, context)
        }


def defaults_in_files(command: str, parameters: list[Any], context: Any) -> dict[str, Any]:
    """Return the defaults in the files by the name of their parameter, as words of a command line.

    Raises:
        UsageError: a key is no option, or the option refuses the value.
    """
    options = {
        option.removeprefix("--"): parameter
        for parameter in parameters
        for option in parameter.opts
        if option[:2] == "--"
    }
    allowed = {name: parameter for name, parameter in options.items() if name not in NOT_FROM_FILES}
    chosen: dict[str, Any] = {}
    for file, place in FILES:
        path = Path(file)
        table = _settings_table(path, place)
        for other in table:
            if other not in COMMANDS:
                raise errors.UsageError(
                    f"{path}: certvit has no settings for '{errors.one_line(other)}'",
                    registry.one_of(other, COMMANDS),
                )
        section = table.get(command, {})
        if not isinstance(section, dict):
            raise errors.UsageError(
                f"{path}: [{command}] is no table", f'[{command}]\ntime-budget = "2m"'
            )
        for key, value in section.items():
            if key not in allowed:
                raise errors.UsageError(
                    f"{path}: [{command}] has no setting '{errors.one_line(key)}'",
                    registry.one_of(key, allowed),
                )
            parameter = allowed[key]
            where = f"{path}: [{command}] {key}"
            words = _typed_words(value, parameter.multiple, where)
            try:
                parameter.process_value(context, words)
            except Exception as failure:  # Typer's, of whichever click it brings
                if not hasattr(failure, "format_message"):
                    raise
                raise errors.UsageError(
                    f"{where}: {errors.one_line(failure)}", f"certvit {command} --help"
                ) from failure
            chosen[parameter.name] = words
    return chosen


def _settings_table(path: Path, place: tuple[str, ...]) -> dict[str, Any]:
    try:
        if reading.is_absent(path):
            return {}
        table: Any = tomllib.loads(reading.read_bounded(path, LARGEST).decode())
    except (OSError, ValueError, RecursionError) as failure:
        raise errors.UsageError(
            f"{path} cannot be read: {errors.one_line(failure)}", "it must be TOML, UTF-8"
        ) from failure
    for name in place:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise errors.UsageError(f"{path}: {'.'.join(place)} is no table")
    return table


def _typed_words(value: Any, several: bool, where: str) -> Any:
    """Return a value of TOML as it is typed."""
    if isinstance(value, list) and several:
        return [_typed_words(item, False, where) for item in value]
    if several:
        return [_typed_words(value, False, where)]
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise errors.UsageError(
        f"{where}: {type(value).__name__} is no value of this option",
        "a text, a number, or a list of them",
    )
