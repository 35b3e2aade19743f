"""`--verify` of lipschitz, certify and log: an alias until the next release."""

import shlex
from collections.abc import Sequence

from certcli.cli.shared.output import Sink

COMMANDS = ("lipschitz", "certify", "log")
RENAMED = {"--samples": "--draws"}
DROPPED = ("--features",)
"""What the file says itself."""


def moved(words: Sequence[str]) -> list[str]:
    """Return the words of `certvit verify` for those of an old `--verify`, and say so in one line."""
    named = [part for word in words for part in _split(word)]
    if not named or named[0] not in COMMANDS or "--verify" not in named:
        return list(words)
    place = named.index("--verify")
    after = place + 1 if named[0] == "log" else place + 2
    rest = [*named[place + 1 : after], *named[1:place], *named[after:]]
    command = ["verify", *(RENAMED.get(word, word) for word in rest if word not in DROPPED)]
    silent = "-q" in named or "--quiet" in named
    Sink("--json" in named, silent).note(
        f"--verify of {named[0]} is a command now: {shlex.join(['certvit', *command])}"
    )
    return command


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--verify=") else [word]
