"""Laws of every attention in every place: no slope exceeds its bound, and building loses nothing."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention, AttentionRope
from timm.models.convit import GPSA, MHSA
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Replacement
from certcli.lipschitz.estimate import jacobian_norms
from certcli.lipschitz.network import bound_network, propagate, trace_network
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.attention import AttentionShape, AttentionWeights
from certcli.nn.attention_variants import L2Attention
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import ArchitectureError
from tests.helpers.grids import crossed

CPU = torch.device("cpu")
ATTENTIONS = [name for name in REPLACEMENTS.names() if name.endswith("-attention")]
WIDTH = 4
SHIFTED = torch.tensor([[[0.0] * 4] * 4, [[0.0, 0, -100, -100]] * 2 + [[-100.0, -100, 0, 0]] * 2])
"""The masks of two windows of four tokens: all see all, and two pairs apart, as in Swin's shifted windows."""

PLACES: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: Attention(WIDTH, 2, qkv_bias=True),
    "windows": lambda: WindowAttention(WIDTH, 2, window_size=(2, 2)),
    "shifted": lambda: WindowAttention(WIDTH, 2, window_size=(2, 2)),
    "gated": lambda: GPSA(WIDTH, 2),
}
ELSEWHERE = {("conv-attention", place) for place in ("windows", "shifted", "gated")} | {
    ("orthogonal-attention", place) for place in ("windows", "shifted", "gated")
}
CASES = [pair for pair in itertools.product(ATTENTIONS, PLACES) if pair not in ELSEWHERE]


def replacement(name: str, old: nn.Module, tokens: int = 4) -> nn.Module:
    """The new part, built as surgery builds it."""
    arguments = {"tokens": tokens} if name == "orthogonal-attention" else {}
    return REPLACEMENTS.load(name)(old, **arguments)


