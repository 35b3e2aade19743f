"""Adaptation: the closed forms keep what they claim to keep, the plan is what is done, the result is what is recorded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.adapt.families import family_of
from certcli.adapt.keep import Keeper
from certcli.adapt.plan import plan
from certcli.adapt.run import Adapter
from certcli.adapt.settings import ATTENTIONS, AdaptSettings, settings_for
from certcli.adapt.start import (
    CenterStart,
    LeastSquares,
    between_inputs,
    compose_inputs,
    deviations,
    floor_start,
    fold_center_norm,
)
from certcli.adapt.streams import AdaptedPart
from certcli.checkpoint.file import Checkpoint
from certcli.cli.adapt.command import Fitting, Surgery
from certcli.images import datasets
from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.nn.l2_attention import L2Attention
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.system.errors import ArchitectureError, DataError, UsageError

CPU = torch.device("cpu")

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "deit-distilled": (
        "deit_tiny_distilled_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 5},
    ),
    "deit3": (
        "deit3_small_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 5},
    ),
    "no-qkv-bias-average-pool": (
        "vit_tiny_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 5,
         "qkv_bias": False, "global_pool": "avg", "class_token": False},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2),
         "num_classes": 5},
    ),
    "swin-padded": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 12, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2),
         "num_classes": 5},
    ),
    "convit": (
        "convit_tiny",
        {"img_size": 16, "patch_size": 4, "embed_dim": 4, "depth": 2, "num_heads": 4, "num_classes": 5,
         "local_up_to_layer": 1},
    ),
}  # fmt: skip
"""One small member of each family."""

_SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cait": ("cait_xxs24_224", _SIZES),
    "xcit": ("xcit_nano_12_p16_224", _SIZES),
    "beit": ("beit_base_patch16_224", _SIZES),
    "beit2": ("beitv2_base_patch16_224", _SIZES),
    "eva": ("eva_giant_patch14_224", _SIZES),
    "eva02": ("eva02_tiny_patch14_224", _SIZES),
    "relative": ("vit_relpos_small_patch16_224", _SIZES),
    "swin2": ("swinv2_tiny_window8_256", {"img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 1),
                                          "num_heads": (2, 2), "num_classes": 5}),
    "efficientformer": ("efficientformer_l1", {"depths": (1, 1, 1, 2), "embed_dims": (8, 8, 8, 16), "num_classes": 5}),
}  # fmt: skip
"""Families that `--goal keep` serves and whose attentions are not replaced: (name, arguments)."""


def make(name: str) -> Checkpoint:
    """Random weights, larger than those that timm starts from: the identity would be too easy to adapt."""
    arch, arguments = (SMALL | OTHERS)[name]
    side = arguments.get("img_size", 224)
    spec = build.spec_of(build.create(arch, arguments, initialise=False), size=(3, side, side))
    fresh = build.initialise(arch, arguments, spec, 5, seed=0)
    generator = torch.Generator().manual_seed(1)
    return Checkpoint(
        {
            key: value + torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5
            if value.dim() in (2, 3) and value.is_floating_point()
            else value
            for key, value in fresh.tensors.items()
        },
        fresh.record,
    )


def pixels(checkpoint: Checkpoint, count: int = 24) -> Tensor:
    return torch.rand(count, *checkpoint.record.input.size, generator=torch.Generator().manual_seed(2))


def run(checkpoint: Checkpoint, settings: AdaptSettings, images: Tensor) -> tuple[list[AdaptedPart], Checkpoint]:
    if not settings.refit:
        keeper = Keeper(checkpoint, settings, images, CPU)
        list(keeper.run())
        return keeper.records, keeper.result()
    adapter = Adapter(checkpoint, settings, images, CPU)
    return list(adapter.run()), adapter.result()


@pytest.fixture(scope="module")
def images(plain: Checkpoint) -> Tensor:
    return datasets.load("digits", plain.record.input, "train").limit(200).tensors()[0]


def logits(checkpoint: Checkpoint, images: Tensor) -> Tensor:
    with torch.no_grad():
        return build.load(checkpoint, dtype=torch.float64)(images.double())


def logit_error(adapted: Checkpoint, original: Checkpoint, images: Tensor) -> float:
    wanted = logits(original, images)
    return float((logits(adapted, images) - wanted).norm() / wanted.norm())


def test_reparametrisations_keep_the_function(plain: Checkpoint, images: Tensor) -> None:
    """Weighted residuals start at a = 1, and a flat linear head copies pooling: nothing may change but rounding."""
    settings = AdaptSettings("keep", "keep", "weighted", "keep", head=(), epochs=-1)
    _, surgery_only = run(plain, settings, images)
    fitted = AdaptSettings("keep", "keep", "weighted", "keep", head=(), epochs=0)
    _, result = run(plain, fitted, images)
    for found in (surgery_only, result):
        assert torch.allclose(logits(found, images), logits(plain, images), atol=1e-3)
    assert surgery_only.tensors.keys() == result.tensors.keys()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("residual", ["convex", "weighted", "keep"])
def test_every_family_keeps_its_function_under_other_residuals(name: str, residual: str) -> None:
    """Only rounding, and for convex residuals LayerNorm's eps on a stream of half the size, may change anything."""
    original = make(name)
    images = pixels(original)
    for epochs in (-1, 0):
        _, result = run(original, AdaptSettings("dp", "keep", residual, epochs=epochs), images)
        assert logit_error(result, original, images) < (1e-2 if residual == "convex" else 1e-4)


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_every_family_keeps_its_answers_under_the_goal_keep(name: str) -> None:
    """A finite bound, a smaller one, and the same function on the images whose deviations were seen."""
    original = make(name)
    images = pixels(original, 5)
    records, result = run(original, settings_for("keep"), images)
    before, after = (bound_network(build.load(each), each.record.input.size, 5).upper for each in (original, result))
    assert after.finite
    assert after < before
    assert {item.path for item in result.record.surgery} == {record.path for record in records}
    assert {item.kind for item in result.record.surgery} == {"floor-norm"}
    floors = [float(value) for key, value in result.tensors.items() if key.endswith("floor")]
    # each norm differs by eps / (2 floor^2) at most, which later layers may turn into ten times as much
    eps = max(part.eps for part in build.load(original).modules() if isinstance(part, nn.LayerNorm))
    assert logit_error(result, original, images) < 10 * sum(eps / (2 * floor**2) for floor in floors)


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_replaced_is_said_in_a_line(name: str) -> None:
    """Which network, which attention, where; and what serves it."""
    with pytest.raises(ArchitectureError) as refusal:
        plan(make(name), settings_for("certify"))
    assert "it does not know how the blocks of" in refusal.value.message
    assert "\n" not in refusal.value.message
    assert "--goal keep" in refusal.value.hint


