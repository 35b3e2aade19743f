"""The walk that follows a graph by operation: slopes by the global domain's theorems, and what
rounding adds in each.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from certcli.engine.table import NoRule, Rule
from certcli.engine.trace import shifts_logits
from certcli.engine.walk import Call, Constant, Unproven
from certcli.lipschitz.context import Context
from certcli.lipschitz.context import rules as slopes
from certcli.lipschitz.network import GlobalDomain
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real
from certcli.lipschitz.value import Size, Value
from certcli.rounding.enclosed import ErrorStep, carried
from certcli.rounding.operation_errors import Executed, Followed, Operation, Sizes, rules


def _slope_near_images(ctx: Context, x: Any) -> Value:
    """What has a rounding, and a slope near an image only."""
    return Value(INF, Size(ctx.arith, x.shape), None, None, x.shape)


class _Rules:
    """The global domain's rules with each tensor's error: what the walk looks up instead."""

    def __init__(self, domain: "Stepwise") -> None:
        self.domain = domain
        self.methods = self._with_errors(slopes.methods, rules.methods)
        self.functions = self._with_errors(slopes.functions, rules.functions)

    def _with_errors(
        self, of_slopes: dict[Any, Rule], roundings: dict[Any, Rule]
    ) -> dict[Any, Rule]:
        return {
            name: self.domain.followed(of_slopes.get(name, _slope_near_images), roundings.get(name))
            for name in of_slopes | roundings
        }

    def find(self, module: nn.Module) -> Any:
        slope = slopes.find(module)
        rule = rules.find(module)
        if slope is None:
            return None
        return replace(
            slope, apply=self.domain.followed(slope.apply, None if rule is None else rule.apply)
        )


class Stepwise(GlobalDomain):
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
            if ctx.dtype not in (None, torch.float64):
                raise NoRule(f"a precision of its own, {ctx.dtype}")
            args, hides = _without_hidden(ctx.kind, args)
            followed = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Followed))
            sources = list({id(x): x for x in followed}.values())
            if ctx.kind != "softmax" and any(x.hides for x in sources):
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
            own_rounding = rounding(
                replace(self.operation, path=ctx.path, kind=ctx.kind, shape=ctx.shape),
                *args,
                **kwargs,
            )
            several = isinstance(operands[0], list)
            parts = list(zip(*operands, strict=True)) if several else [tuple(operands)]
            proven = [
                place for place, values in enumerate(parts) if not isinstance(values[0], Unproven)
            ]
            assert ctx.node is not None
            self.tensors[ctx.node.name] = proven
            steps = [
                self._step(ctx, sources, values, own_rounding, hides)
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
        args, kwargs = tree_map_only(Followed, lambda x: values[x.place], (args, kwargs))
        result = slope(ctx, *args, **kwargs)
        shape = ctx.shape
        if isinstance(result, (Constant, Unproven)):
            return result
        if isinstance(result, (list, tuple)):
            return [
                x
                if isinstance(x, Unproven)
                else ctx.settle(super(Stepwise, self).result(x, replace(ctx, shape=s)))
                for x, s in zip(result, shape, strict=True)
            ]
        return ctx.settle(super().result(ctx.settle(super().result(result, ctx)), ctx))

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


def _without_hidden(kind: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """Return the arguments with 0 for a number of -inf that stands in place of scores."""
    if kind not in ("where", "masked_fill", "masked_fill_"):
        return args, False
    shown = tuple(0.0 if isinstance(x, float) and x == -math.inf else x for x in args)
    return shown, shown != args


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Fused kernels are written out in operations; convolutions are sums of products."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=False),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
