"""Rounding at the neighbours of an image: no execution differs by more than is proven, nor changes
a certified class.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from timm.layers import LayerScale
from timm.layers.attention import Attention
from torch import Tensor, nn

from certcli.certify.box.certifier import BoxCertifier
from certcli.certify.certificate import RecheckSettings
from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier, ProvingCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.options import BACKWARD, REAL, ZONOTOPE, Arithmetic, Effort, Local
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.space import rules as zonotope_rules
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, executed
from certcli.evaluation.image_records import Certificate
from certcli.images import datasets
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.real import ONE, as_real
from certcli.models import build
from certcli.models.pixels import PixelModel, PixelNormalize
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.blocks import CenterNorm, ConvexResidual, FloorNorm, WeightedResidual
from certcli.nn.layers import MaxMin
from certcli.nn.lipschitz_networks import PlaceMixer
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.rounding.enclosed import EnclosedErrors, ErrorStep
from certcli.rounding.operation_errors import Executed
from certcli.system.errors import DataError, NoBoundError
from tests.certify.test_certificate_law import KINDS, climbed
from tests.certify.test_local_lip import SIZE
from tests.enclosure.test_zonotope_networks import OPTIONS as VITS
from tests.enclosure.test_zonotope_networks import network as vision_transformer
from tests.helpers.executions import (
    images_within,
    logits_of_executions,
    pairwise_differences,
    representable,
    require_within,
)
from tests.helpers.grids import EVERY, crossed
from tests.helpers.lipschitz_cases import build_row, f
from tests.helpers.slopes import IMAGE

EXECUTED = [name for name in get_args(Arithmetic) if name != REAL]


def tokens(*parts: nn.Module, residual: nn.Module | None = None, mean: bool = False) -> nn.Module:
    """(b, 1, 6, 6) -> six tokens of six features -> parts -> a linear head on all of them or on
    their mean.
    """
    joins = [] if residual is None else [residual]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([m.token.expand(len(x), -1, -1), x.flatten(1, 2) + m.position], dim=1)
        before = x
        for part in m.parts[: len(parts)]:
            x = part(x)
        if residual is not None:
            x = m.parts[-2](before, x)
        elif x.shape == before.shape:
            x = before + 0.5 * x
        return m.parts[-1](x.mean(dim=1) if mean else x.flatten(1))

    position, token = torch.randn(6, 6), torch.randn(1, 1, 6)
    head = nn.Linear(6 if mean else 42, 5)
    return f(forward, *parts, *joins, head, position=position, token=token)


def quotients() -> nn.Module:
    return f(
        lambda m, x: (
            torch.roll((x / 0.7) / m.divisor, 2, 1).unflatten(-1, (2, 3)).flatten(-2).mul(1.3)
        ),
        divisor=torch.rand(6) + 0.1,
    )


def trained(norm: nn.Module) -> nn.Module:
    norm.running_mean = torch.randn(norm.num_features)
    norm.running_var = torch.rand(norm.num_features) + 0.1
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def floor(width: int = 6) -> FloorNorm:
    norm = FloorNorm(width)
    norm.floor.fill_(0.3)
    return norm


def attention() -> Attention:
    return Attention(6, num_heads=2, qkv_bias=True)


def l2() -> L2Attention:
    return L2Attention(AttentionShape(6, 2, 3, True, 6, True))


def images(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def local(
    effort: str, at: tuple[float, ...] = ()
) -> Callable[[PixelModel, int, str], ProvingCertifier]:
    return lambda model, classes, name: LocalCertifier(
        model, model.input_size, Local(effort, at=at, arithmetic=name)
    )


PROVING: dict[str, Callable[[PixelModel, int, str], ProvingCertifier]] = {
    "lipschitz": lambda model, classes, name: LipschitzCertifier(
        model, prove_network(model, classes), name
    ),
    "box": lambda model, classes, name: BoxCertifier(model, prove_network(model, classes), name),
    "local-lip": lambda model, classes, name: LocalLipCertifier(
        model, classes, model.input_size, name
    ),
    "bcp": lambda model, classes, name: BcpCertifier(model, classes, model.input_size, name),
    "zonotope": local(ZONOTOPE, (0.03,)),
    "backward": local(BACKWARD, (0.02,)),
}


# name: the network on images (b, 1, 6, 6) in [0, 1]
CASES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: images(nn.Flatten(), nn.Linear(36, 5)),
    "without a bias": lambda: images(nn.Flatten(), nn.Linear(36, 5, bias=False)),
    "ReLU": lambda: images(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)),
    "MaxMin": lambda: images(nn.Flatten(), nn.Linear(36, 24), MaxMin(), nn.Linear(24, 24), MaxMin(), nn.Linear(24, 5)),
    "no linear head": lambda: images(nn.Flatten(), nn.Linear(36, 6), MaxMin()),
    "convolution": lambda: images(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(),
                                  nn.Linear(24, 5)),
    "dilated": lambda: images(nn.Conv2d(1, 4, 2, dilation=3, padding=1), nn.Flatten(), nn.Linear(100, 5)),
    "BatchNorm": lambda: images(nn.Conv2d(1, 4, 3, padding=1), trained(nn.BatchNorm2d(4)), nn.ReLU6(),
                                nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), trained(nn.BatchNorm1d(8)),
                                nn.Hardtanh(-0.3, 0.7), nn.Linear(8, 5)),
    "average pooling": lambda: images(nn.Conv2d(1, 4, 3), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(36, 5)),
    "division": lambda: tokens(quotients()),
    "GELU": lambda: images(nn.Flatten(), nn.Linear(36, 12), nn.GELU(), nn.Linear(12, 5)),
    "tanh GELU": lambda: images(nn.Flatten(), nn.Linear(36, 12), nn.GELU("tanh"), nn.Linear(12, 5)),
    "LayerNorm": lambda: tokens(nn.LayerNorm(6, eps=0.1)),
    "LayerNorm of steep slope": lambda: tokens(nn.Linear(6, 6), nn.LayerNorm(6, eps=1e-5)),
    "FloorNorm": lambda: tokens(floor()),
    "CenterNorm": lambda: tokens(CenterNorm(6)),
    "LayerScale": lambda: tokens(nn.Linear(6, 6), LayerScale(6, 0.3)),
    "mean": lambda: tokens(nn.Linear(6, 6), mean=True),
    "convex residual": lambda: tokens(nn.Linear(6, 6), residual=ConvexResidual()),
    "weighted residual": lambda: tokens(nn.Linear(6, 6), residual=WeightedResidual()),
    "attention": lambda: tokens(floor(), attention()),
    "sharp attention": lambda: tokens(floor(), sharp(attention(), "qkv")),
    "L2 attention": lambda: tokens(floor(), l2()),
    "L2 attention on any tokens": lambda: tokens(sharp(l2(), "query")),
    "a block": lambda: tokens(floor(), l2(), floor(), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)),
}  # fmt: skip


def sharp(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).weight.data.mul_(5)
    return module


def network(make: Callable[[], nn.Module], mean: float = 0.4, std: float = 0.3) -> PixelModel:
    torch.manual_seed(3)
    with torch.no_grad():
        net = make()
    return PixelModel(InputSpec(size=SIZE, mean=(mean,), std=(std,)), net).double().eval()


def judged() -> Tensor:
    noise = torch.rand(3, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.cat([noise, noise[:1].round(), torch.zeros(1, *SIZE), torch.full((1, *SIZE), 0.5)])


# by default the two that differ most, in turn
@pytest.mark.parametrize(
    ("name", "arithmetic"), crossed([*CASES], EXECUTED if EVERY else ["float32", "fp16"])
)
def test_no_execution_differs_by_more_than_is_proven(name: str, arithmetic: str) -> None:
    model = network(CASES[name])
    pixels = judged()
    try:
        analysis = NeighbourErrors(model, SIZE, PRECISIONS[arithmetic])
    except NoRule:
        if arithmetic in ("float64", "float32"):
            raise
        return  # sizes that overflow have no theorem
    bound = require_within(analysis, model, pixels, 0.5, arithmetic)
    if arithmetic in ("float64", "float32") and not any(
        word in name for word in ("steep", "any tokens", "sharp")
    ):
        assert bound < 2.0**29 * PRECISIONS[arithmetic].unit * 1e-3  # it says something


def test_the_bound_is_within_a_factor_of_two_where_rounding_is_worst() -> None:
    """1 + 2^-24 + 2^-24 + ... in turn: float32 loses every term, so half of the bound is false."""
    side = 20
    head = nn.Linear(400, 2, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[0] = 2.0**-12
        head.weight[0, 0] = 1
    model = PixelModel(
        InputSpec(size=(1, side, side), mean=(0.0,), std=(1.0,)), nn.Sequential(nn.Flatten(), head)
    )
    model = model.double().eval()
    image = torch.full((1, 1, side, side), 2.0**-12, dtype=torch.float64)
    image[0, 0, 0, 0] = 1
    bound = NeighbourErrors(model, (1, side, side), PRECISIONS["float32"])(
        image, torch.zeros(1), torch.tensor([0])
    )
    with torch.no_grad():
        real = model(image)
    steepest_slope = max(
        float(pairwise_differences(logits, real)[0, 0, 1])
        for logits in logits_of_executions(model, image, "float32")
    )
    assert 0.5 * float(bound[0, 1]) < steepest_slope <= float(bound[0, 1])


@pytest.mark.parametrize("arithmetic", EXECUTED if EVERY else ["float32"])
@pytest.mark.parametrize(
    ("kind", "method"), crossed([*KINDS], [*PROVING] if EVERY else ["lipschitz", "bcp"])
)
def test_no_execution_changes_a_certified_class(method: str, kind: str, arithmetic: str) -> None:
    """Murray's constructions among them: biases that cancel, huge and tiny layers, ties."""
    model = network(KINDS[kind], 0.4, 0.5)
    pixels = torch.rand(6, *SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    claims = _claims(model, pixels, arithmetic, method)
    if kind in ("tied", "bias50", "denormal") or (
        kind.startswith("bias") and arithmetic != "float64"
    ):
        assert not claims
    if kind in ("huge_tiny", "tiny_huge") and arithmetic != "float64":
        assert not claims  # float32 overflows, or has 0
    if kind == "relu" and method not in get_args(Effort) and arithmetic in ("float64", "float32"):
        assert claims
    _hold(model, pixels, claims, arithmetic)


def _claims(
    model: PixelModel, pixels: Tensor, arithmetic: str, method: str = "lipschitz"
) -> list[Any]:
    logits = model(pixels)
    tops = logits.argmax(1).tolist()
    step = 1 if method in ("zonotope", "backward") else len(pixels)
    try:
        certifier = PROVING[method](model, logits.shape[1], arithmetic)
        parts = [range(len(pixels))[start : start + step] for start in range(0, len(pixels), step)]
        rows = [
            row
            for part in parts
            for row in certifier.batch(part, pixels[part], [tops[i] for i in part])
        ]
    except (NoBoundError, DataError):
        return []
    assert certifier.arithmetic == arithmetic
    return [row for row in rows if row.radius > 0]


def _hold(model: PixelModel, pixels: Tensor, claims: list[Any], arithmetic: str) -> None:
    """No image that the arithmetic has, at no place where gradients lead within a claimed radius,
    is of another class.
    """
    if not claims:
        return
    images = pixels[[row.index for row in claims]]
    classes = torch.tensor([row.prediction for row in claims])
    radii = torch.tensor([min(row.radius, 10.0) for row in claims], dtype=torch.float64)
    for near in (images, climbed(model, images, classes, radii)):
        near = representable(near, arithmetic)
        inside = (near - images).flatten(1).norm(dim=1) <= radii
        for logits in logits_of_executions(model, near, arithmetic):
            best = logits.topk(2, dim=1)
            assert bool((best.indices[:, 0] == classes)[inside].all())
            assert bool((best.values[:, 0] > best.values[:, 1])[inside].all())  # a tie is no answer


@pytest.mark.parametrize("arithmetic", EXECUTED if EVERY else ["float32"])
@pytest.mark.parametrize("effort", [ZONOTOPE, BACKWARD])
@pytest.mark.parametrize("kind", [*VITS] if EVERY else ["relu"])
def test_no_execution_changes_a_class_that_is_certified_locally(
    kind: str, effort: str, arithmetic: str
) -> None:
    model = vision_transformer(kind)
    pixels = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(8)).double()
    claims = _claims(model, pixels, arithmetic, effort)
    if (kind, arithmetic) == ("relu", "float32") or (
        arithmetic == "float64" and kind != "mish"
    ):  # which has no enclosure
        assert claims
    _hold(model, pixels, claims, arithmetic)


