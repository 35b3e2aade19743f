"""Adaptation: the closed forms keep what they claim to keep, the plan is what is done, the result
is what is recorded.
"""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.adapt.fit import Adapter
from certcli.adapt.keep import Keeper
from certcli.adapt.plan import AdaptedPart, plan
from certcli.adapt.settings import ATTENTIONS, AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.lipschitz.network import bound_network, trial_upper
from certcli.models import build
from certcli.nn.attention_variants import L2Attention
from certcli.system.errors import ArchitectureError, UsageError
from tests.helpers.grids import crossed

CPU = torch.device("cpu")
CERTIFY = AdaptSettings("certify")

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

_SIZES = {
    "img_size": 32,
    "patch_size": 16,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
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


@cache
def make(name: str) -> Checkpoint:
    """Random weights, larger than those that timm starts from: the identity would be too easy to
    adapt.
    """
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


def random_pixels(checkpoint: Checkpoint, count: int = 24) -> Tensor:
    return torch.rand(
        count, *checkpoint.record.input.size, generator=torch.Generator().manual_seed(2)
    )


def adapt_run(
    checkpoint: Checkpoint, settings: AdaptSettings, images: Tensor
) -> tuple[list[AdaptedPart], Checkpoint]:
    if not settings.refit:
        keeper = Keeper(checkpoint, settings, images, CPU)
        list(keeper.run())
        return keeper.records, keeper.result()
    adapter = Adapter(checkpoint, settings, images, CPU)
    return list(adapter.run()), adapter.result()


@pytest.fixture(scope="module")
def images(plain: Checkpoint) -> Tensor:
    return datasets.load_dataset("digits", plain.record.input, "train").limit(200).tensors()[0]


def logits(checkpoint: Checkpoint, images: Tensor) -> Tensor:
    with torch.no_grad():
        return build.load(checkpoint, dtype=torch.float64)(images.double())


def logit_error(adapted: Checkpoint, original: Checkpoint, images: Tensor) -> float:
    wanted = logits(original, images)
    return float((logits(adapted, images) - wanted).norm() / wanted.norm())


def test_weighted_residuals_keep_the_function(plain: Checkpoint, images: Tensor) -> None:
    """They start at a = 1: nothing may change but rounding."""
    settings = [
        AdaptSettings(norm="keep", residual="weighted", epochs=epochs) for epochs in (-1, 0)
    ]
    alone, fitted = (adapt_run(plain, each, images)[1] for each in settings)
    for adapted in (alone, fitted):
        assert torch.allclose(logits(adapted, images), logits(plain, images), atol=1e-3)
    assert alone.tensors.keys() == fitted.tensors.keys()


def error_of(adapter: Adapter, images: Tensor) -> float:
    """Return the relative logit error of the new network as it is now."""
    with torch.no_grad():
        found = adapter.student(images)
        goal = adapter.teacher(images)
    return float((found - goal).norm() / goal.norm())


@pytest.mark.parametrize(("name", "residual"), crossed([*SMALL], ["convex", "weighted", "keep"]))
def test_every_family_keeps_its_function_under_other_residuals(name: str, residual: str) -> None:
    """Only rounding, and for convex residuals LayerNorm's eps on a stream of half the size, may
    change anything.
    """
    images = random_pixels(make(name))
    adapter = Adapter(
        make(name), AdaptSettings(norm="keep", residual=residual, epochs=0), images, CPU
    )
    limit = 1e-2 if residual == "convex" else 1e-4
    assert error_of(adapter, images) < limit  # after surgery alone
    list(adapter.run())
    assert error_of(adapter, images) < limit


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_every_family_keeps_its_answers_under_the_goal_keep(name: str) -> None:
    """A finite bound, a smaller one, and the same function on the images whose deviations were
    seen.
    """
    original = make(name)
    images = random_pixels(original, 5)
    records, result = adapt_run(original, AdaptSettings(), images)
    size = original.record.input.size
    uppers = [trial_upper(build.load(each), size) for each in (result, original)]
    assert uppers[0].finite
    assert uppers[0] < uppers[1]
    assert {item.path for item in result.record.surgery} == {record.path for record in records}
    assert {item.kind for item in result.record.surgery} == {"floor-norm"}
    floors = [float(value) for key, value in result.tensors.items() if key.endswith("floor")]
    # each norm differs by eps / (2 floor^2) at most, which later layers may turn into ten times as
    # much
    eps = max(part.eps for part in build.load(original).modules() if isinstance(part, nn.LayerNorm))
    assert logit_error(result, original, images) < 10 * sum(
        eps / (2 * floor**2) for floor in floors
    )


@pytest.mark.parametrize(("name", "norm"), crossed([*SMALL], ["center", "floor", "fold"]))
def test_every_family_becomes_lipschitz(name: str, norm: str) -> None:
    """A finite bound, closer to the old function than surgery alone, the plan carried out."""
    original = make(name)
    images = random_pixels(original)
    settings = AdaptSettings("certify", norm=norm, epochs=0, batch_size=10)
    adapter = Adapter(original, settings, images, CPU)
    surgery_alone = error_of(adapter, images)
    records = list(adapter.run())
    result = adapter.result()  # which folds norms
    assert error_of(adapter, images) < 0.7 * surgery_alone
    assert {item.path for item in plan(original, settings)} == {
        item.path for item in result.record.surgery
    }
    assert all(record.error < 1 for record in records)  # 1 is the error of an output of zeros
    model = build.load(result)
    with torch.no_grad():
        assert torch.allclose(model(images), adapter.student(images), rtol=1e-3, atol=1e-3)
    bound = bound_network(model, result.record.input.size, 5)
    assert bound.upper.finite, bound.bound.why


HEADS: tuple[tuple[int, ...] | None, ...] = (None, (8,), (16, 16))
PAIRS = [
    (norm, residual, HEADS[(row + column) % 3])
    for (row, norm), (column, residual) in product(
        enumerate(("center", "floor", "keep")), enumerate(("convex", "weighted", "keep"))
    )
]
"""Norm, residual, head: every pair of values of two of them."""


@pytest.mark.parametrize(("norm", "residual", "head"), PAIRS)
def test_every_combination_runs_and_is_bounded(
    plain: Checkpoint, images: Tensor, norm: str, residual: str, head: tuple[int, ...] | None
) -> None:
    settings = AdaptSettings(
        "certify", norm=norm, residual=residual, activation="maxmin", head=head, epochs=0
    )
    parts, result = adapt_run(plain, settings, images[:64])
    assert any(part.path == "blocks.0" for part in parts)
    model = build.load(result)
    bound = bound_network(model, result.record.input.size, 10)
    assert bound.upper.finite, bound.bound.why
    assert isinstance(model.net.blocks[0].attn, L2Attention)
    assert {item.path for item in plan(plain, settings)} == {
        item.path for item in result.record.surgery
    }
    assert result.record.lineage[-1].command == "adapt"


@pytest.mark.parametrize(
    "attention", [name for name, kind in ATTENTIONS.items() if kind is not None]
)
def test_every_attention_is_fitted(plain: Checkpoint, images: Tensor, attention: str) -> None:
    """Fitting on images leaves less error than surgery alone."""
    adapter = Adapter(
        plain, AdaptSettings(attention=attention, norm="keep", epochs=1, distill=0), images, CPU
    )
    surgery_alone = error_of(adapter, images)
    list(adapter.run())
    assert error_of(adapter, images) < surgery_alone


def test_the_same_seed_gives_the_same_bytes(plain: Checkpoint, images: Tensor) -> None:
    settings = AdaptSettings("certify", head=(16,), epochs=1, distill=1)
    assert (
        adapt_run(plain, settings, images[:64])[1].digest
        == adapt_run(plain, settings, images[:64])[1].digest
    )


def _ready_made(arch: str, **arguments: Any) -> Checkpoint:
    net = build.create(arch, arguments, initialise=False)
    return build.initialise(arch, arguments, build.spec_of(net), 10)


KEEPING = AdaptSettings()


@pytest.mark.parametrize(
    ("arch", "arguments", "settings", "named"),
    [
        *((*row, CERTIFY, f"and this is a .*{name[:3]}") for name, row in OTHERS.items()),
        ("certvit_4c3f", {}, CERTIFY, "and this is a SmallConvNet"),
        ("vit_tiny_patch16_224", {"depth": 1, "qk_norm": True}, CERTIFY, "blocks.0.attn: .*qk_norm"),
        ("vit_tiny_patch16_224", {"depth": 1, "norm_layer": "rmsnorm"}, CERTIFY, "blocks.0.norm1: RmsNorm"),
        ("vit_tiny_patch16_224", {"depth": 1, "global_pool": "map"}, CERTIFY, "attn_pool"),
        ("vit_tiny_patch16_224", {"depth": 1, "scale_mlp_norm": True}, CERTIFY, "blocks.0.mlp"),
        ("vit_tiny_patch16_224", {"depth": 0}, CERTIFY, "no attention"),
        ("levit_128s", {}, KEEPING, "no LayerNorm over the last dimension"),
        ("certvit_4c3f", {}, KEEPING, "no LayerNorm over the last dimension"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(
    arch: str, arguments: dict[str, Any], settings: AdaptSettings, named: str
) -> None:
    """In one line, and where the other goal serves the network it says so."""
    with pytest.raises(ArchitectureError, match=f"(?i){named}") as refusal:
        plan(_ready_made(arch, **arguments), settings)
    assert "\n" not in refusal.value.message
    if "this is a" in named:
        assert "--goal keep" in refusal.value.hint


def test_refusals(plain: Checkpoint, images: Tensor) -> None:
    _, adapted = adapt_run(plain, AdaptSettings("certify", epochs=-1), images[:8])
    with pytest.raises(ArchitectureError, match="adapted network"):
        plan(adapted, CERTIFY)
    for wrong in (
        {"attention": "magic"},
        {"norm": "magic"},
        {"residual": "magic"},
        {"activation": "magic"},
        {"epochs": -2},
    ):
        with pytest.raises(UsageError):
            AdaptSettings(**{"goal": "certify", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "named",
    [{"head": (8,)}, {"activation": "relu"}, {"attention": "l2"}, {"epochs": 0}],
    ids=str,
)
def test_a_named_part_is_refitted_under_the_goal_keep(named: dict[str, Any]) -> None:
    alone = AdaptSettings()
    chosen = AdaptSettings(**named)
    assert (alone.refit, alone.epochs) == (False, 0)
    assert (chosen.refit, chosen.epochs) == (True, named.get("epochs", 3))
    for wrong in ({**named, "keep": 0.9}, {"distill": 3}, {"keep": 0.0}):
        with pytest.raises(UsageError):
            AdaptSettings(**wrong)
