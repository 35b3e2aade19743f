"""What options of training say as texts: learning rates by the name of their schedule, lengths of
time, augmentations; and the share of a run that is done. Importing this file imports no torch."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from re import Match

from certcli.system.errors import UsageError, raise_if
from certcli.system.registry import one_of

Curve = Callable[[float], float]
"""Share of the run that is done -> learning rate, relative to --lr."""

RISE = 0.3
"""Share of a one-cycle run in which the rate rises."""
FIRST = 1 / 25
"""First rate of a one-cycle run, relative to --lr."""
LAST = FIRST / 1e4
"""Its last rate."""
FLOOR = 1e-3
"""Smallest rate of `cosine` and `steps` without numbers, relative to --lr."""

_NUMBER = r"\d+(?:\.\d*)?(?:[eE]-?\d+)?|\.\d+(?:[eE]-?\d+)?"


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    Attributes:
        form: what its text looks like, its numbers as groups.
        example: such a text.
        make: (match of the text, --lr) -> its curve; ValueError for numbers without a meaning.
        warms: whether --warmup comes before it.
    """

    form: re.Pattern[str]
    example: str
    make: Callable[[Match[str], float], Curve]
    warms: bool = True


def one_cycle(share: float) -> float:
    """Return half a cosine from FIRST to 1 in the first RISE of the run, then one from 1 to
    LAST."""
    if share < RISE:
        return FIRST + (1 - FIRST) * 0.5 * (1 - math.cos(math.pi * share / RISE))
    done = min(1.0, (share - RISE) / (1 - RISE))
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def _cosine_rate(match: Match[str], lr: float) -> Curve:
    last = 0.0 if match[1] is None else _last_rate(match[1], lr)
    floor = FLOOR if match[1] is None else 0.0
    return lambda share: max(floor, last + (1 - last) * 0.5 * (1 + math.cos(math.pi * share)))


def _stepped_rate(match: Match[str], lr: float) -> Curve:
    if match[1] is None:
        rates = (1.0, 0.1, 0.01)
        return lambda share: rates[(share >= 7 / 8) + (share >= 19 / 20)]
    factor = float(match[1])
    places = [float(place) for place in match[2].split(",")]
    rising = all(before < after for before, after in pairwise([0.0, *places, 1.0]))
    raise_if(not 0 < factor < 1, ValueError, f"the factor {factor:g} is not between 0 and 1")
    raise_if(not rising, ValueError, "the places are not rising shares of the run")
    return lambda share: factor ** sum(share >= place for place in places)


def _exponential_rate(match: Match[str], lr: float) -> Curve:
    last = _last_rate(match[1], lr)
    start = 0.0 if match[2] is None else float(match[2])
    raise_if(not 0 <= start < 1, ValueError, f"it cannot begin to fall at {start:g} of the run")
    return lambda share: last ** max(0.0, (share - start) / (1 - start))


def _last_rate(text: str, lr: float) -> float:
    """Return the last rate relative to --lr."""
    message = f"the last rate {text} is not between 0 and --lr {lr:g}"
    raise_if(not 0 < float(text) <= lr, ValueError, message)
    return float(text) / lr


SCHEDULES = {
    "cosine": Schedule(re.compile(rf"cosine(?::({_NUMBER}))?"), "cosine:1e-5", _cosine_rate),
    "steps": Schedule(
        re.compile(rf"steps(?::({_NUMBER})@((?:{_NUMBER})(?:,(?:{_NUMBER}))*))?"),
        "steps:0.2@0.5,0.6,0.7,0.8",
        _stepped_rate,
    ),
    "exponential": Schedule(
        re.compile(rf"exponential:({_NUMBER})(?:@({_NUMBER}))?"),
        "exponential:5e-6@0.5",
        _exponential_rate,
    ),
    "one-cycle": Schedule(
        re.compile("one-cycle"), "one-cycle", lambda match, lr: one_cycle, warms=False
    ),
}


def rate_curve(text: str, lr: float, warmup: float) -> Curve:
    """Return the learning rate over the run that a schedule's text describes.

    Args:
        warmup: share of the run in which the rate rises before the schedule.

    Raises:
        UsageError: no schedule is written so, or its numbers have no meaning.
    """
    name = text.partition(":")[0]
    hint = one_of(name, SCHEDULES)
    raise_if(name not in SCHEDULES, UsageError, f"unknown schedule '{text}'", hint)
    schedule = SCHEDULES[name]
    match = schedule.form.fullmatch(text)
    if match is None:
        raise UsageError(f"--schedule '{text}' is not written so", schedule.example)
    try:
        curve = schedule.make(match, lr)
    except ValueError as failure:
        raise UsageError(f"--schedule '{text}': {failure}", schedule.example) from failure
    if warmup == 0 or not schedule.warms:
        return curve
    floor = FLOOR if text in ("cosine", "steps") else 0.0
    return lambda share: max(floor, min(1.0, share / warmup + 1e-3) * curve(share))


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return the seconds of "90", "90s", "10m" or "1.5h". UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    message = f"'{text}' is not a length of time"
    raise_if(seconds <= 0, UsageError, message, "--time-budget 90s, 10m or 1h")
    return seconds


def share_done(step: int, total: int, changes: Sequence[tuple[int, int]] = ()) -> float:
    """Return the share of the schedule before a step: linear in the steps, and continuous where the
    plan changed.

    Args:
        changes: for each earlier plan, the step at which it ended and the total that it had.
    """
    start = 0
    done = 0.0
    for changed, former in changes:
        done += (1 - done) * (changed - start) / (former - start)
        start = changed
    return done + (1 - done) * (step - start) / (total - start)


AUGMENTATIONS = ("crop", "flip", "shift", "warp")
"""Those without numbers."""
CUTOUT = re.compile(r"cutout:([1-9][0-9]?)x([1-9][0-9]{0,4})")
"""Number of squares, and their side in pixels."""
BANDS = re.compile(r"bands:([1-9][0-9]{0,3})")
"""Number of visible columns of cells: of tokens, where these can be dropped."""
SQUARES = re.compile(r"cutout-(random|greedy):([12])x([1-9][0-9]{0,4})")
"""The choice of places; then as CUTOUT. Four squares could hide a whole image, and a certificate
hides two."""
JITTER = re.compile(rf"color-jitter:({_NUMBER})")
"""Reach of brightness, contrast and saturation, as timm's one number."""
NUMBERED = (CUTOUT, BANDS, SQUARES, JITTER)


def require_known_augmentations(names: tuple[str, ...]) -> None:
    """Raise UsageError for a name that is no augmentation, or whose numbers have no meaning."""
    examples = "cutout:2x128,bands:3,cutout-greedy:2x96,color-jitter:0.4"
    hint = f"any of: {','.join(AUGMENTATIONS)},{examples}"
    for name in names:
        is_known = name in AUGMENTATIONS or any(kind.fullmatch(name) for kind in NUMBERED)
        raise_if(not is_known, UsageError, f"unknown augmentation '{name}'", hint)
        match = JITTER.fullmatch(name)
        wrong = match is not None and not 0 < float(match[1]) <= 1
        raise_if(wrong, UsageError, f"the reach of '{name}' is not above 0 and at most 1", hint)
