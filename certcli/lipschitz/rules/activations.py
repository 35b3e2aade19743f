"""Activations by their curves. Proofs: docs/bounds.md, section 3."""

import math
from typing import Any

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.engine.curves import Curve, register_curves
from certcli.lipschitz.context import Context
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


def applied(ctx: Context, x: Value, curve: Curve) -> Value:
    """Return the value after a curve, entry by entry."""
    x = ctx.settle(x)
    old = x.size
    arith = ctx.arith
    growth = arith.const(curve.growth)
    through_0 = curve.offset == 0 and math.isfinite(curve.growth)

    def peak() -> Any:
        if not math.isfinite(curve.growth):
            return arith.const(curve.limit)
        grown = growth * old.peak
        grown = grown if through_0 else grown + arith.const(curve.offset)
        bounded = math.isfinite(curve.limit)
        return arith.minimum(grown, arith.const(curve.limit)) if bounded else grown

    return ctx.chain(
        x,
        arith.const(curve.slope),
        curve.why,
        (lambda: growth * old.fibre) if through_0 else None,
        axis=old.axis,
        total=(lambda: growth * old.total) if through_0 else None,
        peak=peak,
        shape=x.shape,
    )


register_curves(rules, Value, applied)
