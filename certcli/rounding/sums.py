"""Sums and products: how they pass errors on, and what rounding adds, whatever the order."""

import math
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.rounding import TINY, gamma
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.rounding.algorithms import covers
from certcli.rounding.moves import overlap, spread, windows_of_entry
from certcli.rounding.running_error import (
    ROUNDED,
    Error,
    ExecutedOperation,
    Mean,
    Square,
    WithError,
    rule,
)

UNIT = gamma(0)
"""Above the relative error of a few roundings."""
_SHORT = 2.0**20


def total(*errors: Any) -> Any:
    """Return the sum of those that are there."""
    there = [error for error in errors if error is not None]
    return sum(there[1:], there[0]) if there else None


def _of_number(x: float) -> float | None:
    """Return the error of a Python number, computed (1 / sqrt(d)) unless it has few digits."""
    few = not math.isfinite(x) or ((float(x) * _SHORT).is_integer() and abs(x) < 2.0**30)
    return None if few else UNIT * abs(float(x))


def _spread(op: ExecutedOperation, x: Any, entries: int) -> Any:
    """Return the size of an operand's error, copied to `entries` entries."""
    if isinstance(x, Tensor):
        return spread(op, x, entries)
    number_error = _of_number(x)
    return None if number_error is None else number_error * math.sqrt(entries)


def _unrounded(op: ExecutedOperation, value: Tensor) -> bool:
    """Tell whether this is of exact numbers and integers, or small ones: not rounded."""
    if not value.is_floating_point():
        return op.exact
    return (
        op.exact
        and value.dtype == torch.float32
        and bool(((value == value.round()) & (value.abs() < 2**22)).all())
    )


def _reach(x: Any, like: Any) -> Any:
    """Return the most |x y|_2 for |y|_2 = 1, y shaped as `like`: entrywise, copied where 1."""
    if not isinstance(x, Tensor):
        return abs(float(x))
    shape = tuple(like.shape) if isinstance(like, Tensor) else ()
    shape = (1,) * (x.dim() - len(shape)) + shape
    copied = [axis for axis in range(-x.dim(), 0) if shape[axis] == 1]
    if not x.numel():
        return 0.0
    return (torch.linalg.vector_norm(x, dim=copied) + TINY if copied else x.abs()).amax() * ROUNDED


@rule("add", "sub", "rsub")
@covers("entries")
def added(op: ExecutedOperation, a: Any, b: Any, *, alpha: Any = 1) -> WithError:
    """e_a + |alpha| e_b, and the rounding of the result. Where an exact operand is -inf (a mask),
    so is the result.

    x - mean(x) is a projection: the mean brings its own rounding only.
    """
    value = op.run()
    if _unrounded(op, value):
        return value, None
    scale = 1.0 if alpha == 1 else abs(float(alpha)) * (1 + UNIT)
    one = _spread(op, a, value.numel())
    other = _spread(op, b, value.numel())
    entries = value.numel()
    scaled, plain = (one, other) if op.name == "rsub" else (other, one)
    note = op.note(b)
    if (
        op.name == "sub"
        and scale == 1.0
        and isinstance(note, Mean)
        and note.of is a
        and b.dim() == a.dim()
    ):
        scaled = note.own * math.sqrt(entries / b.numel())
    size = op.norm(_unmasked(op, value, a, b)) * UNIT
    if scale != 1.0:
        factor = a if op.name == "rsub" else b
        length = op.norm(factor) if isinstance(factor, Tensor) else abs(float(factor))
        size = size + length * (UNIT * scale * math.sqrt(entries))
    return value, total(size, plain, None if scaled is None else scaled * scale)


def _unmasked(op: ExecutedOperation, value: Tensor, *operands: Any) -> Tensor:
    """value with 0 where an exact operand is -inf."""
    for x in operands:
        if isinstance(x, Tensor) and op.size(x) is None and bool(x.isneginf().any()):
            value = value.masked_fill(x.isneginf(), 0.0)
    return value


@rule("mul")
@covers("entries")
def multiplied(op: ExecutedOperation, a: Any, b: Any) -> WithError:
    """|a| e_b + |b| e_a + e_a e_b, and the rounding of the result."""
    value = op.run()
    if _unrounded(op, value):
        return value, None
    one = op.size(a)
    other = op.size(b)
    size = op.norm(value) * UNIT + TINY
    for x in (a, b):
        if not isinstance(x, Tensor):
            size = size + op.norm(value) * UNIT  # the number itself may be rounded
    if one is not None:
        size = size + one * _reach(b, a)
    if other is not None:
        size = size + other * _reach(a, b)
    if one is not None and other is not None:
        size = size + one * other
    return value, Error(size, Square(a)) if a is b else size


