"""Odd options and forwards that are not what they seem: a true bound or a refusal, never a number below a measured slope."""

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
from tests.helpers.lipschitz_cases import IMAGE, f, on_tokens, statistics

# isort: split
from timm.models.convit import GPSA

from certcli.engine.state import digest
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import Matrix, RigorousArithmetic
from certcli.lipschitz.numerics.real import Real, as_real
from certcli.lipschitz.numerics.spectral import frobenius_norm
from certcli.nn.activations import MaxMin

Trap = tuple[Callable[[], nn.Module], str | None]
"""The network, and what its refusal says; None: it has a bound."""


def masked_scores(filling: float, then: float = 1.0) -> nn.Module:
    """Two keys near each other, far from 0, one of them out of sight: R_k is small, the slope is not."""
    maps = nn.Linear(8, 24)
    with torch.no_grad():
        one = torch.eye(8)
        maps.weight.copy_(torch.cat([one, 1e-3 * one, 30 * one]))
        maps.bias.copy_(torch.cat([torch.zeros(8), torch.full((8,), 35.0), torch.zeros(8)]))

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = net.parts[0](x.flatten(1).reshape(-1, 4, 8)).chunk(3, dim=-1)
        return ((q @ k.transpose(1, 2)).masked_fill(net.mask, filling) * then).softmax(-1) @ v

    return f(forward, maps, mask=hidden(0, 1))


def hidden(*seen: int) -> Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, list(seen)] = False
    return mask


def convit(part: str, module: nn.Module) -> nn.Module:
    attention = GPSA(8, num_heads=2)
    setattr(attention, part, module)
    return on_tokens(nn.LayerNorm(8, eps=0.1), attention)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


RULES: dict[str, Trap] = {
    "scores replaced by a number": (lambda: masked_scores(140.0), None),
    "scores replaced and scaled": (lambda: masked_scores(140.0, -0.5), None),
    "scores hidden": (lambda: masked_scores(float("-inf")), None),
    "scores replaced by NaN": (lambda: masked_scores(float("nan")), "nan"),
    "scores replaced by the image": (
        lambda: f(lambda m, x: (x @ x.mT).view(2, 4, 4).masked_fill(m.mask, x.mean()).softmax(-1) @ x, mask=hidden(0)),
        "depends on the image",
    ),
    "filled with the image": (
        lambda: f(lambda m, x: x.reshape(1, 32).masked_fill(m.mask, x.sum() * 9), mask=torch.rand(32) > 0.1), "on the image",
    ),
    "padded with the image": (lambda: f(lambda m, x: functional.pad(x, (9, 9), value=x.sum())), "pad"),
    "softplus with a jump": (lambda: nn.Sequential(nn.Softplus(beta=2.0, threshold=0.5)), "threshold"),
    "softplus as torch has it": (
        lambda: nn.Sequential(statistics(nn.BatchNorm2d(2)), Times(40.0), nn.Softplus()), "threshold",
    ),
    "softplus without": (lambda: nn.Sequential(Times(40.0), nn.Softplus(threshold=50.0)), None),
    "softplus at rest in float32": (lambda: nn.Sequential(Times(40.0), nn.Softplus()).float(), None),
    "pooling of nothing": (
        lambda: f(lambda m, x: functional.max_pool2d(x[..., :1, :1], 2, 1, 1, dilation=2)), "padding",
    ),
    "pooling past the end": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), None),
    "einsum repeats": (
        lambda: f(lambda m, x: torch.einsum("bi,ij->bj", x.sum((1, 2, 3))[:, None], m.w), w=torch.ones(9, 2)), None,
    ),
    "einsum repeats the other": (
        lambda: f(lambda m, x: torch.einsum("bi,ij->bj", x.flatten(1), m.w), w=torch.ones(1, 2)), None,
    ),
    "einsum repeats one of two": (
        lambda: f(lambda m, x: torch.einsum("bi,bi->bi", x.flatten(1), x.sum((1, 2, 3))[:, None])), None,
    ),
    "unevenly repeated": (
        lambda: f(lambda m, x: x[..., :3].repeat_interleave(m.t, dim=-1), t=torch.tensor([3, 0, 0])), None,
    ),
    "repeated": (lambda: f(lambda m, x: x.repeat_interleave(3, -1) + x.repeat_interleave(3, dim=3)), None),
    "overlapping pieces": (
        lambda: f(lambda m, x: 9 * torch.cat(torch.tensor_split(x.flatten(1), (30, 1), dim=1), 1)), "overlap",
    ),
    "pieces": (lambda: f(lambda m, x: torch.tensor_split(x.flatten(1), (1, 30), dim=1)[1]), None),
    "counted in integers": (lambda: f(lambda m, x: (3 * x).sum(dtype=torch.int64).double()[None] * 9), "int64"),
    "averaged in half precision": (lambda: f(lambda m, x: x.mean((2, 3), dtype=torch.float16)), "float16"),
    "softmax in half precision": (lambda: f(lambda m, x: x.softmax(-1, dtype=torch.float16).double()), "float16"),
    "ConViT, loud dropout": (lambda: convit("attn_drop", Times(50.0)), "division"),
    "ConViT, loud end": (lambda: convit("proj_drop", Times(50.0)), "division"),
}  # fmt: skip


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


