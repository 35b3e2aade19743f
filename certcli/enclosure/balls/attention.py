"""Attention near one image, timm's, torch's fused one, and written out. docs/local.md, 10."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.balls.ball import BallContext, Near, Normalised, fibres, rules, settled
from certcli.enclosure.balls.layers import still
from certcli.enclosure.operations import register_products
from certcli.enclosure.zonotopes.columns import FUNCTION, TINY, gamma, up
from certcli.engine.attention import (
    added_to_scores,
    attention_module,
    fused_attention,
    require_no_mask,
)
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.spectral import spectral_norm

_LONG = 1e300


@dataclass(frozen=True)
class HeadWeights:
    """Heads' matrices (h, e, d), what waits of a LayerNorm folded in, and products' norms.

    Attributes:
        through: sigma(Wo Wv) (h).
        curve: sigma(Wk^T Wq) (h). largest: above the Frobenius norms of all (h).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    through: Tensor
    curve: Tensor
    sizes: Tensor


def _attention_weights(module: Any, gain: Tensor | None) -> HeadWeights:
    heads = module.num_heads
    width = module.head_dim
    query, key, value = module.qkv.weight.unflatten(0, (3, heads, width))
    query = query * module.scale
    out = module.proj.weight.unflatten(1, (heads, width)).movedim(1, 0)  # (h, d, e)
    if gain is not None:
        query = query * gain
        key = key * gain
        value = value * gain
    through = []
    curve = []
    sizes = []
    for q, k, v, o in zip(query, key, value, out, strict=True):
        lengths = [frobenius_norm(part) for part in (q, k, v, o)]
        loss = gamma(width + 8)
        # the products are rounded, and so is each factor's scale
        through.append(spectral_norm(o @ v, loss * lengths[2] * lengths[3]))
        curve.append(spectral_norm(k.T @ q, loss * lengths[0] * lengths[1]))
        sizes.append(lengths)
    make = lambda values: torch.tensor(values, dtype=torch.float64, device=query.device)  # noqa: E731
    return HeadWeights(
        query, key, value, out, make(through), make(curve), make(sizes).T * (1 + 2**-40)
    )


@dataclass(frozen=True)
class Facts:
    """What the scores at the images say, in (b, h, ...): inflated by rounding errors.

    centre (b, n, d), noise (b, n): the attention's value and what it is off by. share (b, h, i, j):
        the probabilities.
    reach: |Wo (v_j - o_i)|. toward (b, h, i): how fast scores move with the keys' tokens. turn: (b,
    h, i, j): with the query's own. own (b, h, i): sigma of sum_j p_ij Wo (v_j - o_i) (k_j - m_i)^T
    Wq.
    """

    centre: Tensor
    noise: Tensor
    share: Tensor
    reach: Tensor
    toward: Tensor
    turn: Tensor
    own: Tensor


