"""Options of --method local. No torch here: `certvit certify --help` reads them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

from certcli.certify.options import CertifierOptions
from certcli.certify.proof_options import Arithmetic
from certcli.evaluation.radii import Norm
from certcli.system.errors import UsageError
from certcli.system.options import option

NORMS: Final = "norms"
ZONOTOPE: Final = "zonotope"
TOKENS: Final = "tokens"
BACKWARD: Final = "backward"
BRANCH: Final = "branch"
AUTO: Final = "auto"
Effort = Literal["norms", "tokens", "zonotope", "backward", "branch", "auto"]
EFFORTS = get_args(Effort)
SECONDS = 30.0
"""An image, of --effort branch where nobody says."""


@dataclass(frozen=True)
class Local(CertifierOptions):
    """How each image's neighbourhood is enclosed.

    Args:
        effort: "norms" (balls around one forward pass, any size, many images at once), "zonotope"
            (affine forms, small networks), "tokens" (zonotopes whose errors are one ellipsoid a
            token: transformers, in a tenth of the time), "backward" (zonotopes, and back through what they
            found), "branch" (the same, and split at the signs of ReLU units; without ReLU, for l2, zonotopes
            over what earlier ones leave), "auto" (zonotopes where they fit into memory, with the way back
            where e e^T has no columns; norms for networks and images that they say nothing about).
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
        "norms (any size, tiny radii), tokens (transformers), zonotope (small networks), "
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
