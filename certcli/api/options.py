"""Options as the functions of Python take them: the fields of the rooms' options that a caller may
set, in the types that a caller may write. tests/api/test_signatures.py compares both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from certcli.certify.options import Arithmetic, Bands, Effort
from certcli.evaluation.threat import Norm, Pixels, Precision

Radius = float | str
"""In pixel units: a finite number >= 0, or a quotient such as "8/255"."""
Radii = Radius | Sequence[Radius]
Words = str | Sequence[str]


class PatchOptions(TypedDict, total=False):
    """Of method patch, and of defence patch: `certify.options.Patches`."""

    patches: Words
    procedure: str
    bands: Bands
    cell: Sequence[int] | None
    rows: int | None


class MethodOptions(PatchOptions, total=False):
    """Of all methods: `certify.options.Proof`, `Local`, `Smoothing` and `Patches`."""

    arithmetic: Arithmetic | None
    effort: Effort
    norm: Norm
    seconds: float | None
    sigma: Radius
    n0: int
    samples: int
    alpha: float
    enough: Radius | None
    decide: bool
    precision: Precision
    seed: int


class CertifyOptions(MethodOptions, total=False):
    """Of `certify`. radii: of method local, ascending, to try in place of a search."""

    radii: Radii


class AttackOptions(TypedDict, total=False):
    """`attack.settings.AttackSettings`."""

    steps: int | None
    restarts: int
    relative_step: float | None
    seed: int
    targets: int
    queries: int
    samples: int
    searches: int
    confidence: float
    initial_c: float
    learning_rate: float
    stop_early: bool
    give_up: bool
    precision: Precision
    pixels: Pixels


class AuditOptions(TypedDict, total=False):
    """`audit.plan.AuditPlan`."""

    radii: Radii
    sigma: Radius | None
    attacks: Words
    methods: Words
    patches: Words
    seed: int
    batch_size: int
    precision: Precision | Literal["auto"]
    pixels: Pixels
    limit: int | None
    anonymous: bool
    denoiser: str | Path | None
