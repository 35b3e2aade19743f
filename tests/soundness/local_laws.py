"""The laws over random programs: no point of the ball leaves a node of a walk, and no attack
succeeds within a radius.

What a domain refuses is counted.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from certcli.certify.around import Around, AroundImages
from certcli.certify.local import LocalCertifier
from certcli.certify.options import BRANCH, REAL, TOKENS, ZONOTOPE, Local
from certcli.enclosure.zonotopes import pointwise
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import lower_bounds
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, executed
from certcli.engine.tracer import Untraceable
from certcli.evaluation.threat import Norm
from certcli.system.errors import NoBoundError
from tests.helpers.enclosure_cases import square_symbols
from tests.soundness.edits import Found
from tests.soundness.local_programs import CLASSES, SIZE, program

STARTS = 3
POINTS = 6
STEPS = 8
RADII = (1e-3, 1e-2, 0.05, 0.2, 0.8)
NODES_AT = (1e-6, 1e-3, 3e-2, 0.3)
"""Radii at which every node is checked."""


def values_of_nodes(traced: Trace, pixels: Tensor) -> dict[fx.Node, Any]:
    """Every node of the graph at these pixels, one image at a time as it was traced."""
    return dict(executed(traced, pixels))


def unit_moves(directions: Tensor) -> Tensor:
    return directions / directions.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)


def guided(traced: Trace, pixels: Tensor, seed: int, most: int = 8) -> Tensor:
    """Unit moves (k, c, h, w): for some nodes, both ways along which a random sum of its entries
    changes fastest.
    """
    x = pixels.clone().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    found = []
    values = [
        v for v in values_of_nodes(traced, x).values() if isinstance(v, Tensor) and v.requires_grad
    ]
    for value in values[1:][:: max(1, len(values) // most)]:
        weight = torch.randn(value.shape, generator=generator).double()
        (slope,) = torch.autograd.grad((weight * value).sum(), x, retain_graph=True)
        found += [slope, -slope]
    axes = torch.eye(pixels.numel()).double().view(-1, *pixels.shape[1:])[seed % 3 :: 7]
    random_moves = torch.randn(6, *pixels.shape[1:], generator=generator).double()
    return unit_moves(torch.cat([*found, axes, -axes, random_moves]))


def share_of_form(form: Form, e: Tensor, truth: Tensor) -> float:
    """How far the truth (points, *shape) is from the form at the pixels' e (points, m), over what
    the form leaves free.
    """
    e = form.space.symbols(e)
    columns = torch.cat([e, square_symbols(e)], 1) if form.space.squares else e
    middle = form.centre + torch.tensordot(columns, form.gens[: form.fixed], dims=1)
    free = form.box_radius
    # the network and the form are evaluated in float64: 500 roundings, relative to the values
    far = (truth - middle).abs() - 1e-13 * (1 + truth.abs() + form.size)
    return float((far / free.clamp_min(1e-300)).max())


def walked_program(
    network: LocalNetwork,
    pixels: Tensor,
    label: int,
    radius: float,
    by_fibres: bool = False,
) -> tuple[dict[fx.Node, tuple[object, int | None]], Tensor | None]:
    """Every node's value in a walk around the images, and the margins; None where the walk has no
    end, as of several images that may not share one.
    """
    values: dict[fx.Node, tuple[object, int | None]] = {}

    def watch(node: fx.Node, value: object, token: int | None) -> None:
        values[node] = value, token

    ball = l2_ball(pixels, radius, squares_up_to=128, limit=300, by_fibres=by_fibres)
    try:
        labels = label if len(pixels) == 1 else torch.full((len(pixels),), label)
        return values, lower_bounds(network.margin_form(ball, labels, watch))
    except (Unbounded, NoRule) as reason:
        if isinstance(reason, NoRule) and len(pixels) == 1:
            raise
        return values, None


def check_nodes(found: Found, name: str, network: LocalNetwork, pixels: Tensor, seed: int) -> None:
    """No point of the ball leaves a node; at radius 0 no margin is above the logits' own."""
    traced = network.ending.trace
    logits = traced.root(pixels)[0]
    scaled = network.ending.norm is not None  # its margins have the sign alone
    label = seed % CLASSES
    by_fibres = name == TOKENS
    _, margins = walked_program(network, pixels, label, 0.0, by_fibres)
    truth = torch.stack([logits[label] - z for j, z in enumerate(logits) if j != label])
    noise = 1e-9 * (1 + logits.abs().max())
    if margins is not None and bool(
        ((margins > 0) & (truth < -noise) if scaled else margins > truth + noise).any()
    ):
        found.broken.append(f"{name}: margins {margins.tolist()} at radius 0, not {truth.tolist()}")
        return
    moves = guided(traced, pixels, seed)
    three = torch.cat([pixels, 1 - pixels, pixels.flip(-1)])
    balls = [(pixels, radius) for radius in NODES_AT]
    for images, radius in [*balls, *((three, radius) for radius in NODES_AT[1:3])]:
        values, _ = walked_program(network, images, label, radius, by_fibres)
        kind = f"{name} nodes" if len(images) == 1 else f"{name} nodes of several images"
        for place, image in enumerate(images.split(1)):
            points = [values_of_nodes(traced, image + radius * e) for e in moves]
            for node, (value, token) in values.items():
                for part, tensors in nodes_beside_points(
                    value, [point[node] for point in points], token
                ):
                    row = part.of_image(place)
                    found.tried[kind] += 1
                    found.tried[f"{name} points at nodes"] += len(points)
                    share = float("inf")
                    if tuple(row.shape) == tuple(tensors.shape[1:]):
                        share = share_of_form(row, moves.flatten(1), tensors)
                    rule = name, rule_of(traced, node)
                    found.tightest[rule] = max(found.tightest.get(rule, 0.0), share)
                    if not share <= 1:
                        found.broken.append(f"{kind}: {node} at {radius:g}: {share:.3g}")
                        return


