"""Errors with a message (what went wrong, where), a hint (what to do next) and an exit code."""


class CertvitError(Exception):
    """A failure that a user can act on, shown as one line and a hint."""

    code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


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
    """A gate was not decided: what was measured allows for both verdicts. More images, or more time, decide it."""

    code = 9


class Interrupted(CertvitError):
    """The user pressed Ctrl-C: 128 + SIGINT."""

    code = 130


class Refused(ValueError):
    """A value is invalid; the caller adds the file or option that it came from."""


def plain(text: str) -> str:
    """Return text for a screen, with unprintable characters (escapes, directions) spelled out."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(failure: object) -> str:
    """Return the first line of a message, printable, at most 200 characters."""
    text = (str(failure).splitlines() or [type(failure).__name__])[0]
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
