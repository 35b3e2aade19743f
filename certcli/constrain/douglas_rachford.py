"""The least norm at an output error: min L(W), |W X - W0 X|_F <= eta |W0 X|_F."""

from dataclasses import dataclass

from torch import Tensor

from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.settings import PENALTIES, ConstrainSettings
from certcli.constrain.single_ellipsoid import Solution, least_norm
from certcli.constrain.statistics import LayerStatistics


@dataclass(frozen=True, eq=False)
class ConstrainedMatrix:
    """A constrained matrix and how far its computation went.

    Args:
        weight: (out, in) float64.
        primal_residual: |Q - P|_F / |W0|_F.
        objective: L(weight).
        lower: a lower limit, in floating point, of L over all feasible matrices, from the dual;
            objective / lower - 1 is the optimality gap.
        rank, ridge, basis: those of the statistics.
    """

    weight: Tensor
    iterations: int
    primal_residual: float
    feasible: bool
    objective: float
    lower: float
    rank: int
    ridge: float
    basis: Eigenbasis | None = None


def constrain_matrix(
    statistics: LayerStatistics, settings: ConstrainSettings, basis: Eigenbasis | None = None
) -> ConstrainedMatrix:
    """Run P = prox(Z), Q = proj_C(2P - Z), Z <- Z + relaxation (Q - P); return P inside, or Q.

    The strength of the prox is at most beta * pace * |W0|* with the dual norm of W0, so that one
    beta suits all layers. A converged result does not depend on beta. W is free in directions that
    no calibration token excites, and has the least norm there; a ridge adds its share of the mean
    eigenvalue to G, which is stricter. Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.

    Args:
        basis: that of the Gram matrix, where it is known already.
    """
    basis = eigenbasis(statistics.gram, settings.ridge) if basis is None else basis
    radius = settings.eta * settings.eta * float(statistics.output_energy)
    penalty = PENALTIES.load(settings.prox)
    if radius == 0.0 or not bool(statistics.weight.any()):
        norm = float(penalty.value(statistics.weight))
        run = Solution(statistics.weight.clone(), 0, 0.0, norm, norm)
    else:
        run = least_norm(statistics.weight, basis, radius, penalty, settings)
    error = float(statistics.relative_error(run.weight))
    return ConstrainedMatrix(
        weight=run.weight,
        iterations=run.iterations,
        primal_residual=run.residual,
        feasible=error <= settings.eta * (1 + 1e-9),
        objective=run.objective,
        lower=run.lower,
        rank=basis.rank,
        ridge=basis.ridge,
        basis=basis,
    )
