"""torch's fused attention, queries and keys with norms, and pooling. docs/local.md, 10.3."""

from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.balls.ball import Near, settled
from certcli.enclosure.balls.layers import fibres, still
from certcli.enclosure.balls.table import BallContext, rules
from certcli.enclosure.zonotopes.rounding import gamma, up
from certcli.engine.attention import added_to_scores, fused_attention
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant


@fused_attention(rules)
def heads(
    ctx: BallContext, query: Any, key: Any, value: Any, mask: Any, scale: float | None
) -> Near:
    """softmax(scale q k^T + mask) v, heads (w, h, n, e); w: the windows of one image, or 1.

    p'_ij = p_ij exp(t_ij - log S_i), |t_ij| <= T_ij, |log S_i| <= L_i, so
    |out'_i - out_i| <= sum_j min(p_ij e^(T_ij + L_i), 1) |dv_j| + min(sum_j p_ij (e^(T_ij + L_i) - 1) |v_j - o_i|,
    2 max_j |v_j - o_i|).
    """
    images = next(
        (len(part.centre) for part in (query, key, value) if not isinstance(part, Constant)), 1
    )
    parts = (query, key, value)
    q, k, v = (
        still(part.tensor, images) if isinstance(part, Constant) else settled(part)
        for part in parts
    )
    if any(len(part.shape) != 4 for part in (q, k, v)):
        raise NoRule("attention over something other than (windows, heads, tokens, width)")
    added = added_to_scores(mask, (*q.shape[:-1], k.shape[-2]))
    width = q.shape[-1]
    count = k.shape[-2]
    factor = width**-0.5 if scale is None else scale
    share, centre, toward, turn, reach, off = ctx.at_centre(
        "heads", lambda: _fused_facts(q, k, v, factor, added)
    )
    a = q.fibre[..., None]
    b = k.fibre[..., None, :]
    g = v.fibre[..., None, :]
    change = up(abs(factor) * ((toward[..., None] + a) * b + a * turn), 8)
    level = up(
        torch.log1p((share * torch.expm1(change)).sum(-1, keepdim=True) * (1 + 2**-40)), count + 256
    )
    level = torch.minimum(level, change.amax(-1, keepdim=True))
    score_change = up(change + level)
    through = (
        torch.minimum(share * score_change.exp() * (1 + 2**-40), torch.ones_like(share)) * g
    ).sum(-1)
    turned = (share * torch.expm1(score_change) * (1 + 2**-40) * reach).sum(-1)
    fibre = up(through + torch.minimum(turned, 2 * reach.amax(-1)), count + 16)
    return Near.of(centre, fibre).noisy(off)


def _fused_facts(
    q: Near, k: Near, v: Near, factor: float, added: Tensor | None
) -> tuple[Tensor, ...]:
    """At the centres: probabilities (from above), averages; inflated by their rounding

    |q_i|, |k_j - m_i|, |v_j - o_i| and what the averages are off by. m_i need not be exact: any row of it serves.
    """
    width = q.shape[-1]
    count = k.shape[-2]
    inner = gamma(width + count + 64)
    exact = "donot_use_mm_for_euclid_dist"
    q_size = fibres(q.centre)
    k_most = fibres(k.centre).amax(-1, keepdim=True)
    v_most = fibres(v.centre).amax(-1, keepdim=True)
    doubt = up(abs(factor) * inner * q_size * k_most, 8)
    scores = (q.centre * factor) @ k.centre.mT
    if added is not None:
        added = added.to(scores)
        scores = scores + added
        doubt = up(doubt + inner * added.abs().amax(-1), 4)
    unsure = up(torch.expm1(2 * doubt) * (1 + 2**-40) + inner, 4)
    share = scores.softmax(-1)
    o = share @ v.centre
    m = share @ k.centre
    off = up((unsure + inner) * v_most, 4)
    turn = up(torch.cdist(m, k.centre, compute_mode=exact), width + 8)
    reach = up(torch.cdist(o, v.centre, compute_mode=exact) + off[..., None], width + 8)
    return up(share * (1 + unsure[..., None]), 4), o, q_size, turn, reach, off
