"""The largest radius that was itself proven: bisection over neighbourhoods, each of which is checked on its own."""

import math
from collections.abc import Callable

Check = Callable[[float], bool]
SMALLEST = 1e-12


def certified_radius(check: Check, guess: float, *, steps: int = 4, largest: float = 1e3) -> float:
    """A radius r for which check(r) was true, 0.0 when none was found down to 1e-12.

    check(r): whether the network is proven constant on the ball of radius r. From `guess` the radius grows or shrinks by
    factors 2, 4, 16, ... until one side is proven and the other is not, then `steps` geometric bisections follow. Nothing
    is assumed to be monotone: what is returned was checked itself.
    """
    proven, open_above = 0.0, math.inf
    radius, factor = guess, 2.0
    while SMALLEST <= radius <= largest:
        if check(radius):
            proven = max(proven, radius)
            if math.isfinite(open_above):
                break
            radius *= factor
        else:
            open_above = min(open_above, radius)
            if proven:
                break
            radius /= factor
        factor = min(factor * factor, 256.0) if not proven or math.isinf(open_above) else factor
    if not proven or math.isinf(open_above):
        return proven
    ratio = open_above / proven
    for _ in range(steps + max(0, math.ceil(math.log2(math.log2(ratio))))):
        middle = math.sqrt(proven * open_above)
        if not proven < middle < open_above:
            break
        if check(middle):
            proven = middle
        else:
            open_above = middle
    return proven