def _facts(module: Any, w: HeadWeights, tokens: Tensor, size: Tensor, pick: slice) -> Facts:
    """tokens (b, n, d), made of terms whose lengths are at most size (b, n).

    Beside every length stands what rounding may have done to it: names end in _off.
    """
    heads = module.num_heads
    width = module.head_dim
    count = tokens.shape[1]
    rows = gamma(tokens.shape[2] + 8)
    scale = module.scale
    parts = module.qkv.weight.unflatten(0, (3, heads, width))
    raw = [up(part.square().sum((-2, -1)).sqrt(), 2**16).view(1, -1, 1) for part in parts]
    projected = tokens @ module.qkv.weight.T
    if module.qkv.bias is not None:
        projected = projected + module.qkv.bias
        offsets = [
            up(part.norm(dim=-1), width).view(1, -1, 1)
            for part in module.qkv.bias.unflatten(0, (3, heads, -1))
        ]
    else:
        offsets = [0 * part for part in raw]
    q, k, v = projected.unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
    q_off, k_off, v_off = (
        rows * (part * size[:, None] + bias) for part, bias in zip(raw, offsets, strict=True)
    )
    q = q[:, :, pick]
    q_off = q_off[:, :, pick]
    q_most = fibres(q) + q_off
    k_most = fibres(k) + k_off
    v_most = fibres(v) + v_off
    k_off, k_most, v_most, v_off = (
        t.amax(-1, keepdim=True) for t in (k_off, k_most, v_most, v_off)
    )
    inner = gamma(width + count + 64)
    # of a score: (b, h, i)
    doubt = up(scale * (q_off * k_most + q_most * k_off + inner * q_most * k_most), 8)
    share = ((q * scale) @ k.mT).softmax(-1)
    unsure = up(torch.expm1(2 * doubt) * (1 + 2**-40) + inner, 4)  # of a probability, relative
    o = share @ v
    m = share @ k
    o_off = up((unsure + inner) * v_most + v_off, 4)
    sq, sk, _, so = (part.view(1, -1, 1) for part in w.sizes)
    turn = torch.cdist(m @ w.query, k @ w.query, compute_mode="donot_use_mm_for_euclid_dist")
    turn = up(turn + (4 * sq * (k_off + inner * k_most))[..., None], tokens.shape[2] + 8)
    toward = (q @ w.key * scale).norm(dim=-1)
    toward = up(toward + 4 * scale * sk * (q_off + inner * q_most), tokens.shape[2] + 8)
    reach = torch.cdist(o @ w.out.mT, v @ w.out.mT, compute_mode="donot_use_mm_for_euclid_dist")
    reach = up(reach + (4 * so * (o_off + v_off + inner * v_most))[..., None], tokens.shape[2] + 8)
    rounding = (unsure + inner) * v_most * k_most + v_off * k_most + v_most * k_off + o_off * k_most
    score = up(_own(w, share, v, o, k, m) + 8 * so * sq * rounding, 8)
    centre = o.transpose(1, 2).flatten(-2) @ module.proj.weight.T
    noise = (so * (o_off + gamma(heads * width + 8) * v_most)).sum(1)
    if module.proj.bias is not None:
        centre = centre + module.proj.bias
        noise = noise + gamma(0) * fibres(centre)
    return Facts(
        centre,
        up(noise, heads + 4),
        up(share * (1 + unsure[..., None]), 4),
        reach,
        toward,
        turn,
        score,
    )


