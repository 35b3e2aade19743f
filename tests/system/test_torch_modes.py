"""A timer may ring in any line: in the entry of a mode, in its exit, while torch.fx takes back patches."""

import gc
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from certcli.audit.clock import EndsAfter, OutOfTime
from certcli.engine import table
from certcli.lipschitz.network import bound_network
from tests.helpers import grids

WATCHED = (
    "engine/trace.py",
    "system/torch_modes.py",
    "torch/utils/_python_dispatch.py",
    "torch/autograd/grad_mode.py",
    "torch/fx/_symbolic_trace.py",
    "contextlib.py",
)
"""Files in whose lines the timer rings: those that enter and leave modes."""
EVERY = 7
"""Each case of the test rings in every seventh line."""
FIRST = range(EVERY) if grids.EVERY else (0, 3)


class Bell:
    """Raises OutOfTime in the n-th line of `WATCHED` that runs, as a signal's handler would."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line" and signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise OutOfTime
        return self


def state() -> tuple[object, ...]:
    return (
        _len_torch_dispatch_stack(),
        _len_torch_function_stack(),
        torch.is_grad_enabled(),
        nn.Module.__call__,
        nn.Module.__getattr__,
        table.patched_function(),
    )


@pytest.fixture
def light_collections() -> None:
    """A collection looks at what the test makes alone. What is frozen stays so: afterwards each
    collection of an audit would walk over all of torch again.
    """
    gc.freeze()


@pytest.mark.usefixtures("light_collections")
@pytest.mark.parametrize("first", FIRST)
def test_a_stage_that_is_broken_off_anywhere_leaves_torch_as_it_was(first: int) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    bound_network(net, (1, 2, 2), 3)  # what it imports is there then
    before = state()
    at = first + 1
    rung = True
    while rung:
        bell = Bell(at)
        watching = sys.gettrace()
        try:
            with EndsAfter(60.0):
                sys.settrace(bell)
                bound_network(net, (1, 2, 2), 3)
            rung = False
        except OutOfTime:
            at += EVERY
        finally:
            sys.settrace(watching)
        assert state() == before
    assert at > 100  # the timer rang in many lines, not in the first ones alone


@pytest.mark.usefixtures("light_collections")
@pytest.mark.parametrize("handling", [False, True])
def test_generators_that_are_left_open_end_with_the_block(handling: bool) -> None:
    """Also those in a cycle, and of an exception that was being handled: collected later, they would
    switch gradients off then.
    """

    def without_gradients() -> Iterator[None]:
        with torch.no_grad():
            yield

    def leave_open() -> None:
        with torch.no_grad():
            generator = without_gradients()
            next(generator)
        cycle: list[Any] = [generator]
        cycle.append(cycle)
        raise ValueError if handling else OutOfTime

    def work() -> None:
        try:
            leave_open()
        except ValueError:
            raise OutOfTime  # noqa: B904 (as a signal would)

    with pytest.raises(OutOfTime), EndsAfter(60.0):
        work()
    assert torch.is_grad_enabled()
    gc.collect()
    assert torch.is_grad_enabled()
