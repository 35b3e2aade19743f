"""Errors with a message (what went wrong, where), a hint (what to do next) and an exit code."""

import re

_COMMAND = re.compile(r"(^|\s|(?=##[a-z]*\[))(::|##)")
"""The beginning of a command to a program that runs workflows."""


class CertvitError(Exception):
    """A failure that a user can act on, shown as one line and a hint."""

    code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(plain_text(message))
        self.message = plain_text(message)
        self.hint = plain_text(hint)


class UsageError(CertvitError):
    """An option or argument is wrong, or an output file exists already."""

    code = 2


class CheckpointError(CertvitError):
    """A checkpoint is missing, truncated, not safetensors, or holds NaN or infinite weights."""

    code = 3


class ArchitectureError(CertvitError):
    """The architecture is unknown, or it and the tensors disagree."""

    code = 4


class NoBoundError(CertvitError):
    """A finite bound was demanded and none can be proven."""

    code = 5


class DataError(CertvitError):
    """A dataset is unknown, missing, malformed, or does not fit the model."""

    code = 6


class GateError(CertvitError):
    """A `--max` or `--min-*` gate was not met."""

    code = 7


class OutputError(CertvitError):
    """The output cannot be written: read-only folder, full disk."""

    code = 8


class UndecidedError(CertvitError):
    """A gate was not decided: both verdicts are possible. More images, or time, decide it."""

    code = 9


class Interrupted(CertvitError):
    """The user pressed Ctrl-C: 128 + SIGINT."""

    code = 130


class Refused(ValueError):
    """A value is invalid; the caller adds the file or option that it came from."""


def raise_if(wrong: object, error: type[Exception], *words: str) -> None:
    """Raise the error, of these words, where something is wrong."""
    if wrong:
        raise error(*words)


def plain_text(text: str) -> str:
    """Return text of strangers (names of files, classes, keys) for one line of a screen, a log or a
    report.

    Unprintable characters (line ends, escapes, marks of direction) are spelled out, and so are the
    beginnings of commands to the programs that run workflows: `::error`, `##[group]`, `##vso[`.
    What is plain stays as it is.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _COMMAND.sub(lambda match: f"{match[1]}\\x{ord(match[2][0]):02x}{match[2][1:]}", shown)


def plain_lines(text: str) -> str:
    """Return text of several lines of our own, each plain."""
    return "\n".join(plain_text(line) for line in text.split("\n"))


def one_line(failure: object) -> str:
    """Return the first line of a message, printable, at most 200 characters."""
    text = (str(failure).splitlines() or [type(failure).__name__])[0]
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
