"""Defences against patches: they classify by passes over views, and prove their answers.

Double masking: a class stands when all other masks agree once one hides the patch.

Masks M cover the patch: at each of its places one of them hides it whole. f(i, j): the network's
class without what masks i and j hide. The procedure: if all f(i, i) agree, that class. Else, of the
masks i that differ from the majority, the class of one whose f(i, j) agree for all j; else the
majority. Theorem: where each place of the patch is hidden by some mask i with f(i, j) = c for all
j, no patch changes the procedure's class c. Proof: docs/patch.md. Source: Xiang, Mahloujifar &
Mittal 2022, PatchCleanser, Algorithm 1 and Theorem 1; several sizes of patches: ours.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from certcli.certify.options import DOUBLE_MASKING, VOTING
from certcli.certify.patch.passes import NONE, Answer, MaskedPasses, met_views, square_masks
from certcli.evaluation.threat import Patch
from certcli.models.pixels import Grid, band_views
from certcli.system.errors import UsageError


@dataclass(frozen=True)
class PatchOutcome:
    """The class, the patches proven not to change it, and what passes voted, where they do.

    Attributes:
        prediction: NONE where passes with logits that are not finite decide.
    """

    prediction: int
    proven: tuple[Patch, ...] = ()
    votes: tuple[int, ...] = ()


class Procedure(ABC):
    """views: (m, rows, columns), of all passes. settings: for records; title: in words."""

    name: ClassVar[str]
    views: Tensor
    settings: Mapping[str, Any]
    title: str

    @abstractmethod
    def predict(self, passes: MaskedPasses, pixels: Tensor) -> list[PatchOutcome]:
        """The class of each image (b, c, h, w), nothing proven."""

    @abstractmethod
    def certify(
        self, passes: MaskedPasses, pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchOutcome]:
        """Classify, and prove. An image not of its label's class may be left unproven."""


class DoubleMasking(Procedure):
    """masks: a side, for patches up to the largest of `patches` in height, width and number."""

    name = DOUBLE_MASKING

    def __init__(self, grid: Grid, patches: Sequence[Patch], masks: int) -> None:
        if not 2 <= masks <= 12:
            raise UsageError(
                f"--procedure {DOUBLE_MASKING}:{masks}", "between 2 and 12 masks a side"
            )
        largest = Patch(
            *(max(getattr(p, side) for p in patches) for side in ("height", "width", "count"))
        )
        self.use(square_masks(grid, largest, masks), grid, patches)
        self.settings = {"masks": masks}
        self.title = f"double masking with {self.count} masks, {len(self.views)} passes at most"

    def use(self, masks: Tensor, grid: Grid, patches: Sequence[Patch]) -> None:
        """Use masks (m, rows, columns), False: hidden. UsageError: a patch that none hides."""
        self.patches = tuple(patches)
        self.count = len(masks)
        self.met = {patch: met_views(masks, grid, patch) for patch in patches}
        for patch in patches:
            if not self.standing(patch, [True] * self.count):
                raise UsageError(f"no mask hides {patch} at every place", "more masks")
        self._pairs = list(itertools.combinations(range(self.count), 2))
        self._view = {pair: self.count + place for place, pair in enumerate(self._pairs)}
        first, second = torch.tensor(self._pairs, dtype=torch.int64).reshape(-1, 2).T
        self.views = torch.cat([masks, masks[first] & masks[second]])

    def view(self, i: int, j: int) -> int:
        """Which view is without what masks i and j hide."""
        return i if i == j else self._view[min(i, j), max(i, j)]

    def standing(self, patch: Patch, alive: Sequence[bool]) -> bool:
        """Whether each place of the patch is hidden whole by a mask that is alive."""
        return bool((~self.met[patch] & torch.tensor(alive)).any(dim=1).all())

    def predict(self, passes: MaskedPasses, pixels: Tensor) -> list[PatchOutcome]:
        singles = self._round_one(passes, pixels)
        return [PatchOutcome(top) for top in self._classes(passes, pixels, singles)]

    def certify(
        self, passes: MaskedPasses, pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchOutcome]:
        singles = self._round_one(passes, pixels)
        proofs = [
            _Proof(self, image, int(label), singles[image]) for image, label in enumerate(labels)
        ]
        _pursue(passes, pixels, proofs)
        unproven = [proof.image for proof in proofs if not proof.proven]
        outcomes = [PatchOutcome(proof.wanted, proof.proven) for proof in proofs]
        if unproven:
            predictions = self._classes(
                passes, pixels[unproven], [singles[image] for image in unproven]
            )
            for image, top in zip(unproven, predictions, strict=True):
                outcomes[image] = PatchOutcome(top)
        return outcomes

    def _round_one(self, passes: MaskedPasses, pixels: Tensor) -> list[list[Answer]]:
        answers = passes.answers(
            pixels, [(image, i) for image in range(len(pixels)) for i in range(self.count)]
        )
        return [answers[start : start + self.count] for start in range(0, len(answers), self.count)]

    def _classes(
        self, passes: MaskedPasses, pixels: Tensor, singles: Sequence[Sequence[Answer]]
    ) -> list[int]:
        """What the procedure says of each image, given its first round."""
        classes = []
        rows = []
        for image, answers in enumerate(singles):
            counts = Counter(answer.top for answer in answers)
            majority = min(counts, key=lambda top: (-counts[top], top))
            classes.append(majority)
            rows += [
                _Row(self, image, i, answers)
                for i in range(self.count)
                if answers[i].top != majority
            ]
        _pursue(passes, pixels, rows)
        for row in reversed(rows):  # the first that agrees counts
            if not row.settled:
                classes[row.image] = row.wanted
        return classes


