"""The law of certificates, over every registered method: nothing inside a claimed radius is of
another class.

Judged at the image itself, at random neighbours and where gradients lead, in rational arithmetic
wherever the network is a chain of linear maps. Of smoothing, which may be wrong with probability
alpha, the classifier of two classes is known exactly: under noise a linear network is itself.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import register_model
from torch import Tensor, nn

from certcli.certify.certificate import Certifier
from certcli.certify.lipschitz import pair_radii
from certcli.certify.methods import METHODS, options_of_method, prepare_method
from certcli.certify.options import CertifierOptions, Patches
from certcli.certify.patch.certifier import PatchCertifier
from certcli.certify.patch.certifier import prepare_patch as prepare_patch
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_records import Certificate, PatchCertificate
from certcli.evaluation.perturbation import Region
from certcli.evaluation.threat import Patch
from certcli.models import build
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.layers import MaxMin
from certcli.system.errors import DataError, NoBoundError
from certcli.system.registry import Entry
from tests.certify.test_local_lip import SIZE, climbed
from tests.helpers.grids import EVERY

COUNT = 6
ALPHA = 0.001


def chain(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((36, *widths), widths, strict=False):
        layers += [nn.Linear(before, after, dtype=torch.float64), activation()]
    return nn.Sequential(*layers[:-1])


def cancelling(power: int) -> nn.Sequential:
    """Rounding decides: the head takes off the biases 2^power, beside which the features are some
    2^(power - 50).
    """
    net = chain(16, 16, 4)
    hidden = net[3]
    head = net[5]
    hidden.weight.mul_(2.0 ** (power - 50))
    hidden.bias.fill_(2.0**power)
    head.weight.zero_()
    head.bias.zero_()
    for row in head.weight:
        row[torch.randperm(16)[:2]] = torch.tensor([1.0, -1.0]).to(row)
    return net


def scaled(*factors: float) -> nn.Sequential:
    net = chain(12, 12, 4, activation=MaxMin)
    for layer, factor in zip((net[1], net[3], net[5]), factors, strict=True):
        layer.weight.mul_(factor)
        layer.bias.zero_()
    return net


def tied() -> nn.Sequential:
    net = chain(16, 4, activation=MaxMin)
    net[3].weight[1], net[3].bias[1] = net[3].weight[0], net[3].bias[0]
    net[3].bias[2:] = -1e3
    return net


class Attending(nn.Module):
    """Six tokens of six pixels, L2 attention beside a stream that cancels, their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = (
            L2Attention(AttentionShape(6, 2, 3, True, 6, True)),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return self.head((tokens + self.attention(tokens)).mean(dim=1))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: chain(2),
    "relu": lambda: chain(16, 16, 4),
    "maxmin": lambda: chain(16, 16, 4, activation=MaxMin),
    "bias25": lambda: cancelling(25),
    "bias50": lambda: cancelling(50),
    "huge_tiny": lambda: scaled(2.0**300, 2.0**-290, 1.0),
    "tiny_huge": lambda: scaled(2.0**-300, 2.0**300, 2.0**4),
    "denormal": lambda: scaled(1.0, 2.0**-1050, 2.0**1000),
    "tied": tied,
    "attention": Attending,
}


@register_model
def law_network(pretrained: bool = False, kind: str = "linear", **given: Any) -> nn.Module:
    with torch.no_grad():
        net = KINDS[kind]().double()
    net.num_classes = 2 if kind == "linear" else 4  # type: ignore[assignment]
    net.pretrained_cfg = {"input_size": SIZE, "num_classes": net.num_classes}  # type: ignore[assignment]
    return net


def network(kind: str) -> Checkpoint:
    classes = 2 if kind == "linear" else 4
    return build.initialise(
        "law_network", {"kind": kind}, InputSpec(SIZE, (0.4,), (0.5,)), classes, seed=4
    )


def certificates(
    method: str, checkpoint: Checkpoint, pixels: Tensor
) -> tuple[Certifier, list[Certificate]]:
    """What the method claims of these images, as certified with the label that it predicts."""
    options = {
        "sigma": 0.1,
        "samples": 2000,
        "alpha": ALPHA,
        "precision": "float32",
        "patches": ["1", "2"],
    }
    certifier = prepare_method(
        method, checkpoint, torch.device("cpu"), options_of_method(method, options)
    )
    if certifier.failure and "linear" not in checkpoint.record.arch_args.values():
        return certifier, []  # another smoothed classifier is not known
    labels = build.load_double(checkpoint, torch.device("cpu"))(pixels).argmax(1).tolist()
    step = certifier.at_once or len(pixels)
    rows = []
    for start in range(0, len(pixels), step):
        chosen = range(start, min(start + step, len(pixels)))
        rows += certifier.batch(list(chosen), pixels[chosen], [labels[i] for i in chosen])
    return certifier, rows


