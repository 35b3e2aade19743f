"""A time budget becomes a number of steps that fit; the command keeps the best and the last, and
survives a full disk.
"""

import errno
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import certcli.checkpoint.file
from certcli.checkpoint import tensor_files as writer
from certcli.checkpoint.file import Checkpoint
from certcli.cli.finetune import run as training
from certcli.finetune import budget, validation
from certcli.finetune.budget import (
    EVALUATION_SHARE,
    FEWEST_VALIDATION_IMAGES,
    MARGIN,
    TOLERANCE,
    Costs,
    affordable_steps,
    changed_total,
)
from certcli.finetune.loop import Trainer
from certcli.finetune.option_texts import parse_duration, share_done
from certcli.finetune.state import KEY
from certcli.finetune.step import Diverged
from certcli.finetune.validation import Quality
from certcli.models import build
from certcli.system.errors import CheckpointError, OutputError, UsageError
from certcli.system.files import atomic_file
from tests.helpers.commands import attempt
from tests.helpers.training import LIPSCHITZ, digit_sets, trainer_of


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small untrained network in a file of its own folder; the command is as young as it would be
    in a process of its own.
    """
    monkeypatch.setattr(training, "LONGEST_START", 0.0)
    path = tmp_path / "start.safetensors"
    build.initialise("certvit_lip_digits", LIPSCHITZ).write(path)
    return path


def finetune(*words: object, fails: type[Exception] | None = None) -> Any:
    """The records of a run, or the error it ended with."""
    common = [
        "finetune",
        *words,
        "--dataset",
        "digits",
        "--loss",
        "ce",
        "--limit",
        64,
        "--batch-size",
        16,
        "--json",
    ]
    outcome = attempt(*common)
    if fails is not None:
        assert isinstance(outcome.exception, fails), outcome.exception
        return outcome.exception
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    return [json.loads(line) for line in outcome.stdout.splitlines() if line.startswith("{")]


@contextmanager
def power_cut(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Inside the block a training ends after so many epochs, as where the power fails."""
    whole = Trainer.run

    def cut(self: Trainer, *sets: Any) -> Iterator[Any]:
        yield from itertools.islice(whole(self, *sets), after)
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", cut)
        yield


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2M ", 120)),
        *((wrong, None) for wrong in ("", "soon", "10 minutes", "-5m", "0", "1d", "nan")),
    ],
)
def test_lengths_of_time(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert parse_duration(text) == seconds
        return
    with pytest.raises(UsageError, match="length of time"):
        parse_duration(text)


@pytest.mark.parametrize("available", [1.0, 10.0, 60.0, 600.0, 86400.0])
@pytest.mark.parametrize("step", [0.001, 0.1, 3.0])
@pytest.mark.parametrize("image", [1e-6, 1e-2])
@pytest.mark.parametrize("validation", [100, 50_000])
def test_a_plan_fits_its_time_and_wastes_little(
    available: float, step: float, image: float, validation: int
) -> None:
    costs = Costs(step, image, 0.05, 0.2, 2 * image)
    batches = 37
    steps, images = affordable_steps(available, costs, batches, validation)
    around = images * image + 0.05

    def seconds(steps: int) -> float:
        return steps * step + -(-steps // batches) * around + images * 2 * image + 0.2

    assert images == validation or FEWEST_VALIDATION_IMAGES <= images < validation
    assert steps == 1 or seconds(steps) <= available * MARGIN
    # an epoch's validation and saving, and one more step, are all that a plan leaves unused
    assert seconds(steps + 1) + around > available * MARGIN
    if images > FEWEST_VALIDATION_IMAGES and steps > batches:
        begun = steps // batches + 1
        assert begun * images * image <= EVALUATION_SHARE * available + images * image


def test_measuring_a_run_leaves_it_as_it_was(start: Path) -> None:
    checkpoint = Checkpoint.read(start)
    sets = digit_sets(checkpoint, 64, 64)
    ends = []
    for measured in (False, True):
        run = trainer_of(
            checkpoint,
            optimiser="stiefel",
            lr=0.01,
            epochs=2,
            batch_size=16,
            ema=0.5,
            augment=("warp",),
        )
        settings = run.settings
        if measured:
            budget.plan_for_budget(run, *sets, ends=time.perf_counter(), around=Costs(0, 0))
            assert run.settings.steps is not None
            run.settings = settings
        list(run.run(*sets))
        ends.append(run.last_net())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_lineage_holds_the_steps_and_they_repeat_the_run(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start.parent
    # a machine that keeps its pace
    monkeypatch.setattr(training, "changed_total", lambda step, total, *rest: total)
    limit = ("--validation-limit", 20)
    planned = finetune(start, "--time-budget", "1s", *limit, "-o", folder / "a.safetensors")[-1]
    made = Checkpoint.read(folder / "a.safetensors")
    parameters = made.record.lineage[-1].parameters
    assert parameters["time_budget"] == "1s"
    assert parameters["steps"] == planned["steps"] >= 1
    assert parameters["validation_limit"] == planned["dataset"]["images"] == 20
    finetune(start, "--steps", parameters["steps"], *limit, "-o", folder / "b.safetensors")
    assert Checkpoint.read(folder / "b.safetensors").digest == made.digest
    finetune(start, "--time-budget", "1s", "--steps", 3, fails=UsageError)


@pytest.mark.parametrize("step", [1, 37, 3700])
@pytest.mark.parametrize("total", [38, 3701, 100_000])
@pytest.mark.parametrize("faster", [1e-3, 0.5, 0.95, 1.0, 1.05, 2.0, 1e3])
def test_what_is_left_is_planned_again_where_the_pace_changed(
    step: int, total: int, faster: float
) -> None:
    if step >= total:
        return
    batches = 37
    pace = 0.25
    left = (total - step) * faster * pace / MARGIN
    changed = changed_total(step, total, pace, left, batches)
    if changed == total:  # right to the tolerance; or to one epoch: a run ends with a whole one
        assert abs(faster - 1) <= max(TOLERANCE + 1 / (total - step), batches / (total - step))
    else:
        spent = (changed - step) * pace
        assert changed >= step
        assert spent <= MARGIN * left * (1 + 1e-9)
        whole = (changed - step) % batches == 0
        assert spent + (batches if whole else 1) * pace > MARGIN * left * (1 - 1e-9)
    assert changed_total(step, total, pace, -1.0, batches) == step


def test_a_schedule_goes_on_from_where_it_is() -> None:
    assert [share_done(step, 7) for step in range(8)] == [step / 7 for step in range(8)]
    changes = [(10, 40), (30, 200), (100, 150)]
    totals = [former for _, former in changes] + [120]
    begins = [0] + [begun for begun, _ in changes]
    for number, (begun, total) in enumerate(zip(begins, totals, strict=True)):
        earlier = changes[:number]
        before = share_done(begun, totals[number - 1], changes[: number - 1]) if number else 0.0
        assert share_done(begun, total, earlier) == pytest.approx(before, abs=1e-15)
        assert share_done(total, total, earlier) == pytest.approx(1.0, abs=1e-15)
        shares = [share_done(step, total, earlier) for step in range(begun, total + 1)]
        assert shares == sorted(shares)


def test_a_plan_that_changes_is_in_the_lineage_and_survives_interruptions(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps an epoch: eight, after the first epoch sixteen. Stopped before the first epoch's
    end or after the second, the run keeps to the plan it then had.
    """
    monkeypatch.setattr(budget, "affordable_steps", lambda *arguments: (8, 10_000))
    monkeypatch.setattr(
        training, "changed_total", lambda step, total, *rest: 16 if step == 4 else total
    )
    out = start.parent / "o.safetensors"
    words = [start, "--time-budget", "1s", "-o"]
    assert finetune(*words, out)[-1]["steps"] == 16
    made = Checkpoint.read(out)
    assert made.record.lineage[-1].parameters["steps"] == 16
    assert made.record.lineage[-1].parameters["plan_changes"] == [[4, 8]]
    for epochs, steps in ((0, 8), (2, 16)):
        ends = start.parent / f"{epochs}.safetensors"
        with power_cut(monkeypatch, epochs):
            finetune(*words, ends, fails=OSError)
        with monkeypatch.context() as patch:
            patch.setattr(training, "plan_for_budget", lambda *_: pytest.fail("planned twice"))
            assert finetune(*words, ends, "--resume")[-1]["steps"] == steps
    assert Checkpoint.read(ends).digest == made.digest


@pytest.mark.parametrize("changes", [[[0, 0]], [[5, 5]], [[4, 2]], [[9, 16]], [[3, 9], [2, 9]]])
def test_a_state_with_plans_that_no_run_makes_is_refused(
    start: Path, monkeypatch: pytest.MonkeyPatch, changes: list[list[int]]
) -> None:
    """Stopped at step 4; shares of such a schedule would divide by zero or lie outside of it."""
    out = start.parent / "o.safetensors"
    state = start.parent / "o.state.safetensors"
    with power_cut(monkeypatch, 1):
        finetune(start, "--epochs", 3, "-o", out, fails=OSError)
    tensors, metadata = certcli.checkpoint.file.read_tensors(state)
    about = json.loads(metadata[KEY])
    assert about["step"] == 4
    certcli.checkpoint.file.write_safetensors(
        state, dict(tensors), {**metadata, KEY: json.dumps({**about, "changes": changes})}, True
    )
    assert "plans" in str(
        finetune(start, "--epochs", 3, "-o", out, "--resume", fails=CheckpointError)
    )


def test_a_second_run_of_one_output_is_refused_while_the_first_lives(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [start, "--epochs", 2, "-o", start.parent / "o.safetensors"]
    living = Trainer.run
    refused = []

    def run(self: Trainer, *sets: Any) -> Any:
        for epoch in living(self, *sets):
            yield epoch
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, "run", living)
                refused.append(
                    finetune(*words, *(["--resume"] if refused else []), fails=OutputError)
                )

    monkeypatch.setattr(Trainer, "run", run)
    finetune(*words)
    assert [("another run" in str(failure), failure.code) for failure in refused] == [(True, 8)] * 2
    assert {path.name for path in start.parent.iterdir()} == {start.name, "o.safetensors"}


def test_the_best_and_the_last_are_both_kept(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each epoch scores is given here: which one wins is no matter of a processor's last
    digits.
    """
    folder = start.parent
    out = folder / "o.safetensors"
    last = folder / "o.last.safetensors"
    scores = iter(
        (0.3, 0.6, 0.592, 0.584)
    )  # a quarter of the standard error of 0.6 on 140 images: 0.0103
    with monkeypatch.context() as patch:
        patch.setattr(validation, "evaluate", lambda *_, **__: Quality(next(scores), None, None))
        records = finetune(start, "--epochs", 4, "-o", out)
    assert [record["clean"] for record in records[:-1]] == [0.3, 0.6, 0.592, 0.584]
    assert records[-1]["last"] == str(last)
    assert records[-1]["epoch"] == 3, "of near equals the later one, measured from the best"
    assert Checkpoint.read(out).digest != Checkpoint.read(last).digest
    assert Checkpoint.read(out).record.evidence
    assert not Checkpoint.read(last).record.evidence
    out.unlink()
    assert "last" in str(
        finetune(start, "-o", out, "--epochs", 1, fails=UsageError)
    )  # it is in the way
    assert "last" not in finetune(start, "-o", out, "--epochs", 1, "--force")[-1]
    assert not last.exists()  # it belonged to the run that was replaced


class FullDisk:
    """Writing fails with ENOSPC while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.left = allowed
        for module in (certcli.checkpoint.file, writer):
            monkeypatch.setattr(module, "atomic_file", self.opened)

    @contextmanager
    def opened(self, path: Path) -> Iterator[Path]:
        with atomic_file(path) as temporary:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield temporary


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_full_disk_leaves_nothing_half_written_and_loses_nothing(
    start: Path, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start.parent
    words = [start, "--epochs", 2, "-o", folder / "o.safetensors"]
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, allowed)
        failure = finetune(*words, fails=OutputError)
        assert disk.left == -1, "nothing is trained, or written, after it"
    assert failure.code == 8
    assert "full" in failure.message
    assert failure.__cause__ is not failure
    state = folder / "o.state.safetensors"
    assert state.exists() is (allowed > 0)
    assert ("--resume" in failure.hint) is (allowed > 0)
    assert set(folder.iterdir()) <= {start, state}
    finetune(*words, "--resume")  # there is room again
    again = folder / "again.safetensors"
    finetune(start, "--epochs", 2, "-o", again)
    assert (folder / "o.safetensors").read_bytes() == again.read_bytes()


def test_a_run_that_diverges_writes_the_best_weights_before_it(start: Path) -> None:
    """The learning rate rises to 100 over the whole run: the first epoch is sound, a later one is
    not.
    """
    out = start.parent / "o.safetensors"
    wild = ["--optimiser", "sgd", "--lr", 100, "--warmup", 1, "--epochs", 10, "-o", out]
    failure = finetune(start, *wild, fails=Diverged)
    assert failure.code == 1
    assert "at step" in failure.message
    assert "--lr" in failure.hint
    kept = Checkpoint.read(out)  # which refuses NaN
    assert kept.record.evidence[-1].digest == kept.digest
    assert set(start.parent.iterdir()) == {start, out}


def test_teachers_are_named_by_digest_and_must_know_the_classes(start: Path) -> None:
    folder = start.parent
    finetune(start, "--epochs", 1, "-o", folder / "teacher.safetensors")
    out = folder / "o.safetensors"
    finetune(start, "--epochs", 1, "--teacher", folder / "teacher.safetensors", "-o", out)
    parameters = Checkpoint.read(out).record.lineage[-1].parameters
    assert parameters["teacher"] == Checkpoint.read(folder / "teacher.safetensors").digest
