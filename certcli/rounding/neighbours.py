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
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.engine.replay import noise_like, replayed
from certcli.engine.table import NoRule, Rule, RuleTable
from certcli.engine.trace import Trace, executed, of_margins, shifts_logits
from certcli.engine.tracer import Untraceable
from certcli.engine.walk import Call, Constant, Unproven, walk
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.lipschitz.propagate import GlobalDomain, deep_recursion
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules as slopes
from certcli.lipschitz.value import Value
from certcli.rounding.enclosed import EnclosedErrors, ErrorStep, carried, errors_of_pairs
from certcli.rounding.head import head_of
from certcli.rounding.operation_errors import Executed, Followed, Operation, Sizes, Steep, rules
from certcli.rounding.precisions import Precision
from certcli.rounding.program_comparison import require_same_program
from certcli.rounding.running_error import written_out
from certcli.system.memory import out_of_memory

_STEPS = 32
"""The number of steps from a number to its double; sizes near an image are rounded up to the next step."""
_FAR = 800 * _STEPS
"""Steps from which on a size counts as infinite."""
_AT_ONCE = 64
"""Images whose sizes are found together."""
_UNSEEN = 2.0**-500
"""Above the length of what is so small that its square underflows, in tensors of 2^50 entries."""


class _Rules:
    """The global domain's rules with each tensor's error: what the walk looks up instead."""

    def __init__(self, domain: "_Stepwise") -> None:
        self.domain = domain
        self.methods = _Looked(slopes.methods, rules.methods, domain)
        self.functions = _Looked(slopes.functions, rules.functions, domain)

    def find(self, module: nn.Module) -> Any:
        slope = slopes.find(module)
        rule = rules.find(module)
        if slope is None:
            return None
        return replace(
            slope, apply=self.domain.followed(slope.apply, None if rule is None else rule.apply)
        )


class _Looked:
    def __init__(
        self, slope: Mapping[Any, Rule], rounding: Mapping[Any, Rule], domain: "_Stepwise"
    ) -> None:
        self.slope = slope
        self.own = rounding
        self.domain = domain

    def get(self, name: Any) -> Rule | None:
        return (
            self.domain.followed(self.slope[name], self.own.get(name))
            if name in self.slope
            else None
        )