@rule("div")
@covers("entries")
def divided(op: ExecutedOperation, a: Any, b: Any, **named: Any) -> WithError:
    """(e_a + |a / b| e_b) / (min |b| - e_b), and the result's rounding; inf where b may be 0."""
    jumps = named.get("rounding_mode") is not None
    op.require(not jumps or op.exact, "a division that jumps")
    value = op.run()
    if jumps or _unrounded(op, value):
        return value, None
    one = op.size(a)
    other = op.size(b)
    size = op.norm(value) * (2 * UNIT) + TINY
    if one is None and other is None:
        return value, size
    smallest = b.abs().amin() if isinstance(b, Tensor) else torch.full_like(size, abs(float(b)))
    below = smallest if other is None else smallest - other * ROUNDED
    numerator = total(
        None if one is None else one * math.sqrt(value.numel() / a.numel()),
        None if other is None else other * _reach(value, b),
    )
    return value, torch.where(below > 0, size + numerator / below * ROUNDED, torch.inf)


@rule("addcmul")
@covers("entries")
def added_product(
    op: ExecutedOperation, x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1
) -> WithError:
    result = op.run()
    product, error = multiplied(ExecutedOperation("mul", torch.mul, (a, b), {}, op.running), a, b)
    size = error.size if isinstance(error, Error) else error
    entries = result.numel()
    size = size * math.sqrt(entries / product.numel()) * abs(value) + op.norm(product) * (
        2 * UNIT * abs(value) * math.sqrt(entries)
    )
    return result, total(size, spread(op, x, entries), op.norm(result) * UNIT)


