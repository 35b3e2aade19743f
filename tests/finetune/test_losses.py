"""Laws over the table of losses: finite, monotone in the radius, blind to the order of classes, exact
in the easy cases; BCP and Local-Lip are the certificate's numbers, with gradients that point where
certificates are.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from certcli.certify.chains.sequential import SequentialNetwork
from certcli.finetune.losses import LOSSES, NEEDS_CHAIN, NEEDS_PAIRS
from certcli.finetune.losses.bounds import (
    EMMA_FLOOR,
    HINGE_WEIGHT,
    TRADES_WEIGHT,
    ChainBound,
    worst_logits,
)
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError, UsageError
from tests.certify.test_local_lip import NETWORKS, SIZE, images, neighbours, network
from tests.helpers.training import digit_sets, trainer_of

CERTIFIED = sorted(NEEDS_PAIRS | NEEDS_CHAIN)
K = 7


def loaded(name: str) -> Callable[..., Tensor]:
    """The loss as a function of pair constants; those that take slopes of single images take the
    label's rows.
    """
    loss = LOSSES.load(name)
    if name not in NEEDS_CHAIN:
        return loss
    return lambda logits, labels, pairs, epsilon: loss(logits, labels, pairs[labels], epsilon)


def batch(
    scale: float = 3.0, count: int = 40, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits right about half of the time, labels, and pair constants of a head."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, K, (count,), generator=generator)
    logits = scale * (
        torch.randn(count, K, generator=generator) + 2 * functional.one_hot(labels, K)
    )
    head = torch.randn(K, 5, generator=generator)
    return logits.to(dtype), labels, torch.cdist(head, head).to(dtype).fill_diagonal_(0.0)


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_larger_radius_never_lowers_the_loss(name: str) -> None:
    logits, labels, pairs = batch()
    loss = loaded(name)
    values = [
        float(loss(logits, labels, pairs, radius)) for radius in (0, 0.01, 0.1, 0.5, 1, 5, 1e4, 1e9)
    ]
    for before, after in pairwise(values):
        assert after >= before - 1e-12 * abs(before)  # rounding of float64
    assert values[4] > values[0]


@pytest.mark.parametrize("name", CERTIFIED)
@pytest.mark.parametrize("gain", [30.0, 1e3])
def test_a_bound_that_is_far_too_large_has_a_way_down(name: str, gain: float) -> None:
    """Certified training begins there after `constrain`: a flat loss would leave every image
    uncertified for good.
    """
    logits, labels, pairs = batch()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    value = loaded(name)(logits, labels, scale * gain * pairs / pairs.max(), 1.0)
    (slope,) = torch.autograd.grad(value, scale)
    assert float(slope) > 0.01  # a flat one has 1e-9 of it at 30, and none beyond


@pytest.mark.parametrize("name", ["lmt", "emma", "trades", "bcp", "local-lip"])
def test_at_radius_zero_only_cross_entropy_is_left(name: str) -> None:
    logits, labels, pairs = batch()
    expected = functional.cross_entropy(logits, labels)
    # float64, sums of seven exponentials
    assert math.isclose(
        float(loaded(name)(logits, labels, pairs, 0.0)), float(expected), rel_tol=1e-12
    )


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_is_alike_in_any_order_and_precision_and_falls_with_the_right_answer(
    name: str,
) -> None:
    logits, labels, pairs = batch()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    loss = loaded(name)
    plain = float(loss(logits, labels, pairs, 0.3))
    moved = float(loss(logits[:, order], order.argsort()[labels], pairs[order][:, order], 0.3))
    assert math.isclose(plain, moved, rel_tol=1e-12)
    single = loss(logits.float(), labels, pairs.float(), 0.3)
    assert single.dtype == torch.float32
    assert math.isclose(float(single), plain, rel_tol=1e-5)  # float32 has 1.2e-7, 280 terms
    right = 9.0 * functional.one_hot(labels, K).double()
    assert loss(right, labels, pairs, 0.1) < loss(-right, labels, pairs, 0.1)
    if name in CERTIFIED:
        rounded = logits.bfloat16()
        wide = loss(rounded.float(), labels, pairs, 0.3)
        assert torch.equal(loss(rounded, labels, pairs, 0.3), wide)


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("slope", [0.0, 1e-9, 1.0, 1e9, 1e40, 1e300])
def test_losses_and_their_gradients_are_finite(name: str, scale: float, slope: float) -> None:
    logits, labels, pairs = batch(scale, dtype=torch.float32)
    logits.requires_grad_(True)
    pairs = (slope * pairs.double()).requires_grad_(True)
    value = loaded(name)(logits, labels, pairs, 1.5)
    assert torch.isfinite(value)
    value.backward()
    assert torch.isfinite(logits.grad).all()
    if name in CERTIFIED:
        assert torch.isfinite(pairs.grad).all()


@pytest.mark.parametrize("name", LOSSES.names())
def test_loss_gradients_are_those_of_finite_differences(name: str) -> None:
    logits, labels, pairs = batch(count=6)
    loss = loaded(name)
    if name == "emma":
        return  # its caps are detached on purpose: see the next test
    inputs = (logits.requires_grad_(True), pairs.requires_grad_(name in CERTIFIED))
    assert torch.autograd.gradcheck(lambda z, k: loss(z, labels, k, 0.2), inputs)


def test_emma_asks_every_pair_for_what_it_has_reached() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, 6.0]], dtype=torch.float64)
    pairs = torch.ones(4, 4, dtype=torch.float64) - torch.eye(4, dtype=torch.float64)
    # radius 2: class 1 has a gap of 1, class 2 one of 5 (capped at 2), class 3 is ahead: the floor
    worst = torch.tensor([[5.0, 5.0, 2.0, 6.0 + 2 * EMMA_FLOOR]], dtype=torch.float64)
    expected = functional.cross_entropy(worst, torch.tensor([0]))
    assert math.isclose(
        float(LOSSES.load("emma")(logits, torch.tensor([0]), pairs, 2.0)), float(expected)
    )


@pytest.mark.parametrize("name", ["gloro", "local-lip-gloro"])
def test_an_extra_class_is_preferred_exactly_where_nothing_is_certified(name: str) -> None:
    """With a large scale cross entropy is 0 or large: below log 2 only where the label wins all k +
    1 classes.
    """
    logits, labels, pairs = batch(count=200)
    radius = 0.4
    loss = loaded(name)
    margin = logits.gather(1, labels.unsqueeze(1)) - logits - radius * pairs[labels]
    certified = margin.scatter(1, labels.unsqueeze(1), math.inf).amin(dim=1) > 0
    assert 10 < int(certified.sum()) < 190
    for index in range(200):
        value = float(
            loss(1e3 * logits[index : index + 1], labels[index : index + 1], 1e3 * pairs, radius)
        )
        assert (value < math.log(2)) == bool(certified[index])


def test_hinge_kr_and_trades_by_hand() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0])
    pairs = torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 2.0], [2.0, 2.0, 0.0]], dtype=torch.float64)
    # radii 1 and 1.5; a radius of 1.25 asks the first for 0.25
    expected = (HINGE_WEIGHT * 0.25 - 1.0 - 1.5) / 2
    assert math.isclose(float(LOSSES.load("hinge-kr")(logits, labels, pairs, 1.25)), expected)
    p = logits.softmax(1)
    q = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64).softmax(1)
    divergence = float((p * (p / q).log()).sum())
    expected = float(functional.cross_entropy(logits, labels)) + TRADES_WEIGHT * divergence
    assert math.isclose(float(LOSSES.load("trades")(logits, labels, pairs, 0.5)), expected)


@pytest.mark.parametrize("name", sorted(NEEDS_PAIRS))
def test_no_constants_or_no_finite_ones_are_refused(name: str) -> None:
    logits, labels, pairs = batch()
    with pytest.raises(UsageError, match="bound"):
        LOSSES.load(name)(logits, labels, None, 0.1)
    for wrong in (math.inf, math.nan):
        with pytest.raises(NoBoundError, match="beyond float64"):
            LOSSES.load(name)(logits, labels, pairs.index_fill(0, torch.tensor([0]), wrong), 0.1)


CHAINED = sorted(NEEDS_CHAIN)


def chain_bound(model: PixelModel, name: str, iterations: int = 30) -> ChainBound:
    arithmetic = TrainableArithmetic(torch.device("cpu"), iterations=iterations)
    return ChainBound(model, lambda: arithmetic, drop=name != "bcp")


# of "thresholds" the four iterations find 95 % of a norm (measured): training's estimate, no bound
@pytest.mark.parametrize("loss", CHAINED)
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"thresholds"}))
def test_gains_are_the_certificates_and_above_what_neighbours_reach(name: str, loss: str) -> None:
    model = network(name)
    pixels = images()
    logits = model(pixels)
    labels = logits.argmax(1)
    top = logits.gather(1, labels[:, None]) - logits
    bound = chain_bound(model, loss)
    proven = SequentialNetwork(model, SIZE)
    for radius in (0.1, 0.5, 2.0):
        radii = torch.full((len(pixels),), radius, dtype=torch.float64)
        with torch.no_grad():
            gains = bound.gains(pixels, labels, radius).scatter(1, labels[:, None], 0.0)
        values = proven.values(pixels)
        drop = loss != "bcp"
        lowest = proven.margins(
            values, proven.moves(pixels, values, radii, drop=drop), labels, drop=drop
        )
        exact = (top - lowest).scatter(1, labels[:, None], 0.0)
        # from below by four power iterations an image (0.2 % here); from above by 1e-12 under a
        # root and the dual's t
        assert bool((gains >= 0.99 * exact - 1e-9).all())
        assert bool((gains <= 1.000001 * exact + 1e-5).all())
        for near in neighbours(pixels, radii, 20):
            moved = model(near)
            risen = top - (moved.gather(1, labels[:, None]) - moved)
            assert bool((risen <= 1.01 * gains + 1e-9).all())


@pytest.mark.parametrize("loss", CHAINED)
@pytest.mark.parametrize("name", ["conv", "maxmin"])
def test_chain_gradients_are_those_of_finite_differences(name: str, loss: str) -> None:
    model, pixels = network(name), images()
    labels = model(pixels).argmax(1)
    weights = [p.requires_grad_(True) for p in model.net.parameters()]
    bound = chain_bound(model, loss)

    def value() -> Tensor:
        return worst_logits(model(pixels), labels, bound.slopes(pixels, labels, 0.05), 0.05)

    generator = torch.Generator().manual_seed(4)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    slopes = torch.autograd.grad(value(), weights)
    expected = float(sum((a * b).sum() for a, b in zip(slopes, directions, strict=True)))
    ends = []
    step = 1e-5
    for sign in (1, -1):
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight += sign * step * direction
            ends.append(float(value()))
            for weight, direction in zip(weights, directions, strict=True):
                weight -= sign * step * direction
    # singular vectors are held fixed: exact where power iteration has converged, here up to 1e-3
    assert expected == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-2)


@pytest.mark.parametrize("loss", CHAINED)
def test_a_run_validates_by_the_bound_it_trains(loss: str) -> None:
    checkpoint = build.initialise("certvit_4c3f", {"img_size": 8})
    run = trainer_of(checkpoint, loss=loss, epsilon=1e-3, ramp=0, steps=2, batch_size=16)
    (record,) = run.run(*digit_sets(checkpoint, 32, 32))
    assert run.pairs() is None
    assert record.certified_estimate is not None
    assert record.certified_estimate <= record.clean
    assert run.state().under("vector.")  # singular vectors go on where they were


def test_a_network_that_is_no_chain_is_refused() -> None:
    checkpoint = build.initialise("certvit_vit_digits", {})
    with pytest.raises(NoBoundError, match="no chain"):
        trainer_of(checkpoint, loss="bcp")
