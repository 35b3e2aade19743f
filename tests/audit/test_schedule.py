"""The order of an audit's work, on a clock that only work moves: what tells most for its time comes first."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from certcli.audit import gates, plan, schedule
from certcli.evaluation.intervals import Sample


class Machine:
    """A wall and a CPU. busy: wall seconds for each second of work; log: what was done."""

    def __init__(self, busy: float = 1.0) -> None:
        self.busy = busy
        self.wall = self.cpu = 0.0
        self.log: list[str] = []

    def clock(self, budget: float) -> plan.Clock:
        clock = plan.Clock(budget, wall=lambda: self.wall, cpu=lambda: self.cpu)
        self.work(0.01)  # so that the pace is known
        return clock

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.wall += seconds * self.busy

    def together(
        self, team: Any, seconds: float, find: Callable[[], Any], *_: Any
    ) -> tuple[list[Any], bool]:
        """Do a unit; it is broken off where it takes more than these wall seconds."""
        began = self.wall
        piece = find()
        if self.wall - began <= seconds:
            return [piece], False
        self.cpu -= (self.wall - began - seconds) / self.busy
        self.wall = began + seconds
        return [], True


class Toy(schedule.Stage):
    """cost: seconds of work of an image; guess: what it is taken for; hits: every which image is one."""

    def __init__(
        self, machine: Machine, name: str, cost: float, guess: float | None = None, hits: int = 2
    ) -> None:
        super().__init__(range(200), 8, cost if guess is None else guess)
        self.machine = machine
        self.name = self.doing = name
        self.cost = cost
        self.hits = hits

    @property
    def samples(self) -> dict[gates.Key, Sample]:
        return {(self.name, ""): Sample([row % self.hits == 0 for row in self.rows], 200)}

    def judge(self, positions: list[int]) -> list[int]:
        self.machine.work(self.cost * len(positions))
        self.machine.log.append(self.name)
        return positions

    def report(self, findings: gates.AuditFindings) -> None:
        findings.failing = self.name


def run(
    machine: Machine,
    stages: Sequence[schedule.Stage],
    budget: float,
    monkeypatch: pytest.MonkeyPatch,
    awaited: Callable[[schedule.Stage], bool] = lambda stage: False,
) -> plan.Clock:
    monkeypatch.setattr(schedule, "run_by_team", machine.together)
    clock = machine.clock(budget)
    schedule.run_stages(stages, clock, awaited)
    return clock


COSTS = {"attack": 0.4, "bound": 0.1, "smoothing": 1.5, "local": 3.0}


@pytest.mark.parametrize("busy", [1.0, 4.0])
@pytest.mark.parametrize("budget", [2.0, 10.0, 40.0, 160.0])
def test_every_stage_that_fits_is_begun_before_any_has_a_second_unit(
    budget: float, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer depends on what the process could compute, not on what else ran."""
    machine = Machine(busy)
    stages = [Toy(machine, name, cost) for name, cost in COSTS.items()]
    clock = run(machine, stages, budget * busy, monkeypatch)
    firsts = list(dict.fromkeys(machine.log))
    assert firsts == ["bound", "attack", "smoothing", "local"][: len(firsts)]
    assert machine.log[: len(firsts)] == firsts
    assert clock.spent <= clock.budget
    alone = Machine()
    again = [Toy(alone, name, cost) for name, cost in COSTS.items()]
    run(alone, again, budget, monkeypatch)
    assert alone.log == machine.log
    assert len(firsts) >= {2.0: 1, 10.0: 3, 40.0: 4, 160.0: 4}[budget]


def test_a_stage_that_cannot_end_is_not_begun_and_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    long = Toy(machine, "long", 100.0)
    quick = Toy(machine, "quick", 0.1)
    run(machine, [long, quick], 30.0, monkeypatch)
    assert "long" not in machine.log
    assert quick.count == 200
    findings = gates.AuditFindings()
    for stage in (long, quick):
        stage.write_down(findings)
    (line,) = findings.skipped
    assert line.stage == "long"
    assert line.for_time
    assert "it takes 400 s" in line.why
    assert findings.failing == "quick"


def test_a_stage_that_was_taken_for_a_short_one_leaves_the_others_their_first_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    wrong = Toy(machine, "wrong", 1000.0, guess=0.01)
    others = [Toy(machine, name, cost) for name, cost in COSTS.items()]
    clock = run(machine, [wrong, *others], 60.0, monkeypatch)
    assert machine.log[0] == "wrong"
    assert wrong.broken
    assert all(stage.count for stage in others)
    assert clock.spent <= clock.budget
    findings = gates.AuditFindings()
    wrong.write_down(findings)
    assert "not finished in" in findings.skipped[0].why


def test_time_that_is_left_goes_to_gates_then_to_what_still_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    gated = Toy(machine, "gated", 1.0)
    cheap = Toy(machine, "cheap", 0.5)
    dear = Toy(machine, "dear", 2.0)
    stages = [cheap, dear, gated]
    run(machine, stages, 150.0, monkeypatch, lambda stage: stage is gated and stage.count < 50)
    assert machine.log[0] == "gated"
    waited = machine.log.index("cheap", 3)
    assert machine.log[3:waited] == ["gated"] * (waited - 3)
    assert gated.count >= 50
    assert cheap.count > dear.count > 4


def test_a_stage_that_is_not_worth_its_time_waits_for_what_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    bound = Toy(machine, "bound", 1.0)
    after = Toy(machine, "after", 0.1)
    after.after = [bound]
    after.barred = lambda: "the bound is enough" if bound.count else None
    run(machine, [after, bound], 30.0, monkeypatch)
    assert "after" not in machine.log
    assert after.refusal == "the bound is enough"
    late = Machine()
    unknown = Toy(late, "bound", 50.0)
    tried = Toy(late, "after", 0.1)
    tried.after = [unknown]
    run(late, [tried, unknown], 30.0, monkeypatch)  # the bound does not fit: nobody waits for it
    assert tried.count > 0


def test_seconds_are_those_of_the_process_where_the_machine_is_busy() -> None:
    busy = Machine(4.0)
    clock = busy.clock(60.0)
    began = clock.now
    busy.work(5.0)
    assert clock.computed(began) == pytest.approx(5.0)
    assert clock.pace == pytest.approx(4.0)
    alone = Machine()
    threads = alone.clock(60.0)
    alone.cpu += 8.0  # eight threads for a second
    alone.wall += 1.0
    assert threads.computed() == pytest.approx(1.01)
    threads.on_cpu = False  # another device: the CPU waits
    alone.wall += 9.0
    assert threads.computed() == pytest.approx(10.01)


@pytest.mark.parametrize(("cost", "begun"), [(0.1, ["attack"]), (1.0, [])])
def test_where_the_start_takes_the_time_an_answer_gets_its_first_unit_and_no_more(
    cost: float, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget is overdrawn by a quarter at most, and only by what fits into that by its forecast."""
    machine = Machine(30.0)
    attack = Toy(machine, "attack", cost)
    attack.owed = True
    attack.first = 1
    other = Toy(machine, "smoothing", 0.01)
    monkeypatch.setattr(schedule, "run_by_team", machine.together)
    clock = machine.clock(60.0)
    machine.work(2.0)
    schedule.run_stages([other, attack], clock, lambda stage: False)
    assert machine.log == begun
    assert clock.spent <= 75.0
