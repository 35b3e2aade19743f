"""Whole networks: every node stays in its enclosure, attacks at the certified radius find nothing."""

import itertools
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import certcli.system.compat  # noqa: F401

# isort: split
import timm
from timm.layers.norm import RmsNorm
from timm.models.vision_transformer import VisionTransformer

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.network import LocalNetwork, affordable
from certcli.enclosure.zonotopes.search import certified_radius
from certcli.engine.trace import executed
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError
from tests.helpers.grids import EVERY
from tests.soundness.local_laws import share_of_form

SIZE = (1, 4, 4)
SPEC = InputSpec(size=SIZE, mean=(0.3,), std=(0.7,))


class Cumulative(nn.Module):
    """What no domain knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


OPTIONS = {
    "plain": {},
    "mean": {"global_pool": "avg", "init_values": 0.5},
    "relu": {
        "global_pool": "avg",
        "act_layer": nn.ReLU,
        "norm_layer": nn.Identity,
        "fc_norm": False,
    },
    "tanh": {"act_layer": lambda: nn.GELU("tanh"), "pre_norm": True, "no_embed_class": True},
    "qk norm": {"qk_norm": True},
    "rms": {"qk_norm": True, "norm_layer": RmsNorm},
    "silu": {"act_layer": nn.SiLU},
    "cumulative": {"act_layer": Cumulative},
}


def network(kind: str, seed: int = 0) -> PixelModel:
    """A ViT of depth 2 with weights large enough that attention and GELU are far from linear."""
    torch.manual_seed(seed)
    net = VisionTransformer(
        img_size=4,
        patch_size=2,
        in_chans=1,
        num_classes=4,
        embed_dim=8,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        **OPTIONS[kind],
    )
    for parameter in net.parameters():
        parameter.data = parameter.data + 0.35 * torch.randn_like(parameter)
        parameter.requires_grad_(False)
    return PixelModel(SPEC, net).double().eval()


def image(seed: int = 0) -> Tensor:
    return torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed)).double()


def node_values(local: LocalNetwork, pixels: Tensor) -> dict[fx.Node, Tensor]:
    """Every node of the graph at these pixels, one image at a time as it was traced."""
    return dict(executed(local.ending.trace, pixels))


def directions(model: nn.Module, pixels: Tensor, label: int, count: int) -> Tensor:
    """Unit directions: down the gradient of every margin, along axes, and random ones."""
    x = pixels.clone().requires_grad_(True)
    logits = model(x)[0]
    found = [
        torch.autograd.grad(logits[j] - logits[label], x, retain_graph=True)[0].flatten()
        for j in range(4)
    ]
    found = [g for j, g in enumerate(found) if j != label]
    random = torch.randn(count, pixels.numel(), generator=torch.Generator().manual_seed(2)).double()
    every = torch.cat([torch.stack(found), torch.eye(pixels.numel())[:4].double(), random])
    return every / every.norm(dim=1, keepdim=True)


def largest_share(
    local: LocalNetwork,
    pixels: Tensor,
    label: int,
    radius: float,
    squares: int,
    symbols: int,
    *,
    partial: bool = False,
    by_fibres: bool = False,
) -> float:
    """Over all nodes and directions: distance from the form at this direction, over what the form
    leaves free.

    partial: a walk may end as Unbounded; the nodes before that are checked.
    """
    forms: dict[fx.Node, tuple[Form, int | None]] = {}

    def watch(node: fx.Node, value: object, token: int | None) -> None:
        if isinstance(value, Form):
            forms[node] = (value, token)

    with suppress(Unbounded) if partial else nullcontext():
        start = l2_ball(pixels, radius, squares_up_to=squares, limit=symbols, by_fibres=by_fibres)
        local.margins(start, label, watch)
    moves = directions(local.ending.trace.root, pixels, label, 3)
    points = [node_values(local, pixels + radius * e.view_as(pixels)) for e in moves]
    shares = [0.0]
    for node, (form, token) in forms.items():
        truth = torch.stack([point[node] for point in points])
        truth = truth if token is None else truth[:, :, token : token + 1]
        shares.append(share_of_form(form, moves, truth))
    return max(shares)


NODES = [
    *(("plain", 128, 4000, False), ("mean", 0, 4000, False), ("rms", 128, 4000, False)),
    *(("tanh", 0, 4000, True), ("plain", 0, 4000, True), ("relu", 0, 4000, True)),
    *(("plain", 128, 60, False), ("plain", 128, 0, False), ("relu", 0, 0, False)),
]
if EVERY:
    NODES = [
        *itertools.product(OPTIONS.keys() - {"cumulative"}, (0, 128), (4000, 60, 0), (False, True))
    ]


@pytest.mark.parametrize(("kind", "squares", "symbols", "by_fibres"), NODES)
def test_every_node_stays_in_its_enclosure(
    kind: str, squares: int, symbols: int, by_fibres: bool
) -> None:
    """Also where box symbols are few, none, or each of one token; then a walk may end early."""
    model = network(kind)
    pixels = image()
    local = LocalNetwork(model, SIZE)
    label = int(model(pixels).argmax())
    partial = by_fibres or symbols == 0
    for radius in (1e-7, 0.02):
        assert (
            largest_share(
                *(local, pixels, label, radius, squares, symbols),
                partial=partial,
                by_fibres=by_fibres,
            )
            <= 1
        )


def require_withstood(
    model: nn.Module,
    pixels: Tensor,
    label: int,
    radius: float,
    norm: str,
    *,
    in_box: bool = False,
) -> None:
    """Attack an image within a radius; no step may find another class."""
    size = pixels.shape[1:]
    moves = torch.randn(200, pixels.numel(), generator=torch.Generator().manual_seed(0)).double()
    moves = moves.sign() if norm == "linf" else moves / moves.norm(dim=1, keepdim=True)
    delta = moves.view(-1, *size) * radius
    for _ in range(20):
        delta = ((pixels + delta).clamp(0, 1) - pixels) if in_box else delta
        delta = delta.detach().requires_grad_(True)
        logits = model(pixels + delta)
        margins = logits[:, label : label + 1] - logits
        margins = margins[:, [j for j in range(logits.shape[1]) if j != label]]
        assert (margins > 0).all()
        (slope,) = torch.autograd.grad(margins.amin(1).sum(), delta)
        if norm == "linf":
            delta = (delta.detach() - 0.3 * radius * slope.sign()).clamp(-radius, radius)
            continue
        length = slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        delta = delta.detach() - 0.3 * radius * slope / length
        delta = delta * (radius / delta.flatten(1).norm(dim=1)).clamp_max(1).view(-1, 1, 1, 1)


@pytest.mark.parametrize("kind", ["plain", *["relu"] * EVERY])
def test_no_attack_succeeds_within_the_certified_radius(kind: str) -> None:
    model = network(kind)
    pixels = image()
    label = int(model(pixels).argmax())
    radius = LocalCertifier(model, SIZE, Local()).radius(pixels, label)
    assert radius > 1e-3
    require_withstood(model, pixels, label, radius, "l2")


def test_certificates_do_not_depend_on_the_order_of_tokens_or_the_scale_of_query_and_key() -> None:
    """The same function written otherwise: heads swapped, queries doubled and keys halved; radii
    agree closely.
    """
    model = network("plain")
    pixels = image()
    label = int(model(pixels).argmax())
    radius = LocalCertifier(model, SIZE, Local("zonotope"), steps=2).radius(pixels, label)
    for block in model.net.blocks:
        weight = block.attn.qkv.weight
        bias = block.attn.qkv.bias
        weight[:8] *= 2
        bias[:8] *= 2
        weight[8:16] /= 2
        bias[8:16] /= 2
    again = LocalCertifier(model, SIZE, Local("zonotope"), steps=2).radius(pixels, label)
    assert again == pytest.approx(radius, rel=1e-9)


class Shy(nn.Module):
    """The tracer shows it something that is no Tensor; on images it does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x if type(x) is Tensor else x


