"""Every rule of the zonotopes, as laws: a row reaches it, and no run of a row leaves what the rules
enclose.
"""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from certcli.checkpoint.record import InputSpec
from certcli.enclosure.slopes.network import Neighbourhood, SlopeNetwork
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.space import rules
from certcli.engine.table import ModuleRule, NoRule, unchanged
from certcli.models.pixels import PixelModel
from tests.helpers.enclosed import ZONOTOPES, Enclosed, Walked, sample_images
from tests.helpers.grids import EVERY
from tests.helpers.lipschitz_cases import ROWS as ROWS_OF_BOUNDS
from tests.helpers.lipschitz_cases import build_row, of_tokens
from tests.helpers.reached import Entry, entries_without_row, title
from tests.helpers.slopes import IMAGE

QUICK = [
    "conv-after-norm", "clipped-relu", "layer-norm-linear", "floor-norm", "rms-norm-torch", "layer-scale", "mean-linear",
    "in-place-residual", "two-names", "expand", "split-heads", "chunks", "attention-bare", "attention-fused",
    "gelu-tanh", "spelled-rounded-enclosed", "linear-function", "maxmin", "attention-windows", "attention-written",
    "pad-channels", "roll-flat", "softmax", "center-norm", "batch-norm-folded", "l2-normalize", "attention-pool",
    "silu", "spelled-rounded-views", "spelled-rounded-moves",
    "quick-gelu", "mish", "sigmoid", "clamp", "softplus", "square", "max-pool", "avg-pool", "avg-pool-1d", "adaptive",
    "upsample", "resize", "conv1d", "broadcast", "conv-reflect", "spelled-rounded-hard", "einsum", "spelled-lines",
    "spelled-curves", "spelled-rounded-curves", "conv-3-stride", "conv-3d", "spelled-images",
    "adaptive-max", "masked", "choice", "amax", "spelled-rounded-chosen", "rounded", "steep", "spelled-jumps",
    "spelled-rounded-jumps", "spelled-rounded-synonyms",
]  # fmt: skip
"""They reach every entry of the table; the other rows are other sizes and compositions of the
same.
"""
ROWS = [
    *QUICK,
    *("linear", "linear-twice", "normalize", "conv-3", "conv-groups", "layer-norm", "rms-norm", "gelu"),
    *("layer-scale-of-one", "layer-scale-2d", "residual", "gain-after-linear", "gain-before-linear"),
    *("negative-scale", "mixed-tokens", "attention", "attention-qk-norm", "parts", "convex", "weighted"),
    *("floor-norm-linear", "batch-norm", "batch-norm-folded-twice", "center-norm-folded", "attention-masked"),
    *("attention-talking", "rolled"),
    *("rolled-between-linear", "sort", "sort-in-windows", "sort-between-linear", "sort-partly", "unfold"),
]  # fmt: skip
WITHOUT = {
    "of several axes, or a deviation: rows along the last axis alone are normalised": (
        "simple-norm", "simple-norm-2d", "group-norm", "group-norm-of-windows", "group-norm-1", "deviations", "variances",
        "sort-shift-of-one", "slices", "spelled-rounded-images",
    ),
    "a length has no slope at 0": (
        "norm", "response-norm", "l2-pool", "l2-pool-of-equal-tokens", "l2-pool-of-one-token", "attention-lipschitz-norm",
        "attention-lipschitz-norm-after-norm",
    ),
    "a constant matrix has a rule on the right side of a product": (
        "constant-matrix", "constant-matrices", "mix-orthogonal", "mix-matrices", "mix-after-linear", "add-product",
        "spelled-rounded-sums",
    ),
    "torch's one function of attention returns two tensors; converters place timm's module in its stead": (
        "attention-torch", "attention-torch-layer",
    ),
    "a mask that hides tokens, or moves": ("attention-causal", "attention-moving-mask", "choice-of-scores"),
    "float32 whatever it is given: not the network in float64, which is enclosed": (
        "spelled-single", "spelled-single-images", "spelled-precisions",
    ),
    "back to images, or of solids": ("conv-transposed", "fold", "adaptive-3d"),
    "log-probabilities are taken off at a network's end, where margins do not see them": ("log-softmax",),
    "options that no model here calls with: alpha, axis, lerp, rsub, maxima that repeat a tensor": (
        "spellings", "constant-branches", "lerp", "larger", "spelled-sums",
    ),
    "no classifier of one image": ("mean-of-fewer", "matrix-transpose"),
}  # fmt: skip
"""Rows of the global bound's laws that zonotopes refuse, with the reason."""
REFUSED = {name for names in WITHOUT.values() for name in names}
RADII = (1e-6, 0.02, 0.3) if EVERY else (0.05,)
PLACES = 8 if EVERY else 2
BACK = "l2 and back"


