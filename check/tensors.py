"""What layers do to constant, size and values of a tensor: the formulas of docs/bounds.md, by
number, written again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import count, takewhile
from typing import Any

import numpy as np

from check import norms
from check.norms import (
    NONE,
    ONE,
    Array,
    Interval,
    U,
    Unknown,
    extreme,
    frobenius,
    gamma,
    length,
    root_sum,
    spectral,
)

GELU_SLOPE = Interval(
    Fraction("1.12890414"), Fraction("1.12890415")
)  # Phi(sqrt 2) + sqrt 2 phi(sqrt 2)


@dataclass(frozen=True, eq=False)
class Node:
    """A bound that the proof must have: a theorem's value, or a law applied to parts."""

    path: str
    law: str
    value: Interval
    parts: tuple["Node", ...] = ()


@dataclass(frozen=True, eq=False)
class Map:
    """x -> M x + b on each token, M and b each within its error; not charged yet."""

    path: str
    matrix: Array
    bias: Array
    error: Fraction = NONE
    bias_error: Fraction = NONE

    @cached_property
    def norm(self) -> Interval:
        return spectral(self.matrix, self.error)

    @property
    def shift(self) -> Interval:
        return length(self.bias, self.bias_error)

    def scaled(self, path: str, gain: Array) -> "Map":
        matrix = self.matrix * gain[:, None]
        bias = self.bias * gain
        largest = Fraction(float(np.abs(gain).max()))
        errors = (
            self.error * largest + U * frobenius(matrix),
            self.bias_error * largest + U * frobenius(bias),
        )
        return Map(path, matrix, bias, *errors)

    def then(self, path: str, matrix: Array, bias: Array) -> "Map":
        rounding = gamma(matrix.shape[1] + 2)
        size = frobenius(matrix)
        carried = matrix @ self.bias
        off = (
            size * self.bias_error
            + rounding * size * frobenius(self.bias)
            + U * frobenius(carried + bias)
        )
        error = size * self.error + rounding * size * frobenius(self.matrix)
        return Map(path, matrix @ self.matrix, carried + bias, error, off)