REFUSED: dict[str, tuple[str, nn.Module, str]] = {
    "no relaxation": (
        "blocks.0.mlp.act",
        nn.Threshold(0.1, 20.0),
        r"blocks\.0\.mlp\.act.*threshold'",
    ),
    "one class": ("head", nn.Linear(8, 1).double(), "one class"),
    "not its trace": ("norm_pre", Shy(), "no local certificate"),
}


@pytest.mark.parametrize("effort", ["zonotope", "backward", "auto"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_without_a_certificate_is_refused(name: str, effort: str) -> None:
    path, part, reason = REFUSED[name]
    model = network("plain")
    model.net.set_submodule(path, part.eval())
    with pytest.raises(NoBoundError, match=reason):
        LocalCertifier(model, SIZE, Local(effort=effort))


def test_memory_decides_how_many_symbols_there_are() -> None:
    local = LocalNetwork(network("plain"), SIZE)
    assert affordable(local, 128, 4000, 1e12) == 4000
    fewer = affordable(local, 128, 4000, 5e6)
    assert fewer is not None
    assert 40 <= fewer < 4000
    assert affordable(local, 0, 4000, 4e5) == 0
    assert affordable(local, 128, 4000, 1e5) is None


def test_going_back_proves_without_any_box_symbols() -> None:
    model = network("relu")
    pixels = image()
    certifier = LocalCertifier(model, SIZE, Local(effort="backward"))
    certifier.symbols = 0
    assert certifier.rung == "backward, 0 symbols"
    assert certifier.proven(pixels, int(model(pixels).argmax()), 1e-4)


@pytest.mark.parametrize("truth", [3e-9, 0.0471, 0.9, 40.0])
def test_the_radius_returned_was_checked_itself(truth: float) -> None:
    asked: list[float] = []

    def check(radius: float) -> bool:
        asked.append(radius)
        return radius <= truth

    radius = certified_radius(check, 1e-2)
    assert radius in asked
    assert truth / 1.045 < radius <= truth
    assert len(asked) < 16
    assert certified_radius(lambda radius: False, 1e-2) == 0.0
    asked.clear()
    for guess in (radius, radius * 1.06, radius / 1.06, truth / 50, truth * 50):
        asked.clear()
        # the grid is the same whatever the guess: shards, resumed runs and other orders of images
        # find the same radius
        assert certified_radius(check, guess, close=True) == radius
        assert radius in asked
        assert len(asked) <= (3 if guess == radius else 6 if truth / 2 < guess < truth * 2 else 16)


@pytest.mark.parametrize("asked", [0.03125, 0.25, 0.5, 1.0, 2.0])
def test_a_network_proven_a_little_beyond_a_radius_is_certified_at_it(asked: float) -> None:
    """Shares count radii beyond the one that is asked: the grid's points are not these themselves."""
    radius = certified_radius(lambda r: r <= asked * (1 + 1e-5), 1e-2)
    assert radius > asked


SMALL = {"img_size": 8, "in_chans": 1, "num_classes": 4, "embed_dim": 8}
TOKENS = {**SMALL, "patch_size": 4, "depth": 1, "num_heads": 2}
WINDOWS = {**SMALL, "patch_size": 2, "window_size": 2, "depths": (2,), "num_heads": (2,)}
FAMILIES: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": TOKENS,
    "cait_xxs24_224": TOKENS,
    "convit_tiny": {**TOKENS, "depth": 2, "local_up_to_layer": 1},
    "eva02_tiny_patch14_224": TOKENS,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "vit_base_patch16_siglip_224": TOKENS,
    "vit_small_patch16_dinov3": TOKENS,
}
QUICK = ("convit_tiny", "swinv2_tiny_window8_256", "vit_base_patch16_siglip_224")


@pytest.mark.parametrize("name", FAMILIES if EVERY else QUICK)
def test_networks_of_timm_are_proven_near_an_image_and_no_attack_succeeds_there(name: str) -> None:
    torch.manual_seed(3)
    spec = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))
    model = PixelModel(spec, timm.create_model(name, pretrained=False, **FAMILIES[name]))
    model = model.double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    pixels = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    label = int(model(pixels).argmax())
    certifier = LocalCertifier(
        model, spec.size, Local(effort="zonotope", at=[1e-3]), symbols=400, steps=0
    )
    (row,) = certifier.batch([0], pixels, [label])
    assert row.radius >= 1e-3
    moved = pixels + row.radius * directions(model, pixels, label, 40).view(-1, *spec.size)
    assert (model(moved).argmax(1) == label).all()


def test_images_in_a_linf_ball() -> None:
    model = network("relu")
    pixels = image()
    local = LocalNetwork(model, SIZE)
    label = int(model(pixels).argmax())
    radius = 2e-4
    bounds = local.margins(linf_ball(pixels, radius, limit=4000), label)
    assert (bounds > 0).all()
    others = [j for j in range(4) if j != label]
    corners = (
        torch.randn(400, *SIZE, generator=torch.Generator().manual_seed(0)).double().sign() * radius
    )
    logits = model(pixels + corners)
    assert (logits[:, label : label + 1] - logits[:, others] >= bounds).all()