def pixel_model(net: nn.Module) -> PixelModel:
    flat = (
        net if net(torch.rand(1, *IMAGE).double()).dim() == 2 else nn.Sequential(net, nn.Flatten())
    )
    return PixelModel(InputSpec(size=IMAGE, mean=(0.4,) * 2, std=(0.3,) * 2), flat).double().eval()


@functools.cache
def enclosed(name: str) -> Enclosed:
    return Enclosed(pixel_model(build_row(name)))


def variants(number: int) -> list[str]:
    """Return the walks of a row: all, or the way back; of every third row another one in turn."""
    forward = [kind for kind in ZONOTOPES if kind != BACK]
    if EVERY:
        return [BACK, *forward]
    return [BACK, *forward[number // 3 % len(forward) :][: number % 3 == 0]]


@functools.cache
def walked(name: str, kind: str) -> list[Walked]:
    """Return the walks of a row, one an image and radius."""
    pictures = sample_images(3 if EVERY else 1)
    return [
        ZONOTOPES[kind](enclosed(name), pixels, radius, PLACES)
        for pixels in pictures
        for radius in RADII
    ]


CASES = [(name, kind) for number, name in enumerate(ROWS if EVERY else QUICK) for kind in variants(number)]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_run_leaves_what_a_rule_encloses(name: str, kind: str) -> None:
    """Of every node, at points of the ball, on its boundary and at corners; and of the margins."""
    for walk in walked(name, kind):
        assert list(walk.faults(enclosed(name).model)) == []


OTHERS = sorted(set(ROWS_OF_BOUNDS).difference(QUICK, REFUSED))


@pytest.mark.parametrize(
    "name", sorted(ROWS_OF_BOUNDS) if EVERY else [*sorted(REFUSED), *OTHERS[::3]]
)
def test_a_row_is_known_to_every_domain_or_stands_in_the_list(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zonotopes with their slopes. Rows of `QUICK` are walked by the law above."""
    monkeypatch.setattr(Neighbourhood, "require_holds", lambda near, weights, form: None)
    pixels = sample_images(1)[0]
    with pytest.raises(NoRule) if name in REFUSED else nullcontext():
        model = pixel_model(build_row(name))
        near = SlopeNetwork(model, IMAGE).near(l2_ball(pixels, 1e-4, limit=300))
        near.gradient(torch.ones(model(pixels).shape[1]).double())


def reached_by_rows() -> set[Entry]:
    for name, kind in CASES:
        walked(name, kind)
    return {entry for name, _ in CASES for entry in enclosed(name).reached}


def test_a_row_reaches_every_entry_of_the_table() -> None:
    assert entries_without_row(rules, reached_by_rows()) == []


def threshold_of_one_piece(ctx: object, module: nn.Module, x: Form) -> Form:
    """Of the piece that the image lies on: true beside it, and wrong across the jump."""
    above = (x.centre > 0.1).double()
    return x.scale(above).shift(20 * (1 - above))


def test_a_wrong_rule_that_is_added_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    name = nn.Threshold
    unchanged(name)
    wrong = ModuleRule(name, threshold_of_one_piece, lambda module: True)
    monkeypatch.setitem(rules.modules, name, wrong)
    assert entries_without_row(rules, reached_by_rows()) == [title(("modules", name))]
    row = Enclosed(pixel_model(of_tokens(nn.Threshold(0.1, 20.0), scale=8.0)))
    walk = ZONOTOPES["l2 with squares"](row, sample_images(1)[0], 0.02, 8)
    assert ("modules", name) in row.reached
    assert list(walk.faults(row.model)) != []
