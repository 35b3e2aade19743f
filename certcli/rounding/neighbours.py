"""How far the logits that an arithmetic computes can lie from those of real arithmetic, at every
image near one.

Every operation of the traced graph is followed. For each tensor v, c bounds its slope from the
pixels, and e the distance
|v_A(x') - v(x')|_2 of the executed tensor from the real one, at every image x' of the box that the arithmetic can represent.
An operation f of tensors a, b, ... has the theorem |f(a, b) - f(a', b')| <= k_a |a - a'| + k_b |b -
b'| of the global domain (`lipschitz.rules`), on tensors of the sizes of the executed ones; so

    c = k_a c_a + k_b c_b,      e = k_a e_a + k_b e_b + (what rounding adds in f, `rounding.operation_errors`).

Sizes are the lesser of those on the box, |v_A| <= |f| there + e, and of those near the image,

    |v_A(x')| <= |v(x)| + c r + e      for |x' - x| <= r.

Every number is a `Real`, which rounds up. k_a is taken with b at rest, and k_b with a: the triangle
inequality adds them.

A `forward` may look at the precision of a tensor, at `torch.finfo`, or open `torch.autocast`: then
it is another network when it is executed. So a copy in that arithmetic is traced too. Both graphs
have the same operations with the same arguments, the same shapes, and constants that are the stored
ones; what was float64 has the precision of the arithmetic.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from certcli.engine.replay import first_other_step, noise_like, replayed
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace, example_of, executed, of_margins, trace_model
from certcli.engine.tracer import Untraceable
from certcli.engine.walk import walk
from certcli.lipschitz.context import rules as slopes
from certcli.lipschitz.network import deep_recursion
from certcli.lipschitz.numerics.real import INF, ONE, Real, as_real
from certcli.rounding.arithmetics import FLOAT64, Precision, error_of
from certcli.rounding.enclosed import (
    EnclosedErrors,
    EnclosedWalk,
    carried,
    errors_of_pairs,
    head_of,
)
from certcli.rounding.operation_errors import Executed, Followed, Operation, Steep
from certcli.rounding.stepwise import Stepwise, plain_kernels
from certcli.system.memory import out_of_memory

_STEPS = 32
"""The number of steps from a number to its double; sizes near an image are rounded up to the next
step.
"""
_FAR = 800 * _STEPS
"""Steps from which on a size counts as infinite."""
_AT_ONCE = 64
_NOTHING = 2.0**-30
"""Of the logits: rounding below it moves no digit of a radius that is shown."""
"""Images whose sizes are found together."""
_UNSEEN = 2.0**-500
"""Above the length of what is so small that its square underflows, in tensors of 2^50 entries."""


class NeighbourErrors:
    """The rounding of a network's logits in one arithmetic, at all images near one.

    Args:
        model: float64, eval mode, on images of `size` (c, h, w).
        tables: Of other domains, whose leaves the graph shall have.
        traced: The model's graph with the leaves of the global domain alone, where it has been
            replayed already.
        as_traced: Constants that the network computes are those of the graph, as its bound takes
            them: for float64 logits that stand for real arithmetic.

    Raises:
        NoRule: Names the operation whose rounding is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, ...],
        precision: Precision,
        tables: Sequence[RuleTable] = (),
        traced: Trace | None = None,
        as_traced: bool = False,
    ) -> None:
        self.precision, self.pixels, self.tables = precision, math.prod(size), (slopes, *tables)
        try:
            graph: AbstractContextManager[Trace] = replayed(model, size, *self.tables)
            if traced is not None and traced.root is model and not tables:
                graph = nullcontext(traced)
            with graph as self._traced, torch.no_grad(), deep_recursion():
                domain = Stepwise(
                    Operation(precision=precision, made=self._traced.made, as_traced=as_traced)
                )
                self._last: Followed = walk(self._traced, domain)
                self._steps, self._tensors = domain.steps, domain.tensors
                self._head = head_of(of_margins(self._traced), precision)
                require_same_program(model, size, precision, self._traced, self.tables)
        except Untraceable as reason:
            raise NoRule(str(reason)) from reason
        slopes_of: list[Real] = []
        for step in self._steps:
            slopes_before = [slopes_of[source] for source in step.sources]
            slopes_of.append(carried(step.slopes, slopes_before) if slopes_before else ONE)
        self._slopes = slopes_of
        example = next(iter([*model.parameters(), *model.buffers()]))
        self._widest = _floats(domain.errors).to(example.device)
        image = noise_like(torch.empty(1, *size, dtype=torch.float64, device=example.device))
        with torch.no_grad(), plain_kernels():
            at_noise = self._lengths_of(image[0])
        # sizes that images may share, up to a factor: as those of noise, and as the slopes from the
        # pixels
        self._profiles = (
            at_noise.clamp_min(1e-300),
            _floats(slopes_of).to(at_noise).clamp_min(1e-300),
        )
        self._known: dict[tuple[int, int], Tensor] = {}

    def _tensors_of(self, image: Tensor) -> Iterator[Tensor]:
        """Yield every step's tensor at one image, scores of -inf as 0: (c, h, w)."""
        yield image
        place = 0
        for node, value in executed(self._traced, image[None]):
            parts = value if isinstance(value, (list, tuple)) else [value]
            for number in self._tensors.get(node.name, ()):
                place += 1
                part = parts[number]
                hides = self._steps[place].hides
                yield part.masked_fill(part == -math.inf, 0.0) if hides else part

    def _lengths_of(self, image: Tensor) -> Tensor:
        """Return |v(x)| of every step at one image, rounded up: (c, h, w) -> (steps,).

        That of float64, and its error, which is below e of any arithmetic.
        """
        lengths = [torch.linalg.vector_norm(part) for part in self._tensors_of(image)]
        return torch.stack(lengths) * (1 + 2.0**-20) + _UNSEEN + self._widest

    @torch.no_grad()
    def _lengths(self, images: Tensor) -> Tensor:
        """Return `_lengths_of` each image, a traced batch of its own: (b, c, h, w) -> (b, steps)."""
        with plain_kernels():
            return torch.vmap(self._lengths_of, chunk_size=_AT_ONCE)(images)

    @property
    def rows(self) -> int:
        """Return how many rows of logits the network makes of one image."""
        return self._last.shape[0]

    @torch.no_grad()
    def evaluated(
        self, images: Tensor, classes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the graph's logits z of each image alone, and how far they lie from real ones.

        By the sizes of the very tensors of which they were computed, in this arithmetic.

        Args:
            images: (b, c, h, w).
            classes: i, by default the top one, (b,).

        Returns:
            (b, k); bounds on the rounding of z_i - z_j, (b, k), and of each logit, (b, 1).
        """
        logits, sizes = self._sizes(images)
        predictions = logits.argmax(1) if classes is None else classes
        of_pairs, of_logits = [], []
        for rows, measured, chosen in zip(
            logits.split(_AT_ONCE), sizes.split(_AT_ONCE), predictions.split(_AT_ONCE), strict=True
        ):
            # sizes that hold for each of these images, where that costs next to nothing
            widest = torch.cat([measured[:, :, :3].amax(0), measured[:, :, 3:].amin(0)], 1)
            pairs, whole = self._of_sizes(widest)
            shared = bool(pairs.amax() <= _NOTHING * rows.abs().amax())
            each = [(pairs, whole)] * len(rows) if shared else map(self._of_sizes, measured)
            for top, (pairs, whole) in zip(chosen, each, strict=True):
                of_pairs.append(pairs.to(images.device)[top])
                of_logits.append(whole)
        return logits, torch.stack(of_pairs), _floats(of_logits).to(images)[:, None]

    def _of_sizes(self, sizes: Tensor) -> tuple[Tensor, Real]:
        """Return bounds on the rounding of all z_i - z_j, (k, k), and of a logit: (steps, 5)."""
        executed_sizes, errors = self._errors(self._measured(sizes.tolist()))
        place = self._last.place
        pairs = errors_of_pairs(
            self._steps, place, self._head, self.precision, executed_sizes, errors
        )
        return pairs, errors[place]

    @torch.no_grad()
    def _sizes(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return `_sizes_of` each image, a traced batch of its own: (b, k), (b, steps, 5)."""
        with plain_kernels():
            try:
                return torch.vmap(self._sizes_of, chunk_size=_AT_ONCE)(images)
            except (RuntimeError, ValueError, TypeError, LookupError) as failure:
                if out_of_memory(failure):
                    raise
                # an operation that is not known for many images
                each = [self._sizes_of(image) for image in images]
        return torch.stack([one for one, _ in each]), torch.stack([sizes for _, sizes in each])

    def _sizes_of(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of one image (c, h, w), and the sizes of all tensors on their way.

        Their lengths, those of the longest row, the largest entries, the least deviations of a row
        and the shortest rows: (steps, 5).
        """
        sizes = []
        logits = image
        for place, part in enumerate(self._tensors_of(image)):
            rows = part.reshape(-1, part.shape[-1]) if part.dim() else part.reshape(1, 1)
            lengths = rows.norm(dim=1)
            sizes.append(torch.stack([
                lengths.norm(), lengths.amax(), rows.abs().amax(), rows.std(1, unbiased=False).amin(), lengths.amin(),
            ]))  # fmt: skip
            logits = part.flatten() if place == self._last.place else logits
        return logits, torch.stack(sizes)

    def _measured(self, sizes: Sequence[Sequence[float]]) -> list[Executed]:
        """Return the sizes of all tensors of one image, rounded outward."""
        measured = []
        for step, numbers in zip(self._steps, sizes, strict=True):
            total, fibre, peak = (
                as_real(x) * (1 + 2.0**-20) + _UNSEEN if x >= 0 else INF for x in numbers[:3]
            )
            # the deviation of a row is rounded as its entries are
            deviation = numbers[3] * (1 - 2.0**-20) - numbers[1] * 2.0**-30
            shortest = numbers[4] * (1 - 2.0**-20)
            measured.append(Executed(step.box.shape, total, fibre, peak, deviation, shortest))
        return measured

    @cached_property
    def on_box(self) -> Tensor:
        """Return bounds on the rounding of all z_i - z_j at every image of the box: (k, k)."""
        return self._pairs([math.inf] * len(self._steps)).to(self._profiles[0])

    def beside(self, enclosed: Collection[str]) -> Callable[[], EnclosedWalk]:
        """Return what makes a walk's rounding of these nodes' results and the margins behind them."""
        errors = EnclosedErrors(
            self._steps, frozenset(enclosed), self._last.place, self._head, self.precision
        )
        return errors.walk

    def __call__(self, pixels: Tensor, radii: Tensor, predictions: Tensor) -> Tensor:
        """Return bounds on the rounding of z_i - z_j, i the top class: (b, c, h, w), (b,), (b,) ->
        (b, k).

        They hold at all images of the box within each radius. An image's sizes are rounded up to a
        multiple of each profile, the one that is less on the whole: images then share one matrix of
        all pairs.
        """
        pixels = pixels.detach().double()
        # no image of the box is further away
        radii = radii.to(pixels).clamp(max=math.sqrt(self.pixels))
        try:
            at_images = self._lengths(pixels)
        except (RuntimeError, ValueError, TypeError, LookupError) as failure:
            if out_of_memory(failure):
                raise
            # an operation that is not known for many images
            return self.on_box[predictions]
        near = at_images + _floats(self._slopes).to(pixels) * radii[:, None] * (1 + 2.0**-20)
        grown = torch.stack(
            [(near / profile).amax(1).nan_to_num(nan=torch.inf) for profile in self._profiles], 1
        )
        steps = (grown.clamp(1e-250, 1e250).log2() * _STEPS + 2.0**-10).ceil()
        whole = torch.stack([profile.log().sum() for profile in self._profiles]) * (
            _STEPS / math.log(2)
        )
        chosen = (whole + steps * len(self._steps)).argmin(1, keepdim=True)
        keys = torch.cat([chosen.double(), steps.gather(1, chosen)], 1).int().tolist()
        return torch.stack(
            [self._shared(*key)[top] for key, top in zip(keys, predictions.tolist(), strict=True)]
        )

    def _shared(self, profile: int, step: int) -> Tensor:
        """Return E near images whose sizes are below 2^(step / steps) times a profile."""
        if (profile, step) not in self._known:
            lengths = self._profiles[profile] * (
                2.0 ** (step / _STEPS) if step < _FAR else math.inf
            )
            lengths = lengths * (1 + 2.0**-20) + 1e-290
            self._known[profile, step] = self._pairs(lengths.tolist()).to(lengths)
        return self._known[profile, step]

    def _pairs(self, lengths: Sequence[float]) -> Tensor:
        """Return E of all images near which each real tensor is no longer than this: (k, k)."""
        sizes: list[Executed] = []
        errors: list[Real] = []
        for step, length in zip(self._steps, lengths, strict=True):
            added = step.rounding(lambda x: sizes[x.place])
            error = carried(step.slopes, [errors[source] for source in step.sources]) + added
            box = step.box.within(as_real(length) + error)
            errors.append(error if box.peak < self.precision.largest else INF)
            sizes.append(box)
        return errors_of_pairs(
            self._steps, self._last.place, self._head, self.precision, sizes, errors
        )

    def _errors(self, measured: Sequence[Executed]) -> tuple[list[Executed], list[Real]]:
        """Return the sizes of tensors that were executed, and how far each is from the real one.

        A slope counts between the two: their rows lie within the error of the executed ones.
        """
        sizes: list[Executed] = []
        errors: list[Real] = []
        for step, size in zip(self._steps, measured, strict=True):
            added = step.rounding(lambda x: sizes[x.place])
            slopes_here = step.slopes
            if isinstance(step.rounding, Steep):
                slopes_here = (min(slopes_here[0], step.rounding.slope(lambda x: sizes[x.place])),)
            error = carried(slopes_here, [errors[source] for source in step.sources]) + added
            errors.append(error if size.peak < self.precision.largest else INF)
            sizes.append(size.within_reach(error))
        return sizes, errors


def _floats(values: Sequence[Real]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def require_same_program(
    model: nn.Module,
    size: tuple[int, ...],
    precision: Precision,
    traced: Trace,
    tables: Sequence[RuleTable],
) -> None:
    """NoRule unless the graph of the network in this precision is its graph in float64.

    Args:
        model: float64, in eval mode, on images of `size` (c, h, w).
        traced: Its graph there, with the leaves of `tables`.
    """
    if precision.dtype == torch.float64:
        return
    converted = copy.deepcopy(model).to(precision.dtype).eval()
    try:
        other = trace_model(converted, example_of(converted, size), *tables)
        steps, others = _program_of(traced, precision.dtype), _program_of(other, torch.float64)
        if steps != others:
            raise Untraceable(first_other_step(others, steps))
        for node in other.graph.nodes:
            name = str(node.target)
            if node.op == "get_attr" and not _is_stored(
                traced, name, other.constants[name], precision
            ):
                raise Untraceable(f"the constant '{name}' is another one")
            if node.op == "call_module":
                _require_same_weights(name, traced.root, converted)
    except Untraceable as reason:
        raise NoRule(f"the network in {precision.name} is not the proven one: {reason}") from reason


def _require_same_weights(leaf: str, *roots: nn.Module) -> None:
    """Untraceable unless a module's tensors are the first network's, cast to the second's types."""
    modules = [root.get_submodule(leaf) for root in roots]
    exact, stored = (dict([*one.named_parameters(), *one.named_buffers()]) for one in modules)
    if exact.keys() != stored.keys() or not all(
        torch.equal(exact[name].to(tensor.dtype), tensor) for name, tensor in stored.items()
    ):
        raise Untraceable(f"the weights of '{leaf}' are other ones")


def _program_of(traced: Trace, precision: torch.dtype) -> list[str]:
    """Return each call with its arguments, shape and precision in words, which equal those of the
    same call in another graph; this precision stands for float64."""
    places: dict[fx.Node, str] = {}
    steps = []
    for node in traced.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
        step = f"{node.target}{arguments} to {node.meta.get('shape')} of {node.meta.get('dtype')}"
        steps.append(step.replace("torch.float64", str(precision)))
        places[node] = f"%{len(places)}"
    return steps


def _is_stored(proven: Trace, name: str, stored: Tensor, precision: Precision) -> bool:
    """Tell whether a constant is the stored one: by bits, or within a computed one's error."""
    exact = proven.constants[name].detach()
    if not exact.is_floating_point():
        return exact.dtype == stored.dtype and torch.equal(exact, stored)
    number = stored.detach().double()
    if torch.equal(exact.to(precision.dtype).double(), number):
        return True
    if number.shape != exact.shape or not name.startswith("."):
        return False
    error = error_of(exact, FLOAT64, proven.made) + error_of(exact, precision, proven.made)
    return bool(((exact.double() - number).abs() <= error).all())
