"""`--goal keep` with a dataset: try changes of single parts, and take as many as agreement allows.

A candidate raises a norm's floor to a quantile of its deviations, or replaces dot-product attention
by a fitted attention of smaller constant. Each is tried alone; their squared logit errors nearly
add up.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from certcli.adapt.families import FAMILIES
from certcli.adapt.fit import RIDGE, capture_input
from certcli.adapt.pixels import as_pixels
from certcli.adapt.settings import ATTENTIONS
from certcli.adapt.start import LeastSquares, deviations
from certcli.evaluation.evidence_schema import Rung
from certcli.evaluation.fidelity import Fidelity, ReferenceLogits, keeps_enough
from certcli.lipschitz.network import trial_upper
from certcli.models.pixels import PixelModel
from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.nn.norms import FloorNorm
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import ArchitectureError
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products

QUANTILES = (0.1, 0.3)
"""Floors are tried at these quantiles of the deviations."""

TRIAL_ATTENTIONS = ("scsa", "l2")
"""The values of `--attention` that are tried."""

FLOOR = "floor"
"""The kind of a candidate that raises a floor."""

COMPARED_IMAGES = 12
FITTING_IMAGES = 48
"""Numbers of images whose logits are compared (the last), and that give quantiles and closed forms (the first)."""

ROUNDS = 4
"""Most rungs measured in search of the best one."""

FIRST_ERROR = 0.05
"""Relative logit error expected at the first rung."""


@dataclass(frozen=True)
class Candidate:
    """One possible change of the part at `path`: `part` in its place.

    Args:
        kind: FLOOR, or the name of a replacement.
        digits: log10 of the factor by which the network's bound falls.
        error: |z - z0|_F / |z0|_F of the logits z with this change alone.
    """

    path: str
    kind: str
    change: str
    digits: float
    part: nn.Module
    error: float = 0.0

    def to_json(self, placed: Mapping[str, "Candidate"]) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "digits": self.digits,
            "logits_error": self.error,
            "taken": placed.get(self.path) is self,
        }


@dataclass(frozen=True)
class Trade:
    """The candidates tried, those placed, and the rungs measured on the choosing images."""

    candidates: tuple[Candidate, ...] = ()
    placed: Mapping[str, Candidate] = field(default_factory=dict)
    rungs: tuple[Rung, ...] = ()


class Trials:
    """Try all candidates of all parts of `student`, whose floors lie below all deviations seen.

    Several processes share the candidates, and all get every result: the same errors, the same
    attentions to the bit.
    """

    def __init__(
        self, student: PixelModel, images: Tensor, batch_size: int, team: Team = ALONE
    ) -> None:
        self.student = student
        self.images = images
        self.batch_size = batch_size
        self.team = team
        self.parts = {
            path: part for path, part in student.net.named_modules() if isinstance(part, FloorNorm)
        } | replaceable_attentions(student.net)
        self.candidates: list[Candidate] = []

    @property
    def most_candidates(self) -> int:
        """Return an upper limit of the number of candidates."""
        return len(self.parts) * max(len(QUANTILES), len(TRIAL_ATTENTIONS))

    def run(self) -> Iterator[Candidate]:
        """Fit every candidate, and try each alone; the leader yields them with their errors."""
        candidates = self._fit_candidates()
        for candidate in candidates:
            self.team.copy_from_leader(list(candidate.part.state_dict().values()))
        compared = as_pixels(self.images[-COMPARED_IMAGES:])
        with torch.no_grad():
            reference = self.student(compared)

        def logit_error(candidate: Candidate) -> float:
            self._place([candidate])
            with torch.no_grad(), fast_products(self.student):
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

    @torch.no_grad()
    def _fit_candidates(self) -> list[Candidate]:
        """Return the candidates of every part, fitted in one pass over FITTING_IMAGES images."""
        deviations_at: dict[str, list[Tensor]] = {}
        fits: dict[tuple[str, str], tuple[Any, LeastSquares]] = {}

        def note_rows(path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
            deviations_at.setdefault(path, []).append(deviations(args[0]))

        def fit(path: str, old: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            for name in TRIAL_ATTENTIONS:
                if (path, name) not in fits:
                    started = start_attention(name, old)
                    fits[path, name] = started, LeastSquares.onto(started.proj)
                new, solver = fits[path, name]
                mixed = capture_input(new.proj, partial(new, *args, **kwargs))
                solver.add(mixed.flatten(0, -2), output.flatten(0, -2))

        with ExitStack() as hooks:
            for path, part in self.parts.items():
                hooks.enter_context(
                    part.register_forward_pre_hook(partial(note_rows, path))
                    if isinstance(part, FloorNorm)
                    else part.register_forward_hook(partial(fit, path), with_kwargs=True)
                )
            for pixels in self.images[:FITTING_IMAGES].split(self.batch_size):
                self.student(as_pixels(pixels))
        candidates: list[Candidate] = []
        for path, rows in deviations_at.items():
            candidates += floor_candidates(path, self.parts[path], torch.cat(rows).sort().values)
        for (path, name), (new, solver) in fits.items():
            # directions that the images hardly excite keep the weights of the closed form
            solver.solve_into(new.proj, RIDGE, keep=True)
            kind = ATTENTIONS[name] or ""
            candidates.append(Candidate(path, kind, type(new).__name__, 1.0, new))
        return candidates

    def _place(self, candidates: Sequence[Candidate]) -> None:
        """Put exactly these candidates in place, and the first parts everywhere else."""
        for path, part in {**self.parts, **{each.path: each.part for each in candidates}}.items():
            parent, _, name = path.rpartition(".")
            setattr(self.student.net.get_submodule(parent), name, part)

    def changes(self) -> list[Candidate]:
        """Return candidates in the order in which they are placed, one replacing its path's last.

        The next one costs least squared logit error for each further digit; a kind's gain is
        measured all at once.
        """
        gains = self._gains()
        self.candidates = [
            replace(each, digits=each.digits * gains[each.kind]) for each in self.candidates
        ]
        changes: list[Candidate] = []
        reached = dict.fromkeys(self.parts, (0.0, 0.0))

        def price(candidate: Candidate) -> float:
            digits, square = reached[candidate.path]
            return max(0.0, candidate.error**2 - square) / (candidate.digits - digits)

        while further := [each for each in self.candidates if each.digits > reached[each.path][0]]:
            changes.append(min(further, key=price))
            reached[changes[-1].path] = changes[-1].digits, changes[-1].error ** 2
        return changes

    def _gains(self) -> dict[str, float]:
        """Return, by kind, the digits gained a digit claimed, all its candidates placed; >= 0."""
        kinds = list(dict.fromkeys(candidate.kind for candidate in self.candidates))
        chosen = {
            kind: {each.path: each for each in self.candidates if each.kind == kind}
            for kind in kinds
        }

        def log10_with(kind: str) -> float:
            self._place([*chosen.get(kind, {}).values()])
            upper = self.log10_upper()
            self._place([])
            return upper

        # "": the network as it is
        uppers = [upper for _, upper in self.team.deal(["", *kinds], log10_with)]
        before, *after = self.team.agree(lambda: uppers)
        claimed = [sum(candidate.digits for candidate in some.values()) for some in chosen.values()]
        return {
            kind: max(0.0, before - upper) / digits if digits > 0 and before < float("inf") else 0.0
            for kind, upper, digits in zip(kinds, after, claimed, strict=True)
        }

    def log10_upper(self) -> float:
        return trial_upper(self.student, self.student.input_size).log10()

    def choose(self, reference: ReferenceLogits | None, keep: float) -> Trade:
        """Make as many changes, in order, as preserve the share `keep` of top-1 predictions.

        With several processes the leader compares logits while the last process proves the bound.

        Args:
            reference: the original logits of the choosing images; None except in the leader.
        """
        changes = self.changes()
        steps = [{each.path: each for each in changes[:count]} for count in range(len(changes) + 1)]
        # squared errors of single changes nearly add up
        expected = [sum(each.error**2 for each in step.values()) ** 0.5 for step in steps]
        rungs: dict[int, Rung] = {}

        def preserves_enough(count: int) -> bool:
            rungs[count], enough = self._measure(steps[count], count, reference, keep)
            return enough

        preserves_enough(0)
        best, refused, aim = 0, len(steps), FIRST_ERROR
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
        placed: Mapping[str, Candidate],
        count: int,
        reference: ReferenceLogits | None,
        keep: float,
    ) -> tuple[Rung, bool]:
        """Return the rung of what is placed (its bound of a trace, not replayed), and whether
        enough predictions stay.
        """
        self._place([*placed.values()])
        upper = self.log10_upper() if self.team.rank == self.team.size - 1 else None
        judged = None
        if reference is not None:
            judged = asdict(reference.compare(reference.logits(self.student)))
        everyone = self.team.everyone([judged, upper])
        fidelity, upper = Fidelity(**everyone[0][0]), everyone[-1][1]
        right = fidelity.right_after
        floors = sum(candidate.kind == FLOOR for candidate in placed.values())
        rung = Rung(
            changes=count,
            floors=floors,
            attentions=len(placed) - floors,
            log10_upper=upper if math.isfinite(upper) else None,
            agreement=fidelity.agreement,
            agreement_at_least=fidelity.agreement_at_least,
            error=fidelity.error,
            accuracy=None if right is None else right / fidelity.images,
            taken=False,
        )
        return rung, keeps_enough(fidelity, keep)


def replaceable_attentions(net: nn.Module) -> dict[str, nn.Module]:
    """Return the attentions that can be replaced, by path: those in blocks of known families."""
    family = FAMILIES.get(type(net))
    attentions = {}
    for section in () if family is None else family.body(net):
        attention = getattr(section.module, "attn", None) if section.kind == "block" else None
        try:
            if attention is not None and AttentionShape.of(attention):
                attentions[f"{section.path}.attn"] = attention
        except ArchitectureError:
            continue
    return attentions


def floor_candidates(path: str, norm: nn.Module, order: Tensor) -> Iterator[Candidate]:
    """Yield floors at quantiles of the ascending deviations that lie above the present floor."""
    assert isinstance(norm, FloorNorm)
    present = float(norm.floor)
    for share in QUANTILES:
        floor = float(order[int(share * (len(order) - 1))])
        if floor > present:
            raised = copy.deepcopy(norm)
            raised.floor.fill_(floor)
            yield Candidate(path, FLOOR, f"floor {floor:.3g}", math.log10(floor / present), raised)


def start_attention(name: str, old: nn.Module) -> Any:
    """Return the attention of that name, started from the weights of `old`."""
    weights = AttentionWeights.of(old)
    new: Any = REPLACEMENTS.load(ATTENTIONS[name] or "")(old)
    new.requires_grad_(False).eval().to(weights.query).start(weights)
    return new
