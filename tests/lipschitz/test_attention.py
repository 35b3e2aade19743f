"""What single theorems of attention say: the counterexamples that they exclude, and the cases in
which they agree.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.lipschitz.network import bound_network, propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import lambert_w_upper
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.lipschitz.rules.lipschitz_attention import l2_mixing_constant, lambert_w_of_exp
from certcli.nn.blocks import FloorNorm
from certcli.nn.surgery import REPLACEMENTS
from tests.helpers.lipschitz_cases import f
from tests.helpers.slopes import slope_at
from tests.nn.test_attention import CPU, PLACES, WIDTH, Lone, attention_network, steepest_ratio


def test_unbounded_rows_leave_untied_values_without_a_bound() -> None:
    """The engine knows no size of a tensor that was padded with numbers."""
    padded = f(lambda m, x: nn.functional.pad(x, (0, 1), value=7.0)[..., :-1])
    attention = REPLACEMENTS.load("l2-untied-value-attention")(PLACES["tokens"]())
    result = bound_network(Lone(attention, norm=padded).eval(), (8, WIDTH), 3)
    assert not result.upper.finite
    assert "untied values" in result.bound.why


def _two_tokens(kind: str, **weights: Tensor) -> nn.Module:
    attention = REPLACEMENTS.load(kind)(Attention(2, 1, proj_bias=False)).double().eval()
    for name, value in {"proj": torch.eye(2), **weights}.items():
        attention.get_submodule(name).weight.data.copy_(value)
    return attention


def test_positive_position_biases_exceed_the_constant_without_positions() -> None:
    """Two tokens that prefer each other by 10: slopes of 10 are found, c_2 is below 3. Theorem 6.2
    counts b.
    """
    mask = 10 * (1 - torch.eye(2, dtype=torch.float64))[None]
    attention = _two_tokens("l2-attention", query=torch.eye(2))
    # tokens in [-4, 4]^2, from pixels in [0, 1], and constants added to their scores
    net = f(lambda m, x: m.parts[0](8.0 * (x - 0.5), mask=mask), attention).eval()
    root = 2**0.25  # z = q / dh^(1/4)
    tokens = (
        root
        * torch.stack(
            [torch.tensor([[-r, 0.0], [r, 0.0]]) for r in torch.linspace(0.5, 2, 60)]
        ).double()
    )
    found = steepest_ratio(net, 0.5 + tokens / 8, steps=3) / 8
    assert found > 3 * l2_mixing_constant(2)
    assert found <= float(bound_network(net, (2, 2), 2).upper) / 8


FLOOR = 0.1
AXES = torch.linalg.qr(torch.cat([torch.ones(8, 1), torch.eye(8)[:, :7]], dim=1).double())[0].T[1:]
"""Orthonormal directions of tokens without mean: what a norm leaves as it is."""


def behind_floor(attention: nn.Module, mask: Tensor | None = None) -> nn.Module:
    """Tokens of length at most sqrt 8: a norm with a floor makes them of pixels, linearly, with the
    slope 1 / FLOOR.
    """
    options = {} if mask is None else {"mask": mask.double().unsqueeze(0)}
    return f(lambda m, x: m.parts[1](m.parts[0](x), **options), FloorNorm(8, FLOOR), attention)


def pixels(tokens: Tensor) -> Tensor:
    """Return pixels of which the norm makes these tokens, a little shorter: beyond their length its
    slope ends.
    """
    return 0.5 + FLOOR * tokens * (1 - 1e-9)


def moved(net: nn.Module, x: Tensor, direction: Tensor) -> float:
    """Return the slope of the network at x in this direction."""
    _, change = torch.func.jvp(lambda one: net(one.unsqueeze(0)), (x,), (direction.to(x),))
    return float(change.norm() / direction.norm())


def _dot_product(heads: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> nn.Module:
    """Return one dot-product attention whose maps have these rows, the same in every head."""
    attention = Attention(8, heads, qkv_bias=True).double().eval().requires_grad_(False)
    parts = attention.qkv.weight.zero_().view(3, heads, 8 // heads, 8)
    for part, rows in zip(parts, (query, key, value), strict=True):
        part[:, : len(rows)] = rows
    attention.qkv.bias.zero_().view(3, heads, -1)[0, :, : len(bias)] = bias
    attention.proj.weight.copy_(torch.eye(8))
    attention.proj.bias.zero_()
    return attention


def _no_term_to_spare() -> dict[str, tuple[nn.Module, Tensor, float]]:
    """Return for each term of Theorem 5.1 an attention and tokens (R = sqrt 8) where it counts, and
    the share attained.
    """
    e, f, g, *_ = AXES
    radius = 8**0.5
    none = torch.zeros(1, dtype=torch.float64)
    rows = torch.stack
    mean = _dot_product(1, none.expand(1, 8), none.expand(1, 8), rows([e]), none)
    # A = 3 (e g^T + f e^T) and tokens R e, -R e: each row's own score and its keys' move the result
    # alike
    both = _dot_product(1, rows([g, e]), 3 * 8**0.5 * rows([e, f]), rows([e]), none)
    # A = 0 and W_K^T b_Q = 15 f: every row, of two heads, sees the same two of four tokens
    offset = _dot_product(2, none.expand(1, 8), 4**0.5 * rows([f]), rows([e]), 15 + none)
    high = (0.3 * f + (1 - 0.3**2) ** 0.5 * e, 0.3 * f - (1 - 0.3**2) ** 0.5 * e)
    low = (-f, -f)
    return {
        "averaging": (mean, rows([e, -e]), 0.7),
        "both scores": (both, rows([radius * e, -radius * e]), 0.68),
        "offset": (offset, radius * rows([*high, *low]), 0.9),
    }


@pytest.mark.parametrize("term", ["averaging", "both scores", "offset"])
def test_no_term_of_dot_product_attention_can_be_spared(term: str) -> None:
    """Without any one of its terms, or with another factor of n or of the heads, Theorem 5.1 would
    be below these slopes.

    "Both scores" reaches sqrt 2 of 2 R^2 |A|, one half of it from either term; "offset" nearly all
    of sqrt(n/2) R |c|.
    """
    attention, tokens, share = _no_term_to_spare()[term]
    net = behind_floor(attention).double().eval()
    found, _ = slope_at(net, pixels(tokens))
    bound = float(bound_network(net, tuple(tokens.shape), 3).upper)
    assert share * bound <= found <= bound


def test_a_token_that_is_hidden_from_itself_leaves_no_bound() -> None:
    result = bound_network(_l2("l2-attention", 1.0, (1 - torch.eye(3)).log()), (3, 8), 3)
    assert not result.upper.finite
    assert "does not see itself" in result.bound.why


def test_no_factor_of_scores_from_the_image_can_be_spared() -> None:
    """Values R and -R, and an addition to the scores that alone moves: R sqrt(1/2) is attained."""
    e, g, *_ = AXES
    rows = (0 * e, 0 * e, e, 1e4 * g)

    def added(m: nn.Module, x: Tensor) -> Tensor:
        query, key, value, moving = (part(x) for part in m.parts)
        return (query @ key.mT + moving.mT).softmax(-1) @ value

    attention = f(added, *(nn.Linear(8, 1, bias=False) for _ in rows))
    for part, row in zip(attention.parts, rows, strict=True):
        part.weight = nn.Parameter(row[None])
    net = behind_floor(attention).double().eval()
    slope, _ = slope_at(net, pixels(8**0.5 * torch.stack([e, -e])))
    assert slope <= float(bound_network(net, (2, 8), 3).upper) <= 1.001 * slope


def _l2(kind: str, distance: float, mask: Tensor) -> nn.Module:
    """Return L2 attention with z = distance u / sqrt 8 on tokens u, and v = u where it has values
    of its own.
    """
    attention = (
        REPLACEMENTS.load(kind)(Attention(8, 1, proj_bias=False))
        .double()
        .eval()
        .requires_grad_(False)
    )
    for name, size in (("query", 8**0.25 * distance / 8**0.5), ("value", 1.0), ("proj", 1.0)):
        if hasattr(attention, name):
            attention.get_submodule(name).weight.copy_(size * torch.eye(8))
    return behind_floor(attention, mask).double().eval()


@pytest.mark.parametrize("kind", ["l2-attention", "l2-untied-value-attention"])
def test_no_factor_of_a_tokens_own_move_can_be_spared(kind: str) -> None:
    """A token amid 400 others at the worst distance, S = W(400/e): its move is averaged by twice
    their covariance, 2 S.

    Theorems 6.2 and 6.3 without that factor 2 would be below the slope.
    """
    e = AXES[0]
    s = lambert_w_upper(400 / math.e)
    mask = torch.full((401, 401), -torch.inf).fill_diagonal_(0.0)
    mask[0] = 0.0  # all others see themselves alone
    tokens = torch.tensor([0.0, *[1.0, -1.0] * 200]).double()[:, None] * 8**0.5 * e
    direction = torch.zeros(401, 8).double()
    direction[0] = e
    net = _l2(kind, (s + 1) ** 0.5, mask)
    found = moved(net, pixels(tokens), direction)
    bound = float(bound_network(net, (401, 8), 3).upper)
    assert 0.5 * bound <= found <= bound


def test_no_factor_of_the_move_of_others_can_be_spared() -> None:
    """Forty tokens, of which each sees the same two others and prefers them by 40: these move all
    forty by 2 S.

    Theorem 6.2 without the factor 2 of this term would be below the slope.
    """
    e = AXES[0]
    preferred = 40.0
    mask = torch.full((42, 42), -torch.inf).fill_diagonal_(0.0)
    mask[2:, :2] = preferred
    tokens = torch.tensor([1.0, -1.0, *[0.0] * 40]).double()[:, None] * 8**0.5 * e
    direction = torch.zeros(42, 8).double()
    direction[:2] = e
    s = float(lambert_w_of_exp(torch.tensor(preferred + math.log(2) - 1).double()))
    net = _l2("l2-attention", (s + 1) ** 0.5, mask)
    found = moved(net, pixels(tokens), direction)
    bound = float(bound_network(net, (42, 8), 3).upper)
    assert 0.5 * bound <= found <= bound


@pytest.mark.parametrize("name", ["l2-attention", "l2-untied-value-attention"])
def test_short_rows_are_averaged(name: str) -> None:
    """Logits of tokens of length 1e-3 differ by 1e-6: attention is the mean, whose constant is 1."""
    attention = REPLACEMENTS.load(name)(PLACES["tokens"]())
    for layer in attention.children():
        layer.weight.data.copy_(torch.eye(WIDTH))
    net = Lone(attention, span=1e-3).double().eval()
    found = steepest_ratio(net, torch.full((1, 8, WIDTH), 0.5).double(), steps=1)
    assert found == pytest.approx(1e-3, rel=1e-6)
    assert found <= float(bound_network(net, (8, WIDTH), 3).upper) <= found * (1 + 1e-4)


def test_a_token_that_sees_only_itself_is_averaged_with_nothing() -> None:
    """A mask that leaves the diagonal: P = I, whose constant is 1; and the bound has a gradient."""
    attention = REPLACEMENTS.load("l2-attention")(PLACES["tokens"]())
    attention.query.weight.data.copy_(torch.eye(WIDTH))
    attention.proj.weight.data.copy_(torch.eye(WIDTH))
    alone = torch.full((2, 4, 4), -torch.inf).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
    net = Lone(attention, alone).double().eval()
    assert float(bound_network(net, (8, WIDTH), 3).upper) == pytest.approx(1.0, rel=1e-8)
    outcome = propagate(trace_network(net, (8, WIDTH)), TrainableArithmetic(CPU, 50))
    outcome.context.settle(outcome.logits).base.backward()
    assert attention.query.weight.grad.isfinite().all()


def copies(attention: nn.Module, mask: Tensor | None) -> nn.Module:
    """One sequence as three windows, of which the first is returned: the input repeated costs
    sqrt(3).
    """
    return f(lambda m, x: m.parts[0](x.expand(3, -1, -1), mask=mask)[:1], attention)


@pytest.mark.parametrize("n", [2, 7, 49])
@pytest.mark.parametrize(
    "name", ["l2-attention", "l2-untied-value-attention", "scsa-attention", "lnorm-attention"]
)
def test_position_biases_of_zero_cost_nothing(name: str, n: int) -> None:
    attention = REPLACEMENTS.load(name)(PLACES["tokens"]()).eval()
    without, zeros = (
        bound_network(copies(attention, mask).eval(), (n, WIDTH), 2).upper
        for mask in (None, torch.zeros(3, n, n))
    )
    # 1e-8: the outward rounding of the general constants
    assert float(without) <= float(zeros) * (1 + 1e-12)
    assert float(zeros) <= float(without) * (1 + 1e-8)
    if name == "l2-attention":
        attention.query.weight.data.copy_(torch.eye(WIDTH))
        attention.proj.weight.data.copy_(torch.eye(WIDTH))
        tied = bound_network(copies(attention, None).eval(), (n, WIDTH), 2).upper
        assert float(tied) == pytest.approx(3**0.5 * l2_mixing_constant(n), rel=1e-8)


def test_untied_values_grow_along_what_the_queries_do_not_see() -> None:
    """|J| is proportional to the length R of the rows: no bound without one, and ours grows in
    proportion too.
    """
    net = _two_tokens(
        "l2-untied-value-attention",
        query=torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        value=torch.eye(2),
    )
    slopes = [
        steepest_ratio(net, torch.tensor([[[0.0, r], [1.0, -r]]]).double(), steps=1)
        for r in (1.0, 10.0, 1000.0)
    ]
    assert slopes[1] > 5 * slopes[0]
    assert slopes[2] == pytest.approx(100 * slopes[1], rel=0.1)


def test_the_bound_has_a_gradient_in_the_position_biases() -> None:
    """Against central differences of the rigorous bound."""
    net = attention_network("l2-attention", "windows", 1.0)
    table = net.attention.relative_position_bias_table
    outcome = propagate(trace_network(net, (8, WIDTH)), TrainableArithmetic(CPU, 50))
    outcome.context.settle(outcome.logits).base.backward()
    gradient = table.grad.clone()
    place = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    assert gradient[place] != 0
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            table[place] += step
            values.append(float(bound_network(net, (8, WIDTH), 3).upper))
            table[place] -= step
    # 1e-3: power iteration and the outward rounding of about 1e-9 over a step of 1e-4
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(float(gradient[place]), rel=1e-3)


def test_lambert_w_of_an_exponential() -> None:
    """w + log w = t, and the derivative w / (1 + w); the scalar function is an upper bound of the
    same numbers.
    """
    t = torch.linspace(-600, 700, 2601, dtype=torch.float64).requires_grad_(True)
    w = lambert_w_of_exp(t)
    (slope,) = torch.autograd.grad(w.sum(), t)
    # relative to w an error of the residual counts 1 / (1 + w); t up to 700 has itself a rounding
    # of 1e-13
    assert float(((w + w.log() - t).abs() / (1 + w)).detach().max()) < 1e-12
    assert torch.allclose(slope, w / (1 + w), rtol=1e-9)
    for z in (1e-3, 0.37, 1.0, 50.0, 1e6):
        exact = float(lambert_w_of_exp(torch.tensor(z, dtype=torch.float64).log()))
        assert exact * (1 - 1e-12) <= lambert_w_upper(z) <= exact * (1 + 1e-12)