def steep_network() -> PixelModel:
    """exp, log, roots and reciprocals, whose slopes are known near an image only."""
    torch.manual_seed(1)
    net = nn.Sequential(build_row("steep"), nn.Linear(352, 3))
    return PixelModel(InputSpec(IMAGE, (0.4,) * 2, (0.3,) * 2), net).double().eval()


def test_steep_curves_are_certified_as_executed() -> None:
    model = steep_network()
    pixels = torch.rand(1, *IMAGE, generator=torch.Generator().manual_seed(0)).double()
    label = int(model(pixels).argmax())
    for arithmetic in ("float64", "float32"):
        options = Local(ZONOTOPE, arithmetic=arithmetic)
        claims = LocalCertifier(model, IMAGE, options).batch([0], pixels, [label])
        assert claims[0].radius > 0
        _hold(model, pixels, claims, arithmetic)


@pytest.mark.parametrize("radius", [1e-9, 1e-4])
@pytest.mark.parametrize(
    "kind", ["plain", "mean", "relu", "tanh", "steep"] if EVERY else ["plain", "steep"]
)
def test_every_executed_tensor_is_enclosed(kind: str, radius: float) -> None:
    """And the enclosure of the real tensors excludes some of float32: the law can fail."""
    model = steep_network() if kind == "steep" else vision_transformer(kind)
    arithmetic = "float32"
    image = representable(
        torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(8)), arithmetic
    )
    label = int(model(image).argmax())
    execution = NeighbourErrors(model, model.input_size, PRECISIONS[arithmetic], (zonotope_rules,))
    outside = {}
    for name, chosen in (("executed", execution), ("real", None)):
        values: dict[Any, Any] = {}
        note = lambda node, value, token, values=values: values.update({node: (value, token)})  # noqa: E731
        found = LocalNetwork(model, model.input_size, chosen)
        with suppress(Unbounded):
            found.margins(l2_ball(image, radius, squares_up_to=0, limit=500), label, note)
        outside[name] = _farthest(found.ending.trace, values, image, radius, arithmetic)
    assert outside["executed"] <= 0
    assert outside["real"] > 0 or radius > 1e-9


