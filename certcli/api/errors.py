"""Errors of the core in Python's words: keyword arguments for options, hints as exception notes."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from certcli.system.errors import UsageError

_WORDS = re.compile(
    r"(?P<features>certvit lipschitz --features)"
    r"|(?P<command>certvit [a-z]+\b[^,;()]*)"
    r"|--arch-arg (?P<key>\w+)=(?P<item>[^\s,;()]+)"
    r"|(?<![\w-])--(?P<option>[a-z][a-z0-9-]*)(?:[ =](?P<value>[A-Z0-9.\"'][^\s,;()]*))?"
    r"|(?<![\w-])-(?P<letter>[aeo])\b"
)
_FLAGS = frozenset(("as_stated", "features", "force"))
_NAMES = {
    "arch_arg": "arch_args",
    "epsilon": "radii",
    "attack": "attacks",
    "patch": "patches",
    "min_certified": "at_least",
    "time_budget": "seconds",
}
_LISTS = frozenset(("attacks", "patches", "fail_on"))
_LETTERS = {"a": "attacks", "e": "radii", "o": "path"}


def in_python(text: str) -> str:
    """Return a message with keyword arguments for options; commands to type stay."""

    def argument(match: re.Match[str]) -> str:
        if match["features"]:
            return "load(..., features=True)"
        if match["command"]:
            return match["command"]
        if match["key"]:
            return f"arch_args={{'{match['key']}': {match['item']}}}"
        if match["letter"]:
            return _LETTERS[match["letter"]]
        name = match["option"].replace("-", "_")
        name = _NAMES.get(name, name)
        if match["value"] and name in _LISTS:
            text = match["value"].strip("'\"")
            return f'{name}=["{text}"]'
        if match["value"]:
            return f"{name}={match['value']}"
        return f"{name}=True" if name in _FLAGS else name

    return _WORDS.sub(argument, text)


def require_known(
    names_given: Iterable[str],
    allowed: Iterable[str],
    where: str,
    written: Mapping[str, str] | None = None,
) -> None:
    """Raise UsageError for a keyword argument that `where` lacks. written: other names -> ours."""
    names = sorted(allowed)
    for name in sorted(set(names_given) - set(names)):
        near = [written[name]] if written and name in written else get_close_matches(name, names, 1)
        options = f"one of: {', '.join(names)}" if names else "it takes none"
        hint = f"did you mean '{near[0]}'? {options}" if near else options
        raise UsageError(f"{where} has no option '{name}'", hint)
