"""The settings of Douglas-Rachford, mostly options. Importing this file imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from certcli.constrain.methods import METHODS
from certcli.system.errors import UsageError
from certcli.system.options import option
from certcli.system.registry import one_of

BETA = 0.01
"""The strength where none is asked for."""


@dataclass(frozen=True)
class ConstrainSettings:
    """How every layer is constrained, under the paper's names.

    Args:
        prox: a name of `METHODS`.
        beta: in (0, 1], in units of the strength at which prox(W0) uses up the allowed error
            (`one_group.PACE`); None: `BETA`. It sets the pace of a run, not its converged result;
            where `iterations` ends the run, as in `PRESETS`, it sets the strength.
        per_head: the penalty of q, k and v is the sum over heads. On ViT-Tiny at 10 % it lowers the
            heads' norms further (to .65 against .87 of the old) and the whole matrix's less (.76
            against .64).
        ridge: isotropic part of the statistics, as a share of their mean eigenvalue, so that no
            direction moves freely.
            None: only where the statistics are rank-deficient (`eigenbasis`).
        eta: allowed relative output error |W X_j - W0 X_j|_F / |W0 X_j|_F of each group j, in (0,
            1). The paper's absolute eta_j is eta^2 |W0 X_j|^2 / T_j.
        mean_squared: the paper's absolute eta in place of ours, sum_t |W x_t - W0 x_t|^2 <= T eta
            over T tokens.
        tolerance: optimality gap at which a run ends; three times that with several groups.

    Raises:
        UsageError: an option is out of its range.
    """

    panel: ClassVar[str] = "Method"
    prox: str = option("spectral", "spectral, l1 (the paper's), nuclear, clip, ball.")
    beta: float | None = option(
        None,
        "Step of the proximal map (default 0.01): the pace of the run. How far norms fall is set by "
        "--keep, --eta or --target; only with --preset, which ends a run early, by --beta.",
    )
    relaxation: float = option(1.2, "lambda of Douglas-Rachford, in (0, 2).")
    iterations: int = option(200, "Largest number of iterations a layer.")
    per_head: bool = option(False, "Penalise q, k and v head by head.")
    ridge: float | None = option(
        0.3,
        "Ridge added to the calibration covariance, relative to its mean eigenvalue.",
        metavar="SHARE",
        read=lambda text: float(text) or None,
    )
    eta: float = 0.1
    mean_squared: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        METHODS[self.prox]
        if not 0 < self.eta < 1:
            hint = "0.1 allows each layer 10 % of output error"
            raise UsageError(f"eta must lie between 0 and 1, not {self.eta:g}", hint)
        if self.beta is not None and not 0 < self.beta <= 1:
            raise UsageError(
                f"beta must lie between 0 and 1, not {self.beta:g}", "0.01 is the default"
            )
        if not 0 < self.relaxation < 2:
            hint = "1.2 is the paper's value"
            raise UsageError(
                f"the relaxation must lie between 0 and 2, not {self.relaxation:g}", hint
            )
        if self.iterations < 1:
            raise UsageError(f"--iterations must be at least 1, not {self.iterations}")
        if self.ridge is not None and not 0 <= self.ridge < float("inf"):
            raise UsageError(
                f"--ridge must be a finite number of at least 0, not {self.ridge:g}",
                "0.3 is the default",
            )


PRESETS = {
    "certvit-paper": ConstrainSettings("l1", 0.01, iterations=10, ridge=None, mean_squared=0.1),
    "certvit-paper-tables": ConstrainSettings(
        "l1", 0.1, iterations=10, ridge=None, mean_squared=0.01
    ),
}
"""CertViT by its section 4.1, and by its Tables 9 and 10 (most columns), which contradict it. No ridge, all tokens.
5 epochs of 2 projections each, in place of convergence; a projection is exact here."""


def preset_of(name: str) -> ConstrainSettings:
    """Return the settings of a preset; UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", one_of(name, PRESETS))
    return PRESETS[name]