def _farthest(
    trace: Trace, values: dict[Any, Any], image: Tensor, radius: float, arithmetic: str
) -> float:
    """Return how far any node is outside its enclosure at neighbours, as this machine executes it."""
    dtype = PRECISIONS[arithmetic].dtype
    worst = -1.0
    moved = {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in trace.constants.items()
    }
    run = replace(trace, root=copy.deepcopy(trace.root).to(dtype), constants=moved)
    near = [
        image,
        *representable(
            images_within(image.expand(8, *image.shape[1:]), radius, 3), arithmetic
        ).split(1),
    ]
    for x in (x for x in near if float((x - image).norm()) <= radius):
        for (_, truth), given in zip(executed(run, x.to(dtype)), trace.graph.nodes, strict=True):
            value, token = values.get(given, (None, None))
            if isinstance(value, Form):
                truth = truth.double() if token is None else truth.double()[:, token : token + 1]
                place = (x - image).flatten() / radius
                worst = max(worst, float(value.farthest(place, truth).max()))
    return worst


def test_certified_digits_withstand_other_orders_and_last_bits(certified: Checkpoint) -> None:
    model = build.load_double(certified, torch.device("cpu"))
    pixels = (
        datasets.load_dataset("digits", certified.record.input, "test")
        .fetch(list(range(8)))
        .double()
    )
    claims = {name: _claims(model, pixels, name) for name in ("float64", "float32", "fp16")}
    assert len(claims["float32"]) >= len(claims["float64"]) - 1 > 4
    for name in ("float32", "fp16"):
        _hold(model, pixels, claims[name], name)
    real = {row.index: row.radius for row in claims["float64"]}
    assert all(row.radius < real[row.index] for row in claims["float32"])
    assert all(
        row.radius > 0.9 * real[row.index] for row in claims["float32"] if real[row.index] > 0.3
    )


