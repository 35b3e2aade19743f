"""A long campaign against enclosures: random networks, images and radii; no point of a ball leaves
a node.

    python -m tests.soundness.local_campaign --seconds 600 --seed 0
    python -m tests.soundness.local_campaign --programs --nodes 100000 --seed 0

The first takes vision transformers, the second random programs of odd layouts
(tests/soundness/local_laws.py), up to a count of checks. Prints seeds, from which --seed goes on,
and exits 1 at the first point found outside an enclosure.
"""

import sys
import time

from certcli.certify.options import ZONOTOPE
from certcli.enclosure.zonotopes.form import Unbounded
from certcli.enclosure.zonotopes.network import LocalNetwork
from tests.enclosure.test_zonotope_networks import OPTIONS, SIZE, image, largest_share, network
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosure_cases import CASES, forms
from tests.soundness.edits import Found, asked_for, bands
from tests.soundness.local_laws import check_program

KINDS = [kind for kind in OPTIONS if kind != "cumulative"]  # which no domain knows


def relaxations(seed: int) -> float:
    """The laws of tests/enclosure/test_zonotopes.py at other seeds: the largest share of what a
    form leaves free.
    """
    worst = 0.0
    for case in CASES:
        for size in (1e-6, 1e-2, 0.3, 0.8):
            for squares_on in (True, False):
                inputs = forms(case, size, squares_on, seed, mixed=seed % 2 == 1)
                try:
                    far, free = outside(case, inputs, *symbols(400, seed))
                except Unbounded:  # 1/x and its like of a form that reaches 0
                    continue
                worst = max(worst, float((far / free.clamp_min(1e-300)).max()))
    return worst


def enclosed_share(seed: int) -> float:
    """The largest share of what forms leave free, over all nodes of a random network, at several
    radii and settings.
    """
    model = network(KINDS[seed % len(KINDS)], seed)
    pixels = image(seed)
    label = int(model(pixels).argmax())
    local = LocalNetwork(model, SIZE)
    return max(
        largest_share(local, pixels, label, r, squares, symbols, partial=True)
        for r in (0.03, 1e-3, 1e-7)
        for squares, symbols in ((128, 4000), (0, 4000), (128, 60))
    )


def programs(seconds: float, seed: int, nodes: int) -> int:
    """The laws over random programs: counts of what was tried, the largest share by rule, and what
    domains refuse.
    """
    found, stop, first = Found(), time.monotonic() + seconds, seed
    checked = f"{ZONOTOPE} nodes"
    while time.monotonic() < stop and found.tried[checked] < nodes and not found.broken:
        check_program(seed, found)
        seed += 1
        if seed % 50 == 0:
            print(f"seed {seed}: {dict(sorted(found.tried.items()))}", flush=True)
    for reason, count in found.refused.most_common(20):
        print(f"refused {count}: {reason}")
    for domain in sorted({domain for domain, _ in found.tightest}):
        shares = {rule: share for (its, rule), share in found.tightest.items() if its == domain}
        for band, names in bands(shares):
            print(f"| {domain} | {band} | {', '.join(names)} |")
    peak_text = ", ".join(f"{name} {count:,}" for name, count in sorted(found.tried.items()))
    print(
        f"seeds {first} to {seed - 1}: {peak_text}; refused {found.refused.total():,}; broken {len(found.broken)}"
    )
    return found.ended()


def local_campaign() -> int:
    asked = asked_for(__doc__ or "", seconds=3600.0, nodes=100_000, programs=False)
    if asked.programs:
        return programs(asked.seconds, asked.seed, asked.nodes)
    stop = time.monotonic() + asked.seconds
    seed = asked.seed
    while time.monotonic() < stop:
        shares = enclosed_share(seed)
        laws = relaxations(seed + 1000)
        print(f"seed {seed}: nodes {shares:.3f}, laws {laws:.3f}", flush=True)
        if not max(shares, laws) <= 1:
            print("VIOLATED")
            return 1
        seed += 1
    print(f"nothing found: {seed - asked.seed} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(local_campaign())
