"""The largest eta a layer at which the network keeps its first choices, found end to end on images that took no part.

The layers' statistics are gathered once. A trial constrains all layers at one eta, roughly, and looks at the held-out images'
logits. These move almost in proportion to eta, so the straight line from the old logits through the new ones says at which
eta each image's first choice would go (`Witness.reach`), and the next trial is made there. Where two trials are close, or
one went too far and says how far, the layers are constrained in earnest, and judged again by their own logits: what is
written is what kept enough. A trial takes a third of the time, and one or two suffice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from certcli.constrain.network import Calibration, constrain_to, try_at, write
from certcli.constrain.options import Options
from certcli.constrain.parallel import LayerResult
from certcli.constrain.projection import Eigenbasis
from certcli.evaluation.fidelity import Fidelity, Witness, allowed_share, check_keep, keeps
from certcli.images.calibration import PHOTOGRAPHS
from certcli.images.labelled import Images

TRIALS = 4
"""Most times that all layers are constrained roughly, to find eta."""

ROUNDS = 3
"""Most times that they then are in earnest: once, unless rough and exact weights differ in what they keep."""

ROUGH = 0.005
"""A trial's layers lie within this share of their least norms, or so float32 says."""

START = 0.02
"""The first eta that is tried: near what networks of photographs turn out to allow."""

MOST = 0.5
"""The largest eta that is tried."""

_NEAR = 1.25
"""Two etas this close are one."""

FAR = 8.0
"""A trial says nothing about etas more than this many times its own."""

_SAFE = 0.9
"""Share of the predicted eta that is tried, for the logits move a little faster than the line says."""


def usual_share(images: Images) -> float:
    """The share of first choices to keep unless one is given.

    0.98 of a network's own images, so that no more than two points of accuracy can go with them: a network that is nearly
    always right loses a point with each choice (digits: 5 points at 0.95). On synthetic photographs 0.95, which there
    bounds the logits' error (`fidelity.ERROR_SHARE`); with it networks of photographs lost .6 points at most.
    """
    return 0.95 if images.name == PHOTOGRAPHS else 0.98


@dataclass(frozen=True)
class Kept:
    """What the search ended with: the layers at one `eta`, and what the network then keeps."""

    eta: float
    results: Sequence[LayerResult]
    fidelity: Fidelity


def constrain_keeping(
    calibration: Calibration,
    options: Options,
    keep: float,
    witness: Witness,
    report: Callable[[float, str], None] = lambda *_: None,
) -> Kept:
    """Constrain at the largest eta found that leaves `keep` of the first choices as they were (`keeps`), and write it.

    report(eta, path) is called for each layer of each trial and round. The eta is at most MOST; it is within 25 % of one that
    was refused, or what such a one predicts. If every round was refused, eta 0: nothing is changed.
    """
    check_keep(keep)
    model = calibration.model
    parameters: dict[str, Any] = {path: model.get_submodule(path).weight for path in calibration.paths}
    originals = {path: parameter.detach() for path, parameter in parameters.items()}
    bases: dict[str, Eigenbasis] | None = {} if calibration.memory_limit_bytes is None else None

    found = unchanged = witness.compare(witness.before)

    def judged(weights: Mapping[str, Tensor], eta: float) -> tuple[bool, float]:
        """Whether the network keeps enough with these weights (`found`), and the eta at which it might keep just enough.

        Of several processes the leader looks: they must go the same way.
        """

        def look() -> tuple[bool, float]:
            nonlocal found
            write(model, weights)
            logits = witness.logits(model)
            write(model, originals)
            found = witness.compare(logits)
            return keeps(found, keep, witness), _SAFE * eta * allowed_share(witness, logits, found, keep, FAR)

        enough, aim = calibration.team.agree(look)
        return enough, aim

    def trial(eta: float) -> tuple[bool, float]:
        weights = {}
        for path, weight in try_at(calibration, replace(options, eta=eta, tolerance=ROUGH), bases):
            weights[path] = weight
            report(eta, path)
        return judged(weights, eta)

    eta = search(trial)
    for turn in range(1, ROUNDS + 1):
        results = []
        for result in constrain_to(calibration, replace(options, eta=eta), bases=bases):
            results.append(result)
            report(eta, result.path)
        enough, aim = judged({result.path: result.weight for result in results}, eta)
        if enough:
            write(model, {result.path: result.weight for result in results})
            return Kept(eta, results, found)
        nearer = eta / 2 if turn == ROUNDS - 1 else eta / _NEAR  # the last is to keep enough as surely as may be
        eta = min(aim, nearer) if aim > 0 else nearer
    return Kept(0.0, [], unchanged)


def search(trial: Callable[[float], tuple[bool, float]]) -> float:
    """An eta to constrain at, from at most TRIALS: trial(eta) says whether enough was kept, and at which eta it might be."""
    eta, kept, refused = START, 0.0, MOST * _NEAR
    for _ in range(TRIALS):
        enough, aim = trial(eta)
        if enough:
            kept = eta
        else:
            refused = eta
            if kept < aim < refused:  # between what is known, the line is as good as another trial
                return aim
        if refused <= _NEAR * kept:
            return kept
        if not kept < aim < refused:
            # a prediction outside of what is known is no news: between the two then
            if kept and aim <= _NEAR * kept:
                return kept
            aim = (kept * refused) ** 0.5 if kept else eta / 2
        if min(MOST, aim) <= _NEAR * kept:
            return kept
        eta = min(MOST, aim)
    return kept or eta