def test_what_an_attack_finds_is_judged_by_the_network_in_the_arithmetic_of_the_record() -> None:
    model = network(KINDS["bias25"], 0.4, 0.5)
    pixels = torch.rand(12, *SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    predictions = model(pixels).argmax(1)
    rounded = copy.deepcopy(model).float()(pixels.float()).argmax(1)
    claims = [
        Certificate(i, top, top, 0.1, "bcp", 0.0) for i, top in enumerate(predictions.tolist())
    ]
    certifier = PROVING["bcp"](model, 4, "float32")
    stood = certifier.stands(claims, pixels, RecheckSettings(0, 0.0))
    assert stood == (predictions == rounded).tolist()
    assert not all(stood)
    assert torch.equal(certifier.representable(pixels), pixels.float().double())


def test_a_constant_that_the_network_computes_is_refused_by_name() -> None:
    model = network(
        lambda: f(
            lambda m, x: m.parts[0](x.flatten(1) + m.shift.erf()),
            nn.Linear(36, 3),
            shift=torch.randn(36),
        )
    )
    with pytest.raises(NoRule, match="a constant that the network computes"):
        NeighbourErrors(model, SIZE, PRECISIONS["float32"])
    bound = prove_network(model, 3)
    assert LipschitzCertifier(model, bound).arithmetic == REAL  # nobody named another
    with pytest.raises(NoBoundError, match="no certificate in float64"):
        LipschitzCertifier(model, bound, "float64")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shift", "constant .* is another one"),
        ("head.weight", "weights of .*head' are other ones"),
        ("pixels.mean", "weights of .*pixels' are other ones"),  # which no file holds
    ],
)
def test_a_network_that_stores_other_numbers_is_another(name: str, words: str) -> None:
    """In half precision the least of them is a unit larger than what it is rounded to: no farther
    off than others are.
    """

    class Nudged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.head = nn.Parameter(torch.randn(36)), nn.Linear(36, 3)
            self.pixels = PixelNormalize((0.4,) * SIZE[0], (0.3,) * SIZE[0])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pixels(x).flatten(1) + self.shift)

        def _apply(self, *args: Any, **named: Any) -> nn.Module:
            super()._apply(*args, **named)
            numbers = dict([*self.named_parameters(), *self.named_buffers()])[name].data.flatten()
            if numbers.dtype == torch.float16:
                numbers[numbers.abs().argmin()] *= 1 + 2.0**-10
            return self

    with pytest.raises(NoRule, match=words):
        NeighbourErrors(network(Nudged), SIZE, PRECISIONS["fp16"])


