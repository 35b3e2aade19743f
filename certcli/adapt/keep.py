"""`--goal keep`: put floors under every LayerNorm, then raise them as far as enough predictions stay.

A floor lies below the deviations at its norm, with ROOM for others: the function stays. The
deviations come from the old network on the calibration images and on blank ones (black, grey,
white). On a ViT-Tiny, blank images have the least deviations at the first norms, and synthetic
photographs at the last norms. All other tensors keep their values.

With a dataset each floor is then raised alone to quantiles of the deviations that reach its norm;
the squared logit errors of single changes nearly add up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from certcli.adapt.plan import Adaptation, AdaptedPart
from certcli.adapt.start import deviations
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.evaluation.evidence_schema import Rung
from certcli.evaluation.fidelity import Fidelity, ReferenceLogits, keeps_enough
from certcli.images.labelled import at_once
from certcli.lipschitz.network import trial_upper
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import FloorNorm
from certcli.system.torch_modes import fast_products

BLANK = (0.0, 0.5, 1.0)

ROOM = 0.7
"""A floor is this share of the least deviation seen (docs/trials.md, *Room under the floors*)."""

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


@dataclass(frozen=True)
class Trade:
    """The floors tried, those placed, and the rungs measured on the choosing images."""

    candidates: Sequence[RaisedFloor] = ()
    placed: Mapping[str, RaisedFloor] = field(default_factory=dict)
    rungs: Sequence[Rung] = ()


class Keeper(Adaptation):
    """Change the network as far as it keeps its predictions.

    Unless `choose_by` is called, only norms change, and on the calibration images they act as
    before. Several processes share the images and the candidates, and all get every result.
    """

    def _begin(self) -> None:
        self.student = with_unit_floors(self.record, self.teacher)
        self.norms = {
            path: part
            for path, part in self.student.net.named_modules()
            if isinstance(part, FloorNorm)
        }
        self.trade = Trade()
        self.reference: ReferenceLogits | None = None
        self.raises_floors = False

    def choose_by(self, reference: ReferenceLogits | None) -> None:
        """Let `run` change more, as long as the share `settings.keep` of first choices stays.

        Args:
            reference: the original logits of other images; None except in the leading process.
        """
        self.reference = reference
        self.raises_floors = True

    @property
    def keep(self) -> float:
        """Return the share of first choices that must stay."""
        return self.settings.keep if self.raises_floors and self.settings.keep is not None else 1.0

    @property
    def steps(self) -> int:
        """Return an upper limit of the number of steps that `run` yields."""
        return 2 + len(QUANTILES) * len(self.norms) if self.raises_floors else 1

    def run(self) -> Iterator[str]:
        """Change the student, and yield a remark after each step."""
        self.records = list(self._place_least_floors())
        yield "floors"
        if not self.raises_floors:
            return
        candidates = []
        for candidate in self.try_floors():
            candidates.append(candidate)
            error = f"logit error {100 * candidate.error:.2g} %"
            yield f"{candidate.path}, {candidate.change}: {error}"
        self.trade = self._choose(self.team.agree(lambda: [asdict(each) for each in candidates]))
        for number, part in enumerate(self.records):
            if raised := self.trade.placed.get(part.path):
                after = f"FloorNorm, {raised.change}"
                self.records[number] = replace(part, after=after, error=raised.error)
        yield f"{len(self.trade.placed)} floors raised"

    def result(self) -> Checkpoint:
        return self.derive(self.record.surgery, keep=self.keep)

    @torch.no_grad()
    def _place_least_floors(self) -> Iterator[AdaptedPart]:
        """Set every floor to ROOM times the least deviation that reaches it; yield a record each.

        A floor is at least 1e-6. The error of a record is eps / (2 floor^2): above a floor the two
        norms differ by LayerNorm's eps alone.
        """
        old: dict[str, Any] = {path: self.teacher.net.get_submodule(path) for path in self.norms}
        images = self.images
        blank = torch.stack([torch.full(images.shape[1:], value) for value in BLANK])
        count = at_once(self.settings.batch_size, images.shape[1:], images.device)
        with fast_products(self.teacher), noting_deviations(old) as rows:
            self.teacher(blank.to(images.device))
            for part in images.split(count)[self.team.rank :: self.team.size]:
                self.teacher(part)
        smallest = {
            path: min((float(values.min()) for values in parts), default=math.inf)
            for path, parts in rows.items()
        }
        everyone = self.team.everyone(smallest)
        for path, norm in self.norms.items():
            lowest = min(each[path] for each in everyone)
            # a norm that is never called
            floor = max(ROOM * lowest, 1e-6) if math.isfinite(lowest) else 1.0
            norm.floor.fill_(floor)
            about = f"FloorNorm, floor {floor:.3g}"
            error = old[path].eps / (2 * floor * floor)
            yield AdaptedPart(path, type(old[path]).__name__, about, error)

    @torch.no_grad()
    def try_floors(self) -> Iterator[RaisedFloor]:
        """Try each candidate alone; the leader yields them with their errors."""
        self.first_floors = {path: float(norm.floor) for path, norm in self.norms.items()}
        candidates = self.team.agree(lambda: [asdict(each) for each in self._higher_floors()])
        compared = self.images[-COMPARED_IMAGES:]
        reference = self.student(compared)

        def logit_error(fields: dict[str, Any]) -> float:
            self._place([RaisedFloor(**fields)])
            with fast_products(self.student):
                difference = self.student(compared) - reference
            self._place([])
            return float(difference.norm() / reference.norm().clamp_min(1e-30))

        tried = self.team.deal(candidates, logit_error)
        for (_, error), fields in zip(tried, candidates, strict=False):
            yield RaisedFloor(**{**fields, "error": error})

    def _higher_floors(self) -> Iterator[RaisedFloor]:
        """Yield floors at quantiles of the deviations that lie above the present floor."""
        with noting_deviations(self.norms) as rows:
            for pixels in self.images[:FITTING_IMAGES].split(self.settings.batch_size):
                self.student(pixels)
        for path, parts in rows.items():
            order = torch.cat(parts).sort().values if parts else torch.zeros(1)
            for share in QUANTILES:
                floor = float(order[int(share * (len(order) - 1))])
                if floor > (first := self.first_floors[path]):
                    yield RaisedFloor(path, floor, math.log10(floor / first))

    def _place(self, raised: Sequence[RaisedFloor]) -> None:
        """Raise exactly these floors; all others are the first ones."""
        floors = {**self.first_floors, **{each.path: each.floor for each in raised}}
        for path, norm in self.norms.items():
            norm.floor.fill_(floors[path])

    def _choose(self, tried: Sequence[dict[str, Any]]) -> Trade:
        """Make as many changes, in order, as preserve the share `keep` of top-1 predictions.

        With several processes the leader compares logits while the last process proves the bound.
        Without a bound nothing can be gained, and no floor is raised.
        """
        rungs: dict[int, Rung] = {}
        candidates = [RaisedFloor(**fields) for fields in tried]
        changes = cheapest_first(candidates)
        steps = [{each.path: each for each in changes[:count]} for count in range(len(changes) + 1)]
        expected = [sum(each.error**2 for each in step.values()) ** 0.5 for step in steps]

        def preserves_enough(count: int) -> bool:
            self._place([*steps[count].values()])
            rungs[count], fidelity = self._measure(count, len(steps[count]))
            return keeps_enough(fidelity, self.keep)

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
        return Trade(candidates, steps[best], [rungs[count] for count in sorted(rungs)])

    def _measure(self, changes: int, floors: int) -> tuple[Rung, Fidelity]:
        """Return the rung of the present floors: its bound is of a trace, not replayed."""
        upper = judged = None
        if self.team.rank == self.team.size - 1:
            upper = trial_upper(self.student, self.student.input_size).log10()
        if self.reference is not None:
            judged = asdict(self.reference.compare(self.reference.logits(self.student)))
        everyone = self.team.everyone([judged, upper])
        fidelity = Fidelity(**everyone[0][0])
        upper = everyone[-1][1]
        right = fidelity.right_after
        rung = Rung(
            changes=changes,
            floors=floors,
            attentions=0,
            log10_upper=upper if math.isfinite(upper) else None,
            agreement=fidelity.agreement,
            agreement_at_least=fidelity.agreement_at_least,
            error=fidelity.error,
            accuracy=None if right is None else right / fidelity.images,
            taken=False,
        )
        return rung, fidelity


@contextmanager
def noting_deviations(norms: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield path -> deviations of the rows at each call of a norm while the caller runs them."""
    rows: dict[str, list[Tensor]] = {path: [] for path in norms}

    def hook(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows[path].append(deviations(inputs[0]))

    with ExitStack() as hooks:
        for path, norm in norms.items():
            hooks.enter_context(norm.register_forward_pre_hook(partial(hook, path)))
        yield rows


def cheapest_first(candidates: Sequence[RaisedFloor]) -> list[RaisedFloor]:
    """Return candidates in the order in which they are placed, one replacing its path's last.

    The next one costs least squared logit error for each further digit.
    """
    changes: list[RaisedFloor] = []
    reached = {each.path: (0.0, 0.0) for each in candidates}

    def price(candidate: RaisedFloor) -> float:
        digits, square = reached[candidate.path]
        return max(0.0, candidate.error**2 - square) / (candidate.digits - digits)

    while further := [each for each in candidates if each.digits > reached[each.path][0]]:
        changes.append(min(further, key=price))
        reached[changes[-1].path] = changes[-1].digits, changes[-1].error ** 2
    return changes


def with_unit_floors(record: Record, teacher: PixelModel) -> PixelModel:
    """Return the network after surgery: floors of 1, all other tensors as in the teacher."""
    net = build.build(record, initialise=True).requires_grad_(False)
    # of others than the teacher's: a floor, or the gain and offset of a norm that had none
    fresh = {
        name: torch.full_like(value, 0.0 if name.endswith(".bias") else 1.0)
        for name, value in net.state_dict().items()
    }
    net.load_state_dict({**fresh, **teacher.net.state_dict()}, strict=True)
    return PixelModel(record.input, net).eval().to(next(teacher.parameters()).device)
