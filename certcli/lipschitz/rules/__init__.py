"""All rules, one theorem each: importing this package registers them in `lipschitz.table.rules`."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.lipschitz.rules import (  # noqa: F401 (for their decorators)
    activations,
    add_sub,
    attention,
    concatenation,
    convit,
    convolution,
    l2_attention,
    lerp,
    linear,
    matmul,
    matmul_attention,
    moves,
    mul_div,
    norms,
    pointwise,
    pooling,
    reduce,
    scale_shift,
    scsa_lnorm_attention,
    token_mixing,
    where_maximum,
)
