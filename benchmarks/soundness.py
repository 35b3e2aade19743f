"""Random networks of operations with odd options: no slope that is measured exceeds the bound,
nothing crashes.

    python benchmarks/soundness.py [--seconds 60] [--seed 0] [--steps 5]

A network is a chain of operations drawn with their options and constants; those that torch itself
does not take are drawn again. Its slope is measured on noise, nearly constant and saturated images,
by the Jacobian and between pairs of images. One line a network that broke its bound or made the
engine crash, and a summary as JSON; exit 1 when there is one.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.bound import check_proof_laws
from certcli.lipschitz.network import bound_network

IMAGE = (2, 4, 4)
LARGEST = 400
"""Numbers in a tensor, at most: the Jacobian is dense."""

Step = Callable[[Tensor], Tensor]


class Draw:
    """Options and constants from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, *options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=self.generator))]

    def normal(self, *shape: int) -> Tensor:
        size = self.number(1.0, 1.0, 1.0, 10.0, 1e-3)
        return size * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) > self.number(0.2, 0.5, 0.9)

    def indices(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.generator)

    def axis(self, x: Tensor) -> int:
        """Any but the batch's."""
        place = 1 + int(torch.randint(x.dim() - 1, (1,), generator=self.generator))
        return int(self.number(place, place - x.dim()))

    def order(self, x: Tensor) -> list[int]:
        return [0, *(1 + torch.randperm(x.dim() - 1, generator=self.generator)).tolist()]


def linear(d: Draw, x: Tensor) -> Step:
    out = d.number(1, 3, 4, 8)
    weight, bias = d.normal(out, x.shape[-1]), d.number(None, d.normal(out))
    return lambda y: functional.linear(y, weight, bias)


