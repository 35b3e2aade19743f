"""What a certifier says of a network that changed after its proof, of batches it does not take, of
odd statistics.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.certify.box.certifier import BoxCertifier
from certcli.certify.certificate import Certificate, Certifier, RecheckSettings
from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_doubts import right_of
from certcli.images.labelled import Images
from certcli.lipschitz.network import prove_network
from certcli.models.pixels import PixelModel
from certcli.rounding.operation_errors import rules
from certcli.system.errors import ArchitectureError, DataError, NoBoundError

SIZE = (1, 4, 4)


def network() -> PixelModel:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = PixelModel(InputSpec(SIZE, (0.5,), (0.5,)), nn.Sequential(*layers)).double().eval()
    return model.requires_grad_(False)


CERTIFIERS = {
    "lipschitz": lambda model: LipschitzCertifier(model, prove_network(model, 3)),
    "box": lambda model: BoxCertifier(model, prove_network(model, 3)),
    "zonotope": lambda model: LocalCertifier(model, SIZE, Local(effort="zonotope"), steps=1),
    "norms": lambda model: LocalCertifier(model, SIZE, Local(effort="norms"), steps=1),
    "local-lip": lambda model: LocalLipCertifier(model, 3, SIZE),
    "bcp": lambda model: BcpCertifier(model, 3, SIZE),
}


def found(certifier: Certifier, pixels: Tensor) -> list[float]:
    return [row.radius for row in certifier.batch(range(len(pixels)), pixels, [0] * len(pixels))]


@pytest.mark.parametrize("name", CERTIFIERS)
def test_logits_that_are_no_numbers_certify_nothing(name: str) -> None:
    with pytest.raises(DataError, match="NaN or infinite logits"):
        CERTIFIERS[name](network()).batch([0], torch.full((1, *SIZE), math.inf), [0])


def test_products_of_symbols_are_of_the_l2_ball() -> None:
    """Their sizes rest on |e| <= 1, which a corner of the box exceeds."""
    for norm, there in (("l2", True), ("linf", False)):
        certifier = LocalCertifier(network(), SIZE, Local(effort="zonotope", norm=norm), steps=1)
        assert (certifier.squares > 0) is there


@pytest.mark.parametrize("way", ["in place", "behind autograd's back", "another tensor"])
@pytest.mark.parametrize("name", CERTIFIERS)
def test_no_certificate_of_weights_that_changed(name: str, way: str) -> None:
    model = network()
    pixels = torch.rand(2, *SIZE)
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
    pixels = torch.rand(2, *SIZE).double()
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
    pixels = torch.rand(4, *SIZE)
    labels = model(pixels.double()).argmax(1)
    labels[1:] = (labels[1:] + 1) % 3
    images = Images(
        "", "all", ("0", "1", "2"), labels, torch.arange(4), lambda places: pixels[list(places)]
    )
    assert right_of(model, images, 3) == [True, False, False, False]
    assert right_of(model, images, labels=labels + 1)[0] is False


class OneImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(1, 16))


@pytest.mark.parametrize("name", ["lipschitz", "zonotope", "norms"])
def test_a_network_of_one_image_is_refused_a_batch(name: str) -> None:
    model = (
        PixelModel(InputSpec(SIZE, (0.5,), (0.5,)), OneImage())
        .double()
        .eval()
        .requires_grad_(False)
    )
    certifier = CERTIFIERS[name](model)
    assert len(found(certifier, torch.rand(1, *SIZE))) == 1
    with pytest.raises(NoBoundError, match="does not take 2 images"):
        certifier.batch([0, 1], torch.rand(2, *SIZE), [0, 0])


@pytest.mark.parametrize("std", [-0.5, 0.0, float("nan")])
def test_statistics_are_checked_where_the_layer_is_made(std: float) -> None:
    with pytest.raises(ArchitectureError, match="std"):
        PixelModel(InputSpec(SIZE, (0.5,), (std,)), nn.Flatten())


def test_an_operation_without_a_rounding_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rules.modules, nn.ReLU)
    with pytest.raises(NoBoundError, match="ReLU"):
        found(CERTIFIERS["lipschitz"](network()), torch.rand(1, *SIZE))


@pytest.mark.parametrize(
    ("symbols", "effort"), [(None, "zonotope"), (None, "auto"), (0, "auto"), (0, "zonotope")]
)
def test_enclosures_that_do_not_fit_are_refused_or_done_without(
    monkeypatch: pytest.MonkeyPatch, symbols: int | None, effort: str
) -> None:
    monkeypatch.setattr("certcli.certify.local.affordable", lambda *_: symbols)
    if (symbols, effort) == (None, "zonotope"):
        with pytest.raises(NoBoundError, match="do not fit into memory"):
            LocalCertifier(network(), SIZE, Local(effort))
        return
    title = LocalCertifier(network(), SIZE, Local(effort)).title
    assert ("do not fit into memory" in title, "not 4,000: memory" in title) == (
        effort == "auto",
        effort != "auto",
    )
