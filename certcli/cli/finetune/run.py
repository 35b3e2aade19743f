"""One run of `certvit finetune` from files to files: images, trainer, progress, what is written and when."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from certcli.checkpoint.outputs import discard_state, last_command, remove, require_own_state
from certcli.cli.shared.groups import beside
from certcli.cli.shared.inputs import return_large_blocks, say_wider
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation.radii import proven_percent, proven_radius, radius_key
from certcli.system.processes import require_one, team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.finetune.options import Order
    from certcli.finetune.loop import Epoch, Trainer
    from certcli.finetune.settings import FinetuneSettings
    from certcli.images.labelled import Images
    from certcli.models.build import PixelModel

REMARK_SECONDS = 10.0
"""Least time between two remarks where there is no progress bar."""
LONGEST_START = 10.0
"""Seconds of start-up (the interpreter, its imports) that a time budget pays for at most."""


class Training:
    """order: the command's options, in groups; settings: the numbers among them that decide the result."""

    def __init__(self, settings: FinetuneSettings, order: Order, sink: Sink) -> None:
        from certcli.finetune.shards import require_shardable
        from certcli.finetune.state import KEY

        self.started = time.perf_counter() - min(time.process_time(), LONGEST_START)
        self.settings, self.order, self.sink = settings, order, sink
        if settings.time_budget is not None:
            require_one("a time budget is planned", "--epochs or --steps")
        reads = (order.source, order.data, order.distillation)
        if order.steps.shard_weights:
            require_shardable(settings, team())
        self.path = order.output.target("finetune", order.source.ckpt, *reads, last=True, state=KEY)
        self.state_path, self.last_path = beside(self.path, "state"), beside(self.path, "last")
        self.checkpoint = order.source.open(sink)
        self.savable = True
        self.remarked = 0.0
        self.kept: dict[str, Any] = {}

    def run(self) -> None:
        from certcli.evaluation.seen import kept_of
        from certcli.finetune.loop import Trainer, identity
        from certcli.finetune.shards import share_out
        from certcli.finetune.state import KEY
        from certcli.finetune.step import Diverged
        from certcli.models import build
        from certcli.system.errors import OutputError

        train, validation = self._images()
        self.sink.note(f"{len(train)} training and {len(validation)} validation images of {train.name}")
        self.kept = kept_of(train) if team().leads else {}
        device = self.order.machine.pick()
        teacher = self._teacher(device)
        sharded = self.order.steps.shard_weights
        # shared out, the weights stay in the file until each process takes its rows of them
        model = build.load(self.checkpoint, "cpu" if sharded else device, writable=not sharded)
        if sharded:
            return_large_blocks()  # what one block's pass took is not kept for the next one's
            share_out(model, device, team(), self.settings.precision)
        run = identity(self.checkpoint.digest, self.settings, train, validation)
        trainer = Trainer(model, self.settings, self.checkpoint.record.classes, run, teacher, team(), sharded)
        require_own_state(self.state_path, KEY, run, self.order.output.force or self.order.length.resume)
        if self.order.length.resume:
            self._resume(trainer, run)
        if self.settings.time_budget is not None and trainer.settings.steps is None:
            self._plan(trainer, train, validation)
        diverged: Diverged | None = None
        try:
            self._learn(trainer, train, validation)
        except Diverged as failure:
            if trainer.best_epoch < 0:
                if team().leads:
                    discard_state(self.state_path, KEY, run)
                    raise
                return
            diverged = failure
        if not team().leads:
            self._follow(trainer, diverged is None)
            return
        try:
            self._write(trainer, train, validation, diverged is None)
        except OutputError as failure:
            if self.state_path.exists():
                raise OutputError(failure.message, "make room, then repeat the command with --resume") from failure
            raise
        discard_state(self.state_path, KEY, run)  # of no use either way: what diverged would diverge again
        if diverged is not None:
            self.sink.note(f"wrote {self.path}: the best weights before it, of epoch {trainer.best_epoch}")
            raise diverged

    def _images(self) -> tuple[Images, Images]:
        from certcli.cli.shared.inputs import doubt_images
        from certcli.images import datasets
        from certcli.system.errors import DataError

        record = self.checkpoint.record
        name = self.order.data.dataset or record.dataset
        if name is None:
            raise DataError(
                "no --dataset given, and the checkpoint does not say what it was trained on", "--dataset digits"
            )
        train, validation = (
            datasets.require_classes(
                datasets.load(name, record.input, split, self.order.data.data_dir), record.classes, record.class_names
            )
            for split in ("train", "val")
        )
        doubt_images(train, record, self.sink)
        for images in (train, validation):
            images.read_by(self.order.data.workers)
        return train.limit(self.order.data.limit, self.settings.seed), validation

    def _teacher(self, device: Any) -> PixelModel | None:
        from certcli.models import build
        from certcli.models.hints import Hints
        from certcli.models.open import open_checkpoint

        if self.order.distillation.teacher is None:
            return None
        checkpoint = open_checkpoint(self.order.distillation.teacher, Hints())
        self.settings = replace(self.settings, teacher=checkpoint.digest)
        return build.load(checkpoint, device)

    def _resume(self, trainer: Trainer, run: str) -> None:
        from certcli.finetune.state import load_state

        if not self.state_path.exists():
            self.sink.note(f"no {self.state_path.name} to go on from: starting at the beginning")
            return
        trainer.restore(load_state(self.state_path, run, copy=not self.order.steps.shard_weights))
        self.sink.note(f"going on after epoch {trainer.epoch}, step {trainer.step}")

    def _plan(self, trainer: Trainer, train: Images, validation: Images) -> None:
        from certcli.finetune.budget import Costs, parse_duration

        budget = str(self.settings.time_budget)
        clock = time.perf_counter()
        self._save_state(trainer)
        saving = time.perf_counter() - clock
        bound, certificate = _proof_seconds(self.checkpoint, validation.limit(128))
        left = parse_duration(budget) - (time.perf_counter() - self.started)
        trainer.plan(train, validation, left, Costs(0.0, 0.0, saving, bound, certificate))
        epochs, limit = trainer.total_steps(train) / trainer.batches(train), trainer.settings.validation_limit
        self.sink.note(f"planned for {budget}: {trainer.settings.steps} steps, {epochs:.2f} epochs")
        if epochs < 1:
            self.sink.warn(f"only {epochs:.2f} of one epoch fits into {budget}")
        if limit is not None:
            self.sink.note(f"validating on {limit} of {len(validation)} images, to save time")
        self._save_state(trainer)  # with the plan, which a run that is gone on with must keep to

    def _learn(self, trainer: Trainer, train: Images, validation: Images) -> None:
        total = trainer.total_steps(train)
        with self.sink.progress("finetune", total=total) as bar:
            bar.advance(trainer.step)
            done = trainer.step
            remark = ""

            def watch(step: int, loss: float) -> None:
                nonlocal done
                bar.advance(step - done, remark or f"loss {loss:.3f}")
                done = step

            for epoch in trainer.run(train, validation, watch):
                self._save_state(trainer)
                self.sink.record(asdict(epoch))
                remark = _remark(epoch)
                bar.advance(0, remark)
                self._say(f"epoch {epoch.epoch}, step {epoch.step} of {total}: {remark}")

    def _say(self, line: str) -> None:
        """A line now and then where no bar is drawn (a log file)."""
        if not sys.stderr.isatty() and time.perf_counter() - self.remarked >= REMARK_SECONDS:
            self.remarked = time.perf_counter()
            self.sink.note(line)

    def _save_state(self, trainer: Trainer) -> None:
        """A run goes on when its state cannot be saved (full disk): hours of training are worth more than --resume."""
        from certcli.finetune.state import save_state
        from certcli.system.errors import OutputError

        if not team().leads and not self.order.steps.shard_weights:
            return
        try:
            save_state(self.state_path, trainer.state(), team())
        except OutputError as failure:
            if self.savable:
                self.sink.warn(f"{failure.message}; training goes on, but --resume will lack these epochs")
            self.savable = False

    def _follow(self, trainer: Trainer, finished: bool) -> None:
        """What the others do while the leader writes: weights that are shared out come together in it."""
        trainer.whole(trainer.best_net)
        if finished and trainer.epoch != trainer.best_epoch:
            trainer.whole(trainer.last_net())

    def _write(self, trainer: Trainer, train: Images, validation: Images, finished: bool) -> None:
        best, last = trainer.best_epoch, trainer.epoch
        settings, epsilon = trainer.settings, trainer.settings.epsilon
        images = validation.limit(settings.validation_limit, settings.seed)
        derived = self._derived(trainer, trainer.whole(trainer.best_net), train)
        final = _prove(derived, images, epsilon, self.sink)
        about: dict[str, Any] = {"split": "val", "epsilon": epsilon}
        if settings.validation_limit is not None:
            about["images"] = len(images)
        say_wider(self.checkpoint, derived, self.sink)
        self.order.output.write(derived.with_evidence("finetune", about, final), self.path)
        report = {"done": True, "output": str(self.path), "epoch": best, "steps": trainer.step, **final}
        line = ""
        if finished and last != best:
            self.order.output.write(self._derived(trainer, trainer.whole(trainer.last_net()), train), self.last_path)
            report["last"] = str(self.last_path)
            line = f"; {self.last_path}: the last epoch, {last}"
        elif self.order.output.force and last_command(self.last_path) == "finetune":
            remove(self.last_path)  # of the run that this one replaces
        if finished:
            self.sink.document(report)
            self.sink.text(
                f"wrote {self.path}: epoch {best}, validation clean {percent(final['clean'])}, "
                f"certified at {proven_radius(epsilon)} {proven_percent(final['certified'])}, "
                f"bound {final['upper_text']} (proven){line}"
            )

    def _derived(self, trainer: Trainer, tensors: Any, train: Images) -> Checkpoint:
        from certcli.checkpoint.record import SEEN
        from certcli.cli.shared.inputs import remember_dataset

        parameters = {**trainer.settings.parameters(), "dataset": train.name, "images": len(train), SEEN: self.kept}
        derived = self.checkpoint.derive(tensors, "finetune", parameters, self.settings.seed)
        return replace(derived, record=remember_dataset(derived.record, train))


