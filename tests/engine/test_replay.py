"""Networks that are not their trace: a true bound or a refusal, never a number below a measured
slope.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers import activations

from certcli.engine import table
from certcli.engine.replay import differs, state_of, tensor_checksum
from certcli.lipschitz.network import bound_network
from tests.helpers.lipschitz_cases import f
from tests.helpers.slopes import IMAGE, require_no_slope_above, steepest_pair

Case = tuple[Callable[[], nn.Module], str | None]
"""A network, and a part of its refusal's reason; None: it has a bound."""


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 50.0


class Net(nn.Module):
    """x -> f(self, x), with places to keep things in."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.register_buffer("store", torch.zeros(1, *IMAGE))
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def adds_to_store(net: Net, x: Tensor) -> Tensor:
    store = torch.zeros_like(x)
    store.add_(x * 9)
    return store + x


def writes_out(net: Net, x: Tensor) -> Tensor:
    return x + torch.mul(x, 9.0, out=torch.empty(x.shape, dtype=x.dtype))


def adds_to_buffer(net: Net, x: Tensor) -> Tensor:
    net.store.mul_(0.0).add_(x[:1])
    return net.store * 5 + x


def adds_behind(net: Net, x: Tensor) -> Tensor:
    net.store.data += 1.0
    return x * net.store.mean()


def is_tensor(net: Net, x: Any) -> Tensor:
    return 50 * x if isinstance(x, Tensor) else 2 * x


def is_exactly_tensor(net: Net, x: Any) -> Tensor:
    return 50 * x if type(x) is Tensor else 2 * x


def unpacks(net: Net, x: Any) -> Tensor:
    first, second = x.transpose(0, 1)
    return 2 * first - second


def counts(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return 2 * x if net.calls < 9 else 50 * x


def trains(net: Any, x: Tensor) -> Tensor:
    y = net.bn(x)
    net.bn.train()
    return y


def swaps(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    net.act = Times()
    return y


GENERATOR = torch.Generator().manual_seed(0)


def batch_mean(net: Net, x: Tensor) -> Tensor:
    return x + 9 * x.mean(0, keepdim=True)


def hooked(before: bool) -> nn.Module:
    net = Net(lambda m, x: m.act(x), act=nn.ReLU())
    if before:
        net.act.register_forward_pre_hook(lambda module, inputs: (50 * inputs[0],))
    else:
        net.act.register_forward_hook(lambda module, inputs, output: 50 * output)
    return net


TRACES: dict[str, Case] = {
    "a hook": (lambda: hooked(False), "act has a forward hook"),
    "a hook before": (lambda: hooked(True), "act has a forward hook"),
    "written into a copy": (lambda: Net(adds_to_store), "writes"),
    "written out": (lambda: Net(writes_out), "writes"),
    "written into a buffer": (lambda: Net(adds_to_buffer), "writes"),
    "written behind the back": (lambda: Net(adds_behind), "store"),
    "isinstance": (lambda: Net(is_tensor), "another graph"),
    "type": (lambda: Net(is_exactly_tensor), "another"),
    "unpacks": (lambda: Net(unpacks), None),
    "counts": (lambda: Net(counts), "calls"),
    "trains": (lambda: Net(trains, bn=nn.BatchNorm2d(2)), "bn is in training mode"),
    "swaps": (lambda: Net(swaps, act=nn.ReLU()), "act"),
    "random": (lambda: Net(lambda m, x: x * random.random() * 50), "random"),
    "numpy.random": (lambda: Net(lambda m, x: x * float(numpy.random.rand()) * 50), "random"),
    "private generator": (
        lambda: Net(lambda m, x: x * m.own.random() * 50, own=random.Random(0)),
        "own",
    ),
    "generator from outside": (
        lambda: Net(lambda m, x: x * torch.rand(1, generator=GENERATOR).double()),
        "other logits",
    ),
    "size of the batch": (lambda: Net(lambda m, x: x * (2.0 if len(x) == 1 else 50.0)), "batch"),
    "place in the batch": (
        lambda: Net(lambda m, x: x * torch.arange(1, len(x) + 1).view(-1, 1, 1, 1)),
        "batch",
    ),
    "the last of the batch": (lambda: Net(lambda m, x: x + 9 * x[-1:]), "batch"),
    "tokens on the batch axis": (
        lambda: Net(
            lambda m, x: functional.softmax(x.reshape(-1, 4).double(), dim=0).reshape(x.shape)
        ),
        "batch",
    ),
    "other operations in a batch": (
        lambda: Net(lambda m, x: 2 * x if len(x) == 1 else x * 4 - x - x),
        None,
    ),
    "batch": (lambda: Net(batch_mean), "batch"),
    "rolled into the next image": (lambda: Net(lambda m, x: x.roll(3)), "batch"),
    "not a number": (lambda: Net(lambda m, x: 2 * x + float("nan")), "finite"),
    "a parameter called constant_0": (
        lambda: Net(
            lambda m, x: x.reshape(-1, 4, 8) * torch.full((8,), 0.1).to(x) * m.constant_0,
            constant_0=nn.Parameter(torch.full((8,), 50.0)),
        ),
        None,
    ),
}


def generators() -> list[str]:
    """The states of the generators that the process shares."""
    numbers = numpy.random.get_state()
    return [
        str(random.getstate()),
        str(torch.get_rng_state().tolist()),
        str((numbers[1].tolist(), numbers[2:])),
    ]


@pytest.mark.parametrize("name", TRACES)
def test_a_network_that_is_not_its_trace_has_no_bound(name: str) -> None:
    torch.manual_seed(0)
    build, reason = TRACES[name]
    net = build().double().eval()
    states = generators()
    require_no_slope_above(net, reason)
    assert generators() == states


@pytest.mark.parametrize(
    "register", ["register_module_forward_hook", "register_module_forward_pre_hook"]
)
def test_a_hook_for_all_modules_leaves_no_bound(register: str) -> None:
    net = Net(lambda m, x: m.act(x), act=nn.ReLU()).double().eval()
    handle = getattr(nn.modules.module, register)(lambda module, inputs, *output: None)
    try:
        require_no_slope_above(net, "a hook is set for all modules")
    finally:
        handle.remove()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


_RELU = functional.relu
_GELU = functional.gelu
_LINEAR = functional.linear

PATCHES: dict[str, tuple[Any, str, Any, Callable[[], nn.Module]]] = {
    "forward of a class": (nn.GELU, "forward", lambda self, x: 50 * _GELU(x), lambda: nn.Sequential(nn.GELU())),
    "forward of another class": (nn.ReLU, "forward", nn.SELU.forward, lambda: nn.Sequential(nn.ReLU())),
    "function that a module of timm calls": (
        activations, "hard_swish", lambda x, inplace=False: 50 * x, lambda: nn.Sequential(activations.HardSwish()),
    ),
    "function that a module calls": (
        functional, "relu", lambda x, inplace=False: 50 * _RELU(x),
        lambda: nn.Sequential(nn.ReLU()),
    ),
    "code of a function": (
        functional.relu, "__code__", (lambda input, inplace=False: 50 * input.clamp_min(0)).__code__,
        lambda: nn.Sequential(nn.ReLU()),
    ),
    "builtin function": (
        functional, "linear", lambda x, w, b=None: 50 * _LINEAR(x, w, b),
        lambda: nn.Sequential(nn.Linear(4, 4)),
    ),
    "function of the network": (
        functional, "gelu", lambda x, approximate="none": 50 * _GELU(x), lambda: f(lambda m, x: functional.gelu(x)),
    ),
    "tensor method": (Tensor, "relu", lambda self: 50 * _RELU(self), lambda: f(lambda m, x: x.relu())),
    "call of modules": (
        nn.Module, "_call_impl", lambda self, *a, **k: 50 * self.forward(*a, **k), lambda: nn.Sequential(nn.ReLU()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_library_has_a_true_bound_or_none(name: str) -> None:
    owner, attribute, value, build = PATCHES[name]
    torch.manual_seed(0)
    net = build().double().eval()
    before = bound_network(net, IMAGE, 3).upper
    assert before.finite
    with patched(owner, attribute, value):
        result = bound_network(net, IMAGE, 3)
        assert not result.upper.finite or steepest_pair(net) <= float(result.upper)
    assert bound_network(net, IMAGE, 3).upper == before


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.bool], ids=str
)
def test_the_digest_of_a_tensor_sees_an_entry_and_its_place(dtype: torch.dtype) -> None:
    storage = torch.arange(16) % 5
    tensor = storage.to(dtype)[1:]  # where a word of eight bytes need not begin
    known = tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == known
    changed = tensor.clone()
    changed[3] = ~changed[3] if dtype == torch.bool else changed[3] + 1
    assert tensor_checksum(changed) != known
    assert tensor_checksum(tensor.roll(1)) != known


def test_a_state_that_nothing_changes_is_found_again() -> None:
    """What is made while a state is described, and dies, is no part of it: functions, their
    globals, counters, generators.
    """
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    steps = [lambda x, n=n: torch.relu(x) * IMAGE[0] + n for n in range(9)]
    net.held = [
        steps,
        {"deep": [[[[steps]]]]},
        itertools.count(3),
        (n for n in range(4)),
        functools.partial(max, 1),
    ]  # type: ignore[assignment]
    first = state_of(net)
    assert all(differs(first, state_of(net)) is None for _ in range(20))


def test_a_timer_that_rings_while_fx_takes_back_its_patches_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rings(patch: object) -> None:
        raise KeyboardInterrupt

    functions = dict(vars(math))
    with monkeypatch.context() as broken:
        broken.setattr("torch.fx._symbolic_trace._PatchedFnSetAttr.revert", rings)
        with pytest.raises(KeyboardInterrupt):
            bound_network(nn.Flatten().eval(), IMAGE, 4)
    assert table.patched_function() is None
    assert vars(math) == functions


def test_a_constant_that_is_overwritten_leaves_no_bound() -> None:
    net = Net(lambda m, x: (x * m.t, m.t.add_(0.0))[0], t=torch.ones(1)).double().eval()
    require_no_slope_above(net, "a tensor that does not depend on the image")
