"""The settings of Douglas-Rachford, mostly options. Importing this file imports no torch."""

from dataclasses import dataclass, replace
from typing import ClassVar

from certcli.system.errors import UsageError, raise_if
from certcli.system.options import option
from certcli.system.registry import Entry, Registry, one_of

BETA = 0.01
"""The strength where none is asked for."""

PENALTIES = Registry(
    "prox",
    Entry(
        "spectral",
        "certcli.constrain.prox:SPECTRAL",
        "least spectral norm at the allowed output error (levels the top singular values)",
        "Combettes & Pesquet 2011, Moreau decomposition onto the nuclear-norm ball",
    ),
    Entry(
        "l1",
        "certcli.constrain.prox:L1",
        "least sum of absolute weights (soft threshold), the paper's choice",
        "CertViT, Algorithm 1",
    ),
)
"""Penalties that Douglas-Rachford minimises over the layers of bounded output error."""


@dataclass(frozen=True)
class ConstrainSettings:
    """How every layer is constrained, under the paper's names.

    Args:
        prox: a name of `PENALTIES`.
        beta: in (0, 1], in units of the strength at which prox(W0) uses up the allowed error
            (`single_ellipsoid.PACE`); None: `BETA`. It sets the pace of a run, not its converged
            result; where `iterations` ends the run, as in `PRESETS`, it sets the strength.
        iterations: the most of a layer.
        ridge: isotropic part of the statistics, as a share of their mean eigenvalue, so that no
            direction moves freely.
            None: only where the statistics are rank-deficient (`eigenbasis`).
        tokens: of an image, in the statistics; None: all, with products in float64.
        eta: allowed relative output error |W X - W0 X|_F / |W0 X|_F, in (0, 1). The paper's
            absolute eta is eta^2 |W0 X|^2 / T.
        mean_squared: the paper's absolute eta in place of ours, sum_t |W x_t - W0 x_t|^2 <= T eta
            over T tokens.
        tolerance: optimality gap at which a run ends.

    Raises:
        UsageError: an option is out of its range.
    """

    panel: ClassVar[str] = "Method"
    prox: str = option("spectral", "spectral, or l1 (the paper's).")
    beta: float | None = option(
        None,
        "Step of the proximal map (default 0.01): the pace of the run. How far norms fall is set by "
        "--keep or --eta; only with --preset, which ends a run early, by --beta.",
    )
    relaxation: float = option(1.2, "lambda of Douglas-Rachford, in (0, 2).")
    iterations: int = 200
    ridge: float | None = 0.3
    tokens: int | None = 50
    eta: float = 0.1
    mean_squared: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        PENALTIES[self.prox]
        raise_if(
            not 0 < self.eta < 1,
            UsageError,
            f"eta must lie between 0 and 1, not {self.eta:g}",
            "0.1 allows each layer 10 % of output error",
        )
        raise_if(
            not 0 < (self.beta or BETA) <= 1 or self.beta == 0,
            UsageError,
            f"beta must lie between 0 and 1, not {self.beta or 0:g}",
            "0.01 is the default",
        )
        raise_if(
            not 0 < self.relaxation < 2,
            UsageError,
            f"the relaxation must lie between 0 and 2, not {self.relaxation:g}",
            "1.2 is the paper's value",
        )


_PAPER = ConstrainSettings("l1", 0.01, iterations=10, ridge=None, tokens=None, mean_squared=0.1)
PRESETS = {
    "certvit-paper": _PAPER,
    "certvit-paper-tables": replace(_PAPER, beta=0.1, mean_squared=0.01),
}
"""CertViT by its section 4.1, and by its Tables 9 and 10 (most columns), which contradict it. No ridge, all tokens.
5 epochs of 2 projections each, in place of convergence; a projection is exact here."""


def preset_of(name: str) -> ConstrainSettings:
    """Return the settings of a preset; UsageError for an unknown name."""
    raise_if(name not in PRESETS, UsageError, f"unknown preset '{name}'", one_of(name, PRESETS))
    return PRESETS[name]
