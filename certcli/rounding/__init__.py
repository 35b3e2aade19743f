"""How far computed logits lie from those of real arithmetic. Importing this registers all rules."""

from certcli.rounding import (  # noqa: F401 (for their decorators)
    executed_attention,
    executed_curves,
    executed_deviations,
    executed_mixing,
    executed_moves,
    executed_norms,
    executed_products,
    executed_windows,
)
from certcli.rounding.neighbours import NeighbourErrors
from certcli.rounding.precisions import PRECISIONS

__all__ = ["PRECISIONS", "NeighbourErrors"]
