"""What an audit is to do: one value for the stages, the words and the command that repeats it."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from certcli.audit.gates import FailOn
from certcli.evaluation.threat import Pixels, Precision, radius_key, require_radii
from certcli.images.names import TORCHVISION
from certcli.system.reading import is_absent

AUTO: Final = "auto"
FLOAT: Final = "float"
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


def last_part(typed: str) -> str:
    """Return the last part of the path of a file or folder; all of any other name."""
    return unmistakable(Path(typed).resolve().name) if not is_absent(Path(typed)) else typed


def unmistakable(typed: str) -> str:
    """Return "./name" for a folder of this name: elsewhere a bare one means timm's network."""
    bare = os.sep not in typed and not typed.startswith(".")
    return f"./{typed}" if bare and Path(typed).is_dir() else typed


def reproduce(plan: AuditPlan, precision: str, typed: Typed) -> str:
    """Return the command that repeats the audit, in the precision it ran in."""
    words = ["certvit", "audit", *typed.network, *typed.images()]
    options: dict[str, Sequence[str]] = {
        "-e": [radius_key(radius) for radius in plan.radii],
        "-a": plan.attacks,
        "--method": plan.methods,
        "--patch": plan.patches,
        "--sigma": [] if plan.sigma is None else [f"{plan.sigma:g}"],
        "--denoiser": [] if plan.denoiser is None else [str(plan.denoiser)],
        "--limit": [] if plan.limit is None else [str(plan.limit)],
        "--seed": [str(plan.seed)],
        "--time-budget": [f"{plan.budget:g}s"],
        "--precision": [precision] if precision != "float32" or plan.precision != AUTO else [],
        "--pixels": [] if plan.pixels == FLOAT else [plan.pixels],
        "--fail-on": [gate.text for gate in plan.gates],
    }
    named = (word for name, values in options.items() for value in values for word in (name, value))
    return shlex.join([*words, *named])