def _plain_norm(x: Tensor) -> Tensor:
    """Above |x|'s spectral norm in each matrix (last 2 axes): Frobenius, sqrt(|x|_1 |x|_inf)."""
    largest = x.abs().amax().clamp_min(TINY)  # scaled, so that no square underflows
    size = x.abs() / largest
    crossed = (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
    return (
        torch.minimum(torch.linalg.vector_norm(size, dim=(-2, -1)), crossed).amax()
        * (largest * ROUNDED)
        + TINY
    )


def _norms(op: ExecutedOperation, x: Tensor) -> tuple[Any, Any]:
    """Above |x| and ||x||, spectral, over x's matrices; exact ones proven, weights' kept."""
    if op.size(x) is not None or x.numel() > 2**26:
        plain = _plain_norm(x)
        return plain, plain
    is_weight = x.untyped_storage().data_ptr() in op.running.weights
    key = (x.data_ptr(), tuple(x.shape), x.stride(), x._version)
    if is_weight and key in op.running.known:
        return op.running.known[key]
    matrices = x.reshape(-1, *x.shape[-2:])
    plain = _plain_norm(x)
    few = len(matrices) <= 64 and (is_weight or x.numel() <= 2**18)
    norms = (
        plain.new_tensor(max(spectral_norms(list(matrices))))
        if few and bool(plain.isfinite())
        else plain,
        plain,
    )
    if is_weight:
        op.running.known[key] = norms
    return norms


@rule("mm", "bmm", "mv", "dot")
@covers("any order")
def matrices(op: ExecutedOperation, a: Tensor, b: Tensor) -> WithError:
    return op.run(), _product(op, a, b, a.shape[-1])


def _product(op: ExecutedOperation, a: Tensor, b: Tensor, terms: int) -> Tensor:
    """|b| e_a + |a| e_b + e_a e_b, and gamma | |a| |b| |_2."""
    one = op.size(a)
    other = op.size(b)
    a_ = a[None] if a.dim() == 1 else a
    b_ = b[:, None] if b.dim() == 1 else b
    left = right = None
    if other is not None or one is None:
        left = _norms(op, a if a_ is a else _same(op, a, a_))
    if one is not None or other is None:
        right = _norms(op, b if b_ is b else _same(op, b, b_))
    bounds = [side[1] * op.norm(x) for side, x in ((left, b), (right, a)) if side is not None]
    size = bounds[0] if len(bounds) == 1 else torch.minimum(*bounds)
    size = size * (gamma(terms) * ROUNDED) + TINY
    if one is not None and right is not None:
        size = size + one * right[0]
    if other is not None and left is not None:
        size = size + other * left[0]
    return size if one is None or other is None else size + one * other


def _same(op: ExecutedOperation, x: Tensor, view: Tensor) -> Tensor:
    """Return a view of x, with its error."""
    if x in op.running.errors:
        op.running.errors[view] = op.running.errors[x]
    return view


@rule("addmm", "baddbmm", "addmv")
@covers("any order")
def matrices_and_bias(
    op: ExecutedOperation, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> WithError:
    value = op.run()
    terms = a.shape[-1] + 4
    size = _product(op, a, b, terms) * (abs(alpha) * ROUNDED)
    return value, size if beta == 0 else size + _bias(op, bias, value, terms) * abs(beta)


def _bias(op: ExecutedOperation, bias: Tensor, value: Tensor, terms: int) -> Tensor:
    copies = math.sqrt(value.numel() / max(1, bias.numel()))
    size: Tensor = total(op.norm(bias) * (gamma(terms) * ROUNDED), op.size(bias)) * copies
    return size


@rule("convolution")
@covers("any order")
def convolution(op: ExecutedOperation, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
                transposed: bool, *_: Any) -> WithError:  # fmt: skip
    """sqrt(windows of an entry) |W|, W of a window; transposed the same: another's adjoint."""
    value = op.run()
    windows = math.sqrt(overlap(weight.shape[2:], stride, all(d == 1 for d in dilation)))
    flat, plain = _norms(op, _same(op, weight, weight.flatten(1)))
    terms = (weight.numel() if transposed else weight[0].numel()) + 2
    size = op.norm(x) * plain * (windows * gamma(terms) * ROUNDED) + TINY
    inherited = op.size(x)
    of_weight = op.size(weight)
    if inherited is not None:
        size = size + inherited * flat * windows
    if of_weight is not None:
        size = size + of_weight * total(op.norm(x), inherited) * windows
    return value, size if bias is None else size + _bias(op, bias, value, terms)


@rule("sum", "mean")
@covers("any order")
def summed(op: ExecutedOperation, x: Tensor, *_: Any, **__: Any) -> WithError:
    """sqrt(n) times n terms' error, 1 / sqrt(n) of their mean; 2 |x| times it for sums of x^2."""
    value = op.run()
    if _unrounded(op, value):
        return value, None
    count = x.numel() // max(1, value.numel())
    factor = 1 / math.sqrt(count) if op.name == "mean" else math.sqrt(count)
    size = op.size(x)
    note = op.note(x)
    rounding_error = op.norm(x) * (factor * gamma(count + 8)) + TINY
    if isinstance(note, Square):
        source = note.of
        error = op.size(source)
        axes = [
            axis
            for axis in range(x.dim())
            if len(value.shape) == x.dim() and value.shape[axis] != x.shape[axis]
        ]
        if math.prod(x.shape[axis] for axis in axes) == count:
            if error is None:
                return value, rounding_error
            longest = (
                torch.linalg.vector_norm(source, dim=axes).amax() + TINY
                if axes
                else source.abs().amax()
            )
            squares = error * (2 * longest * ROUNDED + error)
            return value, rounding_error + (squares / count if op.name == "mean" else squares)
    total_error = total(rounding_error, None if size is None else size * factor)
    return value, Error(total_error, Mean(x, rounding_error)) if op.name == "mean" else total_error


@rule("cumsum")
@covers("any order")
def running_sum(op: ExecutedOperation, x: Tensor, dim: int, *_: Any, **__: Any) -> WithError:
    value = op.run()
    if _unrounded(op, value):
        return value, None
    n = x.shape[dim]
    return value, total(
        op.norm(x) * (n * gamma(n)), None if (size := op.size(x)) is None else size * n
    )


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "avg_pool2d", "avg_pool3d")
@covers("any order")
def pooled(op: ExecutedOperation, x: Tensor, sizes: Any, *options: Any, **named: Any) -> WithError:
    """A mean has slope 1 at most, and an entry may lie in several windows."""
    op.require(len(options) < 5 or options[4] is None, "a divisor of its own")
    value = op.run()
    if "adaptive" in op.name:
        windows = math.sqrt(windows_of_entry(x.shape, sizes))
    else:
        windows = math.sqrt(overlap(sizes, options[0] if options and options[0] else sizes))
    size = op.size(x)
    rounding_error = (
        op.norm(x) * (windows * gamma(x.numel() // max(1, math.prod(x.shape[:2])) + 8)) + TINY
    )
    return value, total(rounding_error, None if size is None else size * windows)