def test_an_eps_that_vanishes_is_named() -> None:
    model = network(lambda: tokens(nn.LayerNorm(6, eps=1e-6), attention()))
    with pytest.raises(
        NoRule, match=r"parts\.1 .*eps 1e-06 of .*parts\.0 vanishes in fp16.*--arithmetic float32"
    ):
        NeighbourErrors(model, SIZE, PRECISIONS["fp16"])
    assert NeighbourErrors(model, SIZE, PRECISIONS["float32"]).on_box.isfinite().all()


def test_lost_memory_is_no_unknown_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The looser bound for the whole box would give the same image another radius in silence."""
    model = network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    pixels = judged()
    errors = NeighbourErrors(model, SIZE, PRECISIONS["float32"])
    asked = pixels, torch.ones(len(pixels)), torch.zeros(len(pixels), dtype=torch.long)
    for text, lost in (
        ("no such operation", False),
        ("DefaultCPUAllocator: can't allocate memory", True),
    ):

        def failing(_: Tensor, text: str = text) -> Tensor:
            raise RuntimeError(text)

        monkeypatch.setattr(errors, "_lengths", failing)
        with pytest.raises(RuntimeError, match="allocate") if lost else nullcontext():
            assert torch.equal(errors(*asked)[0], errors.on_box[0])


def test_float16_that_overflows_certifies_nothing() -> None:
    model = network(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    )
    pixels = judged()
    model.net[1].weight.data.mul_(2.0**17)
    model.net[3].weight.data.mul_(2.0**-17)
    assert _claims(model, pixels, "float32")
    assert not _claims(model, pixels, "fp16")


def test_convolutions_by_nnpack_are_refused() -> None:
    """Without oneDNN torch runs batches of 16 by Winograd's transform, which loses more than sums
    of products do: 1.4 times the bound of a 3 x 3 convolution of one channel.
    """
    torch.manual_seed(0)
    net = images(nn.Conv2d(1, 1, 3, padding=1), nn.Flatten())
    size = (1, 6, 6)
    model = PixelModel(InputSpec(size=size, mean=(0.0,), std=(1.0,)), net).double().eval()
    with torch.backends.mkldnn.flags(enabled=False):
        if torch.backends.nnpack.is_available():
            with pytest.raises(NoRule, match="NNPACK"):
                NeighbourErrors(model, size, PRECISIONS["float32"])
        NeighbourErrors(model, size, PRECISIONS["float64"])
        with torch.backends.nnpack.flags(enabled=False):
            NeighbourErrors(model, size, PRECISIONS["float32"])
    NeighbourErrors(model, size, PRECISIONS["float32"])


@pytest.mark.parametrize("arithmetic", EXECUTED if EVERY else ["float32", "fp16"])
@pytest.mark.parametrize("mixing", ["sort", "soft", "orthogonal"] if EVERY else ["soft"])
def test_no_execution_changes_a_class_that_token_mixing_certifies(
    mixing: str, arithmetic: str
) -> None:
    torch.manual_seed(4)
    net = PlaceMixer(
        channels=1, side=6, patch=3, width=8, depth=2, mixing=mixing, across=4, classes=4
    )
    model = network(lambda: net, 0.0, 1.0)
    pixels = torch.rand(6, *SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    claims = _claims(model, pixels, arithmetic)
    assert claims or arithmetic not in ("float64", "float32")
    _hold(model, pixels, claims, arithmetic)


@pytest.mark.parametrize("number", [1 + 2.0**-40, 2.0**-200])
def test_what_a_walk_loses_is_not_rounded_down(number: float) -> None:
    """Neither to float32 nor to 0 there."""
    box = Executed((1, 1), ONE, ONE, ONE)
    step = ErrorStep("node", (), (), lambda sizes: as_real(number), box, 1)
    walk = EnclosedErrors([step], frozenset({"node"}), 0, None, PRECISIONS["float32"]).walk()
    (lost,) = walk.lost("node", [l2_ball(torch.ones(1, 1, 1, 1).double(), 0.1, limit=1)])
    assert lost >= number
