"""Double masking and voting are right whatever the passes that see the patch answer."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from certcli.certify.patch import masks
from certcli.certify.patch.ablation import stays, winner
from certcli.certify.patch.double_masking import DoubleMasking
from certcli.certify.patch.passes import Answer, MaskedPasses
from certcli.evaluation.threat import Patch
from certcli.models.views import Grid, band_views
from tests.helpers.patches import GRID, ONE_IMAGE, places, shown


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
            single = places(grid, Patch(patch.height, patch.width))
            every = (
                single
                if patch.count == 1
                else [a | b for a, b in itertools.combinations(single, 2)]
            )
            for pixels in every:
                touched = (shown(defence.views, grid) & pixels).flatten(1).any(dim=1)
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
        for pixels in places(GRID, Patch(2, 2)):
            touched = (shown(defence.views, GRID) & pixels).flatten(1).any(dim=1).tolist()
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
    """A vote count stays exactly where no votes of any one set of bands, all tried, change the
    winner.
    """
    generator = torch.Generator().manual_seed(1)
    grid = Grid(2, 7, (1, 1))
    classes = 3
    views = band_views(grid, "columns", 2)
    outcomes = set()
    for patch in (Patch(1, 1), Patch(2, 2)):
        sets = masks.met_views(views, grid, patch)
        for trial in range(40):
            votes = torch.randint(0, 1 + trial % classes, (7,), generator=generator).tolist()
            firm = [bool(trial % 10 != place) for place in range(7)]
            top = winner(votes, classes)
            free = [
                [place for place in range(7) if lost[place] or not firm[place]]
                for lost in sets.tolist()
            ]
            brute = True
            for some in free:
                for replaced in itertools.product(range(classes), repeat=len(some)):
                    now = list(votes)
                    for place, vote in zip(some, replaced, strict=True):
                        now[place] = vote
                    brute = brute and winner(now, classes) == top
            assert stays(top, votes, firm, sets, classes) == brute
            outcomes.add(brute)
    assert outcomes == {True, False}