def _own(w: HeadWeights, share: Tensor, v: Tensor, o: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """Above sigma(Wo C_i Wq), C_i = sum_j p_ij (v_j - o_i)(k_j - m_i)^T: by a 4th power's trace.

    |Wo C Wq|_{S4}^4 = tr Z^2, Z = (Wo^T Wo) C (Wq Wq^T) C^T. The error of Z is at most gamma times the lengths of its parts.
    """
    pairs = torch.einsum("bhij,bhje,bhjf->bhief", share, v, k)
    spread = pairs - o[..., :, None] * m[..., None, :]
    first = (w.out.mT @ w.out)[None, :, None]
    second = (w.query @ w.query.mT)[None, :, None]
    z = first @ spread @ second @ spread.mT
    length = lambda t: t.square().sum((-2, -1)).sqrt()  # noqa: E731
    loss = gamma(6 * (w.out.shape[1] + w.out.shape[2]) + 64)
    doubt = loss * length(first) * length(second) * length(spread) ** 2
    fourth = (
        (z * z.mT).sum((-2, -1)).clamp_min(0)
        + loss * length(z) ** 2
        + 2 * length(z) * doubt
        + doubt**2
    )
    return up(fourth.sqrt().sqrt(), 64)


def _gains(facts: Facts, w: HeadWeights, radius: Tensor, asking: Tensor) -> Tensor:
    """M (b, i, j): |out_i - centre_i| <= sum_j M_ij |z_j - c_j| for |z_j - c_j| <= radius_j (b, n).

    asking (b, i): the radii of the tokens whose results are computed; what they add themselves is
        the last column (b, i, n).
    """
    curve = w.curve.view(1, -1, 1)
    # of a score in its key's token
    slope = up(facts.toward + curve * asking[:, None], 4)[..., None]
    change = up(slope * radius[:, None, None] + facts.turn * asking[:, None, :, None], 4)
    level = up(
        torch.log1p((facts.share * torch.expm1(change)).sum(-1, keepdim=True) * (1 + 2**-40)), 400
    )
    level = torch.minimum(level, change.amax(-1, keepdim=True))
    far = up(change.amax(-1, keepdim=True) + level)
    grown = up(far.exp() * (1 + 2**-40))
    second = up(far / 2 * grown)  # (e^x - 1) / x - 1 <= (x / 2) e^x
    p = facts.share
    reach = facts.reach
    mean = up((p * reach).sum(-1, keepdim=True), p.shape[-1])
    second_order = up(p * second * (reach + (1 + second) * mean), 8)
    through = up(torch.minimum(p * grown, torch.ones_like(p)) * w.through.view(1, -1, 1, 1))
    score_change = up(through + (p * reach + second_order) * slope, 8)
    score = up(facts.own + (second_order * facts.turn).sum(-1), p.shape[-1] + 8)
    total = up(score_change.sum(1), 64)
    return torch.cat([total, up(score.sum(1), 64)[..., None]], -1)


def nonnegative_norm(matrix: Tensor) -> Tensor:
    """sigma(M) <= max_i ((M^T M x)_i / x_i)^(1/2) for M >= 0 and any x > 0 (Collatz, Wielandt): (b,
    i, j) -> (b).
    """
    x = matrix.new_ones(len(matrix), matrix.shape[2], 1)
    for _ in range(4):
        image = matrix.mT @ (matrix @ x)
        x = image / image.amax(1, keepdim=True).clamp_min(TINY) + 1e-6
    image = matrix.mT @ (matrix @ x)
    return up((image / x).amax((1, 2)), sum(matrix.shape[1:]) + 4).sqrt() * (1 + 2**-50)


@attention_module(rules)
def attention(
    ctx: BallContext, module: Any, x: Any, attn_mask: Any = None, is_causal: bool = False
) -> Near:
    """timm's multi-head attention, for the queries that are read later."""
    require_no_mask(attn_mask, is_causal)
    gain = x.gain if isinstance(x, Normalised) else None
    near = x.near if isinstance(x, Normalised) else settled(x)
    if len(near.shape) != 3 or near.shape[0] != 1:
        raise NoRule("attention over something other than one image's tokens")
    w = ctx.of_weights("heads", lambda: _attention_weights(module, gain))
    pick = slice(None) if ctx.token is None else slice(ctx.token, ctx.token + 1)
    tokens = x.centre[:, 0]
    size = fibres(tokens)
    if isinstance(x, Normalised) and x.bias is not None:
        size = size + 2 * up(x.bias.norm(), len(x.bias))
    facts = ctx.at_centre("scores", lambda: _facts(module, w, tokens, size, pick))
    radius = near.fibre[:, 0].clamp_max(_LONG)
    gains = _gains(facts, w, radius, radius[:, pick])
    fibre = up(
        (gains[..., :-1] @ radius[..., None])[..., 0] + gains[..., -1] * radius[:, pick],
        radius.shape[1] + 4,
    )
    matrix = gains[..., :-1].clone()
    rows = torch.arange(matrix.shape[1], device=matrix.device)
    matrix[:, rows, rows + (ctx.token or 0)] += gains[..., -1]
    whole = up(near.whole * nonnegative_norm(up(matrix)))
    return Near.of(facts.centre[:, None], fibre[:, None], whole).noisy(facts.noise[:, None])


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


def _frobenius(rows: Tensor) -> Tensor:
    """Return |Y|_F, rounded up, from the lengths of its rows: (.., j) -> (.., 1)."""
    return up(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), rows.shape[-1] + 2)


def matmul(x: Near, y: Near) -> Near:
    """|dx_i Y + X_i dY + dx_i dY| <= |dx_i| |Y|_F + |X_i| |dY|_F + |dx_i| |dY|_F, row by row."""
    length = x.size
    matrix = _frobenius(y.size)
    moved = _frobenius(y.fibre)
    fibre = up(x.fibre * matrix + length * moved + x.fibre * moved, 8)
    return Near.of(x.centre @ y.centre, fibre).noisy(
        up(gamma(x.shape[-1] + 4) * length * matrix, 4)
    )


def softmax(ctx: BallContext, x: Near) -> Near:
    """Softmax has slope 1/2: the norm of diag(p) - p p^T, whose absolute rows sum to 2 p (1 - p)."""
    centre = x.centre.softmax(-1)
    loss = FUNCTION + gamma(x.shape[-1] + 64)
    return Near.of(centre, up(x.fibre / 2), up(x.whole / 2)).noisy(loss * fibres(centre))


register_products(rules, (Near, Normalised), settled, matmul, softmax)