class _Task:
    """Passes over `image`, in order, until they settle it. wanted: the class they should give."""

    def __init__(self, image: int, target: int, queue: list[int]) -> None:
        self.image = image
        self.wanted = target
        self.queue = queue
        self.settled = False

    def hear(self, view: int, answer: Answer) -> None:
        raise NotImplementedError


class _Row(_Task):
    """Round two: mask i and every other; one unlike f(i, i) settles. The firmest come first."""

    def __init__(
        self, defence: DoubleMasking, image: int, i: int, singles: Sequence[Answer]
    ) -> None:
        prediction = singles[i].top
        others = sorted(
            (j for j in range(defence.count) if j != i),
            key=lambda j: (singles[j].top == prediction, -singles[j].lead),
        )
        super().__init__(image, prediction, [defence.view(i, j) for j in others])

    def hear(self, view: int, answer: Answer) -> None:
        self.settled |= answer.top != self.wanted


class _Proof(_Task):
    """All pairs, least sure masks first. A failed pair ends both masks; none left settles it."""

    def __init__(
        self, defence: DoubleMasking, image: int, label: int, singles: Sequence[Answer]
    ) -> None:
        self.defence = defence
        self.alive = [answer.top == label and answer.firm for answer in singles]
        pairs = sorted(
            defence._pairs, key=lambda pair: singles[pair[0]].lead + singles[pair[1]].lead
        )
        self.pair = {defence.view(*pair): pair for pair in pairs}
        super().__init__(image, label, [defence.view(*pair) for pair in pairs])
        self.open: tuple[Patch, ...] = defence.patches
        self._close()

    def _close(self) -> None:
        self.open = tuple(patch for patch in self.open if self.defence.standing(patch, self.alive))
        self.queue = [view for view in self.queue if any(self.alive[i] for i in self.pair[view])]
        self.settled = not self.open

    def hear(self, view: int, answer: Answer) -> None:
        if answer.top != self.wanted or not answer.firm:
            for i in self.pair[view]:
                self.alive[i] = False
            self._close()

    @property
    def proven(self) -> tuple[Patch, ...]:
        return self.open


def _pursue(passes: MaskedPasses, pixels: Tensor, tasks: Sequence[_Task]) -> None:
    """Run the tasks' passes, each no further than needed, in full batches while there are any."""
    ahead = 1
    while live := [task for task in tasks if task.queue and not task.settled]:
        next_ones = [(task, view) for task in live for view in task.queue[:ahead]]
        queries = [(task.image, view) for task, view in next_ones]
        batches = passes.batches(queries)
        full = [batch for batch in batches if len(batch) == passes.rows]
        if not full and any(len(task.queue) > ahead for task in live):
            ahead *= 2
            continue
        chosen = [place for batch in full or batches for place in batch]
        answers = passes.answers(pixels, [queries[place] for place in chosen])
        for place, answer in zip(chosen, answers, strict=True):
            task, view = next_ones[place]
            if view in task.queue:
                task.queue.remove(view)
            task.hear(view, answer)


class Voting(Procedure):
    """Voting over ablations: every pass sees one band of the image, and a patch meets few bands.

    The procedure's class has most votes; of equal ones the smallest. Theorem: let L be the bands that
    a patch at one place meets. If the class c stays ahead when all votes of L go to any one other
    class, the patch cannot change it; and where that holds for all places, no patch can. It is exact:
    nothing is assumed of the passes. Proof: docs/patch.md. Source: Levine & Feizi 2020,
    (De)randomized smoothing; the votes of each place, in place of their number: ours.

    Args:
        bands: "columns", "rows" or "blocks" of `width` cells at each place, wrapped around.
    """

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
                if vote_stays(top, votes, firm, self.met[patch], self.classes)
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


def vote_stays(
    top: int, votes: Sequence[int], firm: Sequence[bool], met: Tensor, classes: int
) -> bool:
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