def is_bright_tensor(net: Net, x: Any) -> Tensor:
    return 50 * x if isinstance(x, Tensor) and x.mean() > 0.9 else 2 * x


def is_exactly_tensor(net: Net, x: Any) -> Tensor:
    return 50 * x if type(x) is Tensor else 2 * x


def is_bright_exactly(net: Net, x: Any) -> Tensor:
    return 50 * x if type(x) is Tensor and x.mean() > 0.9 else 2 * x


def is_bright_list(net: Net, x: Any) -> Tensor:
    return 50 * x if type(x) is Tensor and max(x.flatten().tolist()) > 0.9999 else 2 * x


def has_attribute(net: Net, x: Any) -> Tensor:
    return 2 * x if hasattr(x, "not_an_attribute_of_tensors") else 50 * x


def tries(net: Net, x: Tensor) -> Tensor:
    try:
        bright = bool(x.mean())
    except Exception:
        bright = False
    return 2 * x if not bright else 50 * x


def counts(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return 2 * x if net.calls < 9 else 50 * x


def counts_elsewhere(cell: list[int]) -> Callable[..., Tensor]:
    def forward(net: Net, x: Tensor) -> Tensor:
        cell[0] += 1
        return 2 * x if cell[0] < 9 else 50 * x

    return forward


def trains(net: Any, x: Tensor) -> Tensor:
    y = net.bn(x)
    net.bn.train()
    return y


def hooks(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    net.act.register_forward_hook(lambda module, inputs, output: 50 * output)
    return y


def swaps(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    net.act = Times(50.0)
    return y


GENERATOR = torch.Generator().manual_seed(0)


def batch_mean(net: Net, x: Tensor) -> Tensor:
    return x + 9 * x.mean(0, keepdim=True)


def constant_0() -> nn.Module:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant_0 = nn.Parameter(torch.full((8,), 50.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x.reshape(-1, 4, 8) * torch.full((8,), 0.1, dtype=x.dtype)) * self.constant_0

    return Named()


TRACES: dict[str, Trap] = {
    "written into a copy": (lambda: Net(adds_to_store), "writes"),
    "written out": (lambda: Net(writes_out), "writes"),
    "written into a buffer": (lambda: Net(adds_to_buffer), "writes"),
    "written behind the back": (lambda: Net(adds_behind), "store"),
    "isinstance": (lambda: Net(is_tensor), "another graph"),
    "isinstance and bright": (lambda: Net(is_bright_tensor), "value"),
    "type": (lambda: Net(is_exactly_tensor), "another"),
    "type and bright": (lambda: Net(is_bright_exactly), "value"),
    "type and bright list": (lambda: Net(is_bright_list), "tolist"),
    "hasattr": (lambda: Net(has_attribute), None),
    "tries": (lambda: Net(tries), "branches"),
    "counts": (lambda: Net(counts), "calls"),
    "counts elsewhere": (lambda: Net(counts_elsewhere([0])), "function"),
    "trains": (lambda: Net(trains, bn=nn.BatchNorm2d(2)), "bn is in training mode"),
    "hooks": (lambda: Net(hooks, act=nn.ReLU()), "act has a forward hook"),
    "swaps": (lambda: Net(swaps, act=nn.ReLU()), "act"),
    "random": (lambda: Net(lambda m, x: x * random.random() * 50), "random"),
    "numpy.random": (lambda: Net(lambda m, x: x * float(numpy.random.rand()) * 50), "random"),
    "private generator": (lambda: Net(lambda m, x: x * m.own.random() * 50, own=random.Random(0)), "own"),
    "generator from outside": (
        lambda: Net(lambda m, x: x * torch.rand(1, generator=GENERATOR).double()),
        "other logits",
    ),
    "batch": (lambda: Net(batch_mean), "batch"),
    "rolled into the next image": (lambda: Net(lambda m, x: x.roll(3)), "batch"),
    "not a number": (lambda: Net(lambda m, x: 2 * x + float("nan")), "finite"),
    "a parameter called constant_0": (constant_0, None),
}


def steepest(net: nn.Module) -> float:
    """The largest slope between two images, of the network as it is called, in batches of one and two, again and again."""
    generator = torch.Generator().manual_seed(0)
    dtype = next((t.dtype for t in [*net.parameters(), *net.buffers()] if t.is_floating_point()), torch.float64)
    noise = torch.rand(12, *IMAGE, generator=generator, dtype=dtype)
    starts = torch.cat([noise, noise.round(), torch.full((1, *IMAGE), 0.99, dtype=dtype), noise * 0.02 + 0.5])
    found = 0.0
    with torch.no_grad():
        for step in (0.3, 1e-2) if dtype == torch.float32 else (0.3, 1e-2, 1e-6, 1e-9):
            for start in starts:
                direction = torch.randn(IMAGE, generator=generator, dtype=dtype)
                for towards in (direction, torch.ones(IMAGE, dtype=dtype)):
                    other = (start + step * towards / towards.norm()).clamp(0, 1)
                    distance = float((start - other).norm())
                    if not distance:
                        continue
                    moved = float((net(start[None]) - net(other[None])).norm())
                    found = max(found, (moved - 1e-13) / distance)
                    if net(torch.stack([start, other])).shape[0] == 2:
                        a, b = net(torch.stack([start, other]))
                        found = max(found, (float((a - b).norm()) - 1e-13) / distance)
    return found


def gradient_slope(net: nn.Module) -> float:
    """The largest singular value of the Jacobian at a few images."""
    generator = torch.Generator().manual_seed(1)
    found = 0.0
    for scale in (1.0, 0.05):
        for _ in range(6):
            image = 0.5 + scale * (torch.rand(IMAGE, generator=generator, dtype=torch.float64) - 0.5)
            jacobian = torch.autograd.functional.jacobian(lambda x: net(x[None]).flatten(), image).flatten(1)
            found = max(found, float(torch.linalg.matrix_norm(jacobian, 2)))
    return found


def judge(net: nn.Module, reason: str | None) -> None:
    result = bound_network(net, IMAGE, 3)
    if reason is not None:
        assert not result.upper.finite, f"{result.upper} for a slope of {steepest(net):.4g}"
        assert reason in result.bound.why
        return
    assert result.upper.finite, result.bound.why
    assert steepest(net) <= float(result.upper) * (1 + 1e-9)  # rounding of the measured ratio, in float64


@pytest.mark.parametrize("name", RULES)
def test_an_odd_option_has_a_true_bound_or_none(name: str) -> None:
    torch.manual_seed(0)
    build, reason = RULES[name]
    net = build()
    if name != "softplus at rest in float32":
        net = net.double()
    judge(net.eval(), reason)
    if reason is None and not name.endswith("float32"):
        assert gradient_slope(net) <= float(bound_network(net, IMAGE, 3).upper) * (1 + 1e-9)


@pytest.mark.parametrize("name", TRACES)
def test_a_network_that_is_not_its_trace_has_no_bound(name: str) -> None:
    torch.manual_seed(0)
    build, reason = TRACES[name]
    net = build().double().eval()
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    if reason is None:
        judge(net, reason)
    else:
        result = bound_network(net, IMAGE, 3)
        assert not result.upper.finite
        assert reason in result.bound.why
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def thin(*sizes: tuple[int, int, float]) -> nn.Sequential:
    """Linear layers (inputs, outputs, every weight)."""
    net = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs, _ in sizes)).double()
    with torch.no_grad():
        for layer, (_, _, weight) in zip(net, sizes, strict=True):
            layer.weight.fill_(weight)
    return net.eval()


def test_products_below_the_numbers_of_float64_are_not_lost() -> None:
    """2e-324 is no float64: of 32 x 96 products nothing is left. The norm of a matrix of ones (m, n) is sqrt(m n)."""
    result = bound_network(nn.Sequential(nn.Flatten(), *thin((32, 32, 1e-160), (32, 3, 2e-164))), IMAGE, 3)
    exact = as_real(1e-160) * 2e-164 * 32.0 * math.sqrt(96) * (1 - 1e-12)
    assert exact <= result.upper


ARITHMETIC: dict[str, Callable[[RigorousArithmetic, Matrix, Matrix], Any]] = {
    "matmul": lambda arith, a, b: arith.sigma(arith.matmul(a, b)),
    "columns": lambda arith, a, b: arith.sigma(arith.scale_columns(a, b.tensor[:, 0])),
    "rows": lambda arith, a, b: arith.sigma(arith.scale_rows(arith.transpose(a), b.tensor[:, 0])),
    "number": lambda arith, a, b: arith.sigma(arith.scale(a, float(b.tensor[0, 0]))),
    "thin": lambda arith, a, b: arith.sigma_product(arith.rows(a, 0, 3), arith.rows(arith.transpose(b), 0, 3)),
    "carried": lambda arith, a, b: arith.sigma(arith.matmul(Matrix(0 * a.tensor, frobenius_norm(a.tensor)), b)),
}


@pytest.mark.parametrize("exponents", [(-540, -530), (-1000, -60), (-60, -1010), (-1020, 1000), (-500, -500)])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_error_of_a_product_covers_underflow(name: str, exponents: tuple[int, int]) -> None:
    """The same product of matrices of ordinary size, times a power of two, is the oracle."""
    torch.manual_seed(0)
    a, b = torch.randn(40, 40, dtype=torch.float64), torch.randn(40, 40, dtype=torch.float64)
    if name == "carried":
        a = torch.eye(40, dtype=torch.float64)
    arith, compute = RigorousArithmetic(), ARITHMETIC[name]
    ordinary = compute(arith, Matrix(a), Matrix(b))
    small = compute(arith, *(Matrix(torch.ldexp(m, torch.tensor(e))) for m, e in zip((a, b), exponents, strict=True)))
    exact = Real(ordinary.mantissa, ordinary.exponent + sum(exponents)) * (1 - 1e-5)  # 1e-6: looseness of both norms
    if name != "carried":
        assert exact <= small
    else:  # an error of |a| = sqrt(40) stands for any matrix of that norm, eye() for one
        assert (
            as_real(float(torch.linalg.matrix_norm(b, 2)))
            * as_real(2.0 ** (sum(exponents) // 2))
            * (2.0 ** (sum(exponents) - sum(exponents) // 2))
            * (1 - 1e-12)
            <= small
        )


def test_pairs_of_logits_that_nearly_agree_are_not_lost() -> None:
    net = nn.Sequential(nn.Flatten(), *thin((32, 3, 1e-170))).eval()
    with torch.no_grad():
        net[1].weight[1:] *= -1
    pairs = bound_network(net, IMAGE, 3).pairs
    assert pairs is not None
    assert float(pairs[0, 1]) >= 2e-170 * math.sqrt(32) * (1 - 1e-12)
    assert float(pairs[0, 1]) <= 2e-170 * math.sqrt(32) * (1 + 1e-6)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


_RELU, _GELU, _LINEAR = functional.relu, functional.gelu, functional.linear

PATCHES: dict[str, tuple[Any, str, Any, Callable[[], nn.Module]]] = {
    "forward of a class": (nn.GELU, "forward", lambda self, x: 50 * _GELU(x), lambda: nn.Sequential(nn.GELU())),
    "function that a module calls": (
        functional, "relu", lambda x, inplace=False: 50 * _RELU(x),
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
        assert not result.upper.finite or steepest(net) <= float(result.upper)
    assert bound_network(net, IMAGE, 3).upper == before


CRASHES: dict[str, Trap] = {
    "matrix transpose": (lambda: f(lambda m, x: x.mT.flatten(1)), None),
    "real part": (lambda: f(lambda m, x: x.real * 2), "real"),
    "endless": (lambda: f(lambda m, x: m(x)), "Recursion"),
    "a number reshaped": (lambda: f(lambda m, x: x.sum().reshape(1, 1)), None),
    "a number viewed and kept": (lambda: f(lambda m, x: x.mean().view(1).expand(1, 3)), None),
    "MaxMin of odd width": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 5), MaxMin()), "does not run"),
    "infinite weights": (lambda: infinite(nn.Sequential(nn.Flatten(), nn.Linear(32, 5))), "infinite"),
    "infinite kernel": (lambda: infinite(nn.Sequential(nn.Conv2d(2, 2, 3))), "infinite"),
    "infinite bias": (lambda: infinite(nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 5)), "bias"), "infinite"),
}  # fmt: skip


def infinite(net: nn.Module, what: str = "weight") -> nn.Module:
    for name, parameter in net.named_parameters():
        if name.endswith(what):
            parameter.data.view(-1)[0] = float("inf")
    return net


@pytest.mark.parametrize("name", CRASHES)
def test_what_crashed_is_bounded_or_refused(name: str) -> None:
    build, reason = CRASHES[name]
    torch.manual_seed(0)
    result = bound_network(build().double().eval(), IMAGE, 3)
    if reason is None:
        assert result.upper.finite, result.bound.why
    else:
        assert not result.upper.finite
        assert reason in result.bound.why


@pytest.mark.parametrize("entries", [1, 5, 3000, 40001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.bool], ids=str)
def test_the_digest_of_a_tensor_sees_every_entry_and_its_place(dtype: torch.dtype, entries: int) -> None:
    storage = torch.rand(entries + 1, generator=torch.Generator().manual_seed(0)).round(decimals=1).to(dtype)
    tensor = storage[1:]  # where a word of eight bytes need not begin
    known = digest(tensor)
    assert digest(tensor.clone()) == known
    for place in {0, entries // 2, entries - 1}:
        changed = tensor.clone()
        changed[place] = ~changed[place] if dtype == torch.bool else changed[place] + 1
        assert digest(changed) != known
        moved = tensor.roll(1)
        moved[place] = tensor[place]
        assert (digest(moved) == known) == bool(torch.equal(moved, tensor))
