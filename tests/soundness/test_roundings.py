"""Every place where a theorem rounds up reaches a bound: rounded up further there alone, some bound
or size grows.
"""

import ast
import functools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import certcli.lipschitz
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace
from certcli.lipschitz.network import propagate, trace_network
from certcli.lipschitz.numerics import arithmetic, convolution, eigenvalues, outward, spectral
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from tests.helpers.lipschitz_cases import build_row, f
from tests.helpers.reached import Site, Sites
from tests.helpers.slopes import IMAGE
from tests.lipschitz.test_attention import Copies
from tests.nn.test_attention import PLACES, WIDTH, attention_network, replacement, stir

FOLDER = Path(certcli.lipschitz.__file__).parent
NUMERICS = (arithmetic, convolution, eigenvalues, outward, spectral)
FURTHER = 2.0**40
UP = outward.up
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
    **{name: (functools.partial(build_row, name), IMAGE) for name in REACHING.split()},
    "error function": (lambda: f(lambda m, x: torch.erf(x).erf()).eval(), IMAGE),
    # many tokens with small scores: the constants of positions are then less than those of any
    # softmax
    "windows": (lambda: attention_network("scsa-attention", "windows", 0.05), (8, WIDTH)),
    "many tokens": (_many_tokens, (49, WIDTH)),
}


def written_calls(files: Iterable[Path], *names: str) -> set[Site]:
    """Return the calls of these functions in these files."""
    return {
        (str(file), node.lineno, node.col_offset)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    }


@functools.cache
def traced(name: str) -> Trace:
    make, size = ROWS[name]
    return trace_network(make(), size)


def bound_and_sizes(name: str) -> list[float]:
    """Return the bound of a row's network, and the sizes of its result."""
    try:
        outcome = propagate(traced(name), Arithmetic())
        logits = outcome.context.settle(outcome.logits)
    except (
        NoRule,
        OverflowError,
    ) as reason:  # so much larger that float64 ends, or rounded the wrong way
        below = re.search(r"-\S+ is not a number >= 0|is negative", str(reason))
        return [-math.inf if below else math.inf] * 4
    size = logits.size
    return [float(part) for part in (logits.base, size.total, size.peak, size.fibre)]


def test_every_rounding_of_a_rule_reaches_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(UP, FURTHER)
    for name, module in list(sys.modules.items()):
        if name.startswith("certcli.lipschitz.rules") and getattr(module, "up", None) is UP:
            monkeypatch.setattr(module, "up", sites)
    plain: dict[str, list[float]] = {}
    rows: dict[Site, list[str]] = defaultdict(list)
    for name in ROWS:
        sites.reached.clear()
        plain[name] = bound_and_sizes(name)
        for site in sites.reached:
            rows[site].append(name)
    for sites.further, names in rows.items():
        assert any(
            a > b * (1 + 1e-6)
            for name in names
            for a, b in zip(bound_and_sizes(name), plain[name], strict=True)
        ), sites.further
    calls = written_calls((FOLDER / "rules").glob("*.py"), "up")
    assert set(rows) <= calls
    assert len(calls - set(rows)) <= 5  # at import, in no rule, or in no row of the rules' laws


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def convolved_rows(groups: int = 1, stride: int = 1, padding: int = 1) -> list[float]:
    geometry = convolution.Geometry((stride,) * 2, ((padding,) * 2,) * 2, (1, 1), groups, (6, 6))
    return [convolution.conv_norm(noise(4, 4 // groups, 3, 3), geometry)]


def random_matrices() -> list[float]:
    arith = Arithmetic()
    a = arith.matrix(noise(3, 8))
    b = Matrix(noise(8, 5), 0.01)
    made = [arith.matmul(a, b), arith.add(a, a), arith.centred(a, 0), arith.scale(b, 3.0)]
    factors = torch.linalg.cholesky_ex
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # any factor proves something: half of the best one leaves a rest
        patch.setattr(
            torch.linalg, "cholesky_ex", lambda gram: (factors(gram)[0] / 2, torch.zeros(1))
        )
        thin = arith.sigma_product(a, arith.matrix(noise(3, 9)))
    return [*(matrix.error for matrix in made), float(thin)]


NUMBERS: dict[str, Callable[[], list[float]]] = {
    "lengths": lambda: [
        outward.frobenius_norm(noise(30)),
        outward.frobenius_norm(noise(30) * 1e-170),
    ],
    "norms": lambda: spectral.spectral_norms([noise(6, 9), noise(6, 9) + 1], [0.0, 0.1]),
    "powers": lambda: [eigenvalues.gram_iteration(noise(6, 6) @ noise(6, 6).mT)],
    "matrices": random_matrices,
    "patches": lambda: convolved_rows(stride=3, padding=0),
    "torus": convolved_rows,
    "depthwise torus": lambda: convolved_rows(groups=4),
}


def test_every_rounding_and_every_lost_sum_reaches_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that lose up to n 2^-20 of their terms in place of n 2^-53, so that a loss of a loss
    shows as well.
    """
    monkeypatch.setattr(convolution, "_DENSE_ENTRIES", 0)
    for name in ("up", "root_up", "gamma"):
        plain = (lambda terms: terms * 2.0**-20) if name == "gamma" else getattr(outward, name)
        sites = Sites(plain, 16.0 if name == "gamma" else FURTHER)
        for module in NUMERICS:
            monkeypatch.setattr(module, name, sites, raising=False)
        rows: dict[Site, list[str]] = defaultdict(list)
        known = {}
        for row, compute in NUMBERS.items():
            sites.reached.clear()
            known[row] = compute()
            for site in sites.reached:
                rows[site].append(row)
        for sites.further, names in rows.items():
            found = [
                (a, b) for row in names for a, b in zip(NUMBERS[row](), known[row], strict=True)
            ]
            assert any(a > b * (1 + 1e-9) for a, b in found), sites.further
        sites.further = None
        left = written_calls((Path(str(module.__file__)) for module in NUMERICS), name) - set(rows)
        assert len(left) <= (name == "up")  # Lambert's, where the exponential is off
