"""The attention-weighted attack."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.attack.catalogue import ATTACKS
from certcli.attack.families.saga import FLOOR, rollout
from certcli.attack.run import attack_images
from certcli.evaluation.perturbation import Region
from certcli.nn.attention_variants import build
from certcli.system.errors import UsageError
from tests.helpers.attack_nets import (
    NORMS,
    SHORT,
    batches,
    labelled,
    random_pictures,
    small_perceptron,
)


def small_vit(l2: bool = False, pool: str = "token") -> nn.Module:
    torch.manual_seed(0)
    net = VisionTransformer(
        img_size=6, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=4, global_pool=pool,
        class_token=pool == "token", fc_norm=False,
    )  # fmt: skip
    if l2:
        for block in net.blocks:
            block.attn = build(block.attn)
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
        attack_images(model, batches(images, labels), ["saga"], region, SHORT, keep_images=True)
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
    wanted = (seen / seen.amax(1, keepdim=True)).clamp_min(FLOOR).view(3, 3, 3)
    found = rollout(model, images)
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
        ATTACKS.load("saga")(model, images, labelled(model, images), Region("l2", 0.5), SHORT)