class _Stepwise(GlobalDomain):
    """Follows a graph by operation; nothing waits to be folded: each one is executed.

    Attributes:
        tensors: by node, which of its results are followed.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__(Arithmetic())
        self.operation = operation
        self.steps: list[ErrorStep] = []
        self.tensors: dict[str, list[int]] = {}
        self.errors: list[Real] = []
        self.rules = _Rules(self)  # type: ignore[assignment]

    def image(self, shape: tuple[int, ...]) -> Any:
        self.first = super().image(shape)
        size = self.first.size
        box = Executed(shape, size.total, size.fibre, size.peak)
        return self._kept(ErrorStep("", (), (), lambda sizes: ZERO, box, math.prod(shape)), ZERO)

    def result(self, value: Any, call: Call) -> Any:
        return value

    def observe(self, node: fx.Node, value: Any) -> None:
        return

    def forget(self, node: fx.Node, value: Any) -> None:
        return

    def _kept(self, step: ErrorStep, error: Real) -> Followed:
        self.steps.append(step)
        self.errors.append(error)
        self.walk.settled.clear()
        return Followed(len(self.steps) - 1, step.box.shape)

    def followed(self, slope: Rule, rounding: Rule | None) -> Rule:
        """Return a rule for executed tensors from an operation's theorem and rounding."""

        def apply(ctx: Context, *args: Any, **kwargs: Any) -> Any:
            if rounding is None:
                raise NoRule("no bound is known of its rounding at the neighbours of an image")
            if ctx.call.dtype not in (None, torch.float64):
                raise NoRule(f"a precision of its own, {ctx.call.dtype}")
            args, hides = _without_hidden(ctx.call.kind, args)
            sources = list({id(x): x for x in _followed_in((args, kwargs))}.values())
            if ctx.call.kind != "softmax" and any(x.hides for x in sources):
                raise NoRule("scores of -inf in something else than a softmax")
            try:
                operands = [
                    self._settled(ctx, slope, args, kwargs, sources, moving) for moving in sources
                ]
            except NoRule as reason:
                finite = all(self.steps[x.place].box.total.finite for x in sources)
                whys = [] if finite else self.operation.vanished  # then no theorem is at fault
                raise NoRule(next(iter(whys), str(reason))) from reason
            if not operands:
                raise NoRule("an operation without a tensor that depends on the image")
            if isinstance(operands[0], (Constant, Unproven)):
                return operands[0]
            own_rounding = rounding(replace(self.operation, call=ctx.call), *args, **kwargs)
            several = isinstance(operands[0], list)
            parts = list(zip(*operands, strict=True)) if several else [tuple(operands)]
            assert ctx.call.node is not None
            proven = [
                place for place, values in enumerate(parts) if not isinstance(values[0], Unproven)
            ]
            self.tensors[ctx.call.node.name] = proven
            steps = [
                self._step(ctx.call, sources, values, own_rounding, hides)
                if place in proven
                else values[0]
                for place, values in enumerate(parts)
            ]
            return steps if several else steps[0]

        return apply

    def _settled(
        self,
        ctx: Context,
        slope: Rule,
        args: Any,
        kwargs: Any,
        sources: Sequence[Followed],
        moving: Followed,
    ) -> Any:
        """Return the theorem's values with only one of the tensors moving, at slope 1."""
        values = {x.place: self._value(x, ONE if x is moving else ZERO) for x in sources}
        result = slope(ctx, *_replaced(args, values), **_replaced(kwargs, values))
        shape = ctx.call.shape
        if isinstance(result, (Constant, Unproven)):
            return result
        if isinstance(result, (list, tuple)):
            return [
                x
                if isinstance(x, Unproven)
                else ctx.settle(super(_Stepwise, self).result(x, replace(ctx.call, shape=s)))
                for x, s in zip(result, shape, strict=True)
            ]
        return ctx.settle(super().result(ctx.settle(super().result(result, ctx.call)), ctx.call))

    def _value(self, x: Followed, base: Real) -> Value:
        if x.place == 0:
            return replace(self.first, base=base, proof=None)
        box = self.steps[x.place].box
        arith = self.walk.arith
        size = Size(arith, box.shape, lambda: box.fibre, -1, lambda: box.total, lambda: box.peak)
        return Value(base, size, None, None, box.shape)

    def _step(
        self,
        call: Call,
        sources: Sequence[Followed],
        values: Sequence[Value],
        rounding: Callable[[Sizes], Real],
        hides: bool,
    ) -> Followed:
        shape = tuple(values[0].shape)
        size = values[0].size
        bases = tuple(value.base for value in values)
        places = tuple(x.place for x in sources)
        added = rounding(lambda x: self.steps[x.place].box)
        error = carried(bases, [self.errors[place] for place in places]) + added
        box = Executed(shape, size.total + added, size.fibre_along(-1) + added, size.peak + added)
        assert call.node is not None
        entries, shifts = math.prod(shape), shifts_logits(call.node)
        step = ErrorStep(call.node.name, places, bases, rounding, box, entries, shifts, hides)
        return replace(self._kept(step, error), hides=hides)

    def shape(self, value: Any) -> Any:
        return value.shape


def _followed_in(x: Any) -> list[Followed]:
    if isinstance(x, Followed):
        return [x]
    if isinstance(x, (list, tuple)):
        return [value for part in x for value in _followed_in(part)]
    return _followed_in(list(x.values())) if isinstance(x, dict) else []


