"""A long campaign against the rules of the global bound: no slope that is found exceeds the bound,
whatever the weights.

    python -m tests.soundness.slope_campaign --checks 1000000 --seed 0

Each round draws every case of tests/helpers/lipschitz_cases.py with new weights, climbs its slope
(Jacobians) and measures it between pairs of images, near and far, at once in a batch; and holds
every tensor of it, and of random programs, to what is claimed about it. Prints a table of rules by
their tightest ratio of slope to bound; exits 1 at a claim that does not hold.
"""

import sys
import time

import torch
from torch import Tensor, nn

from certcli.engine.table import NoRule
from certcli.engine.tracer import Untraceable
from tests.helpers.lipschitz_cases import RULES, build_row
from tests.helpers.nodes import Claims
from tests.helpers.slopes import IMAGE, steepest_jacobian
from tests.soundness.edits import Found, asked_for, bands
from tests.soundness.local_programs import SIZE, program

PAIRS = 400
ALONE = 10
STEPS = 4
PROGRAMS = 20


@torch.no_grad()
def slopes_of_pairs(net: nn.Module, seed: int) -> Tensor:
    """Return slopes between two images of the box, of `PAIRS` pairs at distances of 1e-7 to 3; of a
    few without batches.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(PAIRS, *IMAGE, generator=generator, dtype=torch.float64)
    starts = torch.cat([noise[: PAIRS // 2], noise[PAIRS // 2 :].round()])
    moves = torch.randn(PAIRS, *IMAGE, generator=generator, dtype=torch.float64)
    moves /= moves.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    lengths = 10 ** (torch.rand(PAIRS, 1, 1, 1, generator=generator, dtype=torch.float64) * 7.5 - 7)
    others = (starts + lengths * moves).clamp(0, 1)
    try:
        results = [net(images).reshape(PAIRS, -1) for images in (starts, others)]
    except RuntimeError:  # a case that takes one image at a time
        starts, others = starts[:: PAIRS // ALONE], others[:: PAIRS // ALONE]
        results = [
            torch.stack([net(image[None]).flatten() for image in images])
            for images in (starts, others)
        ]
    apart = (starts - others).flatten(1).norm(dim=1)
    moved = (results[0] - results[1]).norm(dim=1) - 1e-12 * (
        1 + results[0].norm(dim=1)
    )  # float64 rounds both
    return (moved / apart)[apart > 0]


def slope_campaign() -> int:
    asked = asked_for(__doc__ or "", checks=1_000_000)
    found = Found()
    checked = found.tried
    tightest = dict.fromkeys(RULES, 0.0)
    seed = asked.seed
    started = time.monotonic()
    while checked.total() < asked.checks and not found.broken:
        for name in RULES:
            net = build_row(name, seed)
            known = Claims(net)
            upper = float(known.logits.base)
            wrong = list(known.faults(known.images(seed)))
            pairs = slopes_of_pairs(net, seed)
            steepest_slope = max(steepest_jacobian(net, steps=STEPS, seed=seed), float(pairs.max()))
            checked[name] += len(pairs) + 1
            if not steepest_slope <= upper * (1 + 1e-9):  # rounding of the measured slope
                wrong.append(f"a slope of {steepest_slope:.9g} above {upper:.9g}")
            found.broken += [f"{name}, seed {seed}: {fault}" for fault in wrong]
            if upper:
                tightest[name] = max(tightest[name], steepest_slope / upper)
        for number in range(seed * PROGRAMS, (seed + 1) * PROGRAMS):
            try:
                known = Claims(program(number), SIZE)
            except NoRule:  # attention to tokens of unbounded norm
                continue
            except Untraceable as refusal:  # rounding alone moves the logits of a chaotic program
                found.refused[str(refusal)] += 1
                continue
            wrong = list(known.faults(known.images(seed)))
            found.broken += [f"program {number}: {fault}" for fault in wrong]
        seed += 1
        print(
            f"seed {seed}: {checked.total():,} slopes, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    for band, names in bands(tightest):
        print(f"| {band} | {len(names)} | {', '.join(names)} |")
    print(
        f"{seed - asked.seed} networks of each of {len(RULES)} rules, {checked.total():,} slopes, "
        f"{found.refused.total()} of {(seed - asked.seed) * PROGRAMS} programs refused"
    )
    return found.ended()


if __name__ == "__main__":
    sys.exit(slope_campaign())