ZERO = Map("", np.zeros((1, 1)), np.zeros(1))
Follow = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the network before the map that is pending."""

    node: Node
    size: Callable[[], Interval]  # computes a bound of the largest token over all images
    pending: Map | None = None
    batch: Array | None = None  # its values at some images, where they are followed
    lost: Any = NONE  # bounds on their rounding errors (l2), a Fraction of each image
    width: int = 0  # numbers a token has after the pending map

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", cache(self.size))  # a residual asks twice

    def charged(
        self, path: str, slope: Interval, size: Callable[[], Interval] | None = None
    ) -> "Tensor":
        """Return the tensor after a map of this slope; its values are the caller's to follow."""
        node = Node(
            path, "composition", slope * self.node.value, (Node(path, "theorem", slope), self.node)
        )
        return Tensor(
            node, size or self.size, self.pending, None, self.lost * slope.high, self.width
        )

    def at(
        self,
        old: "Tensor",
        follow: Follow,
        terms: int = 0,
        factor: Fraction = NONE,
        last: Map = ZERO,
    ) -> "Tensor":
        """Return the tensor with its values: sums of `terms` products, up to factor |x|, plus the
        bias of the last map.
        """
        if old.batch is None:
            return self
        extent = np.array([frobenius(image) for image in old.batch], dtype=object)
        tokens = norms.root(Fraction(old.batch[0, ..., 0].size), True)
        rounded = gamma(terms + 4) * (factor * extent + frobenius(last.bias) * tokens)
        error = self.lost + rounded + last.error * extent + last.bias_error * tokens
        return replace(self, batch=follow(old.batch), lost=error)

    def settled(self) -> "Tensor":
        """Charge the pending map: |M| (1), and |M x + b| <= |M| |x| + |b|."""
        last = self.pending
        if last is None:
            return self
        plain, (_, terms) = replace(self, pending=None), last.matrix.shape
        charged = plain.charged(last.path, last.norm, lambda: last.norm * self.size() + last.shift)
        return charged.at(
            self, lambda t: t @ last.matrix.T + last.bias, terms, frobenius(last.matrix), last
        )

    def shifted(self, shift: Array, tokens: int) -> "Tensor":
        """Add a constant to every image."""
        fit("a shift of tokens", (tokens, self.width), shift.shape)
        x, longest, last = self.settled(), extreme(max, *map(length, shift)), Map("", shift, shift)
        return replace(x, size=lambda: x.size() + longest).at(
            x, lambda t: t + shift, 1, Fraction(1), last
        )

    def curved(self, path: str, slope: Interval, follow: Follow) -> "Tensor":
        """Act on entries with this slope, |f(t)| <= |t| (3), or move entries: MaxMin, sorting (3.2,
        11.2).
        """
        x = self.settled()
        return x.charged(path, slope).at(x, follow)

    def mean(self, path: str, tokens: int) -> "Tensor":
        """Return the mean of all tokens: 1/sqrt(n) (8.5); a map that is pending on each token
        commutes with it.
        """
        share = Fraction(1, tokens)
        return self.charged(path, Interval.of(share).sqrt()).at(
            self, lambda t: t.mean(axis=1), tokens, Fraction(1)
        )

    def plus(self, branch: "Tensor", path: str) -> "Tensor":
        """x + f (8.2); values are not followed further."""
        other = branch.settled()
        fit(path, self.width, other.width)
        node = Node(path, "sum", self.node.value + other.node.value, (self.node, other.node))
        return Tensor(node, lambda: self.size() + other.size(), width=self.width)

    def beside(self, *others: "Tensor") -> "Tensor":
        """Return tensors without tokens side by side: squares add (8.3)."""
        parts = (self, *others)
        value, size = (
            root_sum(part.node.value for part in parts),
            lambda: root_sum(part.size() for part in parts),
        )
        node = (
            Node("", "concatenation", value, tuple(part.node for part in parts))
            if others
            else self.node
        )
        values = (
            None if self.batch is None else np.concatenate([part.batch for part in parts], axis=1)
        )
        error = sum((part.lost for part in parts), NONE)
        width = sum(part.width for part in parts)
        return Tensor(node, size, None, values, error, width)


def fit(path: str, actual: object, needed: object) -> None:
    if actual != needed:
        raise Unknown(f"{path}: {actual} where {needed} is needed")