@pytest.mark.parametrize("name", ["levit_128s", "certvit_4c3f"])
def test_a_network_without_layernorms_has_nothing_to_keep(name: str) -> None:
    with pytest.raises(ArchitectureError, match="no LayerNorm over the last dimension"):
        plan(_ready_made(name), settings_for("keep"))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("norm", ["center", "floor", "fold"])
def test_every_family_becomes_lipschitz(name: str, norm: str) -> None:
    """A finite bound, closer to the old function than surgery alone, the plan carried out."""
    original = make(name)
    images = pixels(original)
    settings = AdaptSettings("l2", norm, epochs=0, batch_size=10)
    records, result = run(original, settings, images)
    _, surgery = run(original, AdaptSettings("l2", norm, epochs=-1), images)
    found = bound_network(build.load(result), result.record.input.size, 5)
    assert found.upper.finite, found.bound.why
    assert logit_error(result, original, images) < 0.7 * logit_error(surgery, original, images)
    assert {item.path for item in plan(original, settings)} == {item.path for item in result.record.surgery}
    assert all(record.error < 1 for record in records)  # 1 is what no output at all would have


def test_a_floor_that_is_given_is_the_floor() -> None:
    original = make("deit3")
    _, result = run(original, AdaptSettings("keep", "floor", "keep", epochs=0, norm_floor=0.25), pixels(original))
    floors = [float(value) for name, value in result.tensors.items() if name.endswith(".floor")]
    assert floors
    assert set(floors) == {0.25}


