"""Crafting in half precision: what it finds is judged in the network's own."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.attack.catalogue import ATTACKS
from certcli.attack.judge import judge
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched
from certcli.evaluation.perturbation import Region
from tests.helpers.attack_nets import batches, labelled, random_pictures


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    net = VisionTransformer(
        img_size=6, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=4,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # timm starts so small that a fresh net is nearly constant
        net.head.bias -= net(random_pictures(6)).mean(dim=0)
    return net.eval()


class Threshold(nn.Module):
    """Flips where the mean pixel exceeds 1/2, by a logit that bfloat16 (8 bits) rounds to a flip
    too early.
    """

    def __init__(self, matrix: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0], [matrix]]))

    def forward(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(1, keepdim=True)
        return nn.functional.linear(mean, self.weight) + torch.tensor([0.5, 0.0])


def test_a_flip_in_half_precision_alone_is_no_success() -> None:
    """0.4999 is 0.5 in bfloat16: the attack may think that it has won, the verdict does not."""
    model = Threshold(1.0).eval()
    images = torch.full((1, 1, 6, 6), 0.4995)
    labels = torch.zeros(1, dtype=torch.long)
    region = Region("linf", 0.0004)
    half = Watched(model, images, labels, region, True, "bf16")
    nearly = images + 0.0004
    assert half(nearly)[0, 1] == 0.5  # rounded: 0.4999 has no neighbour nearer in bfloat16
    settings = AttackSettings(steps=4, precision="bf16")
    for name in ("fgsm", "pgd", "margin-pgd"):
        (record,) = attack_images(model, batches(images, labels), [name], region, settings)
        assert record.withstood


@pytest.mark.parametrize("name", ["fgsm", "pgd", "apgd-ce", "square", "fab", "cw"])
def test_half_precision_crafts_points_that_the_model_itself_confirms(name: str) -> None:
    model = small_vit()
    images = random_pictures(6)
    labels = labelled(model, images)
    region = Region("l2", 3.0)
    settings = AttackSettings(steps=6, queries=20, searches=2, precision="bf16")
    points = ATTACKS.load(name)(model, images, labels, region, settings)
    assert points.dtype == torch.float32
    verdict = judge(model, images, labels, points, region)
    with torch.no_grad():
        assert (
            model(verdict.adversarial[verdict.success]).argmax(1) != labels[verdict.success]
        ).all()
