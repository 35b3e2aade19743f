"""How far computed logits lie from those of real arithmetic. Importing this registers all rules."""

from certcli.rounding import (  # noqa: F401 (for their decorators)
    curves,
    executed_attention,
    executed_curves,
    executed_deviations,
    executed_mixing,
    executed_moves,
    executed_norms,
    executed_products,
    executed_windows,
    moves,
    sums,
)
from certcli.rounding.neighbours import NeighbourErrors
from certcli.rounding.precisions import PRECISIONS
from certcli.rounding.running_error import ErrorAnalysis

__all__ = ["PRECISIONS", "ErrorAnalysis", "NeighbourErrors"]