def real_margins(net: nn.Module, image: Tensor, label: int) -> Fraction | float:
    """min z_label - z_j, in rational arithmetic of a chain; of another network in float64, where
    1e-9 counts as nothing.
    """

    def number(x: Tensor) -> Any:
        return np.vectorize(lambda t: Fraction(float(t)), otypes=[object])(x.detach().numpy())

    plain = net.net
    if not isinstance(plain, nn.Sequential):
        logits = net(image[None])[0]
        return (
            float((logits[label] - logits).index_fill(0, torch.tensor(label), torch.inf).min())
            + 1e-9
        )
    x = (number(image.flatten()) - Fraction(float(net.normalize.mean))) / Fraction(
        float(net.normalize.std)
    )
    for layer in plain:
        if isinstance(layer, nn.Linear):
            x = number(layer.weight) @ x + number(layer.bias)
        elif isinstance(layer, nn.ReLU):
            x = np.maximum(x, Fraction(0))
        elif isinstance(layer, MaxMin):
            first, second = np.split(x, 2)
            x = np.concatenate([np.maximum(first, second), np.minimum(first, second)])
    return min(x[label] - other for place, other in enumerate(x) if place != label)


def false_claims(
    checkpoint: Checkpoint, pixels: Tensor, rows: Sequence[Certificate]
) -> list[Certificate]:
    """Those with an image of another class, or of none alone, inside their radius."""
    net = build.load_double(checkpoint, torch.device("cpu"))
    claims = [row for row in rows if row.radius > 0 and row.prediction is not None]
    if not claims:
        return []
    images = pixels[[row.index for row in claims]]
    labels = torch.tensor([row.prediction for row in claims])
    radii = torch.tensor([min(row.radius, 10.0) for row in claims], dtype=torch.float64)
    points = climbed(net, images, labels, radii)
    return [
        row
        for row, image, point in zip(claims, images, points, strict=True)
        if any(real_margins(net, x, row.prediction) <= 0 for x in (image, point))
    ]


def false_of_patches(
    certifier: Certifier, pixels: Tensor, rows: Sequence[Certificate]
) -> list[Certificate]:
    """Those whose defended classifier gives another class where a patch is black, white or noise,
    at every place.
    """
    assert isinstance(certifier, PatchCertifier)
    draw = torch.Generator().manual_seed(6)
    found = []
    for row in rows:
        for patch in map(Patch.from_key, row.held if isinstance(row.held, tuple) else ()):
            image = pixels[row.index]
            nearby = [image]
            for corner in itertools.product(
                *(range(side - patch.height + 1) for side in image.shape[1:])
            ):
                for filled in (
                    torch.zeros_like(image),
                    torch.ones_like(image),
                    torch.rand(SIZE, generator=draw).double(),
                ):
                    nearby.append(
                        Region.within(patch, [corner], image[None]).project(
                            filled[None], image[None]
                        )[0]
                    )
            if set(certifier.predict(torch.stack(nearby))) != {row.prediction}:
                found.append(row)
    return found


def false_of_linear(
    checkpoint: Checkpoint, pixels: Tensor, rows: Sequence[Certificate]
) -> list[Certificate]:
    """Those beyond the distance to the hyperplane between two classes, which the smoothed
    classifier shares.
    """
    net: Any = build.load_double(checkpoint, torch.device("cpu"))
    gap = net.net[1].weight[1] - net.net[1].weight[0]
    steep = float(gap.norm()) / float(net.normalize.std)
    margins = net(pixels)[:, 1] - net(pixels)[:, 0]
    true = [(int(m > 0), abs(float(m)) / steep) for m in margins]
    claims = [row for row in rows if row.radius > 0 and row.prediction is not None]
    return [
        r
        for r in claims
        if r.prediction != true[r.index][0] or r.radius > true[r.index][1] * (1 + 1e-9)
    ]