def test_floor_norm_is_layer_norm_above_its_floor() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 50).unsqueeze(1)
    norm = FloorNorm(6, floor=0.5)
    deviation = x.var(dim=1, correction=0).sqrt()
    found, reference = norm(x), nn.functional.layer_norm(x, (6,), eps=0.0)
    assert torch.allclose(found[deviation > 0.5], reference[deviation > 0.5], atol=1e-5)  # float32 rounding
    below = found[deviation < 0.5]
    assert torch.allclose(below, (x - x.mean(dim=1, keepdim=True))[deviation < 0.5] / 0.5, atol=1e-5)


def test_floor_norm_of_a_constant_token_has_a_finite_gradient() -> None:
    x = torch.full((2, 6), 0.3, requires_grad=True)
    FloorNorm(6, floor=0.5)(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_the_chosen_floor_lies_below_nearly_all_deviations() -> None:
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    norm = FloorNorm(8)
    floor_start(norm, torch.cat([deviations(x[:400]), deviations(x[400:])]))
    share = float((x.var(dim=1, correction=0).sqrt() < norm.floor).float().mean())
    assert 0.03 < share < 0.07


def test_folding_a_centre_norm_keeps_the_function() -> None:
    norm, layer = CenterNorm(6), nn.Linear(6, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(5, 6)
    with torch.no_grad():
        before = layer(norm(x))
        fold_center_norm(norm, layer)
        assert torch.allclose(layer(x), before, atol=1e-5)  # float32 weights are rounded once


def test_least_squares_finds_the_minimiser() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 5), torch.randn(50, 3)
    solver, layer = LeastSquares(5, 3, CPU), nn.Linear(5, 3)
    for part in range(0, 50, 7):
        solver.add(x[part : part + 7], y[part : part + 7])
    solver.solve_into(layer, ridge=0.0)
    with torch.no_grad():
        best = (layer(x) - y).square().sum()
        for _ in range(20):
            layer.weight += 0.01 * torch.randn_like(layer.weight)
            assert (layer(x) - y).square().sum() > best
            solver.solve_into(layer, ridge=0.0)


def test_least_squares_without_images_keeps_the_prior() -> None:
    layer = nn.Linear(5, 3)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    solver = LeastSquares(5, 3, CPU)
    solver.add(torch.zeros(4, 5), torch.ones(4, 3))
    solver.solve_into(layer, keep=True)
    assert torch.allclose(layer.weight, weight)  # no image excites them
    assert not torch.allclose(layer.bias, bias)


def test_composed_inputs_undo_a_linear_change_of_them() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(4, 6)]
    old = torch.randn(60, 4)
    new = old @ torch.randn(4, 4) + torch.randn(4)
    with torch.no_grad():
        wanted = [layer(old) for layer in layers]
        solver = between_inputs(layers)
        for part in (slice(30), slice(30, None)):
            solver.add(new[part], old[part])
        compose_inputs(layers, solver, ridge=1e-12)
        for layer, goal in zip(layers, wanted, strict=True):
            assert torch.allclose(layer(new), goal, atol=1e-4)


def test_centre_norm_start_beats_every_other_gain() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 4) * 3 + 1
    wanted = nn.functional.layer_norm(x, (4,))
    norm = CenterNorm(4)
    found = CenterStart(4, CPU)
    for part in (slice(70), slice(70, None)):
        found.add(x[part], wanted[part])
    found.start(norm)
    with torch.no_grad():
        best = (norm(x) - wanted).square().sum()
        for scale in (0.9, 1.1):
            norm.weight *= scale
            assert (norm(x) - wanted).square().sum() > best
            norm.weight /= scale


