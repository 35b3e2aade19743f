"""Search the largest radius of a grid by bisection; every radius returned was itself proven."""

import math
from collections.abc import Callable

Check = Callable[[float], bool]
SMALLEST = 1e-12
BEYOND = 1e-6
"""The grid lies this far beyond powers of two: a certificate holds at what its radius exceeds, and 0.5 is asked for."""


def certified_radius(
    check: Check, guess: float, *, steps: int = 4, largest: float = 1e3, close: bool = False
) -> float:
    """Return r = (1 + BEYOND) 2^(k / 2^steps) for which check(r) was true; 0.0 when none, down to 1e-12.

    From the grid point next to `guess` the radius grows or shrinks by factors 2, 4, 16, ... until
    one side is proven and the other is not. Then the interval is halved until the next larger point
    has failed: 4.4 % for 4 steps. Where check is monotone, the result does not depend on the guess.

    Args:
        check: whether the network is proven constant on the ball of radius r.
        close: the guess is another image's radius; the first stride is then two grid points, so
            most images take three checks.
    """
    parts = 2**steps
    place = math.floor(math.log2(min(max(guess, 2 * SMALLEST), largest)) * parts + 0.01)
    stride = min(2, parts) if close else parts
    proven: int | None = None
    refused: int | None = None
    while SMALLEST <= _radius(place, parts) <= largest and (proven is None or refused is None):
        if check(_radius(place, parts)):
            proven = place
            place = place + stride
        else:
            refused = place
            place = place - stride
        stride = min(2 * stride, 8 * parts)
    if proven is None:
        return 0.0
    while refused is not None and refused - proven > 1:
        middle = (proven + refused) // 2
        if check(_radius(middle, parts)):
            proven = middle
        else:
            refused = middle
    return _radius(proven, parts)


def _radius(place: int, parts: int) -> float:
    return (1 + BEYOND) * 2.0 ** (place / parts)
