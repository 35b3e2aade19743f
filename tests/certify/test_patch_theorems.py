"""Double masking and voting are right whatever the passes that see the patch answer; no patch, of
extreme pixels or adaptive, changes a class that is certified.
"""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from certcli.attack.patch import PatchTarget, attack_patches
from certcli.attack.settings import AttackSettings
from certcli.certify.certificate import RecheckSettings
from certcli.certify.methods import prepare_method, recheck
from certcli.certify.options import Patches
from certcli.certify.patch import passes
from certcli.certify.patch.certifier import PatchCertifier, TouchedPasses
from certcli.certify.patch.double_masking import DoubleMasking, Voting, vote_stays, winner
from certcli.certify.patch.passes import Answer, MaskedPasses
from certcli.checkpoint.file import Checkpoint
from certcli.cli.verify.records import margin_attack
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.threat import Patch, Threat
from certcli.images import datasets
from certcli.models.pixels import Grid, SeenPart, band_views
from tests.helpers.grids import EVERY
from tests.helpers.patches import GRID, ONE_IMAGE, half_normalised, patch_places, views_as_pixels


class Told(MaskedPasses):
    """Answers that are told beforehand: (image, view) -> class."""

    def __init__(self, views: Tensor, tell: Callable[[int, int], int], rows: int = 3) -> None:
        self.views, self.rows, self.kinds, self.tell = views, rows, [0] * len(views), tell
        self.asked: list[tuple[int, int]] = []

    def answers(self, pixels: Tensor, wanted: Sequence[tuple[int, int]]) -> list[Answer]:
        self.asked += wanted
        return [Answer(self.tell(image, view), 1.0, True) for image, view in wanted]


CONTESTS = {
    "one": (GRID, [Patch(2, 2)], 2, 60),
    "two sizes": (GRID, [Patch(1, 1), Patch(2, 3)], 2, 40),
    "two patches at once": (Grid(3, 3, (1, 1)), [Patch(1, 1, 2)], 3, 6),
}


@pytest.mark.parametrize("name", CONTESTS)
def test_no_answers_of_touched_passes_change_what_double_masking_proves(name: str) -> None:
    grid, patches, count, trials = CONTESTS[name]
    generator = torch.Generator().manual_seed(0)
    defence, image = DoubleMasking(grid, patches, count), torch.zeros(1, 1, grid.height, grid.width)

    def found_by(answers: Sequence[int]) -> Told:
        return Told(defence.views, lambda _, view: answers[view])

    proven = broken = 0
    for trial in range(trials):
        wrong = (
            torch.rand(len(defence.views), generator=generator) < (0, 0.03, 0.1)[trial % 3]
        ).tolist()
        clean = [1 + trial % 2 if off else 0 for off in wrong]
        (found,) = defence.certify(found_by(clean), image, [0])
        assert found.prediction == defence.predict(found_by(clean), image)[0].prediction
        for patch in patches:
            single = patch_places(grid, Patch(patch.height, patch.width))
            every = (
                single
                if patch.count == 1
                else [a | b for a, b in itertools.combinations(single, 2)]
            )
            for pixels in every:
                touched = (views_as_pixels(defence.views, grid) & pixels).flatten(1).any(dim=1)
                drawn = torch.randint(0, 3, (3, len(touched)), generator=generator)
                drawn[0] = 1  # all for one other class
                for answers in drawn:
                    attacked = torch.where(touched, answers, torch.tensor(clean)).tolist()
                    (now,) = defence.predict(found_by(attacked), image)
                    if patch in found.proven:
                        proven += 1
                        assert now.prediction == found.prediction == 0
                    else:
                        broken += now.prediction != found.prediction
    assert proven > 100
    assert broken > 10  # the attack is one


def test_every_pair_is_needed() -> None:
    """One pair that differs, and a patch where only one of its masks hides it whole: its second
    round fails.
    """
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    for pair in itertools.combinations(range(4), 2):
        odd = defence.view(*pair)
        (found,) = defence.certify(
            Told(defence.views, lambda image, view, odd=odd: int(view == odd)), ONE_IMAGE, [0]
        )
        assert found.proven == ()
        beaten = 0
        for pixels in patch_places(GRID, Patch(2, 2)):
            touched = (views_as_pixels(defence.views, GRID) & pixels).flatten(1).any(dim=1).tolist()
            told = Told(
                defence.views,
                lambda i, view, t=touched, odd=odd: 2 if t[view] else int(view == odd),
            )
            beaten += defence.predict(told, ONE_IMAGE)[0].prediction != 0
        assert beaten > 0


def test_voting_is_exact() -> None:
    """A class stays exactly where no votes of any one set of bands, all tried, change the winner:
    for all votes of five bands, so with every tie, won by the smaller class and lost by the larger.
    """
    classes = 3
    grid = Grid(1, 5, (1, 1))
    views = band_views(grid, "columns", 1)
    outcomes = set()
    for patch in (Patch(1, 1), Patch(1, 2)):
        sets = passes.met_views(views, grid, patch)
        for number, votes in enumerate(itertools.product(range(classes), repeat=len(views))):
            firm = [number % 7 != place for place in range(len(views))]
            top = winner(votes, classes)
            brute = True
            for lost in sets.tolist():
                options = [
                    range(classes) if lost[place] or not firm[place] else [votes[place]]
                    for place in range(len(views))
                ]
                brute &= all(winner(now, classes) == top for now in itertools.product(*options))
            assert vote_stays(top, votes, firm, sets, classes) == brute
            outcomes.add(brute)
    assert outcomes == {True, False}


def hides(masks_of: Sequence[frozenset[int]], place: frozenset[int]) -> list[int]:
    return [number for number, mask in enumerate(masks_of) if place <= mask]


