"""Products by oneDNN: the sums of torch's own, in another order, and only where they are asked for."""

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from certcli.attack.judge import predict_classes
from certcli.system import products
from certcli.system.products import OneDnnProducts, fast_products, is_faster

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
ADDED = draw(3, 160, 130, seed=3)
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
    "baddbmm": lambda cast: torch.baddbmm(cast(ADDED), *map(cast, PAIR), beta=0.5, alpha=2.0),
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
    product = products._onednn

    def counted(*operands: Any) -> Tensor:
        calls.append(None)
        return product(*operands)

    monkeypatch.setattr(products, "_onednn", counted)
    return calls


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("compute", PRODUCTS.values(), ids=PRODUCTS)
def test_the_sums_are_as_near_as_those_of_torch(
    compute: Callable[[Callable[[Tensor], Tensor]], Tensor],
    inference: bool,
    onednn_calls: list[None],
) -> None:
    exact = compute(Tensor.double)
    with torch.inference_mode(inference), OneDnnProducts():
        result = compute(lambda operand: operand)
    assert onednn_calls
    assert result.shape == exact.shape
    assert result.dtype == torch.float32
    # 96 products each: gamma_96 of float32 times the sum of the absolute values
    size = compute(lambda operand: operand.double().abs())
    assert bool(((result - exact).abs() <= 97 * 2.0**-24 * 1.01 * size).all())


def test_each_operation_that_is_replaced_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set()

    def noted(operation: Any, replacement: Callable[..., Tensor | None]) -> Any:
        def replaced(*operands: Any, **options: Any) -> Tensor | None:
            result = replacement(*operands, **options)
            reached.update([operation] if result is not None else [])
            return result

        return replaced

    table = products._REPLACEMENTS
    monkeypatch.setattr(products, "_REPLACEMENTS", {op: noted(op, table[op]) for op in table})
    for compute in PRODUCTS.values():
        for inference in (False, True):
            with torch.inference_mode(inference), OneDnnProducts():
                compute(lambda operand: operand)
    assert reached == set(table)


@pytest.mark.parametrize("compute", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_all_else_is_torchs_own(compute: Callable[[], Tensor], onednn_calls: list[None]) -> None:
    plain = compute()
    with OneDnnProducts():
        result = compute()
    assert not onednn_calls
    assert torch.equal(result, plain)


def test_rows_that_lie_apart_are_multiplied_as_they_are() -> None:
    """Outside of inference mode such a product is one of a batch, which is left alone."""
    apart = TOKENS.transpose(0, 1).contiguous().transpose(0, 1)
    for inference in (False, True):
        with torch.inference_mode(inference), OneDnnProducts():
            result = F.linear(apart, RIGHT.mT.contiguous(), BIAS)
        assert torch.allclose(result.double(), TOKENS.double() @ RIGHT.double() + BIAS, atol=1e-4)


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
    with OneDnnProducts():
        near = second(torch.float32)
    assert len(onednn_calls) > 3
    for value, true in zip(near, exact, strict=True):
        assert torch.linalg.vector_norm(value - true) <= 1e-5 * torch.linalg.vector_norm(true)


def test_a_verdict_is_taken_on_the_network_as_it_runs(onednn_calls: list[None]) -> None:
    network = torch.nn.Linear(96, 130)
    plain = predict_classes(network, LEFT)
    with OneDnnProducts():
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
    assert products._agrees()
    monkeypatch.setattr(products, "_onednn", product)
    assert not products._agrees()


@pytest.mark.parametrize(
    ("processor", "capability", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),
        ("vendor_id : GenuineIntel", "AVX512", False),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_the_processor_decides(
    processor: str,
    capability: str,
    expected: bool,
    listed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """By /proc/cpuinfo, elsewhere by the processor's name."""
    place = tmp_path / "cpuinfo"
    if listed:
        place.write_text(processor)
    monkeypatch.setattr(products, "CPU_INFO", place)
    monkeypatch.setattr(platform, "processor", lambda: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    is_faster.cache_clear()
    try:
        assert is_faster() is expected
        large = torch.nn.Linear(512, 512)
        assert isinstance(fast_products(large), OneDnnProducts) is expected
        assert not isinstance(fast_products(torch.nn.Linear(8, 8)), OneDnnProducts)
        elsewhere = torch.nn.Linear(512, 512, device="meta")
        assert not isinstance(fast_products(elsewhere), OneDnnProducts)
    finally:
        is_faster.cache_clear()
