"""Standard streams: closed, full, read by `head`, or of an encoding that lacks a character."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Guarded:
    """A text stream whose writes never fail: after an error it drops; `failure` is the reason.

    A command whose reader has left (`certvit log m.safetensors | head -1`) finishes: files are
    written, gates judged.
    """

    def __init__(self, stream: Any) -> None:
        self.failure: str | None = None if stream is not None else "it is closed"
        self._stream: Any = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 (as long as the process)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self._safely(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._safely(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _safely(self, action: Callable[[], Any]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except (OSError, ValueError) as failure:
            self.failure = (
                ""
                if getattr(failure, "errno", None) == errno.EPIPE
                else getattr(failure, "strerror", None) or str(failure)
            )
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # the buffer is emptied into nowhere: the interpreter would fail over it as it ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
                self._stream.flush()


@contextlib.contextmanager
def guarded() -> Iterator[Guarded]:
    """Guard sys.stdout and sys.stderr inside the block; yield the guard of stdout."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number: else a file opened later would become the stream
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    out: Any = Guarded(sys.stdout)
    err: Any = Guarded(sys.stderr)
    sys.stdout = out
    sys.stderr = err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


class Interrupts:
    """Remember Ctrl-C: an import that it breaks off may raise anything but KeyboardInterrupt.

    Attributes:
        terminated: SIGTERM means the same. torchrun sends it to the other processes when one has
            ended.
    """

    def __init__(self, terminated: bool = False) -> None:
        self.seen = False
        self._usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
        self._usual |= {signal.SIGTERM: signal.SIG_DFL} if terminated else {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number, usual in self._usual.items():
            if signal.getsignal(number) is usual:  # a shell may have set it to be ignored
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, self._handle)
                    self._before[number] = usual
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: Any) -> None:
        self.seen = True
        raise KeyboardInterrupt
