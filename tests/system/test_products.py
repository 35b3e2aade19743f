"""Products by oneDNN, and torch's modes: as they were before a block, whatever ended it."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn import functional as F

from certcli.attack.judge import predict_classes
from certcli.audit.plan import EndsAfter, OutOfTime
from certcli.engine import table
from certcli.lipschitz.network import bound_network
from certcli.system import torch_modes
from tests.helpers import grids

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch lacks oneDNN",
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LEFT = draw(160, 96)
RIGHT = draw(96, 130, seed=1)
BIAS = draw(130, seed=2)
TOKENS = draw(5, 40, 96)
PAIR = draw(3, 160, 96), draw(3, 96, 130, seed=1)
PRODUCTS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "mm": lambda cast: cast(LEFT) @ cast(RIGHT),
    "left transposed": lambda cast: cast(LEFT.mT.contiguous()).mT @ cast(RIGHT),
    "right transposed": lambda cast: cast(LEFT) @ cast(RIGHT.mT.contiguous()).mT,
    "both transposed": lambda cast: cast(LEFT.mT.contiguous()).mT @ cast(RIGHT.mT.contiguous()).mT,
    "addmm": lambda cast: torch.addmm(cast(BIAS), cast(LEFT), cast(RIGHT)),
    "linear": lambda cast: F.linear(cast(TOKENS), cast(RIGHT.mT.contiguous()), cast(BIAS)),
    "linear without bias": lambda cast: F.linear(cast(TOKENS), cast(RIGHT.mT.contiguous())),
    "bmm": lambda cast: torch.bmm(*map(cast, PAIR)),
    "one of a batch": lambda cast: torch.bmm(*(cast(operand[:1]) for operand in PAIR)),
}
LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: LEFT.double() @ RIGHT.double(),
    "bfloat16": lambda: LEFT.bfloat16() @ RIGHT.bfloat16(),
    "every second row": lambda: draw(320, 96)[::2] @ RIGHT,
    "one row many times": lambda: LEFT[:1].expand(160, 96) @ RIGHT,
    "small": lambda: LEFT[:8] @ RIGHT,
    "a vector": lambda: LEFT @ RIGHT[:, :1],
    "a scaled sum": lambda: torch.addmm(BIAS, LEFT, RIGHT, beta=0.5),
}


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    product = torch_modes._onednn

    def counted(*operands: Any) -> Tensor:
        calls.append(None)
        return product(*operands)

    monkeypatch.setattr(torch_modes, "_onednn", counted)
    return calls


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("compute", PRODUCTS.values(), ids=PRODUCTS)
def test_the_sums_are_as_near_as_those_of_torch(
    compute: Callable[[Callable[[Tensor], Tensor]], Tensor],
    inference: bool,
    onednn_calls: list[None],
) -> None:
    exact = compute(Tensor.double)
    with torch.inference_mode(inference), torch_modes.OneDnnProducts():
        result = compute(lambda operand: operand)
    assert onednn_calls
    assert result.shape == exact.shape
    assert result.dtype == torch.float32
    # 96 products each: gamma_96 of float32 times the sum of the absolute values
    size = compute(lambda operand: operand.double().abs())
    assert bool(((result - exact).abs() <= 97 * 2.0**-24 * 1.01 * size).all())


@pytest.mark.parametrize("compute", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_all_else_is_torchs_own(compute: Callable[[], Tensor], onednn_calls: list[None]) -> None:
    plain = compute()
    with torch_modes.OneDnnProducts():
        result = compute()
    assert not onednn_calls
    assert torch.equal(result, plain)


def test_gradients_and_their_gradients_pass(onednn_calls: list[None]) -> None:
    def second(precision: torch.dtype) -> list[Tensor]:
        tokens, weight = (
            operand.to(precision).requires_grad_() for operand in (TOKENS, RIGHT.mT.contiguous())
        )
        loss = F.linear(tokens, weight).tanh().square().mean()
        gradients = torch.autograd.grad(loss, (tokens, weight), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        return [*gradients, *torch.autograd.grad(penalty, (tokens, weight))]

    exact = second(torch.float64)
    with torch_modes.OneDnnProducts():
        near = second(torch.float32)
    assert len(onednn_calls) > 3
    for value, true in zip(near, exact, strict=True):
        assert torch.linalg.vector_norm(value - true) <= 1e-5 * torch.linalg.vector_norm(true)


def test_a_verdict_is_taken_on_the_network_as_it_runs(onednn_calls: list[None]) -> None:
    network = torch.nn.Linear(96, 130)
    plain = predict_classes(network, LEFT)
    with torch_modes.OneDnnProducts():
        judged = predict_classes(network, LEFT)
        assert not onednn_calls
        network(LEFT)
        assert onednn_calls
    assert torch.equal(judged, plain)


def _without_layouts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.as_strided(x, x.shape, (x.shape[1], 1)) @ weight.mT


def _refusing(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("product", [_without_layouts, _refusing])
def test_a_library_that_reads_other_layouts_otherwise_is_not_taken(
    product: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_modes._agrees()
    monkeypatch.setattr(torch_modes, "_onednn", product)
    assert not torch_modes._agrees()


@pytest.mark.parametrize(
    ("processor", "capability", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),
        ("vendor_id : GenuineIntel", "AVX512", False),
    ],
)
def test_the_processor_decides(
    processor: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And the size of the network, on a CPU."""
    (tmp_path / "cpuinfo").write_text(processor)
    monkeypatch.setattr(torch_modes, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    torch_modes.is_faster.cache_clear()
    try:
        for net, large in (
            (torch.nn.Linear(512, 512), True),
            (torch.nn.Linear(8, 8), False),
            (torch.nn.Linear(512, 512, device="meta"), False),
        ):
            fast = isinstance(torch_modes.fast_products(net), torch_modes.OneDnnProducts)
            assert fast is (expected and large)
    finally:
        torch_modes.is_faster.cache_clear()


WATCHED = (
    "engine/trace.py",
    "system/torch_modes.py",
    "torch/utils/_python_dispatch.py",
    "torch/autograd/grad_mode.py",
    "torch/fx/_symbolic_trace.py",
    "contextlib.py",
)
"""Files in whose lines the timer rings: those that enter and leave modes."""
EVERY = 15
"""Each case of the test rings in every fifteenth line."""
FIRST = range(EVERY) if grids.EVERY else (0,)


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
