"""`--goal keep` with a dataset: raise floors as far as enough top-1 predictions stay.

Each floor is raised alone to quantiles of the deviations that reach its norm; the squared logit
errors of single changes nearly add up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from certcli.adapt.pixels import as_pixels
from certcli.adapt.start import deviations
from certcli.evaluation.evidence_schema import Rung
from certcli.evaluation.fidelity import Fidelity, ReferenceLogits, keeps_enough
from certcli.lipschitz.network import trial_upper
from certcli.models.pixels import PixelModel
from certcli.nn.norms import FloorNorm
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products

QUANTILES = (0.1, 0.3)
"""Floors are tried at these quantiles of the deviations."""

COMPARED_IMAGES = 12
FITTING_IMAGES = 48
"""Numbers of images whose logits are compared (the last), and that give the quantiles (the first)."""

ROUNDS = 4
"""Most rungs measured in search of the best one."""

FIRST_ERROR = 0.05
"""Relative logit error expected at the first rung."""


@dataclass(frozen=True)
class RaisedFloor:
    """A floor tried in place of the present one of the norm at `path`.

    Args:
        digits: log10 of the factor by which the norm's Lipschitz constant falls.
        error: |z - z0|_F / |z0|_F of the logits z with this change alone.
    """

    path: str
    floor: float
    digits: float
    error: float = 0.0

    @property
    def change(self) -> str:
        return f"floor {self.floor:.3g}"

    def to_json(self, placed: Mapping[str, "RaisedFloor"]) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "digits": self.digits,
            "logits_error": self.error,
            "taken": placed.get(self.path) is self,
        }


@dataclass(frozen=True)
class Trade:
    """The floors tried, those placed, and the rungs measured on the choosing images."""

    candidates: tuple[RaisedFloor, ...] = ()
    placed: Mapping[str, RaisedFloor] = field(default_factory=dict)
    rungs: tuple[Rung, ...] = ()


class Trials:
    """Try floors of all norms of `student`, whose floors lie below all deviations seen.

    Several processes share the candidates, and all get every error.
    """

    def __init__(
        self, student: PixelModel, images: Tensor, batch_size: int, team: Team = ALONE
    ) -> None:
        self.student = student
        self.images = images
        self.batch_size = batch_size
        self.team = team
        self.norms = {
            path: part for path, part in student.net.named_modules() if isinstance(part, FloorNorm)
        }
        self.first_floors: dict[str, float] = {}
        self.candidates: list[RaisedFloor] = []

    @torch.no_grad()
    def run(self) -> Iterator[RaisedFloor]:
        """Try each candidate alone; the leader yields them with their errors."""
        self.first_floors = {path: float(norm.floor) for path, norm in self.norms.items()}
        candidates = self.team.agree(lambda: [asdict(each) for each in self._raised_floors()])
        candidates = [RaisedFloor(**fields) for fields in candidates]
        compared = as_pixels(self.images[-COMPARED_IMAGES:])
        reference = self.student(compared)

        def logit_error(candidate: RaisedFloor) -> float:
            self._place([candidate])
            with fast_products(self.student):
                difference = self.student(compared) - reference
            self._place([])
            return float(difference.norm() / reference.norm().clamp_min(1e-30))

        errors: list[float] = []
        for _, error in self.team.deal(candidates, logit_error):
            yield replace(candidates[len(errors)], error=error)
            errors.append(error)
        errors = self.team.agree(lambda: errors)
        self.candidates = [
            replace(each, error=error) for each, error in zip(candidates, errors, strict=True)
        ]

    def _raised_floors(self) -> Iterator[RaisedFloor]:
        """Yield floors at quantiles of the deviations that lie above the present floor."""
        rows: dict[str, list[Tensor]] = {path: [] for path in self.norms}

        def note(path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows[path].append(deviations(args[0]))

        with ExitStack() as hooks:
            for path, norm in self.norms.items():
                hooks.enter_context(norm.register_forward_pre_hook(partial(note, path)))
            for pixels in self.images[:FITTING_IMAGES].split(self.batch_size):
                self.student(as_pixels(pixels))
        for path, parts in rows.items():
            order = torch.cat(parts).sort().values if parts else torch.zeros(1)
            for share in QUANTILES:
                floor = float(order[int(share * (len(order) - 1))])
                if floor > self.first_floors[path]:
                    digits = math.log10(floor / self.first_floors[path])
                    yield RaisedFloor(path, floor, digits)

    def _place(self, raised: Sequence[RaisedFloor]) -> None:
        """Raise exactly these floors; all others are the first ones."""
        floors = {**self.first_floors, **{each.path: each.floor for each in raised}}
        for path, norm in self.norms.items():
            norm.floor.fill_(floors[path])

    def changes(self) -> list[RaisedFloor]:
        """Return candidates in the order in which they are placed, one replacing its path's last.

        The next one costs least squared logit error for each further digit.
        """
        changes: list[RaisedFloor] = []
        reached = dict.fromkeys(self.norms, (0.0, 0.0))

        def price(candidate: RaisedFloor) -> float:
            digits, square = reached[candidate.path]
            return max(0.0, candidate.error**2 - square) / (candidate.digits - digits)

        while further := [each for each in self.candidates if each.digits > reached[each.path][0]]:
            changes.append(min(further, key=price))
            reached[changes[-1].path] = changes[-1].digits, changes[-1].error ** 2
        return changes

    def choose(self, reference: ReferenceLogits | None, keep: float) -> Trade:
        """Make as many changes, in order, as preserve the share `keep` of top-1 predictions.

        With several processes the leader compares logits while the last process proves the bound.
        Without a bound nothing can be gained, and no floor is raised.

        Args:
            reference: the original logits of the choosing images; None except in the leader.
        """
        rungs: dict[int, Rung] = {}
        changes = self.changes()
        steps = [{each.path: each for each in changes[:count]} for count in range(len(changes) + 1)]
        expected = [sum(each.error**2 for each in step.values()) ** 0.5 for step in steps]

        def preserves_enough(count: int) -> bool:
            rungs[count], enough = self._measure(steps[count], count, reference, keep)
            return enough

        preserves_enough(0)
        best, refused, aim = 0, len(steps) if rungs[0].log10_upper is not None else 1, FIRST_ERROR
        for _ in range(ROUNDS):
            within = sum(error <= aim for error in expected) - 1
            count = min(max(within, best + 1), refused - 1)
            if count <= best:
                break
            best, refused = (count, refused) if preserves_enough(count) else (best, count)
            aim = 2 * expected[best]
            if refused < len(steps):
                aim = (expected[best] + expected[refused]) / 2
        rungs[best] = msgspec.structs.replace(rungs[best], taken=True)
        self._place([*steps[best].values()])
        ordered = tuple(rung for _, rung in sorted(rungs.items()))
        return Trade(tuple(self.candidates), steps[best], ordered)

    def _measure(
        self,
        raised: Mapping[str, RaisedFloor],
        count: int,
        reference: ReferenceLogits | None,
        keep: float,
    ) -> tuple[Rung, bool]:
        """Return the rung of these floors (its bound of a trace, not replayed), and whether enough
        predictions stay.
        """
        self._place([*raised.values()])
        upper = self.log10_upper() if self.team.rank == self.team.size - 1 else None
        judged = None
        if reference is not None:
            judged = asdict(reference.compare(reference.logits(self.student)))
        everyone = self.team.everyone([judged, upper])
        fidelity, upper = Fidelity(**everyone[0][0]), everyone[-1][1]
        right = fidelity.right_after
        rung = Rung(
            changes=count,
            floors=len(raised),
            attentions=0,
            log10_upper=upper if math.isfinite(upper) else None,
            agreement=fidelity.agreement,
            agreement_at_least=fidelity.agreement_at_least,
            error=fidelity.error,
            accuracy=None if right is None else right / fidelity.images,
            taken=False,
        )
        return rung, keeps_enough(fidelity, keep)

    def log10_upper(self) -> float:
        return trial_upper(self.student, self.student.input_size).log10()
