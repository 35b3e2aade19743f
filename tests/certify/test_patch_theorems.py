"""Double masking and voting are right whatever the passes that see the patch answer."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from certcli.certify.patch import masks
from certcli.certify.patch.double_masking import DoubleMasking, vote_stays, winner
from certcli.certify.patch.passes import Answer, MaskedPasses
from certcli.evaluation.threat import Patch
from certcli.models.visible_part import Grid, band_views
from tests.helpers.patches import GRID, ONE_IMAGE, patch_places, views_as_pixels


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


def test_a_refuted_image_stops_at_its_first_pair() -> None:
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    told = Told(
        defence.views, lambda image, view: int(image == 1 and view >= defence.count), rows=1
    )
    refuted = defence.certify(told, ONE_IMAGE.repeat(2, 1, 1, 1), [0, 0])
    assert [one.proven for one in refuted] == [(Patch(2, 2),), ()]
    pairs = [image for image, view in told.asked if view >= defence.count]
    assert pairs.count(0) == 6
    assert pairs.count(1) == 1


def test_voting_is_exact() -> None:
    """A class stays exactly where no votes of any one set of bands, all tried, change the winner:
    for all votes of five bands, so with every tie, won by the smaller class and lost by the larger.
    """
    classes = 3
    grid = Grid(1, 5, (1, 1))
    views = band_views(grid, "columns", 1)
    outcomes = set()
    for patch in (Patch(1, 1), Patch(1, 2)):
        sets = masks.met_views(views, grid, patch)
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
