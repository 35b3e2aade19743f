"""The network that is made of a module in memory is the module: it gives its logits, or it is refused."""

import copy
import functools
import math
import operator
import re
import statistics
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import certvit
from certcli.models import program
from certcli.models.program import program_digest
from certcli.system.errors import ArchitectureError

SIZE = (1, 2, 2)
OPTIONS: dict[str, Any] = {"mean": 0.0, "std": 1.0, "input_size": SIZE}


class Steep(nn.Module):
    """Logits times `steepness`, which a copy may lose."""

    def __init__(self, steepness: float = 50.0) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.steepness = steepness

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)) * self.steepness


class ByCopy(Steep):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        other = ByCopy(1.0)
        other.fc.load_state_dict(self.fc.state_dict())
        return other


class ByState(Steep):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "steepness": 1.0}


class ByMoving(Steep):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.steepness = 1.0
        return super()._apply(fn, recurse)


class ByEval(Steep):
    def eval(self) -> Any:
        self.steepness = 1.0
        return super().eval()


class ByExtraState(Steep):
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steepness)

    def set_extra_state(self, state: Tensor) -> None:
        self.steepness = 1.0


class ByGradient(Steep):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.fc.weight.requires_grad else 0.02)


class Doubled(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        halves(state, kwargs.get("prefix", ""))
        return state


def with_seeded_hook(register: Callable[[nn.Module], Any]) -> nn.Module:
    net = Steep()
    register(net.fc)
    return net


def halves(state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


MODULES: dict[str, Callable[[], nn.Module]] = {
    "copy": ByCopy,
    "pickled state": ByState,
    "conversion": ByMoving,
    "eval": ByEval,
    "extra state": ByExtraState,
    "gradients of weights": ByGradient,
    "weights that are handed out": lambda: nn.Sequential(nn.Flatten(), Doubled(4, 2)),
    "hook of the weights that are handed out": lambda: with_seeded_hook(
        lambda fc: fc.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: halves(state, prefix)
        )
    ),
    "hook before loading": lambda: with_seeded_hook(
        lambda fc: fc._register_load_state_dict_pre_hook(halves)
    ),
    "hook after loading": lambda: with_seeded_hook(
        lambda fc: fc.register_load_state_dict_post_hook(
            lambda module, keys: setattr(module, "weight", nn.Parameter(module.weight / 2))
        )
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_module_that_its_copy_is_not_is_refused(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    module.steepness = 50.0  # type: ignore[assignment]
    with pytest.raises(ArchitectureError, match="other logits than the module"):
        certvit.load(module, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_module_is_loaded_and_left_as_it_was(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    module = nn.Sequential(*parts).to(dtype).train()
    module[2].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state()
    certvit.load(module, **OPTIONS)
    assert [part.training for part in parts] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), states)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_weights_without_values_are_refused_by_name() -> None:
    with pytest.raises(ArchitectureError, match=r"'1\.weight' of the Sequential has no values yet"):
        certvit.load(nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), **OPTIONS)


class Times50(nn.Parameter):
    """A parameter whose products are 50 times those of its entries."""

    def __new__(cls, data: Tensor) -> "Times50":
        return Tensor._make_subclass(cls, data, True)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in (functional.linear, torch.conv2d):
            return result * 50
        kept = func in (Tensor.detach, Tensor.to, Tensor.clone, Tensor.requires_grad_)
        return Tensor._make_subclass(cls, result, False) if kept else result

    def __deepcopy__(self, memo: Any) -> "Times50":
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor._make_subclass(Times50, self.data.clone(), False)


def seeded_linear() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.weight = Times50(layer.weight.data)
    return nn.Sequential(nn.Flatten(), layer)


def seeded_convolution() -> nn.Module:
    layer = nn.Conv2d(1, 2, 2)
    layer.weight = Times50(layer.weight.data)
    return nn.Sequential(layer, nn.Flatten())


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Times50(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.flatten(1), self.weight)


class Elsewhere(Functional):
    """The tensor lies where no module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.there = [self.weight]
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.flatten(1), self.there[0])


@pytest.mark.parametrize("build", [seeded_linear, seeded_convolution, Functional, Elsewhere])
def test_a_tensor_of_another_type_has_no_bound(build: Callable[[], nn.Module]) -> None:
    from certcli.lipschitz.network import bound_network

    torch.manual_seed(0)
    result = bound_network(build().eval(), SIZE, 2)
    assert not result.upper.finite
    assert "no tensor of torch's own" in result.bound.why
    assert "Times50" in result.bound.why


@pytest.mark.parametrize("build", [seeded_linear, seeded_convolution, Functional])
def test_a_module_with_a_tensor_of_another_type_is_not_loaded(
    build: Callable[[], nn.Module],
) -> None:
    with pytest.raises(ArchitectureError, match=r"weight' \(Times50\) of the"):
        certvit.load(build(), **OPTIONS)


class Between(nn.Module):
    """Two maps with a function between them, in all such networks with the same weights."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x.flatten(1))))


def scaled_module(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def by_graph(between: Callable[[Tensor], Tensor]) -> nn.Module:
    return fx.symbolic_trace(Between(between))


def by_text(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """A class that a program made, which has no source."""
    space: dict[str, Any] = {"Between": Between}
    exec("class Made(Between):\n def forward(self, x): return Between.forward(self, x)", space)
    made: nn.Module = space["Made"](between)
    return made


def by_global(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """The code names a function that lies elsewhere."""
    space: dict[str, Any] = {"Between": Between, "between": between}
    exec("def called(x): return between(x)", space)
    return Between(space["called"])


class Setting:
    """An object of a type of the user's."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        self.between = [{"function": between}]

    def __call__(self, x: Tensor) -> Tensor:
        return self.between[0]["function"](x)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("power",)

    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.power


FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "relu": lambda: torch.relu,
    "sin": lambda: torch.sin,
    "twice": lambda: scaled_module(2.0),
    "thrice": lambda: scaled_module(3.0),
    "power 2": lambda: functools.partial(torch.pow, exponent=2),
    "power 3": lambda: functools.partial(torch.pow, exponent=3),
    "plus 0": lambda: torch.zeros(4).add,
    "plus 1": lambda: torch.ones(4).add,
}


@pytest.mark.parametrize(
    "build",
    [Between, by_graph, by_text, by_global, lambda between: Between(Setting(between))],
    ids=["attribute", "graph", "text", "global", "object"],
)
def test_two_programs_with_the_same_weights_have_two_digests(
    build: Callable[[Callable[[Tensor], Tensor]], nn.Module],
) -> None:
    """Else evidence about one would verify of the other; and one program made twice has one digest."""
    digests = [
        [certvit.load(build(function()), **OPTIONS).digest for _ in range(2)]
        for function in FUNCTIONS.values()
    ]
    assert all(one == again for one, again in digests)
    assert len({one for one, _ in digests}) == len(FUNCTIONS)


STATES = (
    *(slice(1, 3), slice(1, 4), range(4), range(5), deque([1]), deque([2]), Fraction(1, 2)),
    *(Fraction(1, 3), SimpleNamespace(a=1), SimpleNamespace(a=2), Slotted(2), Slotted(3)),
    *(torch.channels_last, torch.contiguous_format, re.compile("a"), re.compile("b")),
)
"""Objects that a program may depend on, in pairs of one type."""


def test_what_an_object_holds_counts() -> None:
    digests = [program_digest(Between(state)) for state in STATES]  # type: ignore[arg-type]
    assert digests == [program_digest(Between(copy.deepcopy(state))) for state in STATES]
    assert len(set(digests)) == len(STATES)


WRITTEN = {
    "cached": "@functools.cache\ndef read(net=None): return NUMBER",
    "cached method": "class Net(Between):\n    @functools.cache\n    def number(self): return NUMBER\n"
    "read = Net.number",
    "cached property": "class Net(Between):\n    @functools.cached_property\n"
    "    def number(self): return NUMBER\nread = lambda net: net.number",
    "partial method": "class Net(Between):\n    def __call(self, one): return one\n"
    "    number = functools.partialmethod(__call, NUMBER)\nread = lambda net: net.number()",
    "descriptor": "class Descriptor:\n    def __get__(self, net, kind): return NUMBER\n"
    "class Net(Between): number = Descriptor()\nread = lambda net: net.number",
    "class within": "class Net(Between):\n    class Part: number = NUMBER\n"
    "read = lambda net: net.Part.number",
    "set": "class Net(Between): numbers = {NUMBER}\nread = lambda net: max(net.numbers)",
    "object": "class Net(Between): part = SimpleNamespace(number=NUMBER)\n"
    "read = lambda net: net.part.number",
    "class of a class": "class Kind(type): number = NUMBER\nclass Part(metaclass=Kind): pass\n"
    "read = lambda net: Part.number",
    "by type": "@functools.singledispatch\ndef read(net): return NUMBER",
}
"""Programs that multiply by NUMBER, which stands where the code of their forward only leads to."""


@pytest.mark.parametrize("source", WRITTEN.values(), ids=WRITTEN)
def test_code_that_is_wrapped_counts(source: str) -> None:
    """Two programs that differ by a number alone had one digest."""
    digests = []
    for number in ("2.0", "3.0", "2.0"):
        names: dict[str, Any] = {**globals(), "Net": Between}
        exec(source.replace("NUMBER", number), names)
        net = names["Net"](lambda x: x)
        net.read = names["read"]
        digests.append(program_digest(net))
    assert digests[0] == digests[2] != digests[1]


class Sliced(nn.Module):
    """A graph with a constant, a slice, an argument by name and a part."""

    def __init__(self, start: int, shift: float, dim: int) -> None:
        super().__init__()
        self.part = nn.Linear(4, 2)
        self.start, self.dim = start, dim
        self.register_buffer("shift", torch.tensor([1.0, shift]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.part(x.flatten(1))[:, self.start :] + self.shift, dim=self.dim)


def test_a_graph_counts_by_its_operations() -> None:
    """Not by the names of its nodes, nor by what nothing in it reads."""
    graphs = [fx.symbolic_trace(Sliced(*about)) for about in ((0, 1, 1), (1, 1, 1), (0, 1, 0))]
    digests = [program_digest(graph) for graph in graphs]
    assert len(set(digests)) == 3
    for graph in graphs:
        for number, node in enumerate(graph.graph.nodes):
            node._rename(f"step_{number}")
        graph.meta["note"] = "unread"
        graph.recompile()
    assert [program_digest(graph) for graph in graphs] == digests


TARGETS = (
    *(operator.add, operator.getitem, max, getattr, math.sqrt, statistics.fmean, "relu", "softmax"),
    *(torch.relu, functional.relu, functional.gelu, Tensor.add, torch.ops.aten.cumsum.default),
    *(torch.ops.aten.cumsum, torch.ops.aten.relu.default, torch.ops.aten.sum.dim_IntList),
)
"""What graphs call: of Python, of its library, of torch."""


def called_graph(target: Any) -> nn.Module:
    graph = fx.Graph()
    call = graph.call_method if isinstance(target, str) else graph.call_function
    graph.output(call(target, (graph.placeholder("x"), slice(1, None), Ellipsis, torch.float64)))
    return fx.GraphModule(nn.Module(), graph)


def test_no_code_of_python_enters_the_digest_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instructions belong to one version. A call of aten was read to the code of `typing`."""
    monkeypatch.setattr(program, "_code_parts", lambda code: pytest.fail(f"{code} was read"))
    digests = {program_digest(called_graph(target)) for target in TARGETS}
    assert len(digests) == len(TARGETS)


def test_a_buffer_that_no_state_dict_holds_counts() -> None:
    one, other = (certvit.load(Sliced(0, shift, 1), **OPTIONS).digest for shift in (1.0, 2.0))
    assert one != other