class Layers:
    """The weights of a network, each of which must be read, and the layers that use them."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self.tensors, self.read = tensors, set[str]()

    def weight(self, name: str, rank: int) -> Array:
        shape = self.tensors[name].shape if name in self.tensors else None
        if shape is None or len(shape) != rank or 0 in shape:
            raise Unknown(f"{name} of shape {shape}")
        self.read.add(name)
        return self.tensors[name]

    def bias(self, path: str, width: int) -> Array:
        return self.weight(f"{path}.bias", 1) if f"{path}.bias" in self.tensors else np.zeros(width)

    def each(self, pattern: str, step: int = 1) -> list[str]:
        """Return `pattern` with 0, step, ... in place of {} while tensors begin with it."""
        paths = (pattern.format(number) for number in count(0, step))
        return list(
            takewhile(lambda path: any(name.startswith(path + ".") for name in self.tensors), paths)
        )

    def linear(self, x: Tensor, path: str) -> Tensor:
        matrix = self.weight(f"{path}.weight", 2)
        bias = self.bias(path, len(matrix))
        fit(path, (x.width, len(matrix)), (matrix.shape[1], len(bias)))
        pending = x.pending.then(path, matrix, bias) if x.pending else Map(path, matrix, bias)
        return replace(x, pending=pending, width=len(matrix))

    def mlp(self, x: Tensor, path: str, slope: Interval) -> Tensor:
        return self.linear(
            self.linear(x, f"{path}.fc1").curved(f"{path}.act", slope, np.copy), f"{path}.fc2"
        )

    def norm(self, x: Tensor, path: str, eps: float) -> Tensor:
        """LayerNorm: 1/sqrt(eps), tokens of norm below sqrt(d) (4.1); scale, centring and shift
        stay pending.
        """
        gain = self.weight(f"{path}.weight", 1)
        shift = self.weight(f"{path}.bias", 1)
        fit(path, (x.width, x.width, True), (len(gain), len(shift), len(gain) > 1))
        matrix = np.diag(gain) - gain[:, None] / len(gain)
        normed = x.settled().charged(
            path, Interval.of(1 / Fraction(eps)).sqrt(), Interval.of(len(gain)).sqrt
        )
        return replace(normed, pending=Map(path, matrix, shift, 3 * U * frobenius(matrix)))

    def patches(self, x: Tensor, path: str, function: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return tokens, linear maps of patches of normalised pixels (2.3), and the number of
        patches.
        """
        weight = self.weight(f"{path}.weight", 4)
        mean = function["mean"]
        std = function["std"]
        (out, channels, high, wide), size = weight.shape, function["size"]
        fit(
            path,
            (len(mean), len(std), size[0], size[1] % high, size[2] % wide),
            (channels, channels, channels, 0, 0),
        )
        plain, bias = weight.reshape(out, -1), self.bias(path, out)
        fit(path, (len(bias), min(std) > 0), (out, True))
        deviation, middle = (
            np.repeat(np.array(values, dtype=np.float64), high * wide) for values in (std, mean)
        )
        matrix = plain / deviation
        extent = frobenius(matrix)
        projected = matrix @ middle
        off = gamma(plain.shape[1] + 4) * extent * frobenius(middle) + U * frobenius(
            bias - projected
        )
        reach = max(
            max(abs(Fraction(m)), abs(1 - Fraction(m))) / Fraction(s) for m, s in zip(mean, std)
        )
        pending = Map(path, matrix, bias - projected, 2 * U * extent, off)
        batch = x.batch
        if batch is not None:
            grid = (
                len(batch),
                channels,
                batch.shape[2] // high,
                high,
                batch.shape[3] // wide,
                wide,
            )
            batch = (
                batch.reshape(grid)
                .transpose(0, 2, 4, 1, 3, 5)
                .reshape(len(batch), -1, plain.shape[1])
            )
        embedded = replace(x, pending=pending, batch=batch, width=out).settled()
        longest = Interval.of(reach) * Interval.of(plain.shape[1]).sqrt()
        tokens = size[1] // high * (size[2] // wide)
        return replace(embedded, size=lambda: spectral(plain) * longest + length(bias)), tokens

    def convolution(self, x: Tensor, path: str, stride: int, size: tuple[int, int]) -> Tensor:
        """A convolution with one pixel of zeros around the image (2.3); its values are not
        followed.
        """
        weight = self.weight(f"{path}.weight", 4)
        fit(path, (x.width, len(weight)), (weight.shape[1], len(self.bias(path, len(weight)))))
        return replace(x.charged(path, norms.convolution(weight, stride, size)), width=len(weight))

    def mixing(self, x: Tensor, path: str, tokens: int, placed: bool = False) -> Tensor:
        """Each head's channels times a matrix over tokens, or (placed) each token's by its own: the
        largest norm (11.1).
        """
        x = x.settled()
        maps = [self.weight(f"{part}.weight", 2) for part in self.each(f"{path}.maps.{{}}")]
        shift = self.weight(f"{path}.shift", 2)
        largest = extreme(max, *map(spectral, maps))
        axis, side, shift = (1, x.width, shift.T) if placed else (2, tokens, shift)
        fit(
            path,
            (tokens * x.width // side % len(maps), {m.shape for m in maps}),
            (0, {(side, side)}),
        )
        times = (lambda m, s: s @ m.T) if placed else np.matmul
        follow = lambda t: np.concatenate([*map(times, maps, np.split(t, len(maps), axis))], axis)  # noqa: E731
        return (
            x.charged(path, largest)
            .at(x, follow, side, max(map(frobenius, maps)))
            .shifted(shift, tokens)
        )

    def attention(self, x: Tensor, path: str, heads: int, tokens: int, theorem: str) -> Tensor:
        """Dot-product attention of tokens of norm at most R, by theorem 5.1, 5.2 or 7.2, and its
        output map, pending.
        """
        pending = self.linear(x, f"{path}.qkv").pending
        assert pending is not None
        width = len(pending.matrix) // (3 * heads)
        fit(path, (3 * heads * width, width > 0), (len(pending.matrix), heads > 0))
        starts = range(0, 3 * heads * width, width)
        plain = replace(x, pending=None, width=heads * width)
        of = lambda i, j: replace(pending, matrix=pending.matrix[i:j], bias=pending.bias[i:j])  # noqa: E731
        rows = [of(start, start + width) for start in starts]
        query = rows[:heads]
        key = rows[heads : 2 * heads]
        value = rows[2 * heads :]
        whole = [of(k * heads * width, (k + 1) * heads * width) for k in range(3)]
        if theorem == "7.2":
            return self.linear(self._products(plain, path, whole, width, tokens), f"{path}.proj")
        radius = x.size()
        scale = Interval.of(Fraction(1, width)).sqrt().wider(U)
        pull = Interval.of(Fraction(tokens, 2)).sqrt()
        constant = Interval.of(tokens).sqrt() * whole[2].norm
        sizes = [v.norm * radius + v.shift for v in value]
        if theorem == "5.2":
            of_query = [v.norm * radius * scale * k.norm * radius for v, k in zip(value, key)]
            of_key = [
                v.norm * radius * scale * pull * (q.norm * radius + q.shift)
                for v, q in zip(value, query)
            ]
            for weights, parts, together in ((of_query, query, whole[0]), (of_key, key, whole[1])):
                each = root_sum(w * part.norm for w, part in zip(weights, parts))
                constant = constant + extreme(min, each, extreme(max, *weights) * together.norm)
            return self.linear(
                plain.charged(path, constant, lambda: extreme(max, *sizes)), f"{path}.proj"
            )
        scores = [
            norms.of_product(k.matrix, q.matrix, (k.error, q.error)) * scale
            for k, q in zip(key, query)
        ]
        offsets = [q.then("", k.matrix.T, np.zeros(k.matrix.shape[1])) for k, q in zip(key, query)]
        shifts = [
            o.shift.wider(k.error * q.shift.high) * scale for o, k, q in zip(offsets, key, query)
        ]
        constant = constant + radius * radius * root_sum(v.norm * a for v, a in zip(value, scores))
        moves = (v.norm * (radius * a + shift) for v, a, shift in zip(value, scores, shifts))
        constant = constant + pull * radius * root_sum(moves)
        return self.linear(plain.charged(path, constant, lambda: root_sum(sizes)), f"{path}.proj")

    def _products(self, x: Tensor, path: str, maps: list[Map], width: int, tokens: int) -> Tensor:
        """Attention with a mask by windows, which stands between scores and softmax: products
        (7.2), softmax 1/2 (3.1).
        """
        times, gain = Interval.of(tokens).sqrt(), np.full(len(maps[0].bias), width**-0.5)
        maps = [maps[0].scaled(maps[0].path, gain), *maps[1:]]
        query, key, value = (replace(x, pending=part).settled() for part in maps)

        def of_two(a: Tensor, b: Tensor, size_a: Interval, size_b: Interval) -> Tensor:
            first, second = (
                t.charged(path, other * times).node for t, other in ((a, size_b), (b, size_a))
            )
            node = Node(path, "sum", first.value + second.value, (first, second))
            return Tensor(node, lambda: size_a * size_b * times, width=x.width)

        chances = of_two(query, key, query.size(), key.size()).charged(
            f"{path}.softmax", Interval.of(0.5)
        )
        return of_two(chances, value, ONE, value.size())
