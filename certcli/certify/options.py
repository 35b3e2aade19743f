"""Options of every certificate method, and the statistics of smoothing. No torch here: `--help`
reads them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from certcli.evaluation.intervals import MOST_DRAWS, lower_confidence, upper_confidence
from certcli.evaluation.threat import (
    Norm,
    Patch,
    Precision,
    attacked_radius,
    parse_number,
    parse_radius,
)
from certcli.system.errors import UsageError
from certcli.system.options import option, require_choices


@dataclass(frozen=True)
class CertifierOptions:
    """The options of a method that has none; others inherit, and annotate with `Option`.

    Raises:
        UsageError: a field has none of the values that its type names.
    """

    panel: ClassVar[str] = ""

    def __post_init__(self) -> None:
        require_choices(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among plain values of their types, as `evidence_schema.OPTIONS` lets
        them in; other names and None are left out.

        Raises:
            UsageError: a value has no meaning.
        """
        names = {item.name for item in fields(cls)}
        return cls(
            **{name: value for name, value in values.items() if name in names and value is not None}
        )


Arithmetic = Literal["real", "float64", "float32", "tf32", "bf16", "fp16"]
REAL: Literal["real"] = "real"


@dataclass(frozen=True)
class Proof(CertifierOptions):
    """What proven certificates speak of.

    Args:
        arithmetic: That executes the network at the neighbours of an image; None stands for
            float64, and for real numbers where an operation of the network has no proven rounding.
    """

    panel: ClassVar[str] = "Proofs"
    arithmetic: Arithmetic | None = option(
        None,
        "Arithmetic of the certified network: real, float64, float32, tf32, bf16, fp16. "
        "Default: float64 if the rounding of every operation is proven, else real.",
        metavar="NAME",
    )


ZONOTOPE: Final = "zonotope"
TOKENS: Final = "tokens"
BACKWARD: Final = "backward"
BRANCH: Final = "branch"
AUTO: Final = "auto"
Effort = Literal["tokens", "zonotope", "backward", "branch", "auto"]
SECONDS = 30.0
"""An image, of --effort branch where nobody says."""


@dataclass(frozen=True)
class Local(CertifierOptions):
    """How each image's neighbourhood is enclosed.

    Args:
        effort: "zonotope" (affine forms, small networks), "tokens" (zonotopes whose errors are one
            ellipsoid a token: transformers, in a tenth of the time), "backward" (zonotopes, and back
            through what they found), "branch" (the same, and split at the signs of ReLU units; without
            ReLU, for l2, zonotopes over what earlier ones leave), "auto" (zonotopes where they fit into
            memory, without columns for e e^T with the way back, with them, for `at`, over what one leaves;
            else tokens).
        norm: of the radii.
        at: ascending radii; zonotopes try these alone, up to the first that they do not prove, in
            place of a search.
        seconds: of "branch", an image; None stands for 30. "auto" with seconds is "branch".
        arithmetic: as in `Proof`.

    Raises:
        UsageError: a word is unknown, `at` does not ascend, or `seconds` is no time, or of another
            effort.
    """

    panel: ClassVar[str] = "Local"
    effort: Effort = option(
        AUTO,
        "tokens (transformers), zonotope (small networks), "
        "backward (more pixels than 128; ReLU), branch (the most: goes on where one walk ends), auto.",
    )
    norm: Norm = option("l2", "Norm of the radii: l2, or linf (with --method local).")
    at: Sequence[float] = ()
    seconds: float | None = option(
        None,
        "With --effort branch, which it names: seconds an image; the best radius proven by then counts. "
        "Default: 30.",
        metavar="N",
    )
    arithmetic: Arithmetic | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds {self.seconds:g}: a finite time above 0")
        if self.seconds is not None and self.effort == AUTO:
            object.__setattr__(self, "effort", BRANCH)  # which alone spends them
        if self.seconds is not None and self.effort != BRANCH:
            raise UsageError(f"--seconds is of --effort {BRANCH}", f"--effort {BRANCH}")
        if not all(0 < radius < math.inf for radius in self.at) or list(self.at) != sorted(self.at):
            raise UsageError("radii to try are finite, above 0 and ascending")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """As `CertifierOptions.of`. UsageError too for an effort that earlier versions had."""
        if values.get("effort") == "norms":
            raise UsageError("this version has no effort 'norms', balls of norms", "certify again")
        return super().of(values)


DOUBLE_MASKING: Literal["double-masking"] = "double-masking"
VOTING: Literal["voting"] = "voting"
Bands = Literal["columns", "rows", "blocks"]
Hiding = Literal["auto", "tokens", "pixels"]
MOST_ROWS = 4096
MOST_PATCHES = 32
_PROCEDURE = re.compile(rf"({DOUBLE_MASKING}|{VOTING})(?::([1-9]\d{{0,3}}))?")


