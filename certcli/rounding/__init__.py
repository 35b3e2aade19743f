"""How far computed logits lie from those of real arithmetic. Importing this registers all rules."""

from certcli.rounding import (  # noqa: F401 (for their decorators)
    executed_attention,
    executed_layers,
    executed_norms,
    executed_products,
)
from certcli.rounding.arithmetics import PRECISIONS
from certcli.rounding.neighbours import NeighbourErrors

__all__ = ["PRECISIONS", "NeighbourErrors"]
