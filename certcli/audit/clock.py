"""A time budget: the time left, a stage's share, and an end to stages that do not stop."""

import gc
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from certcli.system.processes import ALONE, Team

FINISHING = 0.04
"""Share of the budget kept for writing what was found."""
AGAIN = 5.0
"""Seconds between two rings: a library may swallow what is raised inside it, and with it the first one."""

AFTER_AN_IMPORT = 0.05
"""Seconds until the next ring, where one met an import, the entry of a block, or the end of an object."""


class OutOfTime(BaseException):
    """A stage's time is over. Not an Exception, so that no room handles it as its own failure."""


@dataclass
class Clock:
    """budget: wall seconds, from `started` on the clock of `time.perf_counter`.

    Of several processes the leader's is right.
    """

    budget: float
    started: float = field(default_factory=time.perf_counter)
    team: Team = ALONE

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left(self) -> float:
        """Seconds for work: the end of the budget belongs to writing."""
        return max(0.0, self.budget * (1 - FINISHING) - self.spent)

    def part(self, share: float) -> "StageTime":
        """Return the time of a stage that may take this share of the rest. All processes call it."""
        return StageTime(self.team.agree(lambda: share * self.left))


@dataclass
class StageTime:
    """One stage's seconds, counted from its beginning."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" if self.seconds >= 1 else "less than a second"

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def ended(self) -> "Ending":
        """Break a block off by OutOfTime, by a signal: in the main thread alone."""
        if self.left <= 0:
            raise OutOfTime
        return Ending(self)


class Ending:
    """`with` this, a block ends with its stage's time, and torch's modes are as they were before.

    No generator: a signal could end its exit before it is asked to go on.
    """

    def __init__(self, time: StageTime) -> None:
        self.time = time
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        from certcli.system.torch_modes import RestoredModes

        if self.in_main_thread:
            self.modes = RestoredModes()
            self.modes.__enter__()
            # the audit itself may run inside an import
            self.imports = _imports(sys._getframe())
            self.hook = sys.unraisablehook
            sys.unraisablehook = self._deferred
            self.handler = signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, max(self.time.left, 1e-3), AGAIN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if self.in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.handler)
            sys.unraisablehook = self.hook
            if kind is OutOfTime:
                _close_generators(error)
            self.modes.__exit__(None, None, None)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        entering = frame is not None and frame.f_code is Ending.__enter__.__code__
        if frame is not None and frame.f_code is Ending.__exit__.__code__:
            return  # the block is over
        if entering or _imports(frame) > self.imports:
            # a module cut off in the middle would fail later
            signal.setitimer(signal.ITIMER_REAL, AFTER_AN_IMPORT, AGAIN)
        else:
            raise OutOfTime

    def _deferred(self, unraisable: Any) -> None:
        """Ring again soon where Python drops the end of time: in `__del__`, a weak reference's
        callback, or the collector nothing can be raised.
        """
        if unraisable.exc_type is OutOfTime:
            signal.setitimer(signal.ITIMER_REAL, AFTER_AN_IMPORT, AGAIN)
        else:
            self.hook(unraisable)


def _close_generators(error: BaseException | None) -> None:
    """End the generators that an exception left open: each restores its state, such as gradients
    off, when it is collected, which could be in a later stage.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()  # some are parts of a cycle


def _imports(frame: FrameType | None) -> int:
    """Count the frames of imports that are under way, from this frame outwards."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count
