"""The options of Douglas-Rachford, checked once and passed whole; importing this file imports no torch."""

from dataclasses import dataclass

from certcli.constrain.methods import METHODS
from certcli.system.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How every layer is constrained, under the paper's names.

    Args:
        prox: a name of `METHODS`.
        beta: strength of the proximal map, in (0, 1], in units of the strength at which prox(W0) uses up the allowed error
            (`one_group.PACE`). It sets the pace of a run, not its converged result.
        eta: allowed relative output error |W X_j - W0 X_j|_F / |W0 X_j|_F of each group j, in (0, 1). The paper's absolute
            eta_j is eta^2 |W0 X_j|^2 / T_j.
        relaxation: lambda of Douglas-Rachford, in (0, 2).
        iterations: most iterations a layer.
        per_head: the penalty of q, k and v is the sum over heads. On ViT-Tiny at 10 % it lowers the heads' norms further
            (to .65 against .87 of the old) and the whole matrix's less (.76 against .64).
        ridge: isotropic part of the statistics, as a share of their mean eigenvalue, so that no direction moves freely.
            None: only where the statistics are rank-deficient (`eigenbasis`).
        tolerance: optimality gap at which a run ends; three times that with several groups.

    Raises:
        UsageError: an option is out of its range.
    """

    prox: str = "spectral"
    beta: float = 0.01
    eta: float = 0.1
    relaxation: float = 1.2
    iterations: int = 200
    per_head: bool = False
    ridge: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        METHODS[self.prox]
        if not 0 < self.eta < 1:
            hint = "0.1 allows each layer 10 % of output error"
            raise UsageError(f"eta must lie between 0 and 1, not {self.eta:g}", hint)
        if not 0 < self.beta <= 1:
            raise UsageError(f"beta must lie between 0 and 1, not {self.beta:g}", "0.01 is the default")
        if not 0 < self.relaxation < 2:
            hint = "1.2 is the paper's value"
            raise UsageError(f"the relaxation must lie between 0 and 2, not {self.relaxation:g}", hint)
