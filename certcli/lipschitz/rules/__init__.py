"""All rules, one theorem each: importing this package registers them in
`lipschitz.context.rules`.
"""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.lipschitz.rules import (  # noqa: F401 (for their decorators)
    attention,
    convolution,
    joined,
    linear,
    lipschitz_attention,
    matmul_attention,
    moves,
    norms,
    pointwise,
    reductions,
)
