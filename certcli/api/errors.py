"""Errors of the core in Python's words: keyword arguments for options, hints as exception notes."""

import re
from collections.abc import Iterable

from certcli.system import errors, registry

_WORDS = re.compile(
    r"(?P<features>certvit lipschitz --features)"
    r"|(?P<quoted>(?<![\w=])'[^']*'(?!\w))"
    r"|(?P<command>certvit [a-z]+\b[^,;()]*)"
    r"|--arch-arg (?P<key>\w+)=(?P<item>[^\s,;()]+)"
    r"|(?<![\w-])--(?P<option>[a-z][a-z0-9-]*)(?:[ =](?P<value>'[^']*'(?!\w)|\"[^\"]*\"|[A-Z0-9.][^\s,;()]*))?"
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
    "budget": "seconds",
    "gates": "fail_on",
}
_LISTS = frozenset(("attacks", "patches", "fail_on"))
_LETTERS = {"a": "attacks", "e": "radii", "o": "path"}


def in_python(text: str) -> str:
    """Return a message with keyword arguments for options; commands to type stay."""

    def argument(match: re.Match[str]) -> str:
        if match["features"]:
            return "load(..., features=True)"
        if match["command"] or match["quoted"]:
            return match[0]
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


def require_option_names(passed: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise UsageError for a keyword argument that `where` lacks; it says the nearest name."""
    names = sorted(allowed)
    for name in sorted(set(passed) - set(names)):
        ours = _NAMES.get(name)
        hint = f"did you mean '{ours}'?" if ours in names else registry.one_of(name, names)
        raise errors.UsageError(
            f"{where} has no option '{name}'", hint if names else "it takes none"
        )
