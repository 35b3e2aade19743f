"""Every operation that errors are followed through: executed in float32, in other memory formats
and by other kernels, it loses no more than its rule says in float32's units.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from certcli.rounding import curves, running_error, sums
from certcli.rounding.precisions import PRECISIONS
from certcli.rounding.running_error import RULES, ExecutedOperation, WithError
from tests.helpers.grids import EVERY
from tests.helpers.layouts import formats_and_kernels
from tests.rounding.test_passing_on import ROWS, allowed, ascended, at, without_a_row

WIDER = PRECISIONS["float32"].unit / PRECISIONS["float64"].unit
SURROUNDINGS = list(formats_and_kernels())
LARGE = 3e3
"""Added to all arguments, so that sums cancel."""


class Single(TorchFunctionMode):
    """Every function gets float32 in place of float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._single, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _single(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == torch.float64 else x


@pytest.fixture
def units_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rules float32's units of rounding, of elementary functions and of underflow."""
    gamma = sums.gamma
    for module in (sums, curves):
        monkeypatch.setattr(module, "UNIT", sums.UNIT * WIDER)
        monkeypatch.setattr(module, "gamma", lambda terms: gamma(terms) * WIDER)
        monkeypatch.setattr(module, "TINY", 1e-30)
    monkeypatch.setattr(curves, "FUNCTION", PRECISIONS["float32"].function)
    monkeypatch.setattr(running_error, "TINY", 1e-30)


def lost(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    surrounded: Callable[[], AbstractContextManager[Any]],
) -> float:
    """Return how far float32 is from float64, of arguments that float32 has."""
    exact = function(*inputs)
    with torch.no_grad(), Single(), surrounded():
        executed = function(*[x.float() for x in inputs])
    return float((executed.double() - exact).norm())


def chosen(name: str) -> list[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Return the surroundings of a row: all of them, or the plain one and another in turn."""
    if EVERY:
        return SURROUNDINGS
    place = list(ROWS).index(name) % (len(SURROUNDINGS) - 1)
    return [SURROUNDINGS[0], *islice(SURROUNDINGS, place + 1, place + 2)]


@pytest.mark.usefixtures("units_of_float32")
@pytest.mark.parametrize("shift", [0.0, LARGE])
@pytest.mark.parametrize("name", ROWS)
def test_no_execution_in_float32_loses_more(name: str, shift: float) -> None:
    function, inputs, _, _ = ROWS[name]
    inputs = tuple((x + shift).float().double() for x in inputs)
    most = allowed(function, inputs, 0.0)
    for title, surrounded in chosen(name):
        distance = lost(function, inputs, surrounded)
        assert not distance > most, title


@pytest.mark.parametrize("name", ROWS)
def test_no_two_executions_in_float64_differ_by_more_than_twice_it(name: str) -> None:
    function, inputs, _, _ = ROWS[name]
    most = allowed(function, inputs, 0.0)
    plain = function(*inputs)
    for title, surrounded in chosen(name):
        with torch.no_grad(), surrounded():
            executed = function(*inputs)
        assert not float((executed - plain).norm()) > 2 * most, title


def steep(op: ExecutedOperation, x: Tensor) -> WithError:
    """A curve that is taken for one of slope 1."""
    return op.run(), op.size(x)


def test_a_wrong_slope_that_is_added_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "sinh", steep)
    assert without_a_row() == {"sinh"}
    inputs = (at(2.0),)
    assert ascended(torch.sinh, inputs, 1e-3) > 3 * allowed(torch.sinh, inputs, 1e-3)


@pytest.mark.usefixtures("units_of_float32")
def test_a_rounding_that_is_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "tanh", lambda op, x: (op.run(), op.norm(x) * 2.0**-40))
    inputs = (at(0.3, 0.7, 1.1),)
    surrounded = SURROUNDINGS[0][1]
    assert lost(torch.tanh, inputs, surrounded) > allowed(torch.tanh, inputs, 0.0)