@pytest.mark.parametrize("norm", ["center", "floor", "keep"])
@pytest.mark.parametrize("residual", ["convex", "weighted", "keep"])
@pytest.mark.parametrize("head", [None, (), (16, 16)])
def test_every_combination_runs_and_is_bounded(
    plain: Checkpoint, images: Tensor, norm: str, residual: str, head: tuple[int, ...] | None
) -> None:
    settings = AdaptSettings("l2", norm, residual, "maxmin", head, epochs=0)
    parts, result = run(plain, settings, images[:64])
    assert any(part.path == "blocks.0" for part in parts)
    model = build.load(result)
    found = bound_network(model, result.record.input.size, 10)
    assert found.upper.finite, found.bound.why
    assert isinstance(model.net.blocks[0].attn, L2Attention)
    assert {item.path for item in plan(plain, settings)} == {item.path for item in result.record.surgery}
    assert result.record.lineage[-1].command == "adapt"


@pytest.mark.parametrize("attention", [name for name, kind in ATTENTIONS.items() if kind is not None])
def test_every_attention_is_fitted(plain: Checkpoint, images: Tensor, attention: str) -> None:
    """Fitting on images leaves less error than surgery alone."""
    errors = []
    for epochs in (-1, 1):
        _, result = run(plain, AdaptSettings(attention, "keep", "keep", epochs=epochs, distill=0), images)
        errors.append(logit_error(result, plain, images))
    assert errors[1] < errors[0]


def test_the_same_seed_gives_the_same_bytes(plain: Checkpoint, images: Tensor) -> None:
    settings = AdaptSettings(head=(16,), epochs=1, distill=1)
    assert run(plain, settings, images[:64])[1].digest == run(plain, settings, images[:64])[1].digest


def _ready_made(arch: str, **arguments: Any) -> Checkpoint:
    net = build.create(arch, arguments, initialise=False)
    return build.initialise(arch, arguments, build.spec_of(net), 10, 0)


@pytest.mark.parametrize(
    ("arch", "arguments", "named"),
    [
        ("certvit_4c3f", {}, "SmallConvNet, which has no attention: there is none to replace"),
        ("vit_tiny_patch16_224", {"depth": 1, "qk_norm": True}, "blocks.0.attn: .*qk_norm"),
        ("vit_tiny_patch16_224", {"depth": 1, "norm_layer": "rmsnorm"}, "blocks.0.norm1: RmsNorm"),
        ("vit_tiny_patch16_224", {"depth": 1, "global_pool": "map"}, "attn_pool"),
        ("vit_tiny_patch16_224", {"depth": 1, "scale_mlp_norm": True}, "blocks.0.mlp"),
        ("vit_tiny_patch16_224", {"depth": 0}, "no attention"),
    ],
)
def test_what_is_not_known_is_refused_by_name(arch: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArchitectureError, match=named):
        plan(_ready_made(arch, **arguments), AdaptSettings())


def test_refusals(plain: Checkpoint, images: Tensor) -> None:
    _, adapted = run(plain, AdaptSettings(epochs=-1), images[:8])
    with pytest.raises(ArchitectureError, match="adapted network"):
        plan(adapted, AdaptSettings())
    with pytest.raises(DataError, match="calibration image"):
        Adapter(plain, AdaptSettings(), images[:0], CPU)
    for wrong in (
        {"attention": "magic"},
        {"norm": "magic"},
        {"residual": "magic"},
        {"activation": "magic"},
        {"epochs": -2},
        {"norm_floor": 0.1},
        {"norm": "floor", "norm_floor": -1.0},
    ):
        with pytest.raises(UsageError):
            AdaptSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "surgery", [{"head": "flat"}, {"activation": "relu"}, {"attention": "l2"}, {"norm_floor": 0.5}]
)
def test_a_named_part_is_refitted_under_the_goal_keep(surgery: dict[str, Any]) -> None:
    alone, named = (Surgery(**parts).settings(Fitting(), 64, 0) for parts in ({}, surgery))
    assert (alone.refit, alone.epochs) == (False, 0)
    assert (named.refit, named.epochs) == (True, 3)


def test_a_family_runs_as_its_network_does() -> None:
    """embed, body, end is the forward pass of every family."""
    for name in SMALL:
        checkpoint = make(name)
        model, family = build.load(checkpoint), family_of(build.load(checkpoint).net)
        x = pixels(checkpoint, 2)
        with torch.no_grad():
            stream = family.embed(model.net, model.normalize(x))
            for step in family.body(model.net):
                stream = step.run(stream)
            assert torch.equal(family.end(model.net, stream), model(x))
