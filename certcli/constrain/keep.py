"""The largest eta a layer at which the network keeps its first choices, found end to end on images that took no part.

The layers' statistics are gathered once; a round constrains all layers at one eta, each starting where the round before
ended, and looks at the held-out images' logits. Logits move almost in proportion to eta, so the straight line from the old
logits through the new ones says at which eta each image's first choice would go (`Witness.reach`), and the next round is
made there. Two or three rounds suffice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from certcli.calibration import PHOTOGRAPHS
from certcli.constrain.network import Calibration, Options, constrain_to, write
from certcli.constrain.parallel import LayerResult
from certcli.constrain.projection import Eigenbasis
from certcli.fidelity import Fidelity, Witness, allowed_share, check_keep, keeps
from certcli.images import Images

ROUNDS = 4
"""Most times that all layers are constrained."""

START = 0.02
"""The first eta that is tried: near what networks of photographs turn out to allow."""

MOST = 0.5
"""The largest eta that is tried."""

_NEAR = 1.25
"""Two etas this close are one."""

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
    rounds: int


def constrain_keeping(
    calibration: Calibration,
    options: Options,
    keep: float,
    witness: Witness,
    report: Callable[[int, float, LayerResult], None] = lambda *_: None,
) -> Kept:
    """Constrain at the largest eta found that leaves `keep` of the first choices as they were (`keeps`), and write it.

    report(round, eta, result) is called for each layer of each round. The eta is at most MOST, and within 25 % of one
    that was refused, or the best of ROUNDS. If every round was refused, eta 0: nothing is changed.
    """
    check_keep(keep)
    model = calibration.model
    parameters: dict[str, Any] = {path: model.get_submodule(path).weight for path in calibration.paths}
    originals = {path: parameter.detach().clone() for path, parameter in parameters.items()}
    best = Kept(0.0, [], witness.compare(witness.before), 0)
    refused, eta = MOST * _NEAR, START
    bases: dict[str, Eigenbasis] = {}
    for turn in range(1, ROUNDS + 1):
        results = []
        tried = replace(options, eta=eta)
        for result in constrain_to(calibration, tried, bases=bases if calibration.memory_limit_bytes is None else None):
            results.append(result)
            report(turn, eta, result)
        write(model, {result.path: result.weight for result in results})
        logits = witness.logits(model)
        write(model, originals)
        found = witness.compare(logits)
        if keeps(found, keep, witness):
            best = Kept(eta, results, found, turn)
        else:
            refused = eta
        best = replace(best, rounds=turn)
        aim = _SAFE * eta * allowed_share(witness, logits, found, keep)
        # a prediction outside of what is known, or too close to it, is no news: between the two then
        if best.eta > 0 and refused <= _NEAR * best.eta:
            break
        if not best.eta < aim < refused:
            if best.eta > 0 and aim <= _NEAR * best.eta:
                break
            aim = (best.eta * refused) ** 0.5 if best.eta > 0 else eta / 2
        eta = min(MOST, aim)
        if best.eta == 0 and turn == ROUNDS - 1:
            eta /= 2  # the last chance to keep enough and change something
        if eta <= _NEAR * best.eta:
            break
    write(model, {result.path: result.weight for result in best.results})
    return best
