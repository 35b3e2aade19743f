"""No patch, of extreme pixels or adaptive, changes a class that is certified."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from certcli.attack.patch import PatchTarget, attack_patches
from certcli.attack.settings import AttackSettings
from certcli.certify.certificate import Certificate, RecheckSettings
from certcli.certify.methods import prepare_method
from certcli.certify.patch.certifier import PatchCertifier
from certcli.certify.patch.climbed import TouchedPasses
from certcli.certify.patch.double_masking import DoubleMasking, Voting
from certcli.certify.patch.options import Patches
from certcli.certify.patch.passes import MaskedPasses
from certcli.certify.record_check import recheck
from certcli.checkpoint.file import Checkpoint
from certcli.cli.verify.records import margin_attack
from certcli.evaluation.claim import Claim
from certcli.evaluation.threat import Patch, Threat
from certcli.images import datasets
from certcli.models.visible_part import SeenPart
from tests.helpers.patches import GRID, half_normalised, patch_places

CPU = torch.device("cpu")


class Bright(nn.Module):
    """Classes by smoothed brightness of parts of the image: robust here, not there."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 20, generator=generator))
        self.bias = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ self.weight.T) + self.bias * 0.5


@pytest.mark.parametrize("name", ["double-masking", "voting"])
def test_no_patch_of_extreme_pixels_changes_a_certified_class(name: str) -> None:
    """Exhaustive: all 2 x 1 patches of black and white pixels, at all places, against the procedure
    itself.
    """
    attacked = kept = 0
    for seed in range(4):
        patch = Patch(2, 1)
        part = SeenPart(half_normalised(Bright(seed), (1, 4, 5)), GRID)
        defence = (
            DoubleMasking(GRID, [patch], 2)
            if name == "double-masking"
            else Voting(GRID, [patch], "columns", 2, 3)
        )
        passes = MaskedPasses(part, defence.views, 16)
        images = torch.rand(6, 1, 4, 5, generator=torch.Generator().manual_seed(seed))
        labels = [one.prediction for one in defence.predict(passes, images)]
        for image, found in zip(images, defence.certify(passes, images, labels), strict=True):
            near = []
            for pixels in patch_places(GRID, patch):
                for values in itertools.product((0.0, 1.0), repeat=2):
                    one = image.clone()
                    one[0, pixels] = torch.tensor(values)
                    near.append(one)
            now = [one.prediction for one in defence.predict(passes, torch.stack(near))]
            if found.proven:
                kept += 1
                assert set(now) == {found.prediction}
            else:
                attacked += set(now) != {found.prediction}
    assert kept > 0
    assert attacked > 0 or name == "voting"


# attacks


def places_of(patch: Patch, image: tuple[int, int]) -> list[tuple[int, int]]:
    return list(
        itertools.product(range(image[0] - patch.height + 1), range(image[1] - patch.width + 1))
    )


def test_a_patch_that_turns_the_network_is_found() -> None:
    """Four strong pixels in one corner: the attack finds that place, changes nothing else, and
    withstands elsewhere.
    """
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    net[1].weight.data.zero_()
    net[1].weight.data[1, [0, 1, 8, 9]] = 4.0  # of normalised pixels in [-1, 1]
    net[1].bias.data = torch.tensor([0.0, 8.0])
    model = half_normalised(net, (1, 8, 8))
    images = torch.zeros(2, 1, 8, 8)
    target = PatchTarget(lambda corner: model, lambda x: model(x).argmax(1).tolist())
    rows = attack_patches(target, [5, 6], images, [0, 0], Patch(2, 2), AttackSettings(steps=10))
    for row, image in zip(rows, images, strict=True):
        assert row.corner == (0, 0)
        assert row.adversarial is not None
        changed = (row.adversarial != image).nonzero()[:, 1:]
        assert bool((changed < 2).all())
        assert target.classify(row.adversarial[None]) == [1]
    assert (
        attack_patches(target, [0], images[:1], [1], Patch(2, 2), AttackSettings())[0].withstood
        is False
    )
    inner = attack_patches(
        target, [0], images[:1], [0], Patch(2, 2), AttackSettings(steps=10), places=[(3, 3)]
    )
    assert inner[0].withstood


@pytest.mark.parametrize("name", ["double-masking", "voting"])
def test_no_adaptive_attack_breaks_what_is_certified(certified: Checkpoint, name: str) -> None:
    """At every place: PGD on the passes that see the patch, judged by the procedure itself."""
    hide = "pixels" if name == "double-masking" else "auto"  # its flat head wants all tokens
    given = Patches(["1"], name, hide=hide, band_width=1, bands="blocks")
    certifier = prepare_method("patch", certified, CPU, given)
    assert isinstance(certifier, PatchCertifier)
    patch, images = (
        Patch(1, 1),
        datasets.load_dataset("digits", certified.record.input, "test").select(range(24)),
    )
    pixels, labels = images.tensors()
    rows = certifier.batch(range(24), pixels, labels.tolist())
    target = PatchTarget(lambda corner: TouchedPasses(certifier, patch, corner), certifier.predict)
    chosen = places_of(patch, (8, 8))[::9]
    found = attack_patches(
        target, range(24), pixels, labels.tolist(), patch, AttackSettings(steps=8), chosen
    )
    held = [row.index for row in rows if row.holds_at(Threat.of(patch))]
    assert [row.index for row in found if row.index in held and not row.withstood] == []
    assert held


class Credulous(PatchCertifier):
    """It finds every claim again."""

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        return [claim.checked("verified", "as it says") for claim in claims]


def test_a_false_claim_about_a_patch_is_refuted_by_attack_alone(plain: Checkpoint) -> None:
    """Masks for one pixel, claims about five by five: `certvit verify` attacks inside them."""
    honest = prepare_method("patch", plain, CPU, Patches(["1"], hide="pixels"))
    certifier = Credulous(honest.procedure, honest.passes, honest.patches)
    images = datasets.load_dataset("digits", plain.record.input, "test").select(range(12))
    pixels, labels = images.tensors()
    claims = [
        replace(row, proven=("1x1", "5x5"))
        for row in certifier.batch(images.indices.tolist(), pixels, labels.tolist())
    ]
    rows = list(recheck(certifier, claims, images, 5, margin_attack(1), 12))
    assert all(row.attacked for row in rows)
    refuted = [row for row in rows if row.claim.status == "refuted"]
    assert refuted
    assert all("within a patch of 5x5 is of another class" in row.claim.why for row in refuted)
