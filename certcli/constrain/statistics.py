"""Gram matrices of the inputs of each layer, from streamed forward passes; no activation is kept.

A layer with weight W0 (out x in) and calibration inputs X (in x T, a column a token) needs only
G = X X^T: |W X - W0 X|_F^2 = tr(D G D^T) with D = W - W0. The cross moments H = W0 G and energy S =
tr(W0 G W0^T) follow from G, because the layer's outputs are its own. A convolution is the matrix
over its unfolded patches.

With all tokens, the inputs are cast to float64, so that "the error is at most eta" is true to a
dozen digits. A sample of tokens, drawn anew for each batch, costs a fraction; its products have the
inputs' own precision and are summed in float64. Float32 products (benchmarks/constrain.py,
precision) miss an allowed error of 0.1 % on ViT-Tiny by at most 3e-4 of it, in the patch embedding,
whose Gram matrix has condition 3e7.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from certcli.constrain.layers import (
    Batches,
    Visit,
    conv_geometry,
    input_rows,
    module_at,
    proven_norm,
    refusal,
    require_finite_inputs,
    run_batches,
    sampled,
    visiting,
)
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.system.errors import UsageError, raise_if


@dataclass
class GramSums:
    """The sum of one pass for one layer, X X^T (in, in) in float64."""

    gram: Tensor
    conv: Geometry | None
    tokens: int = 0

    def add(self, columns: Tensor) -> None:
        """Add X X^T of the rows (tokens, in), a product in their precision."""
        self.tokens += len(columns)
        self.gram += columns.mT @ columns


MOST_ETA = 0.999
"""Largest relative error by an absolute one: at 1 a layer may vanish."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Sufficient statistics of one layer.

    Args:
        weight: (out, in) float64 (see `widened`); a convolution's as out x (in * kh * kw).
        gram: (in, in) float64, G = X X^T.
        kind: "linear" or "conv".
        shape, dtype: those of the parameter.
        held_out: (in, in), the Gram matrix of images that take no part in the constraint.
        conv: see `layers.geometry`.
        tokens: the number of columns of X.
    """

    path: str
    weight: Tensor
    gram: Tensor
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held_out: Tensor | None = None
    conv: Geometry | None = None
    tokens: int = 0

    @cached_property
    def output_energy(self) -> Tensor:
        """Return S = |W0 X|_F^2, the energy of the outputs without bias: ()."""
        return energy(self.weight, self.gram)

    def relative_error(self, weight: Tensor) -> Tensor:
        """Return |W X - W0 X|_F / |W0 X|_F, (out, in) -> (), any dtype. 0 / 0 is 0."""
        error = energy(weight - self.weight, self.gram)
        return torch.where(error > 0, (error / self.output_energy).sqrt(), torch.zeros_like(error))

    def held_out_error(self, weight: Tensor) -> float | None:
        """Return the same ratio on the held-out images; None without them."""
        if self.held_out is None:
            return None
        return float(replace(self, gram=self.held_out).relative_error(weight))

    def eta_of(self, mean_squared: float) -> float:
        """Return the relative error of this mean squared error, at most MOST_ETA.

        sqrt(T mean_squared / S) with T tokens is the paper's constraint sum_t |W x_t - W0 x_t|^2 <=
        T mean_squared. Source: CertViT, (12).
        """
        size = float(self.output_energy)
        return min(MOST_ETA, math.sqrt(self.tokens * mean_squared / size)) if size > 0 else MOST_ETA

    @cached_property
    def before(self) -> float:
        """Return the layer's proven norm before any change."""
        return self.norm(self.weight)

    def norm(self, weight: Tensor) -> float:
        """Return the layer's proven norm with this weight, (out, in) or in the parameter's shape."""
        return proven_norm(weight.reshape(self.shape), self.conv)

    @property
    def overlapping(self) -> bool:
        """Return whether this is a convolution whose windows share pixels."""
        return self.conv is not None and tuple(self.conv.stride) != tuple(self.shape[2:])

    def widened(self) -> "LayerStatistics":
        """Return a copy with the weight in float64; before, it shares the parameter's memory."""
        return replace(self, weight=self.weight.double())


def energy(matrix: Tensor, gram: Tensor) -> Tensor:
    """Return tr(M G M^T) >= 0: (out, in), (in, in) -> ()."""
    return (matrix @ gram).mul_(matrix).sum((-2, -1)).clamp_min(0)


def bytes_of(model: nn.Module, paths: Sequence[str], copies: int) -> int:
    """Return the bytes of all layers' statistics, float64 weights; `copies`: `passes_within`."""
    shapes = [module_at(model, path).weight.flatten(1).shape for path in paths]
    return sum(8 * (copies * columns**2 + rows * columns) for rows, columns in shapes)


def work_bytes(model: nn.Module, path: str) -> int:
    """Return the bytes of work on a layer: 3 Gram matrices, 10 weights (measured)."""
    rows, columns = module_at(model, path).weight.flatten(1).shape
    return 8 * (3 * columns**2 + 10 * rows * columns)


