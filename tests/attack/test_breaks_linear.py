"""Every attack of the registry breaks a linear network at 1.5 times the exact distance.

One that is marked weak breaks some image there, so that an attack that does nothing is noticed.
"""

import pytest
from torch import Tensor, nn

from certcli.attack.catalogue import ATTACKS
from certcli.attack.families import gradient
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region
from tests.helpers.attack_nets import batches, exact_distances, labelled, linear, pictures

REACH = 1.5
LONG = AttackSettings(steps=60, queries=500, searches=5, targets=4)
CASES = [
    (attack.name, norm) for attack in ATTACKS if not attack.needs_attention for norm in attack.norms
]


def share_broken(name: str, norm: Norm) -> float:
    """Return the share of images that an attack breaks, each at REACH times its own distance."""
    model = linear(2)
    images = pictures(4)
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

    monkeypatch.setattr(gradient, "fgsm", idle)
    assert share_broken("fgsm", "l2") == 0.0