@dataclass(frozen=True)
class Patches(CertifierOptions):
    """The patches, and the procedure that defends a network against them.

    Args:
        bands: what each vote sees, columns, rows or blocks.
        hide: tokens or pixels, as records state it; auto drops tokens where that is possible.
        cell: (height, width) in pixels of what is hidden together; None asks the network.
        rows: passes in a batch; None takes the device's usual number.

    Raises:
        UsageError: a value has no meaning.
    """

    panel: ClassVar[str] = "Patches"
    patches: list[str] = option(
        list,
        "32 (pixels a side), 16x64 (width x height), 2% (of the pixels), 2:32 (two of "
        "them); may be repeated.",
        "--patch",
        metavar="SIZE",
    )
    procedure: str = option(
        DOUBLE_MASKING,
        "How the defended classifier decides: double-masking[:K] (K x K masks; a larger K hides less "
        "and takes more passes), or voting[:W] (over bands of W cells). Default of both numbers: 3.",
        metavar="NAME[:N]",
    )
    bands: Bands = "columns"
    hide: Hiding = "auto"
    cell: Sequence[int] | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if _PROCEDURE.fullmatch(str(self.procedure)) is None:
            raise UsageError(
                f"unknown procedure '{self.procedure!s:.40}'",
                "double-masking[:K], with K x K masks, or voting[:W], over bands of W cells",
            )
        if self.cell is not None and [*map(type, self.cell)] != [int, int]:
            raise UsageError(f"cell {list(self.cell)} is not (height, width) in pixels")
        if (
            not 1 <= (1 if self.rows is None else self.rows) <= MOST_ROWS
            or len(self.patches) > MOST_PATCHES
        ):
            raise UsageError(
                f"rows is between 1 and {MOST_ROWS}, and patches are at most {MOST_PATCHES}"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """As `CertifierOptions.of`; records state the number of a procedure beside its name."""
        number = values.get("masks", values.get("band_width"))
        named = {} if number is None else {"procedure": f"{values['procedure']}:{number}"}
        return super().of({**values, **named})

    @property
    def decided_by(self) -> tuple[str, int]:
        """The procedure's name, and its K or W."""
        name, _, number = self.procedure.partition(":")
        return name, int(number or 3)

    def sizes(self, image: tuple[int, int]) -> list[Patch]:
        """Return the patches for (height, width), as named; UsageError when there is none."""
        if not self.patches:
            raise UsageError(
                "--method patch needs a patch",
                "--patch 32 (pixels), --patch 2%, --patch 16x64",
            )
        return [Patch.read(str(text), image) for text in self.patches]


EARLY_SHARE = 0.1
"""Of alpha, for all looks before the last together, when a certificate may be given early."""
HOPELESS = 1e-4
"""An image is given up when p <= 1/2 at this confidence. No certificate is wrong by it: it only
abstains.
"""
UNLIKELY = 0.01
"""With `decide`, an image is given up when at this confidence it cannot be certified beyond
`enough`.
"""
_DOWN = 1 - 2.0**-21
"""Relative: noise may be smaller than sigma z by 2^-24 where sigma is a float32 number, and by as
much in each function that Box and Muller's transform takes; scipy's normal quantile errs by a few
1e-16.
"""
FARTHEST = 5.4
"""Radii at most, in sigma: the grid of `noise` reaches no farther. Ten million draws at alpha 0.001
certify 4.8.
"""
LARGEST_SIGMA = 1e6
SAME = 1e-9
"""Relative: radii of one count, computed by two versions of scipy; those of neighbouring counts
differ by far more.
"""


def _read_sigma(text: str) -> float:
    if "," in text:
        first = text.partition(",")[0]
        raise UsageError(
            f"--sigma {text}: one number a run, since radii of several would share --alpha",
            f"--sigma {first} -e {first} --split val --limit 12 shows on other images what it certifies",
        )
    return parse_number(text)


@dataclass(frozen=True)
class Smoothing(CertifierOptions):
    """n0 draws choose the class, `samples` bound its probability, at confidence 1 - alpha.

    Args:
        enough: stop drawing for an image once it is certified beyond this radius; None draws all
            samples.
        decide: stop also once the image is unlikely to be certified beyond `enough`; it keeps the
            radius of that moment.
        precision: of the network as it runs.
        seed: of all noise.
        batch_size: noisy images at a time.
        denoiser: digest of the denoiser that records state; `denoiser_file` must hold that one.
        denoiser_module: in place of a file, from Python.

    Raises:
        UsageError: a value has no meaning.
    """

    panel: ClassVar[str] = "Smoothing"
    sigma: float = option(
        0.25,
        "Standard deviation of the noise, pixel units.",
        metavar="S",
        read=_read_sigma,
    )
    n0: int = option(100, "Draws that choose an image's class.")
    samples: int = option(
        1000,
        "Draws that bound its probability. More draws certify larger radii.",
        "--samples",
        "-n",
    )
    alpha: float = option(0.001, "Probability that a certificate is wrong, for each image.")
    enough: float | None = option(
        None, "Stop drawing once an image is certified beyond R.", metavar="R", read=parse_radius
    )
    decide: bool = option(
        False,
        "With --enough R: also stop on images that will probably (99 %) not reach R. Only "
        "the share at R is then meaningful.",
    )
    precision: Precision = option(
        "float32",
        "Precision of the certified network: float32 or bf16.",
    )
    denoiser_file: Path | None = option(
        None,
        "Denoise the noisy images first: a DnCNN, a folder of diffusers, a guided-diffusion file.",
        "--denoiser",
        metavar="PATH",
    )
    seed: int = 0
    batch_size: int = 128
    denoiser: str | None = None
    denoiser_module: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        draws = min(self.n0, self.samples) >= 1 and max(self.n0, self.samples) <= MOST_DRAWS
        enough = self.enough is None or 0 <= self.enough < math.inf
        for value, good, hint in (
            (
                f"--sigma {self.sigma:g}",
                0 < self.sigma <= LARGEST_SIGMA,
                f"above 0, at most {LARGEST_SIGMA:g}",
            ),
            (f"--alpha {self.alpha:g}", 0 < self.alpha < 1, "between 0 and 1, as 0.001"),
            (f"--n0 {self.n0} --samples {self.samples}", draws, f"each from 1 to {MOST_DRAWS:,}"),
            (f"--enough {self.enough}", enough, "a finite radius >= 0, as 0.25"),
            (
                "--decide without a radius",
                not self.decide or self.enough is not None,
                "--enough 0.25",
            ),
            (f"--seed {self.seed}", 0 <= self.seed < 1 << 64, "from 0 to 2^64"),
        ):
            if not good:
                raise UsageError(f"{value} is not possible", hint)

    def require_reach(self) -> None:
        """Raise UsageError unless these draws can certify a radius, and one beyond `enough`."""
        if self.reach <= 0:
            fewest = math.floor(math.log(self.levels[self.samples]) / math.log(0.5)) + 1
            raise UsageError(
                f"{self.samples} samples can certify no radius at alpha {self.alpha:g}, even if all of them agree",
                f"--samples {fewest} or more; 1000 is a good number",
            )
        if self.enough is not None and self.enough >= self.reach:
            raise UsageError(
                f"--enough {self.enough:g} is beyond {attacked_radius(self.reach, 4)}, "
                "the largest radius that can be certified",
                "more --samples, or a larger --sigma",
            )

    @property
    def looks(self) -> tuple[int, ...]:
        """When counts are looked at: n0, doubling, all. Fixed before anything is drawn."""
        sizes = [self.n0 << power for power in range(64) if self.n0 << power < self.samples]
        return (*sizes, self.samples)

    @property
    def levels(self) -> Mapping[int, float]:
        """Look -> its part of alpha (0: abstention only). They sum to alpha, rounded down."""
        *early, last = self.looks
        if self.enough is None or not early:
            return {**dict.fromkeys(early, 0.0), last: self.alpha}
        each = self.alpha * EARLY_SHARE / len(early)
        return {**dict.fromkeys(early, each), last: self.alpha * (1 - EARLY_SHARE) * (1 - 2.0**-50)}

    @property
    def reach(self) -> float:
        """Return the radius when every sample falls into one class: none larger can be certified."""
        return self.radius(self.samples, self.samples)

    def radius(self, hits: int, drawn: int) -> float:
        """sigma min(Phi^-1(p), FARTHEST), p this look's lower bound, rounded down; 0 for p <= 1/2."""
        from scipy.special import ndtri

        level = self.levels[drawn]
        p = lower_confidence(hits, drawn, level) if level > 0 else 0.0
        quantile = min(float(ndtri(p)), FARTHEST)
        return max(0.0, self.sigma * quantile * _DOWN) if p > 0.5 else 0.0

    def states(self, radius: float) -> bool:
        """Tell whether some count of hits states this radius in CERTIFY."""
        for look in self.looks:
            low = 0
            high = look
            while low < high:  # the fewest hits that give this radius
                middle = (low + high) // 2
                low, high = (
                    (low, middle)
                    if self.radius(middle, look) >= radius * (1 - SAME)
                    else (middle + 1, high)
                )
            drawn_radius = self.radius(low, look)
            ends = (
                look == self.samples
                or (self.enough is not None and drawn_radius > self.enough)
                or self.hopeless(low, look)
            )
            if ends and abs(drawn_radius - radius) <= radius * SAME:
                return True
        return False

    def hopeless(self, hits: int, drawn: int) -> bool:
        """No sample left could lead to a certificate, or p <= 1/2 at confidence 1 - HOPELESS.

        With `decide`: to one beyond `enough`, or p <= Phi(enough / sigma) at the confidence 1 -
        UNLIKELY.
        """
        demanded = self.enough if self.decide and self.enough is not None else 0.0
        if self.radius(hits + self.samples - drawn, self.samples) <= demanded:
            return True
        if upper_confidence(hits, drawn, HOPELESS) <= 0.5:
            return True
        return self.decide and upper_confidence(hits, drawn, UNLIKELY) <= normal_chance(
            demanded / self.sigma
        )


def normal_chance(z: float) -> float:
    """Phi(z)"""
    from scipy.special import ndtr

    return float(ndtr(z))
