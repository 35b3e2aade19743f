"""A time budget: what is left, what this process computed, and an end to work that does not
stop."""

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from certcli.system.processes import ALONE, Team

FINISHING = 0.04
"""Share of the budget kept for writing what was found."""
WRITING = 0.2
"""Seconds of work that writing takes at least: on a busy machine more than its share of the
budget."""
OWED = 0.25
"""Of the budget, beyond it: for the first attacked images and the bound, without which there is no
answer."""
PREPARING = 0.4
"""Share of the budget after which images without labels get no further answers."""
AGAIN = 5.0
"""Seconds between two rings: a library may swallow what is raised inside it, and with it the first
one."""

AFTER_AN_IMPORT = 0.05
"""Seconds until the next ring, where one met an import, the entry of a block, or the end of an
object."""

Moment = tuple[float, float]
"""Wall and CPU seconds."""


class OutOfTime(BaseException):
    """A stage's time is over. Not an Exception, so that no room handles it as its own failure."""


@dataclass
class Clock:
    """Wall seconds of a budget, and how many of them this process had a processor for.

    Of several processes the leader's is right.

    Args:
        started: on the clock `wall`; None for now, else the beginning of the process.
        on_cpu: False where another device computes, whose seconds are the wall's.
    """

    budget: float
    started: float | None = None
    team: Team = ALONE
    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    on_cpu: bool = True

    def __post_init__(self) -> None:
        before = self.cpu() if self.started is None else 0.0
        self.begin: Moment = (self.wall() if self.started is None else self.started, before)

    @property
    def now(self) -> Moment:
        return self.wall(), self.cpu()

    @property
    def spent(self) -> float:
        return self.wall() - self.begin[0]

    @property
    def left(self) -> float:
        """Seconds for work: the end of the budget belongs to writing."""
        return max(0.0, self.budget - self._writing - self.spent)

    @property
    def owed(self) -> float:
        """Seconds for what the answer cannot do without, where its start has taken the time."""
        return max(0.0, self.budget * (1 + OWED) - self._writing - self.spent)

    @property
    def _writing(self) -> float:
        return max(FINISHING * self.budget, WRITING * self.pace)

    @property
    def pressed(self) -> bool:
        """Whether preparations have taken their share; of several processes all prepare alike."""
        return self.spent > PREPARING * self.budget and not self.team.several

    def computed(self, since: Moment | None = None) -> float:
        """Return the seconds of work since then: on a busy machine those of the CPU, with several
        threads those of the wall.
        """
        wall, cpu = (b - a for a, b in zip(since or self.begin, self.now, strict=True))
        return min(wall, cpu) if self.on_cpu else wall

    @property
    def pace(self) -> float:
        """Wall seconds that a second of work takes here: 1 where nothing else runs."""
        return self.spent / max(self.computed(), 1e-3) if self.spent > 0 else 1.0


class EndsAfter:
    """`with` this, a block ends by OutOfTime after these wall seconds, and torch's modes are as they
    were before; by a signal, so in the main thread alone.

    No generator: a signal could end its exit before it is asked to go on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        from certcli.system.torch_modes import RestoredModes

        if self.seconds <= 0:
            raise OutOfTime
        if self.in_main_thread:
            self.modes = RestoredModes()
            self.modes.__enter__()
            # the audit itself may run inside an import
            self.imports = _imports(sys._getframe())
            self.hook = sys.unraisablehook
            sys.unraisablehook = self._deferred
            self.handler = signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 1e-3), AGAIN)

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
        entering = frame is not None and frame.f_code is EndsAfter.__enter__.__code__
        if frame is not None and frame.f_code is EndsAfter.__exit__.__code__:
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
