"""LayerNorm as y times an enclosure of 1 / sqrt(max(|y|^2 / d + eps, floor^2)). Proofs:
docs/local.md.
"""

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.functions import RSQRT, SQRT
from certcli.enclosure.zonotopes.pointwise import apply_above
from certcli.enclosure.zonotopes.products import scaled, squares
from certcli.enclosure.zonotopes.rounding import gamma, up
from certcli.nn.norms import Spread


def centred(x: Form) -> Form:
    """x - mean(x) on the last axis."""
    width = x.shape[-1]
    return x.linear(
        lambda t: t - t.mean(-1, keepdim=True),
        lambda t: t + t.mean(-1, keepdim=True),
        width + 4,
        lambda r: r - r.mean(-1, keepdim=True),
    )


def mean_square(y: Form, spread: Spread) -> tuple[Form, Tensor, Tensor]:
    """v = |y|^2 / d + eps as a form, and bounds on it: also (|c| - |y - c|)^2 / d + eps from below."""
    eps, min_variance = spread
    width = y.shape[-1]
    v = squares(y).scale(torch.tensor(1 / width, dtype=torch.float64, device=y.centre.device))
    # 1 / d is rounded: one more relative u of everything
    v = v.doubted(gamma(2) * v.size)
    v = v.shift(torch.tensor(eps, dtype=torch.float64, device=y.centre.device))
    length = torch.linalg.vector_norm(y.centre, dim=-1, keepdim=True)
    far = up(torch.linalg.vector_norm(y.radius, dim=-1, keepdim=True), width)
    down = 1 - gamma(2 * width + 16)
    low = ((length * down - far).clamp_min(0) ** 2 / width + eps) * down
    # the form's upper bound is no larger than (|c| + |y - c|)^2 / d + eps
    below, high = v.interval()
    low = torch.maximum(low, below)
    positive = low > 0 if min_variance == 0 else low >= 0
    if not bool((positive & (low <= high)).all()):
        raise Unbounded("a LayerNorm whose variance may be 0")
    return v, low, high


def layer_norm(
    x: Form, spread: Spread, weight: Tensor | None, bias: Tensor | None, center: bool = True
) -> Form:
    """weight * (x - mean) / spread + bias on the last axis (center: False for RMSNorm)."""
    y = centred(x) if center else x
    v, low, high = mean_square(y, spread)
    # one symbol a token, shared by all its features
    inverse = apply_above(RSQRT, v, low, high, spread.min_variance).solid()
    out = scaled(y, inverse)
    if weight is not None:
        out = out.scale(weight)
    return out if bias is None else out.shift(bias)


def signs(
    x: Form, spread: Spread, weight: Tensor, bias: Tensor, doubt: Tensor, center: bool = True
) -> Form:
    """weight y + bias spread: sign of weight LN(x) + bias. (.., d) -> (.., j).

    weight may be off by 4 u of itself, bias by `doubt`.
    """
    y = centred(x) if center else x
    v, low, high = mean_square(y, spread)
    root = apply_above(SQRT, v, low, high, spread.min_variance).solid()
    heads = y.linear(lambda t: t @ weight.T, lambda t: t @ weight.abs().T, terms=y.shape[-1] + 4)
    norm = root.linear(lambda t: t * bias, lambda t: t * bias.abs(), terms=4)
    norm = norm.doubted(doubt * root.size)
    return heads + norm