class Lone(nn.Module):
    """Pixels (b, 8, 4) in [0, 1] spread to tokens in [-span / 2, span / 2], two windows of four,
    into one attention.
    """

    def __init__(
        self,
        attention: nn.Module,
        mask: Tensor | None = None,
        norm: nn.Module | None = None,
        span: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.span = span
        self.norm = norm or nn.Identity()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        tokens = self.norm((x - 0.5) * self.span).reshape(b * 2, 4, WIDTH)
        mixed = (
            self.attention(tokens) if self.mask is None else self.attention(tokens, mask=self.mask)
        )
        return mixed.reshape(b, 8, WIDTH)


def stir(module: nn.Module, size: float, seed: int = 0) -> None:
    """Weights of this size, the tables and scalars of the layer included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def attention_network(name: str, place: str, size: float, seed: int = 0, span: float = 1.0) -> Lone:
    """The replacement with random weights. Where only bounded rows have a bound they come out of a
    LayerNorm.
    """
    attention = replacement(name, PLACES[place]())
    stir(attention, size, seed)
    norm = nn.LayerNorm(WIDTH, eps=1.0) if "untied" in name else None
    return Lone(attention, SHIFTED if place == "shifted" else None, norm, span).double().eval()


def starts(scale: float) -> Tensor:
    """Pixels of spread, small, large, nearly equal and clustered tokens, ordinary ones being
    `scale` large: (6, 8, 4).
    """
    noise = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = noise[:1].expand(8, WIDTH)
    clusters = torch.cat([one[:2], -one[:2], one[:1], -one[:3]]) + 0.01 * noise
    tokens = torch.stack(
        [noise, 0.05 * noise, 10 * noise, one + 1e-3 * noise, clusters, 3 * clusters]
    )
    return (0.5 + scale * tokens).clamp(0, 1)


def steepest_ratio(net: nn.Module, x: Tensor, steps: int = 6) -> float:
    """The largest singular value of the dense Jacobian that gradient ascent finds from all starts
    at once.
    """
    jacobian = vmap(jacrev(lambda one: net(one.unsqueeze(0)).flatten()))
    size = (x - 0.5).flatten(1).norm(dim=1)
    steepest_slope = 0.0
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        slopes = torch.linalg.matrix_norm(jacobian(x).flatten(2), 2)
        steepest_slope = max(steepest_slope, float(slopes.detach().max()))
        if not slopes.requires_grad:
            break
        (gradient,) = torch.autograd.grad(slopes.sum(), x, allow_unused=True)
        if gradient is None:
            break
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # the second derivative of a norm at 0
        length = gradient.flatten(1).norm(dim=1).clamp_min(1e-30)
        x = (x + gradient * (0.15 * size / length).view(-1, 1, 1)).clamp(0, 1)
    return steepest_slope


SPREADS = [(0.4, 100.0), (3.0, 10.0), (0.6, 0.5)]
"""Sizes of weights and spans of tokens."""
TOKENS = [case for case in CASES if case[1] == "tokens"]


@pytest.mark.parametrize(
    ("case", "spread"),
    [
        *itertools.product(TOKENS, SPREADS),
        *crossed([case for case in CASES if case not in TOKENS], SPREADS),
    ],
)
def test_no_slope_exceeds_the_bound_and_the_estimate_agrees(
    case: tuple[str, str], spread: tuple[float, float]
) -> None:
    """Wide tokens, on which softmaxes saturate, and short ones, on which the bounds of short rows
    count.
    """
    size, span = spread
    net = attention_network(*case, size, span=span)
    result = bound_network(net, (8, WIDTH), 3)
    assert result.upper.finite, result.bound.why
    # 1e-9: rounding of the measured singular value, in float64 on matrices of 32 columns
    assert steepest_ratio(net, starts(1 / (size * span))) <= float(result.upper) * (1 + 1e-9)
    outcome = propagate(trace_network(net, (8, WIDTH)), TrainableArithmetic(CPU, 50))
    base = outcome.context.settle(outcome.logits).base
    base.backward()
    assert all(part.grad is None or part.grad.isfinite().all() for part in net.parameters())
    estimate = float(base.detach())
    # 1e-6: constants of the estimate are float32; below, fifty steps of power iteration come close
    # to a spectral norm
    assert 0.9 * float(result.upper) <= estimate <= float(result.upper) * (1 + 1e-6)


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_image_does_not_depend_on_the_batch_and_proj_comes_last(name: str, place: str) -> None:
    net = attention_network(name, place, 1.0)
    x = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        together = net(x)
        tokens = net.norm((x - 0.5) * net.span).reshape(6, 4, WIDTH)
        one_by_one = torch.cat([net(image.unsqueeze(0)) for image in x])
        mask = {} if net.mask is None else {"mask": net.mask}
        last = net.attention.proj(net.attention.mix(tokens, **mask)).reshape(3, 8, WIDTH)
    assert together.dtype == torch.float64
    assert torch.allclose(together, one_by_one, rtol=1e-12, atol=1e-12)  # sums in another order
    assert torch.equal(together, last)
    single = net.float()(x.float())
    assert torch.allclose(
        single.double(), together, rtol=1e-3, atol=1e-3
    )  # the same function in float32


@pytest.mark.parametrize(("name", "place"), CASES)
def test_building_reads_no_weights_and_starting_sets_all_of_them(name: str, place: str) -> None:
    """Two starts from the same old weights agree, whatever the random weights before."""
    old = PLACES[place]()
    stir(old, 0.5)
    new = replacement(name, old)
    states = []
    for seed in (1, 2):
        stir(new, 1.0, seed)
        new.start(AttentionWeights.of(old))
        states.append({key: value.clone() for key, value in new.state_dict().items()})
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def _symmetric(place: str, width: int = 32) -> nn.Module:
    """An attention with W_K = W_Q and no bias in either: its logits are a positive form, as those
    of tied attention.
    """
    kinds: dict[str, Callable[[], nn.Module]] = {
        "tokens": lambda: Attention(width, 2, qkv_bias=True),
        "windows": lambda: WindowAttention(width, 2, window_size=(4, 4)),
        "gated": lambda: GPSA(width, 2),
        "plain convit": lambda: MHSA(width, 2),
    }
    old = kinds[place]()
    stir(old, 0.3)
    layer = old.qk if place == "gated" else old.qkv
    with torch.no_grad():
        layer.weight[width : 2 * width] = layer.weight[:width]
        if layer.bias is not None:
            layer.bias[: 2 * width] = 0
    return old.double().eval()


def _random_tokens(width: int = 32) -> Tensor:
    noise = torch.randn(
        4, 16, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    return nn.functional.layer_norm(noise, (width,))


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("place", ["tokens", "windows", "gated", "plain convit"])
@pytest.mark.parametrize("name", ["l2-untied-value-attention", "scsa-attention"])
def test_starts_keep_the_function_of_symmetric_logits(name: str, place: str) -> None:
    """Not exactly: |q_j| (L2) and the norms of rows (cosine) vary over tokens. A random start is
    off by 1 or more.
    """
    old = _symmetric(place)
    x = _random_tokens()
    new = replacement(name, old).double()
    stir(new, 0.3)
    with torch.no_grad():
        wanted = old(x)
        assert _relative_error(new(x), wanted) > 0.9
        new.start(AttentionWeights.of(old))
        assert _relative_error(new(x), wanted) < 0.3


NETWORKS: dict[str, tuple[str, dict[str, object], str]] = {
    "vit": ("certvit_vit_digits", {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}, "blocks.0.attn"),
    "deit": (
        "deit3_small_patch16_224",
        {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3},
        "blocks.0.attn",
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2,), "num_heads": (2,),
         "num_classes": 3},
        "layers.0.blocks.{}.attn",
    ),
    "convit": (
        "convit_tiny",
        {"img_size": 16, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "local_up_to_layer": 1,
         "num_classes": 3},
        "blocks.{}.attn",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), crossed(ATTENTIONS, [*NETWORKS]))
def test_networks_are_bounded_and_come_back_from_their_checkpoint(
    name: str, family: str, tmp_path: Path
) -> None:
    arch, args, path = NETWORKS[family]
    net = build.create(arch, args, initialise=True)
    spec = build.spec_of(net, size=build.input_size_of(net))
    places = [path] if "{}" not in path else [path.format(0), path.format(1)]
    arguments = (
        {"tokens": 5} if name == "orthogonal-attention" else {}
    )  # a class token and four patches
    surgery = tuple(Replacement(place, name, arguments) for place in places)
    fresh = build.initialise(arch, args, spec, build.classes_of(net), seed=0)
    record = dataclasses.replace(fresh.record, surgery=surgery)
    if name in ("conv-attention", "orthogonal-attention") and family in ("swin", "convit"):
        with pytest.raises(ArchitectureError, match=name):
            build.build(record, initialise=True)
        return
    built = build.build(record, initialise=True)
    stir(built, 0.2)
    for place in places:
        built.get_submodule(place).start(AttentionWeights.of(net.get_submodule(place)))
    Checkpoint(
        {key: value.detach().clone() for key, value in built.state_dict().items()}, record
    ).write(tmp_path / "a")
    loaded = build.load(Checkpoint.read(tmp_path / "a"))
    image = torch.rand(2, *spec.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # the same weights at another address in memory: sums of float32 may be taken in another
        # order
        assert torch.allclose(
            loaded(image), PixelModel(spec, built).eval()(image), rtol=1e-4, atol=1e-5
        )
    state = loaded.net.state_dict()
    assert all(torch.equal(state[key], value) for key, value in built.state_dict().items())
    result = bound_network(loaded, spec.size, build.classes_of(net))
    assert result.upper.finite, result.bound.why
    assert float(jacobian_norms(loaded.double(), image.double(), 20).max()) <= float(result.upper)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "q and k norm": (
        lambda: Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm),
        "qk_norm.*Attention",
    ),
    "scale norm": (
        lambda: Attention(8, 2, scale_norm=True, norm_layer=nn.LayerNorm),
        "scale_norm.*Attention",
    ),
    "Swin v2": (
        lambda: WindowAttentionV2(8, (2, 2), 2),
        "WindowAttention of timm.models.swin_transformer_v2",
    ),
    "rotary": (lambda: AttentionRope(8, 2), "AttentionRope"),
    "not attention": (lambda: nn.Linear(8, 8), "Linear"),
    "adapted before": (lambda: L2Attention(AttentionShape(8, 2, 4, True, 8, True)), "L2Attention"),
}
if "gated" in inspect.signature(Attention).parameters:  # not yet in the oldest timm
    REFUSED["gate"] = (lambda: Attention(8, 2, gated=True), "gated.*Attention")


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_option_that_would_be_lost_is_refused_by_name(name: str, case: str) -> None:
    make, named = REFUSED[case]
    old = make()
    with pytest.raises(ArchitectureError, match=named):
        replacement(name, old)
    with pytest.raises(ArchitectureError, match=named):
        AttentionWeights.of(old)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_masks_that_no_theorem_covers_are_refused(name: str) -> None:
    attention = replacement(name, PLACES["tokens"]())
    x = torch.randn(1, 4, WIDTH)
    with pytest.raises(ArchitectureError, match="mask"):
        attention(x, attn_mask=torch.zeros(4, 4))
    with pytest.raises(ArchitectureError, match="mask"):
        attention(x, is_causal=True)
