"""What an audit does next: of all units that fit into the time, the one that tells most a second.

Each stage first gets its smallest unit. Then time goes to what a gate waits for, and then to
where an interval still shrinks. The rule is a price list: seconds of work of an image, a guess before
the first unit and the largest so far after it, times the wall seconds that a second of work takes here.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from certcli.audit import gates, plan
from certcli.evaluation import intervals
from certcli.images.labelled import Images
from certcli.system import errors, processes

Piece = TypeVar("Piece")
REFUSALS = {
    kind.__name__: kind
    for kind in (errors.UsageError, errors.ArchitectureError, errors.NoBoundError, errors.DataError)
}
"""Failures after which an audit continues without the stage, in all processes."""


def run_by_team(
    team: processes.Team,
    seconds: float,
    work: Callable[[], Piece],
    pack: Callable[[Piece], Any] = lambda piece: piece,
    unpack: Callable[[Any], Piece] = lambda plain: plain,
) -> tuple[list[Piece], bool]:
    """(results by rank, to the first that was broken off; whether one was). pack: to plain values.

    What was found behind one that took too long is dropped: else images that take long would be
    left out for taking long. A refusal of one process is raised in all of them.
    """
    if not team.several:
        try:
            with plan.EndsAfter(seconds):
                return [work()], False
        except plan.OutOfTime:
            return [], True
    try:
        with plan.EndsAfter(seconds):
            mine = ["found", pack(work())]
    except plan.OutOfTime:
        mine = ["over"]
    except errors.CertvitError as refusal:
        if type(refusal).__name__ not in REFUSALS:
            raise
        mine = ["refused", type(refusal).__name__, refusal.message, refusal.hint]
    pieces: list[Piece] = []
    everyone = team.everyone(mine)
    for kind, *rest in everyone:
        if kind == "refused":
            raise REFUSALS[rest[0]](*rest[1:])
    for kind, *rest in everyone:
        if kind == "over":
            return pieces, True
        pieces.append(unpack(rest[0]))
    return pieces, False


FIRST = 4
"""Images of the first unit at most; each further one is twice as large."""
CAREFUL = 1.25
"""A unit begins only if this multiple of its price is left."""
UNSURE = 2.0
"""A unit may take this multiple of that and of a second of work (imports, a machine that stalls), and more only where the
first units of others still fit."""


class Stage:
    """Images in turn, a batch a unit, which the processes of a team judge together.

    Attributes:
        name: of what it finds, as gates and the list of what was skipped call it.
        doing: for the progress.
        proven: whether its shares are proofs.
        optional: whether the audit goes on where it is refused.
        owed: whether an answer needs its first unit, for which a budget may be overdrawn
            (`Clock.owed`).
        refusal: why it is not done, whatever the time.
        broken: whether the last unit was broken off, which does not count.
        rows: of each image so far.
        first, largest: images of the first unit and of any, at most, in each process.
        few: images from which on it has said what a first round asks of it.
        each: seconds of work of an image, a guess and then the most that one took.
        tries, units: how many were begun, and ended; seconds: of work in those that ended.
        after: stages to wait for, and `barred`: why it is not worth its time after them, or None.
    """

    name: str
    doing: str
    proven = False
    optional = False
    owed = False
    refusal: str | None = None
    broken = False
    first = FIRST
    few = 1
    tries = 0
    units = 0
    seconds = 0.0

    def __init__(
        self,
        images: Sequence[Any] | Images,
        largest: int,
        each: float,
        team: processes.Team = processes.ALONE,
    ) -> None:
        self.images: Any = images
        self.largest = largest
        self.each = each
        self.team = team
        self.rows: list[Any] = []
        self.after: Sequence[Stage] = ()
        self.barred: Callable[[], str | None] = lambda: None

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def rest(self) -> int:
        return len(self.images) - self.count

    @property
    def size(self) -> int:
        """Images of the next unit; no machine decides it, as images of a batch draw from one seed."""
        return min(self.largest, self.first * 2 ** min(self.units, 20))

    @property
    def begins(self) -> bool:
        """Whether its first round is not over; what was broken off at once has no second chance in it."""
        return not self.tries or 0 < self.count < self.few

    @property
    def price(self) -> float:
        """Seconds of work of the next unit."""
        return self.each * max(1, min(self.size, self.rest))

    @property
    def gain(self) -> float:
        """How much the interval of a share of one half shrinks: outcomes may not decide how many
        images there are, or the intervals would not hold.
        """
        after = self.count + min(self.size * self.team.size, self.rest)
        return _interval_width(self.count) - _interval_width(after)

    @property
    def samples(self) -> dict[gates.Key, intervals.Sample]:
        """Outcomes of the images so far, for the gates."""
        return {}

    def find(self) -> Any:
        """Judge the next images of this process, after those so far and those of lower ranks."""
        start = self.count + self.team.rank * self.size
        positions = list(range(start, min(start + self.size, len(self.images))))
        return self.judge(positions) if positions else []

    def judge(self, positions: list[int]) -> Any:
        """Return a row an image."""
        raise NotImplementedError

    def take(self, pieces: Sequence[Any]) -> None:
        """Take the rows of all processes, by rank."""
        self.rows += [row for rows in pieces for row in rows]
        self.units += bool(pieces)

    def report(self, findings: gates.AuditFindings) -> None:
        """Add what it found."""
        raise NotImplementedError

    @staticmethod
    def pack(piece: Any) -> Any:
        """Return rows in plain values, for another process."""
        return piece

    def unpack(self, plain: Any) -> Any:
        return plain

    def go(self, clock: plan.Clock, seconds: float) -> None:
        """Do one unit in these wall seconds at most."""
        began = clock.now
        before = self.count
        try:
            pieces, self.broken = run_by_team(self.team, seconds, self.find, self.pack, self.unpack)
        except tuple(REFUSALS.values()) as failure:
            if not self.optional:
                raise
            self.refusal = failure.message
            return
        took = clock.computed(began)
        size = max(1, min(self.size, self.rest))
        self.take(pieces)
        # imports are the first unit's, and tell nothing about the next one
        learns = not self.tries or (self.units <= 2 and not self.broken)
        easy = 0 < self.count < self.few  # a first image that is quickly fooled says little
        self.each = took / size if learns and not easy else max(self.each, took / size)
        self.tries += 1
        self.seconds += took if self.count > before else 0.0

    def write_down(self, findings: gates.AuditFindings) -> None:
        """Add what it found, and say what it did not."""
        if self.refusal is not None:
            findings.skip(self.name, self.refusal)
        elif not self.count:
            findings.skip(self.name, self.unfinished(), True)
        elif self.rest:
            findings.skip(f"{self.name}, further images", self.unfinished(), True)
        if self.count:
            findings.samples |= self.samples
            self.report(findings)

    def unfinished(self) -> str:
        if not self.tries:
            return f"not begun: it takes {_seconds_text(self.price)}, which were not left"
        if not self.count:
            return f"not finished in {_seconds_text(self.each)}"
        done = f"{self.count} of {self.count + self.rest} images fitted into {_seconds_text(self.seconds)}"
        hard = "; one more was broken off and is not counted: such images tend to be hard"
        return done + hard * self.broken


def _interval_width(images: int) -> float:
    """Return the width of the 95 % interval of a share of one half."""
    low, high = intervals.share_interval(images // 2, images) if images else (0.0, 1.0)
    return high - low


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else "less than a second"


def run_stages(
    stages: Sequence[Stage],
    clock: plan.Clock,
    awaited: Callable[[Stage], bool],
    tell: Callable[[str], None] = lambda doing: None,
) -> None:
    """Do units of the stages until none fits. awaited: whether a gate waits for more of a stage."""
    while True:
        barred, place, seconds = clock.team.agree(lambda: _next_unit(stages, clock, awaited))
        for number, why in barred:
            stages[number].refusal = why
        if place is not None:
            tell(stages[place].doing)
            stages[place].go(clock, seconds)
        elif not barred:
            return


def _next_unit(
    stages: Sequence[Stage], clock: plan.Clock, awaited: Callable[[Stage], bool]
) -> tuple[list[tuple[int, str]], int | None, float]:
    """Return stages that are not worth their time and why, the next one, and its seconds at most."""

    def wall(stage: Stage) -> float:
        return CAREFUL * stage.price * clock.pace

    def limit(stage: Stage) -> float:
        return clock.owed if stage.owed and not stage.tries else time_left

    def over(stage: Stage) -> bool:
        return stage.tries > 0 or stage.refusal is not None or wall(stage) > time_left

    time_left = clock.left
    eager = [stage for stage in stages if stage.refusal is None and stage.rest > 0]
    ready = [stage for stage in eager if all(map(over, stage.after))]
    new = [stage for stage in ready if not stage.tries]
    barred = [(stages.index(stage), why) for stage in new if (why := stage.barred()) is not None]
    fitting = [stage for stage in ready if wall(stage) <= limit(stage)]
    if barred or not fitting:
        return barred, None, 0.0
    first = [stage for stage in fitting if stage.begins]
    best = max(
        first or list(filter(awaited, fitting)) or fitting,
        key=lambda stage: (awaited(stage), stage.gain / max(stage.price, 1e-6)),
    )
    prices = [wall(stage) for stage in eager if not stage.tries and stage is not best]
    others = sum(price for price in prices if price <= time_left)
    enough = UNSURE * (wall(best) + clock.pace)
    return [], stages.index(best), min(limit(best), max(enough, time_left - others))
