"""One hierarchy of errors: what went wrong and where (message), what to do next (hint), how the shell sees it (code)."""


class CertvitError(Exception):
    """A failure that a user can act on. Shown as one line and a hint, never as a traceback."""

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


class Interrupted(CertvitError):
    """Ctrl-C. 128 + SIGINT, as shells have it."""

    code = 130


class Refused(ValueError):
    """A value that does not pass, in one line; the caller knows which file or option it came from."""


def plain(text: str) -> str:
    """Text as a screen may have it: every character that is not printable (escapes, directions) spelled out."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(failure: object) -> str:
    """The first line of a message, printable and not longer than a line."""
    text = (str(failure).splitlines() or [type(failure).__name__])[0]
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
