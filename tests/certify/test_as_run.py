"""What is certified is what runs, and holds still: precisions, batches, memory formats, a module's
own normalisation, and networks that change after their proof.
"""

import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import certvit
from certcli.certify.box.certifier import BoxCertifier
from certcli.certify.certificate import Certifier, RecheckSettings
from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier, ProvingCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.options import Effort, Local
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_doubts import right_of
from certcli.evaluation.image_records import Certificate
from certcli.images.labelled import Images
from certcli.lipschitz.network import bound_network, prove_network
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.rounding.operation_errors import rules
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    DataError,
    NoBoundError,
)
from check.documents import read_text
from tests.helpers.grids import crossed
from tests.helpers.lipschitz_cases import f

SIZE = (1, 2, 2)


Logits = Callable[[Any, Tensor], Tensor]


def by_one_layer(forward: Logits = lambda m, x: m.parts[0](x.flatten(1))) -> nn.Module:
    """Two classes of four pixels by one linear layer."""
    layer = nn.Linear(4, 2)
    layer.weight.data = torch.tensor([[1.0] * 4, [-1.0] * 4])
    layer.bias.data = torch.tensor([-1.5, 1.5])
    return f(forward, layer)


def by(name: str) -> nn.Module:
    return by_one_layer(lambda m, x: m.parts[0](BY[name](x.flatten(1))))


BY: dict[str, Callable[[Tensor], Tensor]] = {
    "precision": lambda x: 1 - x if x.dtype == torch.float32 else x,
    "limits": lambda x: x * (1.0 if torch.finfo(x.dtype).bits == 64 else 0.25),
    "batch": lambda x: 1 - x if len(x) >= 3 else x,
    "large batch": lambda x: 1 - x if len(x) >= 65 else x,
    "inference": lambda x: 1 - x if torch.is_inference_mode_enabled() else x,
}
"""What a network may depend on beside its pixels."""


def by_mean(m: Any, x: Tensor) -> Tensor:
    """The batch votes, behind one large logit."""
    t = m.parts[0](x.flatten(1))[:, :1]
    return torch.cat([t + 5 * (t.mean(0, keepdim=True).expand_as(t) - t), 0 * t, 0 * t - 1e6], 1)


def by_mean_aside(m: Any, x: Tensor) -> Tensor:
    """The batch votes, behind a large number that moves with the image and is added to all logits."""
    return by_mean(m, x)[:, :2] + 1e5 * x.flatten(1).mean(1, keepdim=True)


def by_mean_elsewhere(m: Any, x: Tensor) -> Tensor:
    """The batch votes, and a third class wins by far on the image without grey that replay sees."""
    other = 4e7 * (functional.relu((2 * x.flatten(1) - 1).square().mean(1, keepdim=True) - 0.9))
    return torch.cat([by_mean(m, x)[:, :2], other - 1e3], 1)


def one_logit_moves(move: float, dtype: torch.dtype, fewest: int = 3, place: int = -1) -> nn.Module:
    """One logit of one image of a large batch moves, to one side, in one precision."""

    def forward(m: Any, x: Tensor) -> Tensor:
        logits = m.parts[0](x.flatten(1))
        if len(x) < fewest or x.dtype != dtype:
            return logits
        moved = torch.zeros_like(logits)
        moved[place, 0] = move
        return logits + moved

    return by_one_layer(forward)


def certificates(module: nn.Module, **options: Any) -> Any:
    opened = certvit.load(module, mean=0.0, std=1.0, input_size=SIZE)
    pixels = torch.rand(8, *SIZE, generator=torch.Generator().manual_seed(0))
    return certvit.certify(opened, pixels, torch.zeros(8, dtype=torch.long), **options)


@pytest.mark.parametrize("name", ["precision", "limits"])
def test_another_network_in_the_named_precision_is_refused(name: str) -> None:
    with pytest.raises(CertvitError, match="not the proven one"):
        certificates(by(name), arithmetic="float32")
    assert len(certificates(by_one_layer(), arithmetic="float32")) == 8