def rule_of(traced: Trace, node: fx.Node) -> str:
    """The operation of a node, as its rules name it."""
    if node.op == "call_module":
        return type(traced.root.get_submodule(str(node.target))).__name__
    return (
        getattr(node.target, "__name__", str(node.target))
        if node.op.startswith("call")
        else node.op
    )


def nodes_beside_points(
    value: object, tensors: list[object], token: int | None
) -> Iterator[tuple[Form, Tensor]]:
    """What a walk says of a node's tensors, beside these tensors at some points: (points, *shape)."""
    if isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from nodes_beside_points(part, [one[i] for one in tensors], token)
    elif isinstance(value, Form):
        stacked = torch.stack(tensors)
        yield value, stacked if token is None else stacked[:, :, token : token + 1]


def least_margin_by_attack(
    model: nn.Module, pixels: Tensor, label: int, radius: float, seed: int
) -> float:
    """The least margin found within the radius among images in [0, 1], of which certificates speak."""
    generator = torch.Generator().manual_seed(seed)
    nearest = float("inf")
    for turn in range(STARTS):
        delta = radius * unit_moves(torch.randn(1, *SIZE, generator=generator).double())
        for step in range(STEPS):
            delta = ((pixels + delta).clamp(0, 1) - pixels).requires_grad_(True)
            logits = model(pixels + delta)[0]
            margins = torch.stack([logits[label] - z for j, z in enumerate(logits) if j != label])
            nearest = min(nearest, float(margins.detach().min()))
            aim = margins[turn % len(margins)] if turn < len(margins) else margins.min()
            (slope,) = torch.autograd.grad(aim, delta)
            delta = delta.detach() - (
                radius if step == 0 else 0.5 * radius * (1 - step / STEPS)
            ) * unit_moves(slope)
            delta = delta * (radius / delta.norm()).clamp_max(1)
    return nearest


