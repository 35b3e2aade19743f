"""Attacks by themselves: what each breaks of a linear network, the one that weighs by attention, and
half precision.
"""

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import certvit
from certcli.attack import catalogue, judge, run, watched_model
from certcli.attack.families import ascent
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region
from certcli.nn.attention_variants import build_l2_attention
from certcli.system.errors import UsageError
from tests.helpers.attack_nets import (
    NORMS,
    SHORT,
    batches,
    exact_distances,
    labelled,
    linear_classifier,
    random_pictures,
    small_perceptron,
)

REACH = 1.5
LONG = AttackSettings(steps=40, queries=300, searches=5, targets=4)
CASES = [
    (attack.name, norm)
    for attack in catalogue.ATTACKS
    if not attack.needs_attention
    for norm in attack.norms
]


def share_broken(name: str, norm: Norm) -> float:
    """Return the share of images that an attack breaks, each at REACH times its own distance."""
    model = linear_classifier(2)
    images = random_pictures(3)
    labels = labelled(model, images)
    distances = exact_distances(model, images, labels, norm)
    broken = 0
    for row in range(len(images)):
        part = slice(row, row + 1)
        region = Region(norm, REACH * float(distances[row]))
        (record,) = run.attack_images(
            model, batches(images[part], labels[part], 1), [name], region, LONG
        )
        broken += not record.withstood
    return broken / len(images)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_an_attack_breaks_what_lies_within_its_reach(name: str, norm: Norm) -> None:
    share = share_broken(name, norm)
    assert share > 0 if catalogue.ATTACKS[name].weak else share == 1.0


def test_an_attack_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the place of FGSM: it returns the images as they are."""

    def idle(model: nn.Module, images: Tensor, *rest: object) -> Tensor:
        return images

    monkeypatch.setattr(ascent, "fgsm", idle)
    assert share_broken("fgsm", "l2") == 0.0


def test_momentum_breaks_more_where_gradients_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of MaxMin is linear in pieces: without momentum signs turn to and fro (100 left, 98 with it)."""
    model = certvit.network("certvit/digits")
    images, labels = certvit.images("certvit/digits", "digits", split="val").tensors()
    left = {}
    for momentum in (0.0, ascent.MOMENTUM):
        monkeypatch.setattr(ascent, "MOMENTUM", momentum)
        region, settings = Region("linf", 0.12), AttackSettings(steps=10)
        adversarial = ascent.margin_pgd(model, images, labels, region, settings)
        left[momentum] = int((model(adversarial).argmax(1) == labels).sum())
    assert left[ascent.MOMENTUM] < left[0.0]


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 3e37, math.inf])
def test_no_size_of_a_gradient_ends_the_momentum(scale: float) -> None:
    """The sum of 784 entries of 3e37 is beyond float32."""
    signs = torch.ones(2, 1, 28, 28)
    signs[0, 0, ::2] = -1
    scaled = ascent._unit_mean(scale * signs)
    assert bool(scaled.sign().equal(signs))
    assert float((scaled.abs() - 1).abs().max()) < 1e-3
    assert not ascent._unit_mean(0 * signs).any()


def small_vit(l2: bool = False, pool: str = "token") -> nn.Module:
    torch.manual_seed(0)
    net = VisionTransformer(
        img_size=6, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=4, global_pool=pool,
        class_token=pool == "token", fc_norm=False,
    )  # fmt: skip
    if l2:
        for block in net.blocks:
            block.attn = build_l2_attention(block.attn)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # timm starts so small that a fresh net is nearly constant
        net.head.bias -= net(random_pictures(6)).mean(dim=0)
    return net.eval()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_saga_attacks_vits_of_either_attention(norm: str, l2: bool, pool: str) -> None:
    model = small_vit(l2, pool)
    images = random_pictures(6)
    labels = labelled(model, images, wrong=1)
    region = Region(norm, 3.0 if norm == "l2" else 0.6)
    records = list(
        run.attack_images(model, batches(images, labels), ["saga"], region, SHORT, keep_images=True)
    )
    assert len(records) == 6
    assert any(record.fell for record in records)  # a random net at half of the box's diagonal
    for record in records:
        assert region.contains(record.adversarial[None], record.image[None]).all()
    assert not any(module._forward_hooks for module in model.modules())


def test_rollout_is_the_product_of_half_attention_and_half_identity() -> None:
    model = small_vit()
    images = random_pictures(3)
    maps: list[Tensor] = []
    for block in model.blocks:
        attention = block.attn
        attention.fused_attn = False
        attention.attn_drop.register_forward_hook(
            lambda _, __, output: maps.append(output.mean(dim=1))
        )
    model(images)
    eye = torch.eye(10)
    seen = ((maps[1] + eye) / 2 @ ((maps[0] + eye) / 2))[:, 0, 1:]
    wanted = (seen / seen.amax(1, keepdim=True)).clamp_min(ascent.FLOOR).view(3, 3, 3)
    found = ascent.rollout(model, images)
    assert found.shape == (3, 1, 6, 6)
    # patch (i, j) covers the pixels 2i, 2i+1 x 2j, 2j+1; float32 softmax in two orders
    torch.testing.assert_close(found[:, 0, ::2, ::2], wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[:, 0, ::2, ::2], found[:, 0, 1::2, 1::2])


@pytest.mark.parametrize(
    "model", [small_perceptron(3), nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()]
)
def test_saga_refuses_a_net_without_attention(model: nn.Module) -> None:
    images = random_pictures(2)
    with pytest.raises(UsageError, match="saga needs"):
        catalogue.ATTACKS.load("saga")(
            model, images, labelled(model, images), Region("l2", 0.5), SHORT
        )


class Threshold(nn.Module):
    """Flips where the mean pixel exceeds 1/2, by a logit that bfloat16 (8 bits) rounds to a flip
    too early.
    """

    def __init__(self, matrix: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0], [matrix]]))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(
            images.flatten(1).mean(1, keepdim=True), self.weight
        ) + torch.tensor([0.5, 0.0])


def test_a_flip_in_half_precision_alone_is_no_success() -> None:
    """0.4999 is 0.5 in bfloat16: the attack may think that it has won, the verdict does not."""
    model = Threshold(1.0).eval()
    images = torch.full((1, 1, 6, 6), 0.4995)
    labels = torch.zeros(1, dtype=torch.long)
    region = Region("linf", 0.0004)
    half = watched_model.Watched(model, images, labels, region, True, "bf16")
    nearly = images + 0.0004
    assert half(nearly)[0, 1] == 0.5  # rounded: 0.4999 has no neighbour nearer in bfloat16
    settings = AttackSettings(steps=4, precision="bf16")
    for name in ("fgsm", "pgd", "margin-pgd"):
        (record,) = run.attack_images(model, batches(images, labels), [name], region, settings)
        assert record.withstood


@pytest.mark.parametrize("name", ["fgsm", "pgd", "apgd-ce", "square", "fab", "cw"])
def test_half_precision_crafts_points_that_the_model_itself_confirms(name: str) -> None:
    model = small_vit()
    images = random_pictures(6)
    labels = labelled(model, images)
    region = Region("l2", 3.0)
    settings = AttackSettings(steps=6, queries=20, searches=2, precision="bf16")
    points = catalogue.ATTACKS.load(name)(model, images, labels, region, settings)
    assert points.dtype == torch.float32
    verdict = judge.judge_points(model, images, labels, points, region)
    with torch.no_grad():
        assert (
            model(verdict.adversarial[verdict.success]).argmax(1) != labels[verdict.success]
        ).all()