def behind(image: tuple[int, ...], mask: frozenset[int]) -> tuple[int, ...]:
    """Return what a pass sees: -1 where the mask is."""
    return tuple(-1 if cell in mask else value for cell, value in enumerate(image))


CELLS = 6
PLACES = [frozenset((cell,)) for cell in range(CELLS)]
MASKS = {
    "each place once": [frozenset((cell,)) for cell in range(CELLS)],
    "each place twice": [frozenset((cell, (cell + 1) % CELLS)) for cell in range(CELLS)],
    "each place thrice": [frozenset((cell + i) % CELLS for i in range(3)) for cell in range(CELLS)],
    "most": [frozenset((cell + i) % CELLS for i in range(4)) for cell in range(CELLS)],
    "pairs": [frozenset(pair) for pair in itertools.combinations(range(CELLS), 2)],
}
"""Masks on a row of cells, with patches of one cell."""
SHARED = {"most", "pairs"}
"""Those of them that hide every two places together."""


def apart(masks_of: Sequence[frozenset[int]]) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Return the pairs of places that no mask hides together."""
    pairs = itertools.combinations(PLACES, 2)
    return [(first, second) for first, second in pairs if not hides(masks_of, first | second)]


@pytest.mark.parametrize("name", MASKS)
def test_places_without_a_common_mask_refute_every_rule_of_one_round(name: str) -> None:
    """Two images, each of one class behind every mask, a patch away from a third one."""
    pairs = apart(MASKS[name])
    assert bool(pairs) == (name not in SHARED)
    for first, second in pairs:
        image = (1,) * CELLS
        other = tuple(2 if cell in first | second else 1 for cell in range(CELLS))
        attacked = tuple(2 if cell in first else 1 for cell in range(CELLS))
        for near, place in ((image, first), (other, second)):
            differing = {cell for cell in range(CELLS) if near[cell] != attacked[cell]}
            assert differing <= place
        network: dict[tuple[int, ...], int] = {}
        for mask in MASKS[name]:
            for seen, label in ((behind(image, mask), 0), (behind(other, mask), 1)):
                assert network.setdefault(seen, label) == label  # a network that has both


@pytest.mark.parametrize("name", sorted(SHARED))
def test_a_common_mask_for_every_two_places_makes_one_round_right(name: str) -> None:
    """Whatever passes answer that see the patch, one class alone has a place whose masks agree."""
    generator = torch.Generator().manual_seed(0)
    for place in PLACES:
        for trial in range(200):
            answers = torch.randint(0, 3, (len(MASKS[name]),), generator=generator)
            if trial == 0:
                answers[:] = 1
            answers[hides(MASKS[name], place)] = 0
            agreed = {
                int(answers[hiding[0]])
                for hiding in (hides(MASKS[name], other) for other in PLACES)
                if len(set(answers[hiding].tolist())) == 1
            }
            assert agreed == {0}


def test_double_masking_does_not_prove_both_of_two_images_that_one_round_would() -> None:
    """The images of the refutation behind certvit's own masks, and a network that is as good to both
    as a network can be: behind pairs that hide both places it sees one image.
    """
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    views = views_as_pixels(defence.views, GRID)
    first, second = next(
        (one, two)
        for one, two in itertools.combinations(patch_places(GRID, Patch(2, 2)), 2)
        if all(bool((view & (one | two)).any()) for view in views[: defence.count])
    )
    image = torch.full((GRID.height, GRID.width), 1)
    other = torch.where(first | second, 2, image)
    network: dict[tuple[int, ...], int] = {}

    def answer(pixels: Tensor, label: int, view: int) -> int:
        return network.setdefault(tuple((pixels * views[view]).flatten().tolist()), label)

    proven = []
    for pixels, label in ((image, 0), (other, 1)):
        first_round = [answer(pixels, label, view) for view in range(defence.count)]
        assert first_round == [label] * defence.count
        for view in range(len(views)):
            answer(pixels, label, view)
        told = Told(
            defence.views,
            lambda _, view, pixels=pixels, label=label: answer(pixels, label, view),
        )
        (outcome,) = defence.certify(told, ONE_IMAGE, [label])
        proven.append(outcome.proven)
    assert proven == [(Patch(2, 2),), ()]


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
        assert bool(((row.adversarial != image).nonzero()[:, 1:] < 2).all())
        assert target.classify(row.adversarial[None]) == [1]
    assert (
        attack_patches(target, [0], images[:1], [1], Patch(2, 2), AttackSettings())[0].withstood
        is False
    )
    inner = attack_patches(
        target, [0], images[:1], [0], Patch(2, 2), AttackSettings(steps=10), places=[(3, 3)]
    )
    assert inner[0].withstood


IMAGES = 24 if EVERY else 12


@pytest.mark.parametrize("name", ["double-masking", "voting:1"])
def test_no_adaptive_attack_breaks_what_is_certified(certified: Checkpoint, name: str) -> None:
    """At every place: PGD on the passes that see the patch, judged by the procedure itself."""
    given = Patches(["1"], name, bands="blocks")
    certifier = prepare_method("patch", certified, CPU, given)
    assert isinstance(certifier, PatchCertifier)
    patch, images = (
        Patch(1, 1),
        datasets.load_dataset("digits", certified.record.input, "test").select(range(IMAGES)),
    )
    pixels, labels = images.tensors()
    rows = certifier.batch(range(IMAGES), pixels, labels.tolist())
    target = PatchTarget(lambda corner: TouchedPasses(certifier, patch, corner), certifier.predict)
    found = attack_patches(
        target,
        range(IMAGES),
        pixels,
        labels.tolist(),
        patch,
        AttackSettings(steps=8 if EVERY else 4),
        places_of(patch, (8, 8))[:: 9 if EVERY else 21],
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