def check_certificate(
    found: Found, model: nn.Module, certifier: LocalCertifier, pixels: Tensor, seed: int
) -> None:
    """No attack succeeds within the radius of this image."""
    label = int(model(pixels).argmax())
    name = certifier.effort
    (row,) = certifier.batch([0], pixels, [label])
    if row.radius > 0:
        found.tried[f"{name} certificates"] += 1
        found.tried[f"{name} attacks"] += STARTS
        least = least_margin_by_attack(model, pixels, label, row.radius, seed)
        if not least > 0:
            found.broken.append(f"{name}: margin {least:.3g} within {row.radius:.3g}")


def all_fibres(x: Form, *_: Any) -> Tensor:
    """Return every fibre: an ellipsoid holds wherever it is taken, and small networks take none."""
    return torch.arange(x.centre.numel() // x.shape[-1])


def check_slopes(found: Found, model: nn.Module, pixels: Tensor, seed: int) -> None:
    """No gradient of a margin in a ball is longer than what bounds margins near the image."""
    images = AroundImages(model, SIZE)
    norm: Norm = ("l2", "linf")[seed % 2]
    for radius in NODES_AT[1:]:
        near = images.near(pixels, Around(radius, norm, slopes=False))
        found.tried["slopes near images"] += int(near.upper.isfinite().sum()) - 1
        moves = torch.randn(POINTS, *SIZE, generator=torch.Generator().manual_seed(seed)).double()
        moves = unit_moves(moves) if norm == "l2" else moves.sign()
        for point in (pixels + radius * moves).clamp(0, 1).split(1):
            lengths = slopes_at(model, point, near.prediction, norm)
            if bool((lengths > near.upper * (1 + 1e-12)).any()):  # autograd's own roundings
                found.broken.append(f"slopes {lengths.tolist()} above {near.upper.tolist()}")
                return


def slopes_at(model: nn.Module, point: Tensor, label: int, norm: Norm) -> Tensor:
    """Return the length of each margin's gradient at a point (1, c, h, w)."""
    rows = torch.autograd.functional.jacobian(lambda x: model(x)[0], point, vectorize=False)
    return (rows[label] - rows).flatten(1).norm(p=2 if norm == "l2" else 1, dim=1)


def check_program(seed: int, found: Found) -> None:
    """All laws for the program of this seed, for every third one with all ellipsoids."""
    if seed % 3 == 2:
        with mock.patch.object(pointwise, "_ellipsoid_places", all_fibres):
            _check_laws(seed, found)
    else:
        _check_laws(seed, found)


def _check_laws(seed: int, found: Found) -> None:
    model = program(seed)
    laws = Found()
    pixels = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed + 1)).double()
    for name in (ZONOTOPE, TOKENS, BRANCH):
        options = Local(
            effort=name,
            at=RADII,
            arithmetic=(REAL, None)[seed % 2],
            seconds=1.0 if name == BRANCH else None,  # what is proven by then is attacked
        )
        try:
            certifier = LocalCertifier(model, SIZE, options, symbols=300, steps=1)
            if name != BRANCH:
                check_nodes(laws, name, certifier.network, pixels, seed)
            check_certificate(laws, model, certifier, pixels, seed)
        except (NoRule, Untraceable, NoBoundError) as reason:
            found.refused[f"{name}: {str(reason).removeprefix('no local certificate: ')}"[:90]] += 1
    try:
        check_slopes(laws, model, pixels, seed)
    except NoBoundError as reason:
        found.refused[f"slopes: {str(reason).removeprefix('no local bound: ')}"[:90]] += 1
    found.tried.update(laws.tried)
    found.tried["programs"] += 1
    for rule, share in laws.tightest.items():
        found.tightest[rule] = max(found.tightest.get(rule, 0.0), share)
    found.broken += [f"seed {seed}, {line}" for line in laws.broken]
