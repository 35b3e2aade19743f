"""Find the largest eta at which the network keeps its first choices on held-out images.

A trial constrains all layers to a coarser tolerance at one eta and compares the held-out logits. These move almost
in proportion to eta, so the line from the old logits through the new ones predicts the eta at which
each first choice changes (`ReferenceLogits.reach`); the next trial is made there. Then the layers
are constrained exactly and judged again by their own logits, on all images; a trial runs those that
change first (`ReferenceLogits.trial_logits`). The statistics are gathered once. One
or two trials suffice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from certcli.constrain.network import LayerCalibration, LayerResult, constrain_to, write
from certcli.constrain.prox import Eigenbasis
from certcli.constrain.settings import ConstrainSettings
from certcli.evaluation.fidelity import (
    Fidelity,
    ReferenceLogits,
    allowed_share,
    check_keep,
    keeps_enough,
)
from certcli.images.calibration import PHOTOGRAPHS
from certcli.images.labelled import Images

TRIALS = 4
"""Most trials: rough constraints of all layers, to find eta."""

ROUNDS = 3
"""Most exact rounds: one, unless rough and exact weights differ in the choices that they keep."""

ROUGH = 0.005
"""Tolerance of a trial: its norms lie within this share of the least ones."""

START = 0.01
"""The first eta tried, near the result for networks of photographs."""

MOST = 0.5
"""The largest eta tried."""

_NEAR = 1.25
"""Two etas within this factor count as one."""

FAR = 8.0
"""A trial predicts etas up to this many times its own."""

_SAFE = 0.9
"""The share of the predicted eta that is tried: the logits move a little faster than the line predicts."""


def usual_share(images: Images) -> float:
    """Return the default share of first choices to keep.

    It is 0.98 on a network's own images, so that accuracy falls by two points at most (digits lost
    5 points at 0.95). On synthetic photographs it is 0.95, which there limits the logit error
    (`fidelity.CHANGED_PER_ERROR`).
    """
    return 0.95 if images.name == PHOTOGRAPHS else 0.98


@dataclass(frozen=True)
class KeepResult:
    """The result of the search: the layers at one `eta`, and the fidelity of the network."""

    eta: float
    results: Sequence[LayerResult]
    fidelity: Fidelity


def constrain_keeping(
    calibration: LayerCalibration,
    settings: ConstrainSettings,
    keep: float,
    reference: ReferenceLogits,
    report: Callable[[float, str], None] = lambda *_: None,
) -> KeepResult:
    """Constrain at the largest eta that keeps the share `keep` of first choices; write weights.

    The eta is at most MOST, and lies within 25 % of a refused one or is predicted by it. If every
    round is refused, eta is 0 and nothing changes.

    Args:
        report: called with (eta, path) for each layer of each trial and round.
    """
    check_keep(keep)
    model = calibration.model
    parameters: dict[str, Any] = {
        path: model.get_submodule(path).weight for path in calibration.paths
    }
    originals = {path: parameter.detach() for path, parameter in parameters.items()}
    bases: dict[str, Eigenbasis] | None = {} if calibration.memory_limit_bytes is None else None

    fidelity = unchanged = reference.compare(reference.before)

    def judged(
        settings: ConstrainSettings, logits_of: Callable[[Any], Tensor]
    ) -> tuple[list[LayerResult], bool, float]:
        """Return the layers at these settings, whether they keep enough, and the predicted eta that
        just does.

        The leader decides for all processes.
        """
        results = []
        for result in constrain_to(calibration, settings, bases):
            results.append(result)
            report(settings.eta, result.path)

        def look() -> tuple[bool, float]:
            nonlocal fidelity
            write(model, {result.path: result.weight for result in results})
            fidelity = reference.compare(logits_of(model))
            write(model, originals)
            aim = _SAFE * settings.eta * allowed_share(fidelity, keep, FAR)
            return keeps_enough(fidelity, keep), aim

        return results, *calibration.team.agree(look)

    def trial(eta: float) -> tuple[bool, float]:
        rough = replace(settings, eta=eta, tolerance=ROUGH)
        _, enough, aim = judged(rough, reference.trial_logits)
        return enough, aim

    eta = search_eta(trial)
    for turn in range(1, ROUNDS + 1):
        results, enough, aim = judged(replace(settings, eta=eta), reference.logits)
        if enough:
            write(model, {result.path: result.weight for result in results})
            return KeepResult(eta, results, fidelity)
        nearer = eta / 2 if turn == ROUNDS - 1 else eta / _NEAR  # the last round must keep enough
        eta = min(aim, nearer) if aim > 0 else nearer
    return KeepResult(0.0, [], unchanged)


def search_eta(trial: Callable[[float], tuple[bool, float]]) -> float:
    """Return an eta from at most TRIALS calls of trial(eta) -> (enough is kept, predicted eta)."""
    eta = START
    accepted = 0.0
    refused = MOST * _NEAR
    for _ in range(TRIALS):
        enough, aim = trial(eta)
        if enough:
            accepted = eta
        else:
            refused = eta
            if accepted < aim < refused:  # between known etas the line is as good as a trial
                return aim
        if refused <= _NEAR * accepted:
            return accepted
        if not accepted < aim < refused:
            # ignore a prediction outside the known etas: take one between them
            if accepted and aim <= _NEAR * accepted:
                return accepted
            aim = (accepted * refused) ** 0.5 if accepted else eta / 2
        if min(MOST, aim) <= _NEAR * accepted:
            return accepted
        eta = min(MOST, aim)
    return accepted or eta