def _without_hidden(kind: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """Return the arguments with 0 for a number of -inf that stands in place of scores."""
    if kind not in ("where", "masked_fill", "masked_fill_"):
        return args, False
    shown = tuple(0.0 if isinstance(x, float) and x == -math.inf else x for x in args)
    return shown, shown != args


def _replaced(x: Any, values: Mapping[int, Value]) -> Any:
    if isinstance(x, Followed):
        return values[x.place]
    if isinstance(x, (list, tuple)):
        return type(x)(_replaced(part, values) for part in x)
    return {name: _replaced(part, values) for name, part in x.items()} if isinstance(x, dict) else x


class NeighbourErrors:
    """The rounding of a network's logits in one arithmetic, at all images near one.

    Args:
        model: float64, eval mode, on images of `size` (c, h, w).
        tables: Of other domains, whose leaves the graph shall have.
        traced: The model's graph with the leaves of the global domain alone, where it has been
            replayed already.

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
    ) -> None:
        self.precision, self.pixels, self.tables = precision, math.prod(size), (slopes, *tables)
        try:
            graph: AbstractContextManager[Trace] = replayed(model, size, *self.tables)
            if traced is not None and traced.root is model and not tables:
                graph = nullcontext(traced)
            with graph as self._traced, torch.no_grad(), deep_recursion():
                domain = _Stepwise(Operation(precision, self._traced.made))
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
        with torch.no_grad(), written_out():
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
        with written_out():
            return torch.vmap(self._lengths_of, chunk_size=_AT_ONCE)(images)

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
        rows, of_pairs, of_logits = [], [], []
        for number, image in enumerate(images):
            with written_out():
                logits, sizes = self._measured(image)
            executed_sizes, errors = self._errors(sizes)
            pairs = errors_of_pairs(
                self._steps,
                self._last.place,
                self._head,
                self.precision,
                executed_sizes,
                errors,
            ).to(images.device)
            top = logits.argmax() if classes is None else classes[number]
            rows.append(logits)
            of_pairs.append(pairs[top])
            of_logits.append(errors[self._last.place])
        return torch.stack(rows), torch.stack(of_pairs), _floats(of_logits).to(images)[:, None]

    def _measured(self, image: Tensor) -> tuple[Tensor, list[Executed]]:
        """Return the logits of one image (c, h, w), and the sizes of all tensors on their way."""
        sizes = []
        logits = image
        for place, part in enumerate(self._tensors_of(image)):
            rows = part.reshape(-1, part.shape[-1]) if part.dim() else part.reshape(1, 1)
            lengths = rows.norm(dim=1)
            sizes.append(torch.stack([
                lengths.norm(), lengths.amax(), rows.abs().amax(), rows.std(1, unbiased=False).amin(), lengths.amin(),
            ]))  # fmt: skip
            logits = part.flatten() if place == self._last.place else logits
        measured = []
        for step, numbers in zip(self._steps, torch.stack(sizes).tolist(), strict=True):
            total, fibre, peak = (
                as_real(x) * (1 + 2.0**-20) + _UNSEEN if x >= 0 else INF for x in numbers[:3]
            )
            # the deviation of a row is rounded as its entries are
            deviation = numbers[3] * (1 - 2.0**-20) - numbers[1] * 2.0**-30
            shortest = numbers[4] * (1 - 2.0**-20)
            measured.append(Executed(step.box.shape, total, fibre, peak, deviation, shortest))
        return logits, measured

    @cached_property
    def on_box(self) -> Tensor:
        """Return bounds on the rounding of all z_i - z_j at every image of the box: (k, k)."""
        return self._pairs([math.inf] * len(self._steps)).to(self._profiles[0])

    def beside(self, enclosed: Collection[str]) -> EnclosedErrors:
        """Return what rounding adds to these nodes' results and the margins behind them."""
        return EnclosedErrors(
            self._steps, frozenset(enclosed), self._last.place, self._head, self.precision
        )

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
        moved = _floats(self._slopes).to(pixels) * radii[:, None] * (1 + 2.0**-20)
        near = at_images + torch.where(radii[:, None] > 0, moved, 0.0)
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
