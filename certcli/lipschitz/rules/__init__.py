"""One theorem a rule: importing this package registers all of them in `certcli.lipschitz.table.rules`."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.lipschitz.rules import (  # noqa: F401 (for their decorators)
    activations,
    adaptive_pooling,
    add_sub,
    addmm_lerp,
    attention,
    convit,
    convolution,
    l2_attention,
    linear,
    lipschitz_attentions,
    matmul,
    matmul_attention,
    multiply,
    norms,
    pointwise,
    pooling,
    reduce,
    repeat_pad,
    scale_shift,
    shapes,
    slice_concat,
    token_convolution,
    token_mixing,
    var_std,
    where_maximum,
)