@pytest.mark.parametrize(
    "kind",
    [
        lambda: by("batch"),
        lambda: by_one_layer(by_mean),
        lambda: by_one_layer(by_mean_aside),
        lambda: by_one_layer(by_mean_elsewhere),
    ],
    ids=["batch", "mean", "aside", "elsewhere"],
)
@pytest.mark.parametrize("options", [{}, {"method": "smoothing", "samples": 100}], ids=str)
def test_logits_that_depend_on_the_batch_are_refused(
    kind: Callable[[], nn.Module], options: Any
) -> None:
    with pytest.raises(CertvitError, match=r"batch|images beside it"):
        certificates(kind(), **options)


@pytest.mark.parametrize("move", [-1e-3, 1e-3])
@pytest.mark.parametrize("arithmetic", ["float64", "float32"])
def test_one_image_whose_logit_moves_to_one_side_refuses_the_batch(
    arithmetic: str, move: float
) -> None:
    network = one_logit_moves(move, getattr(torch, arithmetic))
    with pytest.raises(CertvitError, match="batch"):
        certificates(network, method="lipschitz", arithmetic=arithmetic)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_every_image_of_a_batch_is_compared_before_anything_is_bounded(place: int) -> None:
    """Whatever compares a batch with its images alone looks at all of them."""
    network = one_logit_moves(1.0, torch.float64, 2, place)
    proven = bound_network(network.eval().double(), SIZE, 2)
    assert not proven.upper.finite
    assert "batch" in proven.bound.why
    late = certvit.load(
        one_logit_moves(1.0, torch.float64, 3, place), mean=0.0, std=1.0, input_size=SIZE
    )
    with pytest.raises(CertvitError, match="in a batch of 3"):
        certvit.bounds(late, torch.rand(3, *SIZE), 0.01)


@pytest.mark.parametrize("place", [0, 50, -1])
def test_smoothing_compares_images_of_the_batches_that_it_draws(place: int) -> None:
    """The first, the one in the middle and the last."""
    network = one_logit_moves(10.0, torch.float32, 65, place)
    with pytest.raises(CertvitError, match="images beside it"):
        certificates(network, method="smoothing", samples=200, n0=100, batch_size=100)


@pytest.mark.parametrize("name", ["large batch", "inference"])
def test_smoothing_compares_the_batches_that_it_draws(name: str) -> None:
    with pytest.raises(CertvitError, match="images beside it"):
        certificates(by(name), method="smoothing", samples=200)


@pytest.mark.parametrize("method", ["local", "bcp", "local-lip"])
def test_certified_classes_are_those_of_the_network_as_run(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    predictions = whole(torch.rand(8, *SIZE, generator=torch.Generator().manual_seed(0))).argmax(1)
    opened = certvit.load(whole, mean=0.0, std=1.0, input_size=SIZE)
    pixels = torch.rand(8, *SIZE, generator=torch.Generator().manual_seed(0))
    certified = [
        each.index
        for each in certvit.certify(opened, pixels, predictions, method=method)
        if each.radius > 0
    ]
    assert len(certified) > 2
    last = certified[-1]  # the last one alone is enough
    monkeypatch.setattr(
        ProvingCertifier,
        "stands",
        lambda self, claims, *_: [claim.index != last for claim in claims],
    )
    with pytest.raises(CertvitError, match="other classes than its proven graph"):
        certvit.certify(opened, pixels, predictions, method=method)


@pytest.mark.parametrize(("arithmetic", "shift"), [("float64", 3e3), ("float32", 3.0)])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_a_group_norm_of_channels_last_lies_within_its_rounding(
    batch: int, arithmetic: str, shift: float
) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = (x + shift).contiguous(memory_format=torch.channels_last)
            return functional.group_norm(x, 1, eps=1e-2).flatten(1)

    net = PixelModel(InputSpec((2, 2, 2), (0.0,) * 2, (1.0,) * 2), Norm()).eval()
    net.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    exact = net.double()
    precision = PRECISIONS[arithmetic]
    allowed = NeighbourErrors(exact, (2, 2, 2), precision).on_box
    pixels = torch.rand(batch, 2, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    assert bool(torch.isfinite(allowed).all())  # an infinite bound would allow anything
    x = pixels + shift
    centred = x - x.mean((1, 2, 3), keepdim=True)
    real = (centred / (centred.square().mean((1, 2, 3), keepdim=True) + 1e-2).sqrt()).flatten(1)
    run = Norm()(pixels.to(precision.dtype)).double()
    apart = ((run[:, :, None] - run[:, None]) - (real[:, :, None] - real[:, None])).abs()
    assert bool((apart <= allowed).all())


@pytest.mark.parametrize("text", ["1000000000000000000000000e-24", "0" * 24 + "1", "1e12345678"])
def test_the_second_checker_refuses_a_text_that_it_would_have_to_cut(text: str) -> None:
    with pytest.raises(ValueError, match="at most 24"):
        read_text(text)
    assert read_text("1.5") == 1.5


def test_a_scripted_submodule_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(4, 2)))
    assert "scripted" in bound_network(net.eval(), SIZE, 2).bound.why


