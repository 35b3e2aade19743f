"""Run `certvit finetune` from files to files: images, trainer, progress, outputs."""

import contextlib
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from certcli.checkpoint import file, outputs
from certcli.checkpoint.record import SEEN
from certcli.cli.finetune import command, ending
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Sink
from certcli.evaluation.image_doubts import kept_of
from certcli.finetune import loop, objective, option_texts, start, state
from certcli.finetune.budget import Costs, changed_total, expected_duration, plan_for_budget
from certcli.finetune.step import Diverged
from certcli.images import datasets, labelled
from certcli.models import build, origins
from certcli.system import errors, reading
from certcli.system.processes import require_one, team

REMARK_SECONDS = 10.0
"""Least time between two remarks where there is no progress bar."""
LONGEST_START = 10.0
"""Most seconds of start-up (the interpreter, its imports) that a time budget pays for."""


class Training:
    """One run of the command."""

    def __init__(self, order: command.Order, sink: Sink) -> None:
        self.started = time.perf_counter() - min(time.process_time(), LONGEST_START)
        self.settings = replace(order.settings, seed=order.data.seed)
        self.order = order
        self.sink = sink
        self.ends: float | None = None
        if self.settings.time_budget is not None:
            self.ends = self.started + option_texts.parse_duration(self.settings.time_budget)
            require_one("a time budget is planned", "--epochs or --steps")
        reads = (order, order.source, order.data)
        self.path = order.output.target(
            "finetune", order.source.ckpt, *reads, last=True, state=state.KEY
        )
        self.state_path, self.last_path = (
            inputs.path_beside(self.path, "state"),
            inputs.path_beside(self.path, "last"),
        )
        self.checkpoint = order.source.open(sink)
        self.begin = start.start_of(self.checkpoint.record)
        self.proof_costs = 0.0, 0.0
        self.before: ending.Accuracy | None = None
        self.remarked = 0.0
        self.seen: dict[str, Any] = {}
        self.held = contextlib.ExitStack()

    def run(self) -> None:
        from certcli.models.open import open_checkpoint

        order = self.order
        sink = self.sink
        train, validation = self._images()
        sink.note(f"{len(train)} training and {len(validation)} validation images of {train.name}")
        self._choose(len(train))
        self.seen = kept_of(train) if team().leads else {}
        device = order.machine.pick()
        teacher = None
        if order.teacher is not None:
            teaching = open_checkpoint(order.teacher, origins.Hints())
            self.settings = replace(self.settings, teacher=teaching.digest)
            teacher = objective.Teacher(
                build.load(teaching, device), teaching.record, self.checkpoint.record, train.classes
            )
            if teacher.note:
                sink.note(f"the teacher: {teacher.note}")
        before = ending.read_noise_remover(
            order.denoiser, self.settings.noise, self.checkpoint.record.input.size, device, sink
        )
        if before is not None:
            self.settings = replace(self.settings, denoiser=before.digest)
        model = build.load(self.checkpoint, device, writable=True)
        if team().leads:
            self.before = ending.accuracy(model, validation)
        run = state.training_identity(self.checkpoint.digest, self.settings, train, validation)
        trainer = loop.Trainer(
            model,
            self.settings,
            self.checkpoint.record.classes,
            run,
            teacher,
            team(),
            before,
        )
        if self.before is not None and self.begin.trained and trainer.orthogonal:
            ending.warn_of_orthogonal(self.before, ending.accuracy(model, validation), sink)
        outputs.require_own_state(
            self.state_path, state.KEY, run, order.output.force or order.resume
        )
        if team().leads:
            outputs.hold_state(self.state_path, self.held)
        if order.resume and not reading.is_absent(self.state_path):
            trainer.restore(state.load_training_state(self.state_path, run))
            sink.note(f"continuing after epoch {trainer.epoch}, step {trainer.step}")
        elif order.resume:
            sink.note(f"no {self.state_path.name} to resume from: starting from the beginning")
        # a run that goes on keeps to its last plan: what it took before is not recorded
        end: float | None = None
        if self.settings.time_budget is not None and trainer.settings.steps is None:
            end = self._plan(trainer, self.settings.time_budget, train, validation)
        elif self.defaulted and not trainer.step:
            self.sink.note(expected_duration(trainer, train, validation))
        diverged: Diverged | None = None
        try:
            self._learn(trainer, train, validation, end)
        except Diverged as failure:
            if trainer.best_epoch < 0:
                if team().leads:
                    outputs.discard_state(self.state_path, state.KEY, run)
                    raise
                return
            diverged = failure
        if not team().leads:
            return
        try:
            self._write(trainer, train, validation, diverged is None)
        except ending.EndedAtChanceError:
            outputs.discard_state(self.state_path, state.KEY, run)
            raise
        except errors.OutputError as failure:
            self._say_how_to_go_on(failure)
            raise
        outputs.discard_state(
            self.state_path, state.KEY, run
        )  # a run that diverged would diverge again
        if diverged is not None:
            sink.note(
                f"wrote {self.path}: the best weights before it, of epoch {trainer.best_epoch}"
            )
            raise diverged

    def _choose(self, images: int) -> None:
        """Take the defaults that suit the network, fresh or trained already, and say which."""
        settings = self.order.settings
        parameters = sum(tensor.numel() for tensor in self.checkpoint.tensors.values())
        usual = start.default_batch_size(self.begin, settings, parameters, images)
        self.settings = replace(
            self.settings,
            batch_size=self.order.machine.batch_size or usual,
            **start.defaults_of_start(self.begin, settings, parameters),
        )
        self.defaulted = "epochs" in settings.unsaid and settings.steps is None
        if settings.unsaid:
            self.sink.note(start.sentence_of_start(self.begin, self.settings))

    def _images(self) -> tuple[labelled.Images, labelled.Images]:
        """Return the training and the validation images, which share none."""
        record = self.checkpoint.record
        data = self.order.data
        name = data.dataset or record.dataset
        if name is None:
            raise errors.DataError(
                "no --dataset given, and the checkpoint does not say what it was trained on",
                "--dataset digits",
            )
        train, validation = (
            datasets.require_classes(
                datasets.load_dataset(name, record.input, split, data.data_dir),
                record.classes,
                record.class_names,
            )
            for split in ("train", "val")
        )
        judges = validation.limit(self.settings.validation_limit, self.settings.seed)
        notes = (note for images in (train, validation) for note in images.note.split("; "))
        for note in filter(None, dict.fromkeys(notes)):
            self.sink.note(note)
        inputs.doubt_images(train, record, self.sink)
        return train.limit(data.limit, self.settings.seed), judges

    def _plan(
        self,
        trainer: loop.Trainer,
        budget: str,
        train: labelled.Images,
        validation: labelled.Images,
    ) -> float:
        """Turn the time budget into steps, and return when they should end, on the clock."""
        clock = time.perf_counter()
        self._save_state(trainer)
        saving = time.perf_counter() - clock
        bound, certificate = ending.seconds(
            self.checkpoint, validation, self.settings.epsilon, self.sink
        )
        assert self.ends is not None
        end = self.ends
        self.proof_costs = bound, certificate
        plan_for_budget(trainer, train, validation, end, Costs(0, 0, saving, bound, certificate))
        settings = trainer.settings
        epochs = trainer.total_steps(train) / trainer.batches(train)
        self.sink.note(f"planned for {budget}: {settings.steps} steps, {epochs:.2f} epochs")
        if epochs < 1:
            self.sink.warn(f"only {epochs:.2f} of one epoch fits into {budget}")
        judges = len(validation.limit(settings.validation_limit, settings.seed))
        if judges < len(validation):
            self.sink.note(f"validating on {judges} of {len(validation)} images, to save time")
        self._save_state(trainer)  # a resumed run must keep to the plan
        return end - bound - judges * certificate

    def _learn(
        self,
        trainer: loop.Trainer,
        train: labelled.Images,
        validation: labelled.Images,
        end: float | None,
    ) -> None:
        """Train to the end, with a progress bar or log lines; save each epoch's state.

        Args:
            end: when the steps of a time budget should end; each epoch's pace corrects their
                number.
        """
        started = time.perf_counter()
        first = trainer.step
        with self.sink.progress("finetune", total=trainer.total_steps(train)) as bar:
            bar.reach(trainer.step)
            remark = ""

            def watch(step: int, loss: float) -> None:
                bar.reach(step, remark or f"loss {loss:.3f}")

            for epoch in trainer.run(train, validation, watch):
                if end is not None and trainer.step < trainer.total_steps(train):
                    now = time.perf_counter()
                    pace = (now - started) / (trainer.step - first)
                    self._plan_again(trainer, train, pace, end - now)
                    bar.aim(trainer.total_steps(train))
                self._save_state(trainer)
                self.sink.record(asdict(epoch))
                remark = ending.remark_of(epoch)
                bar.reach(trainer.step, remark)
                now = time.perf_counter()
                if not sys.stderr.isatty() and now - self.remarked >= REMARK_SECONDS:
                    self.remarked = now
                    total = trainer.total_steps(train)
                    self.sink.note(f"epoch {epoch.epoch}, step {epoch.step} of {total}: {remark}")

    def _plan_again(
        self, trainer: loop.Trainer, train: labelled.Images, pace: float, time_left: float
    ) -> None:
        """Let the run have as many steps as fit at this pace (seconds a step)."""
        total = trainer.total_steps(train)
        batches = trainer.batches(train)
        steps = changed_total(trainer.step, total, pace, time_left, batches)
        if steps != total:
            self.sink.note(f"planned again: {steps} steps, {steps / batches:.2f} epochs")
            trainer.change_plan(train, steps)

    def _save_state(self, trainer: loop.Trainer) -> None:
        """Save the state. A full disk ends the run: nobody could have what is trained after it."""
        if not team().leads:
            return
        try:
            state.save_training_state(self.state_path, trainer.state())
        except errors.OutputError as failure:
            self._say_how_to_go_on(failure)
            raise
        outputs.hold_state(self.state_path, self.held)

    def _say_how_to_go_on(self, failure: errors.OutputError) -> None:
        """Name the way on from the last state, where there is one."""
        if not reading.is_absent(self.state_path):
            failure.hint = "make room, then repeat the command with --resume"

    def _write(
        self,
        trainer: loop.Trainer,
        train: labelled.Images,
        validation: labelled.Images,
        finished: bool,
    ) -> None:
        """Write the best weights and their bound, then the last weights where they differ."""
        output = self.order.output
        settings = trainer.settings
        sink = self.sink
        best = trainer.best_epoch
        last = trainer.epoch
        epsilon = settings.epsilon
        derived = self._derived(trainer, trainer.best_net, train)
        output.write(
            derived, self.path, self.order.resume
        )  # before the proof, which may take longer than is left
        spent = time.perf_counter() - self.started
        sink.note(f"wrote {self.path}: epoch {best}; {spent:.0f} s so far")
        seconds_left = None if self.ends is None else self.ends - time.perf_counter()
        images = validation.limit(settings.validation_limit, settings.seed)
        count = ending.affordable_images(len(images), seconds_left, self.proof_costs)
        if count < len(images):
            sink.note(
                f"certified: {count} of {len(images)} images, to keep to {settings.time_budget}"
            )
            images = validation.limit(count, settings.seed)
        final = ending.prove_trained(derived, images, epsilon, sink)
        about: dict[str, Any] = {"split": "val", "epsilon": epsilon}
        if len(images) < len(validation):
            about["images"] = len(images)
        derived.with_evidence("finetune", about, final.evidence).write(
            self.path, True, output.shard_bytes()
        )
        doubt = ending.doubt_training(
            self.before,
            final.evidence["clean"],
            len(images),
            derived.record,
            self.settings.noise > 0,
        )
        report = {
            "done": doubt is None,
            "output": str(self.path),
            "epoch": best,
            "steps": trainer.step,
            "doubt": None if doubt is None else doubt.message,
            **final.evidence,
        }
        line = ""
        if finished and last != best:
            output.write(
                self._derived(trainer, trainer.last_net(), train),
                self.last_path,
                self.order.resume,
            )
            report["last"] = str(self.last_path)
            line = f"; {self.last_path}: the last epoch, {last}"
        elif output.force and outputs.last_command(self.last_path) == "finetune":
            outputs.remove(self.last_path)  # of the run that this one replaces
        if not finished:
            return
        sink.document(report)
        sink.text(f"{self.path}: epoch {best}, {final.told(len(images), epsilon)}{line}")
        advice = ending.certifying_command(self.order, settings, self.path)
        if advice:
            sink.note(advice)
        if doubt is not None:
            ending.end_in_doubt(doubt, sink)

    def _derived(
        self, trainer: loop.Trainer, tensors: Any, train: labelled.Images
    ) -> file.Checkpoint:
        parameters = {
            **trainer.settings.parameters(),
            "dataset": train.name,
            "images": len(train),
            SEEN: self.seen,
        }
        if trainer.changes:
            parameters["plan_changes"] = trainer.changes
        derived = self.checkpoint.derive(tensors, "finetune", parameters, self.settings.seed)
        return replace(derived, record=inputs.remember_dataset(derived.record, train))


def train(order: command.Order, talk: groups.Talk) -> None:
    """Train on --dataset, choose the epoch on its validation images, and prove the bound of the
    result.
    """
    if order.settings.time_budget is not None and order.settings.steps is not None:
        raise errors.UsageError("--steps and --time-budget exclude each other", "one of the two")
    training = Training(order, talk.sink())
    with training.held:
        training.run()
