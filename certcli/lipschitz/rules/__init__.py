"""One theorem a rule: importing this package registers all of them in `certcli.lipschitz.table.rules`."""

import certcli.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.lipschitz.rules import (  # noqa: F401 (for their decorators)
    activations,
    adaptive,
    affine,
    attention,
    blends,
    choices,
    convit,
    convolution,
    copies,
    deviations,
    l2,
    lipschitz_attentions,
    mixing,
    multiples,
    norms,
    parts,
    pointwise,
    pooling,
    products,
    reductions,
    scales,
    shapes,
    sums,
    token_convolution,
    written_attention,
)
