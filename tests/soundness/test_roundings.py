"""Every place where a theorem rounds up reaches a bound: rounded up further there alone, some bound or size grows."""

import ast
import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import certcli.lipschitz
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace
from certcli.lipschitz.numerics import spectral
from certcli.lipschitz.numerics.arithmetic import RigorousArithmetic
from certcli.lipschitz.propagate import propagate, trace_network
from tests.helpers.lipschitz_cases import build
from tests.helpers.slopes import IMAGE
from tests.lipschitz.test_attention import Copies
from tests.nn.test_attention import PLACES, WIDTH, network, replacement, stir

FOLDER = Path(certcli.lipschitz.__file__).parent
Site = tuple[str, int]
FURTHER, UP = 2.0**40, spectral.up
REACHING = (
    "attention-l2-untied batch-norm-folded-twice group-norm curves adaptive-1d simple-norm-2d response-norm normalize-square "
    "l2-normalize center-norm-folded floor-norm-linear sigmoid unfold attention-bare attention-moving-mask "
    "attention-positional attention-l2-windows token-convolution-after-linear deviations variances fold attention-l2"
)
"""Rows that reach every place between them."""


def _many_tokens() -> nn.Module:
    attention = replacement("lnorm-attention", PLACES["tokens"]())
    stir(attention, 0.05)
    return Copies(attention.double().eval(), None).eval()


ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (functools.partial(build, name), IMAGE) for name in REACHING.split()},
    # many tokens with small scores: the constants of positions are then less than those of any softmax
    "windows": (lambda: network("scsa-attention", "windows", 0.05), (8, WIDTH)),
    "many tokens": (_many_tokens, (49, WIDTH)),
}


class Sites:
    """Stands for `up`: notes who calls it, and rounds up further for one caller."""

    def __init__(self) -> None:
        self.reached: set[Site] = set()
        self.further: Site | None = None

    def __call__(self, value: float, ulps: int = 1) -> float:
        frame = sys._getframe(1)
        site = (frame.f_code.co_filename, frame.f_lineno)
        self.reached.add(site)
        return UP(value, ulps) * (FURTHER if site == self.further else 1.0)


@functools.cache
def traced(name: str) -> Trace:
    make, size = ROWS[name]
    return trace_network(make(), size)


def numbers(name: str) -> list[float]:
    """Return the bound of a row's network, and the sizes of its result."""
    try:
        outcome = propagate(traced(name), RigorousArithmetic())
        logits = outcome.context.settle(outcome.logits)
    except (NoRule, OverflowError):  # so much larger that float64 ends
        return [math.inf] * 4
    size = logits.size
    return [float(part) for part in (logits.base, size.total, size.peak, size.fibre)]


def test_every_rounding_of_a_rule_reaches_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites()
    for name, module in list(sys.modules.items()):
        if name.startswith("certcli.lipschitz.rules") and getattr(module, "up", None) is UP:
            monkeypatch.setattr(module, "up", sites)
    plain: dict[str, list[float]] = {}
    rows: dict[Site, list[str]] = defaultdict(list)
    for name in ROWS:
        sites.reached.clear()
        plain[name] = numbers(name)
        for site in sites.reached:
            rows[site].append(name)
    for sites.further, names in rows.items():
        assert any(a > b * (1 + 1e-6) for name in names for a, b in zip(numbers(name), plain[name], strict=True)), (
            sites.further
        )
    written = {
        (str(file), node.lineno)
        for file in (FOLDER / "rules").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "up"
    }
    assert set(rows) <= written
    assert len(written - set(rows)) <= 5  # at import, in no rule, or in no row of the rules' laws