def hold(method: str, kind: str, count: int = COUNT) -> int:
    """Raise AssertionError where a claim of this method is false; else how many claims there are."""
    checkpoint = network(kind)
    pixels = torch.rand(count, *SIZE, generator=torch.Generator().manual_seed(5)).double()
    pixels[1::2] = (2 * pixels[1::2] - 0.5).clamp(0, 1)  # half of these pixels at 0 or 1
    try:
        certifier, rows = certificates(method, checkpoint, pixels)
    except (NoBoundError, DataError):  # a refusal claims nothing
        return 0
    assert len(rows) == count or (certifier.failure and kind != "linear")
    assert all(0 <= row.failure < 1 and row.failure == certifier.failure for row in rows)
    if certifier.norm == "patch":
        assert not false_of_patches(certifier, pixels, rows)
    elif certifier.failure == 0:
        assert not false_claims(checkpoint, pixels, rows)
    if (
        kind == "linear" and certifier.domain == "all"
    ):  # within the box the hyperplane may be farther away
        wrong = false_of_linear(checkpoint, pixels, rows)
        # so many false ones have a chance below 1e-6 where each has alpha
        allowed = (
            next(k for k in range(count + 1) if math.comb(count, k) * certifier.failure**k < 1e-6)
            if wrong
            else 1
        )
        assert len(wrong) < max(1, allowed), wrong
    return sum(bool(row.held) for row in rows)


def cases() -> list[tuple[str, str]]:
    """Return each method with each network; by default with the one it must certify, the one it
    must not, and two others in turn.
    """
    others = itertools.cycle([kind for kind in KINDS if kind not in ("linear", "tied")])
    return [
        (method, kind)
        for method in METHODS.names()
        for kind in (
            KINDS
            if EVERY
            else dict.fromkeys((certain(method), "tied", *itertools.islice(others, 2)))
        )
    ]


def certain(method: str) -> str:
    """Return the network of which this method certifies something."""
    return "relu" if method == "patch" else "linear"


@pytest.mark.parametrize(("method", "kind"), cases())
def test_nothing_of_another_class_is_inside_a_claimed_radius(method: str, kind: str) -> None:
    claims = hold(method, kind, COUNT if EVERY else 3)
    if kind == certain(method):
        assert claims  # the law is about something
    if kind == "tied" and method not in (
        "smoothing",
        "patch",
    ):  # as a network is executed, its ties go one way
        assert not claims


class Claiming(Certifier):
    """A false method: every image, the same radius."""

    method = "claiming"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def attacked(self) -> nn.Module:
        return self.model

    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        tops = self.model(pixels.double()).argmax(1).tolist()
        rows = zip(indices, labels, tops, strict=True)
        return [
            Certificate(index, label, top, 0.5, self.method, self.failure)
            for index, label, top in rows
        ]


class PatchClaiming(PatchCertifier):
    """A false method: every image, whatever the masked passes say."""

    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchCertificate]:
        predictions = self.predict(pixels)
        return [
            PatchCertificate(index, label, top, proven=("2x2",))
            for index, label, top in zip(indices, labels, predictions, strict=True)
        ]


def patch_claiming(checkpoint: Checkpoint, device: torch.device, options: Patches) -> Certifier:
    honest = prepare_patch(checkpoint, device, options)
    return PatchClaiming(honest.procedure, honest.passes, honest.patches)


class Chancy(Claiming):
    failure = ALPHA


def claiming(checkpoint: Checkpoint, device: torch.device, options: CertifierOptions) -> Certifier:
    return Claiming(build.load_double(checkpoint, device))


def chancy(checkpoint: Checkpoint, device: torch.device, options: CertifierOptions) -> Certifier:
    return Chancy(build.load_double(checkpoint, device))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("patch_claiming", "linear"),
        ("chancy", "linear"),  # a chance of failure excuses no false method
        *(("claiming", kind) for kind in ("linear", "relu", "maxmin", "bias25", "tied")),
    ],
)
def test_a_method_that_claims_something_of_every_image_breaks_the_law(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(method, f"{__name__}:{method}", "a false method")
    monkeypatch.setitem(METHODS._entries, method, entry)
    with pytest.raises(AssertionError):
        hold(method, kind)


@pytest.mark.parametrize("largest", [False, True])
def test_the_rounding_is_taken_off_a_pairs_margin(largest: bool) -> None:
    """r K + E_ij <= z_i - z_j in rational arithmetic, E_ij next to nothing or large."""
    draw = torch.Generator().manual_seed(8)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    logits, slopes = 8 * positive(20, 4), positive(4, 4)
    rounding = positive(20, 4) * (1.0 if largest else 1e-9)
    top = logits.argmax(1)
    radii = pair_radii(logits, rounding, slopes, top)
    proven = 0
    for row, other in itertools.product(range(20), range(4)):
        i, radius = int(top[row]), float(radii[row, other])
        if other != i and radius > 0:
            proven += 1
            slope, off = (Fraction(float(part[other])) for part in (slopes[i], rounding[row]))
            margin = Fraction(float(logits[row, i])) - Fraction(float(logits[row, other]))
            assert Fraction(radius) * slope + off <= margin
    assert proven > 20