def moves(d: Draw, x: Tensor) -> Step:
    axis, other, order = d.axis(x), d.axis(x), d.order(x)
    steps: list[Step] = [
        lambda y: y.permute(order),
        lambda y: y.transpose(axis, other),
        lambda y: y.mT,
        lambda y: y.flatten(1),
        lambda y: y.reshape(y.shape[0], -1, 4),
        lambda y: y.reshape(y.shape[0], 2, -1),
        lambda y: y.unsqueeze(axis),
        lambda y: y.squeeze(),
        lambda y: y.roll(3, axis),
        lambda y: y.flip(axis),
        lambda y: y.movedim(axis, other),
        lambda y: y.unflatten(axis, (2, -1)),
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def parts(d: Draw, x: Tensor) -> Step:
    axis = d.axis(x)
    n = x.shape[axis]
    whole = (slice(None),) * (axis % x.dim())
    first, last, step = d.number(0, 1, -2), d.number(None, 3, -1), d.number(1, 2)
    chosen, number = d.indices(n, d.number(1, 3, 6)), int(d.indices(n, 1))
    cuts = (int(d.indices(n + 1, 1)), int(d.indices(n + 1, 1)))
    steps: list[Step] = [
        lambda y: y[(*whole, slice(first, last, step))],
        lambda y: y[(*whole, number)],
        lambda y: y[(*whole, chosen)],
        lambda y: y[(*whole, None)],
        lambda y: y.index_select(axis, chosen),
        lambda y: y.narrow(axis, number, 1),
        lambda y: y.select(axis, number),
        lambda y: y.unbind(axis)[-1],
        lambda y: y.chunk(3, axis)[0],
        lambda y: torch.cat(y.split(2, dim=axis)[::-1], axis),
        lambda y: torch.cat(torch.tensor_split(y, cuts, dim=axis), axis),
        lambda y: torch.tensor_split(y, 2, dim=axis)[1],
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def copies(d: Draw, x: Tensor) -> Step:
    axis, n = d.axis(x), d.number(2, 3)
    often = d.indices(4, x.shape[axis])
    times = [1] * x.dim()
    times[axis] = n
    constant = d.normal(*x.shape[1:])
    pad, filling = [d.number(0, 1, 2, -1) for _ in range(2 * d.number(1, 2))], d.number(0.0, 3.0)
    steps: list[Step] = [
        lambda y: y.repeat(times),
        lambda y: y.tile(times),
        lambda y: y.repeat_interleave(n, axis),
        lambda y: y.repeat_interleave(often, dim=axis),
        lambda y: torch.repeat_interleave(y, often, axis),
        lambda y: torch.cat([y, -y, y], dim=axis),
        lambda y: torch.cat([y, constant.expand_as(y)], dim=axis),
        lambda y: torch.stack([y, 2 * y], dim=axis),
        lambda y: functional.pad(y, pad, value=filling),
        lambda y: functional.pad(y, pad, mode="reflect"),
        lambda y: functional.pad(y, pad, mode="circular"),
        lambda y: y.unfold(axis, 2, 1),
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def pointwise(d: Draw, x: Tensor) -> Step:
    a, b = d.number(-3.0, -0.5, 0.3, 2.0), d.number(0.1, 1.0, 4.0)
    low, high = d.number(-1.0, 0.2, None), d.number(0.4, -0.3, 2.0)
    axis, threshold = d.axis(x), d.number(0.5, 20.0, 60.0)
    steps: list[Step] = [
        functional.gelu,
        lambda y: functional.gelu(y, approximate="tanh"),
        functional.silu,
        functional.mish,
        functional.hardswish,
        functional.relu,
        functional.selu,
        lambda y: functional.leaky_relu(y, a),
        lambda y: functional.elu(y, a),
        lambda y: functional.celu(y, b),
        lambda y: functional.softplus(y, b, threshold),
        nn.Softplus(b, threshold),
        nn.Hardtanh(-b, b),
        nn.PReLU(init=a).double().requires_grad_(False),
        lambda y: y.clamp(low, high),
        lambda y: functional.threshold(y, 0.3, a),
        lambda y: functional.hardshrink(y, b),
        lambda y: functional.softshrink(y, b),
        lambda y: functional.glu(y, axis),
        lambda y: y.softmax(axis),
        lambda y: functional.log_softmax(y, dim=axis),
        lambda y: functional.softmax(y, axis, dtype=torch.float16).double(),
        lambda y: torch.sigmoid(a * y),
        lambda y: y**2,
        lambda y: y * y.sigmoid(),
        lambda y: y.abs().sqrt(),
        lambda y: y.half().double(),
        lambda y: a * y + b,
        lambda y: y / a - b,
        lambda y: y.round(),
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def reductions(d: Draw, x: Tensor) -> Step:
    axis, other, keep = d.axis(x), d.axis(x), d.number(True, False)
    dtype = d.number(None, None, torch.float64, torch.int64)
    steps: list[Step] = [
        lambda y: y.mean(axis, keepdim=keep),
        lambda y: y.mean((axis, other), keep),
        lambda y: y.sum(axis, keepdim=keep, dtype=dtype).double(),
        lambda y: y.amax(axis, keepdim=keep),
        lambda y: torch.amin(y, (axis, other)),
        lambda y: y.norm(dim=axis, keepdim=keep),
        lambda y: y.var(axis, keepdim=keep),
        lambda y: y.std(axis, keepdim=keep, correction=0),
        lambda y: y.logsumexp(axis, keepdim=keep),
        lambda y: y.cumsum(axis),
        lambda y: y.prod(axis),
        lambda y: y.max(axis).values,
        lambda y: y - y.mean(axis, keepdim=True),
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def norms(d: Draw, x: Tensor) -> Step:
    width, eps, axis = x.shape[-1], d.number(1e-2, 0.3), d.axis(x)
    order = d.number(2.0, 2.0, 1.0)
    scale, shift, per_channel = (
        d.normal(width),
        d.number(None, d.normal(width)),
        d.normal(x.shape[1]),
    )
    statistics = nn.BatchNorm2d(x.shape[1]).double().eval().requires_grad_(False)
    statistics.weight.data, statistics.running_mean = per_channel, d.normal(x.shape[1])
    groups = nn.GroupNorm(d.number(1, 2), x.shape[1], eps=eps).double().requires_grad_(False)
    steps: list[Step] = [
        lambda y: functional.layer_norm(y, (width,), scale, shift, eps),
        nn.LayerNorm(width, eps=eps, dtype=torch.float64).requires_grad_(False),
        lambda y: functional.rms_norm(y, (width,), scale, eps),
        lambda y: functional.normalize(y, p=order, dim=axis, eps=eps),
        statistics,
        groups,
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


def images(d: Draw, x: Tensor) -> Step:
    channels = x.shape[1]
    kernel, stride, padding = d.number(1, 2, 3), d.number(1, 2, 3), d.number(0, 1)
    dilation, ceil, size = (
        d.number(1, 2),
        d.number(True, False),
        (d.number(1, 2, 3, 5), d.number(1, 4)),
    )
    groups = d.number(1, 1, channels)
    mode = d.number("zeros", "zeros", "reflect", "circular")
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    counted, divisor, factor = d.number(True, False), d.number(None, None, 2), d.number(0.6, 1.5)
    resize = d.number("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    steps: list[Step] = [
        nn.Conv2d(channels, 2 * groups, kernel, groups=groups, padding_mode=mode, **options),  # type: ignore[list-item]
        nn.ConvTranspose2d(channels, 2 * groups, kernel, groups=groups, **options),  # type: ignore[list-item]
        nn.Conv1d(channels, 3, kernel, **options),  # type: ignore[list-item]
        lambda y: functional.max_pool2d(y, kernel, stride, padding, dilation, ceil),
        nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil),  # type: ignore[list-item]
        lambda y: functional.avg_pool2d(y, kernel, stride, padding, ceil, counted, divisor),
        lambda y: functional.adaptive_avg_pool2d(y, size),
        lambda y: functional.adaptive_max_pool2d(y, size),
        lambda y: functional.interpolate(y, size, mode=resize),
        lambda y: functional.interpolate(y, scale_factor=factor, mode=resize),
        lambda y: functional.pixel_shuffle(y, 2),
        lambda y: functional.pixel_unshuffle(y, 2),
        lambda y: functional.unfold(y, kernel, dilation, padding, stride),
        lambda y: functional.fold(y, (4, 4), 2, dilation, padding, stride),
    ]
    step = d.number(*steps)
    return step.double().eval().requires_grad_(False) if isinstance(step, nn.Module) else step  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.inner = (
            nn.MultiheadAttention(width, heads, batch_first=True).double().requires_grad_(False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def products(d: Draw, x: Tensor) -> Step:
    n = x.shape[-2]
    width = x.shape[-1]
    maps = [d.normal(width, width) / 3 for _ in range(3)]
    shifts = [d.number(0.0, 3.0, 30.0) for _ in range(3)]
    mask, filling = d.mask(n, n), d.number(-math.inf, -math.inf, -5.0, 0.0, 50.0)
    constant, one, narrow = d.normal(n, width), d.normal(*x.shape[1:]), d.normal(1, width)
    scale = d.number(None, 0.3, -2.0)

    def written(y: Tensor) -> Tensor:
        q, k, v = (y @ m + s for m, s in zip(maps, shifts, strict=True))
        return ((q @ k.mT).masked_fill(mask, filling) * (scale or 1.0)).softmax(-1) @ v

    def fused(y: Tensor) -> Tensor:
        q, k, v = (y @ m + s for m, s in zip(maps, shifts, strict=True))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask, scale=scale)

    filled, number = d.mask(width), d.number(0.0, 7.0)
    labels = "abcdef"[: x.dim()]
    steps: list[Step] = [
        written,
        written,
        fused,
        lambda y: y @ maps[0],
        lambda y: maps[1] @ y.mT,
        lambda y: y @ y.mT,
        lambda y: y * constant,
        lambda y: y + constant,
        lambda y: y * y.mean(-1, keepdim=True),
        lambda y: y + y[..., :1],
        lambda y: torch.einsum(f"{labels},{labels}->{labels}", y, y.sum(-1, keepdim=True)),
        lambda y: torch.einsum(
            f"{labels},{labels[-1]}z->{labels[:-1]}z", y.sum(-1, keepdim=True), maps[0]
        ),
        lambda y: torch.einsum(f"{labels},z{labels[-1]}->{labels[:-1]}z", y, narrow),
        lambda y: torch.where(mask[: y.shape[-2], : y.shape[-1]], y, 0.5),
        lambda y: y.masked_fill(filled, number),
        lambda y: torch.maximum(y, one),
        lambda y: torch.addcmul(y, y, one, value=0.5),
        lambda y: torch.lerp(y, one, 0.3),
        lambda y: y.clone().add_(y).mul_(0.5),
        SelfAttention(width, 1),
    ]
    return d.number(*steps)  # type: ignore[no-any-return]


FAMILIES = (linear, moves, parts, copies, pointwise, reductions, norms, images, products, products)


class Chain(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))
        self.register_buffer("precision", torch.zeros(1, dtype=torch.float64))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def step_of_one(step: Step, batch: Tensor, output: Tensor) -> bool:
    """Tell whether the step gives the first image alone what it has in the batch's shape."""
    return step(batch[:1]).shape == (1, *output.shape[1:])


def network(seed: int, length: int) -> tuple[nn.Module, list[str]]:
    """A chain that torch runs, batch axis kept, and what each step is."""
    d = Draw(seed)
    x = torch.rand(2, *IMAGE, generator=d.generator, dtype=torch.float64)
    steps: list[Step] = []
    names: list[str] = []
    for _ in range(20 * length):
        family = d.number(*FAMILIES)
        try:
            step = family(d, x)
            output = step(x)
            if (
                output.shape[0] != 2
                or not 0 < output.numel() <= 2 * LARGEST
                or not output.isfinite().all()
                or output.dim() < 2
                or not step_of_one(step, x, output)
            ):
                continue
        except Exception:  # torch does not take these options here
            continue
        x = output
        steps.append(step)
        names.append(f"{family.__name__} -> {tuple(output.shape[1:])}")
        if len(steps) == length:
            break
    return Chain(steps).eval(), names


def steepest(net: nn.Module, seed: int) -> float:
    """The largest slope met; nan where there is no derivative."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(3, *IMAGE, generator=generator, dtype=torch.float64)
    steepest_slope = 0.0
    for image in (*noise, noise[0].round(), 0.5 + 0.003 * noise[1], 0.5 + 1e-6 * noise[2]):
        try:
            jacobian = torch.autograd.functional.jacobian(
                lambda y: net(y[None]).flatten(), image
            ).flatten(1)
            if jacobian.isfinite().all():
                steepest_slope = max(steepest_slope, float(torch.linalg.matrix_norm(jacobian, 2)))
        except RuntimeError:
            pass
        with torch.no_grad():
            for step in (0.5, 1e-2, 1e-5):
                direction = torch.randn(IMAGE, generator=generator, dtype=torch.float64)
                other = (image + step * direction / direction.norm()).clamp(0, 1)
                here = net(image[None])
                there = net(other[None])
                # rounding of the two results, so that their difference counts as what it is
                rounding = (
                    1e-12 * float(here.abs().max() + there.abs().max()) * math.sqrt(here.numel())
                )
                steepest_slope = max(
                    steepest_slope,
                    (float((here - there).norm()) - rounding) / float((image - other).norm()),
                )
    return steepest_slope


def campaign(seconds: float, seed: int, length: int) -> Iterator[dict[str, Any]]:
    """One record a network."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        record: dict[str, Any] = {"seed": seed}
        net, record["steps"] = network(seed, length)
        try:
            result = bound_network(net, IMAGE, 3)
            upper = float(result.upper)
            record |= {
                "upper": upper,
                "why": result.bound.why,
                "state": "finite" if result.upper.finite else "refused",
            }
            if result.upper.finite:
                record["slope"] = steepest(net, seed)
                # 1e-8: rounding of the measured singular value, of Jacobians with a few hundred
                # thousand entries and 1e-12: of a constant map, whose slope is rounding alone
                if record["slope"] > upper * (1 + 1e-8) + 1e-12 or check_proof_laws(
                    result.bound.to_json()
                ):
                    record["state"] = "broken"
        except Exception as failure:
            record |= {"state": "crash", "why": f"{type(failure).__name__}: {str(failure)[:200]}"}
        yield record
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--refusals", action="store_true", help="print why networks are refused, with how often"
    )
    options = parser.parse_args()
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in campaign(options.seconds, options.seed, options.steps):
        states[record["state"]] += 1
        if record["state"] in ("broken", "crash"):
            print(json.dumps(record), flush=True)
        elif record["state"] == "refused":
            reasons[record["why"][:90]] += 1
    if options.refusals:
        for reason, count in reasons.most_common(40):
            print(f"{count:6d} {reason}", file=sys.stderr)
    print(json.dumps({"networks": sum(states.values()), **states}))
    return 1 if states["broken"] or states["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
