"""What an audit is to do, one value for the stages, the words and the command that repeats it; and its time
budget: what is left, what this process computed, and an end to work that does not stop."""

import gc
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

from certcli.audit.gates import AuditFindings, FailOn
from certcli.evaluation.threat import Pixels, Precision, radius_key, require_radii
from certcli.images.names import TORCHVISION
from certcli.system import processes, reading

AUTO: Final = "auto"
FLOAT: Final = "float"
IMAGENET = 224
"""Pixels a side from which on an image is of ImageNet's size."""
FARTHEST = 1.5
"""Radius of a gate over sigma: with so few draws more images were certified at it than at 1 or 1.9
(validation digits)."""


@dataclass(frozen=True)
class AuditPlan:
    """Options of an audit.

    Args:
        radii: pixel l2, ascending, at which images are certified and attacked; gates add theirs.
        sigma: of smoothing; None takes the smallest radius above 0, or what the gates need.
        attacks: in turn. Ten steps of each loss break as many images as twenty of each, and more
            than twenty of one (docs/attack.md).
        methods: of certificates; none takes those that suit the network.
        patches: sizes as --patch spells them; none takes 2 % of a photograph, where no proof of the
            network is useful.
        precision: of smoothing and of the attacks' own passes; "auto" takes bf16 for large networks
            where the machine multiplies matrices in it, else float32.
        pixels: "8bit": attacks search among images that a file can hold.
        denoiser: path of one that noisy images pass before a smoothed network.
        budget: wall seconds.
        limit: images at most, as it was typed.
        anonymous: the document names neither folders and files of images nor the processor.
    """

    radii: tuple[float, ...] = (0.12, 0.5)
    sigma: float | None = None
    attacks: tuple[str, ...] = ("pgd-10", "margin-pgd-10")
    methods: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 128
    precision: Precision | Literal["auto"] = AUTO
    pixels: Pixels = FLOAT
    gates: tuple[FailOn, ...] = ()
    budget: float = 120.0
    limit: int | None = None
    denoiser: Path | None = None
    anonymous: bool = False

    def _at_gates(self, *quantities: str) -> list[float]:
        return [
            gate.radius
            for gate in self.gates
            if gate.radius is not None and gate.quantity in quantities
        ]

    @property
    def certified_radii(self) -> tuple[float, ...]:
        return require_radii([*self.radii, *self._at_gates("certified", "proven")])

    @property
    def attacked_radii(self) -> tuple[float, ...]:
        return require_radii([*self.radii, *self._at_gates("robust")])

    @property
    def tried_patches(self) -> list[str]:
        return [*self.patches, *(gate.patch for gate in self.gates if gate.patch is not None)]

    @property
    def least(self) -> float:
        """The smallest radius above 0, which the answer speaks of first."""
        return next((radius for radius in self.certified_radii if radius > 0), 0.12)

    @property
    def reach(self) -> float:
        """The largest radius that smoothing must reach."""
        return max(self._at_gates("certified"), default=self.least)

    @property
    def noise(self) -> float:
        """Return the sigma of smoothing: as it was typed, or enough for its radius."""
        return self.sigma if self.sigma is not None else max(self.least, self.reach / FARTHEST)

    def suits_denoiser(self, findings: AuditFindings) -> bool:
        """Whether a published diffusion model fits the images, and none stands before the network.
        Without a GPU it takes minutes an image.
        """
        channels, *sides = findings.input
        fits = channels == 3 and min(sides) >= IMAGENET and not any(side % 32 for side in sides)
        judged = findings.dataset is not None and findings.failing is None
        return (
            fits and judged and findings.gpu and self.denoiser is None and self.tries("smoothing")
        )

    def tries(self, method: str) -> bool:
        return not self.methods or method in self.methods


@dataclass(frozen=True)
class Typed:
    """The words that name the network and its images. hints: words for reading the network;
    trained_on: its own dataset, for where no images are named.
    """

    source: str
    hints: Sequence[str] = ()
    dataset: str | None = None
    data_dir: str | None = None
    split: str | None = None
    trained_on: str | None = None

    @property
    def network(self) -> list[str]:
        return [self.source, *self.hints]

    def without(self, *options: str) -> list[str]:
        """Return the words that name the network, less these options and their values."""
        words = iter(self.hints)
        words_left = [self.source]
        for word in words:
            words_left += [] if word in options and next(words) else [word]
        return words_left

    def images(self, judged: bool = True) -> list[str]:
        """judged: for a command that judges a network, which knows splits."""
        options = [] if self.dataset is None else ["--dataset", self.dataset]
        options += [] if self.data_dir is None else ["--data-dir", self.data_dir]
        return options + (["--split", self.split] if self.split is not None and judged else [])

    @property
    def labelled(self) -> str:
        """The options that would name labelled images; FOLDER is the reader's to fill in."""
        if self.trained_on is not None and self.trained_on in TORCHVISION:
            return f"--dataset {self.trained_on} --data-dir FOLDER"
        return "--dataset FOLDER"

    def anonymous(self) -> "Typed":
        """Return the words for a page that others read: files and folders without those above."""
        dataset, folder = (
            None if name is None else _last_part(name) for name in (self.dataset, self.data_dir)
        )
        source = _last_part(self.source)
        return replace(self, source=source, dataset=dataset, data_dir=folder)


def _last_part(typed: str) -> str:
    """Return the last part of the path of a file or folder; all of any other name."""
    return unmistakable(Path(typed).resolve().name) if not reading.is_absent(Path(typed)) else typed


def unmistakable(typed: str) -> str:
    """Return "./name" for a folder of this name: elsewhere a bare one means timm's network."""
    bare = os.sep not in typed and not typed.startswith(".")
    return f"./{typed}" if bare and Path(typed).is_dir() else typed


def reproduce(plan: AuditPlan, precision: str, typed: Typed) -> str:
    """Return the command that repeats the audit, in the precision it ran in."""
    words = ["certvit", "audit", *typed.network, *typed.images()]
    denoiser = None if plan.denoiser is None else str(plan.denoiser)
    if denoiser is not None and plan.anonymous:
        denoiser = _last_part(denoiser)
    options: dict[str, Sequence[str]] = {
        "-e": [radius_key(radius) for radius in plan.radii],
        "-a": plan.attacks,
        "--method": plan.methods,
        "--patch": plan.patches,
        "--sigma": [] if plan.sigma is None else [f"{plan.sigma:g}"],
        "--denoiser": [] if denoiser is None else [denoiser],
        "--limit": [] if plan.limit is None else [str(plan.limit)],
        "--seed": [str(plan.seed)],
        "--time-budget": [f"{plan.budget:g}s"],
        "--precision": [precision] if precision != "float32" or plan.precision != AUTO else [],
        "--pixels": [] if plan.pixels == FLOAT else [plan.pixels],
        "--fail-on": [gate.text for gate in plan.gates],
    }
    named = (word for name, values in options.items() for value in values for word in (name, value))
    return shlex.join([*words, *named, *["--anonymous"] * plan.anonymous])


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
    team: processes.Team = processes.ALONE
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
    were before; by a signal, so in the main thread alone, on systems that have alarms.

    No generator: a signal could end its exit before it is asked to go on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        in_main_thread = threading.current_thread() is threading.main_thread()
        self.rings = in_main_thread and hasattr(signal, "setitimer")

    def __enter__(self) -> None:
        from certcli.system.torch_modes import RestoredModes

        if self.seconds <= 0:
            raise OutOfTime
        if self.rings:
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
        if self.rings:
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