WIDE = (1, 4, 4)


def network() -> PixelModel:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = PixelModel(InputSpec(WIDE, (0.5,), (0.5,)), nn.Sequential(*layers)).double().eval()
    return model.requires_grad_(False)


CERTIFIERS = {
    "lipschitz": lambda model: LipschitzCertifier(model, prove_network(model, 3)),
    "box": lambda model: BoxCertifier(model, prove_network(model, 3)),
    "zonotope": lambda model: LocalCertifier(model, WIDE, Local(effort="zonotope"), steps=1),
    "local-lip": lambda model: LocalLipCertifier(model, 3, WIDE),
    "bcp": lambda model: BcpCertifier(model, 3, WIDE),
}


def found(certifier: Certifier, pixels: Tensor) -> list[float]:
    return [row.radius for row in certifier.batch(range(len(pixels)), pixels, [0] * len(pixels))]


@pytest.mark.parametrize("name", CERTIFIERS)
def test_logits_that_are_no_numbers_certify_nothing(name: str) -> None:
    with pytest.raises(DataError, match="NaN or infinite logits"):
        CERTIFIERS[name](network()).batch([0], torch.full((1, *WIDE), math.inf), [0])


def test_products_of_symbols_are_of_the_l2_ball() -> None:
    """Their sizes rest on |e| <= 1, which a corner of the box exceeds."""
    for norm, there in (("l2", True), ("linf", False)):
        certifier = LocalCertifier(network(), WIDE, Local(effort="zonotope", norm=norm), steps=1)
        assert (certifier.squares > 0) is there


@pytest.mark.parametrize("way", ["in place", "behind autograd's back", "another tensor"])
@pytest.mark.parametrize("name", CERTIFIERS)
def test_no_certificate_of_weights_that_changed(name: str, way: str) -> None:
    model = network()
    pixels = torch.rand(2, *WIDE)
    certifier = CERTIFIERS[name](model)
    claims = certifier.batch([0, 1], pixels, [0, 0])
    assert len(claims) == 2
    layer = model.net[3]
    if way == "in place":
        layer.weight.mul_(2)
    elif way == "another tensor":
        layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    else:
        layer.weight.data[0, 0] += 1e-9
    with pytest.raises(NoBoundError, match="changed after its proof"):
        certifier.batch([0], pixels[:1], [0])
    with pytest.raises(NoBoundError, match="changed after its proof"):
        certifier.confirm(claims, pixels, RecheckSettings(0, 1e-4))


class Failing(nn.Linear):
    """What a machine has not in half precision, or no memory for."""

    words = "not implemented for 'Half'"

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(self.words)


def test_what_does_not_run_in_its_precision_runs_in_float64_unless_memory_ends() -> None:
    model = network()
    pixels = torch.rand(2, *WIDE).double()
    certifier: Any = CERTIFIERS["lipschitz"](model)
    certifier._executed = Failing(1, 1).half()
    first, second = model(pixels).argmax(1).tolist()
    claims = [
        Certificate(0, 0, first, 0.1, "", 0.0),
        Certificate(1, 0, (second + 1) % 3, 0.1, "", 0.0),
    ]
    assert certifier.stands(claims, pixels, RecheckSettings(0, 1e-4)) == [True, False]
    certifier._executed.words = "can't allocate memory"
    with pytest.raises(RuntimeError, match="memory"):
        certifier.stands(claims, pixels, RecheckSettings(0, 1e-4))


