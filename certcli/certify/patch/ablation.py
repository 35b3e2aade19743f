"""Voting over ablations: every pass sees one band of the image, and a patch meets few bands.

The procedure's class has most votes; of equal ones the smallest. Theorem: let L be the bands that a
patch at one place meets. If the class c stays ahead when all votes of L go to any one other class,
the patch cannot change it; and where that holds for all places, no patch can. It is exact: nothing
is assumed of the passes. Proof: docs/patch.md. Source: Levine & Feizi 2020, (De)randomized
smoothing; the votes of each place, in place of their number: ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from certcli.certify.patch.masks import met_views
from certcli.certify.patch.options import VOTING
from certcli.certify.patch.passes import NONE, Answer, MaskedPasses
from certcli.certify.patch.procedure import PatchOutcome, Procedure
from certcli.evaluation.threat import Patch
from certcli.models.views import Grid, band_views


class Voting(Procedure):
    """bands: "columns", "rows" or "blocks" of `width` cells at each place, wrapped around."""

    name = VOTING

    def __init__(
        self, grid: Grid, patches: Sequence[Patch], bands: str, width: int, classes: int
    ) -> None:
        self.patches = tuple(patches)
        self.classes = classes
        self.views = band_views(grid, bands, width)
        self.met = {patch: met_views(self.views, grid, patch) for patch in patches}
        self.settings = {"bands": bands, "band_width": width}
        self.title = f"votes of {len(self.views)} bands ({bands} of {width} cells)"

    def predict(self, passes: MaskedPasses, pixels: Tensor) -> list[PatchOutcome]:
        return [
            PatchOutcome(winner(votes, self.classes)) for votes, _ in self._votes(passes, pixels)
        ]

    def certify(
        self, passes: MaskedPasses, pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchOutcome]:
        outcomes = []
        for votes, firm in self._votes(passes, pixels):
            top = winner(votes, self.classes)
            certified = tuple(
                patch
                for patch in self.patches
                if stays(top, votes, firm, self.met[patch], self.classes)
            )
            outcomes.append(PatchOutcome(top, certified, votes))
        return outcomes

    def _votes(
        self, passes: MaskedPasses, pixels: Tensor
    ) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        each = len(self.views)
        answers: list[Answer] = passes.answers(
            pixels, [(image, v) for image in range(len(pixels)) for v in range(each)]
        )
        parts = [answers[start : start + each] for start in range(0, len(answers), each)]
        return [(tuple(one.top for one in part), tuple(one.firm for one in part)) for part in parts]


def winner(votes: Sequence[int], classes: int) -> int:
    """The class with most votes, of equal ones the smallest; NONE without any."""
    cast = [vote for vote in votes if vote != NONE]
    return (
        int(torch.bincount(torch.tensor(cast, dtype=torch.int64), minlength=classes).argmax())
        if cast
        else NONE
    )


def stays(top: int, votes: Sequence[int], firm: Sequence[bool], met: Tensor, classes: int) -> bool:
    """Whether `top` wins whatever bands of one set vote, and what is not firm: met (s, m) bool.

    All of them voting for one other class is the worst: it is then compared with every class j,
    ties by the smaller index.
    """
    if top == NONE:
        return False
    touched = met | ~torch.tensor(firm)
    # NONE is not firm, so it is lost
    one_hot = torch.nn.functional.one_hot(torch.tensor(votes).clamp(min=0), classes)
    fixed = (~touched).long() @ one_hot  # (s, k): votes that nobody can change
    against = fixed + touched.sum(dim=1, keepdim=True)
    lead = fixed[:, top : top + 1] - against
    wins_ties = torch.arange(classes) > top
    ahead = (lead > 0) | ((lead == 0) & wins_ties)
    ahead[:, top] = True
    return bool(ahead.all())