def passes_within(
    model: nn.Module,
    paths: Sequence[str],
    *,
    copies: int = 1,
    memory_limit_bytes: int | None = None,
) -> list[list[str]]:
    """Split `paths` into passes whose Gram matrices (copies * in^2 float64 each) fit.

    `copies`: one, and one for held-out images. UsageError names a layer that does not fit alone.
    """
    limit = math.inf if memory_limit_bytes is None else memory_limit_bytes
    passes: list[list[str]] = [[]]
    used = 0
    for path in paths:
        needed = 8 * copies * math.prod(module_at(model, path).weight.shape[1:]) ** 2
        raise_if(
            needed > limit,
            UsageError,
            f"layer '{path}' alone needs {needed / 2**20:.3g} MiB of statistics, the limit is "
            f"{limit / 2**20:.3g} MiB",
            "name the others with --layers",
        )
        if passes[-1] and used + needed > limit:
            passes.append([])
            used = 0
        passes[-1].append(path)
        used += needed
    return [each for each in passes if each]


def collect_in_passes(
    model: nn.Module,
    batches: Batches,
    paths: Sequence[str],
    *,
    memory_limit_bytes: int | None = None,
    held_out_batches: Batches | None = None,
    sample: int | None = None,
    held_out: Mapping[str, GramSums] | None = None,
) -> Iterator[dict[str, LayerStatistics]]:
    """Yield statistics of as many layers as fit, one forward pass over `batches` a time.

    G is the sum of x x^T over the tokens. Memory: 8 * (1 + held out) * in^2 bytes a layer, plus 64
    MiB. The caller calls `widened` on one layer at a time. The model must not change before the
    last pass. A path that the forward pass never calls as a module (weights used functionally) is
    absent.

    Args:
        batches: tensors of images. Several passes need a list, or a function that returns an
            iterator.
        sample: most tokens of an image that count (None: all, in float64); the first one, a class
            token where there is one, always does.
        held_out: the sums of the held-out images, where they are known already (`gathering`).

    Raises:
        UsageError: training mode, a module that cannot be constrained, or shared weights.
        DataError: NaN or infinite input of a layer, or no images.
    """
    copies = 1 + (held_out_batches is not None)
    for part in passes_within(model, paths, copies=copies, memory_limit_bytes=memory_limit_bytes):
        _require_constrainable(model, part)
        with gathering(model, part, sample) as sums_of:
            run_batches(model, batches)
        others = held_out or {}
        if held_out is None and held_out_batches is not None:
            with gathering(model, part, sample) as others:
                run_batches(model, held_out_batches)
        statistics = {}
        for path in part:
            if path in sums_of:
                module = module_at(model, path)
                weight = module.weight.detach()  # of the model's memory
                statistics[path] = LayerStatistics(
                    path=path,
                    weight=weight.flatten(1),
                    gram=sums_of[path].gram,
                    kind="linear" if isinstance(module, nn.Linear) else "conv",
                    shape=tuple(weight.shape),
                    dtype=weight.dtype,
                    held_out=others[path].gram if path in others else None,
                    conv=sums_of[path].conv,
                    tokens=sums_of[path].tokens,
                )
        yield statistics


def _require_constrainable(model: nn.Module, paths: Sequence[str]) -> None:
    hint = "call model.eval() first"
    raise_if(model.training, UsageError, "statistics need a model in evaluation mode", hint)
    path_of: dict[int, str] = {}
    for path in paths:
        module = module_at(model, path)
        reason = refusal(module)
        raise_if(
            reason is not None,
            UsageError,
            f"layer '{path}' cannot be constrained: {reason}",
            "name the others with --layers",
        )
        other = path_of.setdefault(id(module.weight), path)
        shared = f"layers '{other}' and '{path}' share one weight"
        raise_if(other != path, UsageError, shared, "exclude one of them")


@contextlib.contextmanager
def gathering(
    model: nn.Module, paths: Sequence[str], sample: int | None
) -> Iterator[dict[str, GramSums]]:
    """Yield path -> sums of the layer's inputs, complete once the caller ran the model."""
    sums_of: dict[str, GramSums] = {}
    with visiting(model, paths, _adding(sums_of, sample)):
        yield sums_of
    for path, sums in sums_of.items():
        require_finite_inputs(path, sums.gram.diagonal())
        sums_of[path] = replace(sums, gram=sums.gram.clone())  # autograd refuses inference tensors


def _adding(sums_of: dict[str, GramSums], sample: int | None) -> Visit:
    """Return a visitor of `stream` that adds a layer's inputs to its sums."""

    def visit(number: int, path: str, module: nn.Module, value: Tensor) -> None:
        pieces = (
            input_rows(module, value) if sample is None else sampled(module, value, sample, number)
        )
        for columns in pieces:
            if path not in sums_of:
                width = columns.shape[1]
                gram = torch.zeros(width, width, dtype=torch.float64, device=columns.device)
                sums_of[path] = GramSums(gram, conv_geometry(module, value))
            require_finite_inputs(path, torch.stack(columns.aminmax()))
            sums_of[path].add(columns)

    return visit
