"""Every attack of the registry breaks a linear network at 1.5 times the exact distance.

One that is marked weak breaks some image there, so that an attack that does nothing is noticed.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import certvit
from certcli.attack.catalogue import ATTACKS
from certcli.attack.families import ascent
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region
from tests.helpers.attack_nets import (
    batches,
    exact_distances,
    labelled,
    linear_classifier,
    random_pictures,
)

REACH = 1.5
LONG = AttackSettings(steps=60, queries=500, searches=5, targets=4)
CASES = [
    (attack.name, norm) for attack in ATTACKS if not attack.needs_attention for norm in attack.norms
]


def share_broken(name: str, norm: Norm) -> float:
    """Return the share of images that an attack breaks, each at REACH times its own distance."""
    model = linear_classifier(2)
    images = random_pictures(4)
    labels = labelled(model, images)
    distances = exact_distances(model, images, labels, norm)
    broken = 0
    for row in range(len(images)):
        part = slice(row, row + 1)
        region = Region(norm, REACH * float(distances[row]))
        data = batches(images[part], labels[part], 1)
        (record,) = attack_images(model, data, [name], region, LONG)
        broken += not record.withstood
    return broken / len(images)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_an_attack_breaks_what_lies_within_its_reach(name: str, norm: Norm) -> None:
    share = share_broken(name, norm)
    assert share > 0 if ATTACKS[name].weak else share == 1.0


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


def test_steps_of_one_length_have_no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a paper's."""
    model = linear_classifier(2)
    images = random_pictures(4)
    labels = labelled(model, images)
    settings = AttackSettings(steps=5, step_size=0.02)
    before = ascent.pgd(model, images, labels, Region("linf", 0.05), settings)
    monkeypatch.setattr(ascent, "MOMENTUM", 0.9)
    assert ascent.pgd(model, images, labels, Region("linf", 0.05), settings).equal(before)