def test_an_image_is_right_whose_top_class_is_its_label() -> None:
    model = network()
    pixels = torch.rand(4, *WIDE)
    labels = model(pixels.double()).argmax(1)
    labels[1:] = (labels[1:] + 1) % 3
    images = Images(
        "", "all", ("0", "1", "2"), labels, torch.arange(4), lambda places: pixels[list(places)]
    )
    assert right_of(model, images, 3) == [True, False, False, False]
    assert right_of(model, images, labels=labels + 1)[0] is False


def test_a_network_of_one_image_is_refused_a_batch_where_several_are_run() -> None:
    model = (
        PixelModel(
            InputSpec(WIDE, (0.5,), (0.5,)),
            f(lambda m, x: m.parts[0](x.reshape(1, 16)), nn.Linear(16, 3)),
        )
        .double()
        .eval()
        .requires_grad_(False)
    )
    images = torch.rand(2, *WIDE)
    for name in ("lipschitz", "zonotope"):
        assert len(found(CERTIFIERS[name](model), images[:1])) == 1
    with pytest.raises(NoBoundError, match="does not take 2 images"):
        CERTIFIERS["lipschitz"](model).batch([0, 1], images, [0, 0])
    labels = [int(model(image).argmax()) for image in images.split(1)]
    certifier = LocalCertifier(model, WIDE, Local(at=(1e-3,)))
    assert all(row.radius > 1e-3 for row in certifier.batch([0, 1], images, labels))


@pytest.mark.parametrize("std", [-0.5, 0.0, float("nan")])
def test_statistics_are_checked_where_the_layer_is_made(std: float) -> None:
    with pytest.raises(ArchitectureError, match="std"):
        PixelModel(InputSpec(WIDE, (0.5,), (std,)), nn.Flatten())


def test_an_operation_without_a_rounding_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rules.modules, nn.ReLU)
    with pytest.raises(NoBoundError, match="ReLU"):
        found(CERTIFIERS["lipschitz"](network()), torch.rand(1, *WIDE))


def attending() -> PixelModel:
    arguments = {"embed_dim": 8, "depth": 1, "num_heads": 1, "patch_size": 4}
    return build.load_double(build.initialise("certvit_vit_digits", arguments), torch.device("cpu"))


def memory_refusal(model: PixelModel, effort: Effort) -> NoBoundError | None:
    try:
        LocalCertifier(model, model.input_size, Local(effort))
    except NoBoundError as refusal:
        return refusal
    return None


MEMORIES = [(None, True), (None, False), (0, False), (0, True)]
"""How many symbols memory lasts for, and whether it does for tokens."""


@pytest.mark.parametrize("make", [network, attending])
@pytest.mark.parametrize(("effort", "memory"), crossed(get_args(Effort), MEMORIES))
def test_what_does_not_fit_is_refused_and_what_the_hint_names_fits(
    monkeypatch: pytest.MonkeyPatch, memory: tuple[int | None, bool], effort: Effort, make: Any
) -> None:
    """No hint leads to a second refusal."""
    symbols, tokens = memory
    monkeypatch.setattr("certcli.certify.local.affordable", lambda *_: symbols)
    monkeypatch.setattr("certcli.certify.local.fits_by_fibres", lambda *_: tokens)
    refusal = memory_refusal(make(), effort)
    chooses = make is attending and effort in ("auto", "branch")  # which has no ReLU
    by_tokens = tokens and (chooses or effort == "tokens")
    assert (refusal is None) is (by_tokens or (symbols == 0 and effort != "tokens"))
    if refusal is not None:
        assert "do not fit into memory" in refusal.message
        assert "--method smoothing" in refusal.hint
        named = re.search("--effort (.*) fits", refusal.hint)
        assert (named is not None) is (make is attending and tokens)
        assert named is None or memory_refusal(make(), "tokens") is None


def test_a_measured_slope_lies_below_the_proven_bound_of_a_linear_network() -> None:
    opened = certvit.load(by_one_layer(), mean=0.0, std=1.0, input_size=SIZE)
    slope = certvit.slope(opened, torch.rand(4, *SIZE)).value
    assert 0.999 * 8**0.5 < slope <= 8**0.5 <= float(certvit.bound(opened).upper)