def _remark(epoch: Epoch) -> str:
    certified = "" if epoch.certified_estimate is None else f", about {percent(epoch.certified_estimate)} certified"
    masked = "" if epoch.masked is None else f", in part {percent(epoch.masked)}"
    return f"loss {epoch.loss:.3f}, clean {percent(epoch.clean)}{masked}{certified}"


def _proof_seconds(checkpoint: Checkpoint, sample: Images) -> tuple[float, float]:
    """What the proof at the end will take: the bound, and certifying one image; measured on the starting weights."""
    import torch

    from certcli.lipschitz.network import prove
    from certcli.models.build import load_double

    started = time.perf_counter()
    model = load_double(checkpoint)
    prove(model, checkpoint.record.classes)
    proven = time.perf_counter()
    with torch.no_grad():
        for _, pixels, _ in sample.batches(256):
            model(pixels.double())
    return proven - started, (time.perf_counter() - proven) / len(sample)


def _prove(checkpoint: Checkpoint, validation: Images, epsilon: float, sink: Sink) -> dict[str, Any]:
    """The proven bound, and the validation images certified by it: float64, rounded outward."""
    import torch

    from certcli.certify.certificate import certified_accuracy
    from certcli.certify.lipschitz import plain_accuracy
    from certcli.certify.methods import certify, prepare
    from certcli.evaluation.records import describe
    from certcli.lipschitz.bound import bound_document
    from certcli.lipschitz.numerics.real import INF
    from certcli.models.build import load_double
    from certcli.system.errors import NoBoundError

    try:
        certifier = prepare("lipschitz", checkpoint, torch.device("cpu"))
    except NoBoundError as failure:
        sink.note(failure.message)
        clean = plain_accuracy(load_double(checkpoint), validation)
        return {"dataset": describe(validation), "clean": clean, "certified": 0.0, **bound_document(INF)}
    rows = [row for batch in certify(certifier, validation, 256) for row in batch]
    found = certified_accuracy(rows, [epsilon])
    bound = certifier.about["bound"]
    return {
        "dataset": describe(validation),
        "clean": found.clean,
        "certified": found.certified[radius_key(epsilon)],
        **bound,
    }
