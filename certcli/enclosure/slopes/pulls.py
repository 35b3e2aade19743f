"""The table of pulls: each rule of the zonotopes, with the derivative of what it encloses. Pulls of what
moves, sums or averages entries: the transpose.

All coefficients of these maps are at least 0, so that the transpose bounds what it does to errors.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.enclosure.operations import NOTHING, register_choices
from certcli.enclosure.zonotopes.form import Form
from certcli.engine import moves
from certcli.engine.table import RuleTable
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelNormalize

pulls = RuleTable("slopes")

Pulled = list[tuple[Form, Form]]
"""Forms among a rule's arguments, each with the gradient at it; of what is not named it is 0."""


@dataclass(frozen=True)
class PullContext:
    """A node on the way back, where a pull (context, arguments of the rule) -> `Pulled`.

    Attributes:
        node: None for the last norm, which is off the graph.
        gradient: the form of the gradient at the node's result; of several results those that are read,
            by their place.
        inner: what the rule put down on the way forward, and what pulls of this node share.
        token: the only token of the result that was computed; None: all.
    """

    node: fx.Node | None
    gradient: Any
    inner: dict[str, Any]
    token: int | None = None

    def once(self, name: str, compute: Callable[[], Form]) -> Form:
        """Return what `compute` did in the first pull of this node: gradients differ, values do not."""
        if name not in self.inner:
            self.inner[name] = compute()
        form: Form = self.inner[name]
        return form


def filled(arguments: Any, tensors: Iterator[Tensor]) -> Any:
    """Return arguments with tensors in place of forms, and of constants."""

    def tensor_of(part: Any) -> Any:
        if isinstance(part, Form):
            return next(tensors)
        return part.tensor if isinstance(part, Constant) else part

    return moves.replaced(arguments, tensor_of)


def transposed(gradient: Form, run: Callable[..., Any], *like: Form) -> list[Form]:
    """Return L^T of a gradient for run = L x + constant on tensors like those of the forms, L >= 0."""
    out, back = adjoint(run, like)
    return [
        gradient.linear(lambda t, i=i: back(t)[i], lambda t, i=i: back(t)[i], out.numel())  # type: ignore[misc]
        for i in range(len(like))
    ]


def adjoint(
    run: Callable[..., Tensor], like: Sequence[Form]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return run at 0, and L^T on columns (m, ..) for run = L x + constant.

    Not by `torch.func.vjp`, which imports the compiler when it runs: a second of CPU.
    """
    with torch.enable_grad():
        places = [torch.zeros_like(x.centre, requires_grad=True) for x in like]
        out = run(*places)
    return out, lambda t: torch.autograd.grad(
        out, places, t, retain_graph=True, is_grads_batched=True, materialize_grads=True
    )


def summed(ctx: PullContext, *args: Any, **named: Any) -> Pulled:
    """Return the pull of this node's operation, a sum or average, run on tensors."""
    target: Any = ctx.node.target  # type: ignore[union-attr]
    function = getattr(Tensor, target) if isinstance(target, str) else target

    def run(*tensors: Tensor) -> Any:
        arguments, names = filled((args, named), iter(tensors))
        return function(*arguments, **names)

    forms = moves.leaves((args, named), Form)
    return list(zip(forms, transposed(ctx.gradient, run, *forms), strict=True))


pulls.function(
    F.pad, torch.mean, torch.sum, torch.cat, torch.concat, torch.concatenate, torch.stack, F.dropout, F.dropout1d,
    F.dropout2d, F.dropout3d,
)(summed)  # fmt: skip
pulls.method("mean", "sum")(summed)


def moved(ctx: PullContext, x: Form, *args: Any, **named: Any) -> Pulled:
    """Return the pull of a rearrangement: numbers of entries say where each came from.

    Not by differentiation: autograd follows no `detach`, and the function that is enclosed does.
    """
    target: Any = ctx.node.target  # type: ignore[union-attr]
    function = getattr(Tensor, target) if isinstance(target, str) else target
    others = filled((args, named), (form.centre for form in moves.leaves((args, named), Form)))
    numbers = torch.arange(1, x.centre.numel() + 1, dtype=torch.float64, device=x.centre.device)
    results = function(numbers.view(x.shape), *others[0], **others[1])
    gradients = {0: ctx.gradient} if isinstance(ctx.gradient, Form) else ctx.gradient
    results = [results] if isinstance(results, Tensor) else results
    parts = [
        put_back(part, results[place].flatten().long() - 1, x) for place, part in gradients.items()
    ]
    return [(x, functools.reduce(Form.__add__, parts))]


def put_back(gradient: Form, places: Tensor, like: Form) -> Form:
    """Return the sums of a gradient over the entries that came from each flat place of a tensor;
    places of -1 are beside it.
    """
    entries = like.centre.numel()

    def back(t: Tensor) -> Tensor:
        out = t.new_zeros(len(t), entries + 1)
        out = out.index_add(1, places.flatten() % (entries + 1), t.flatten(1))
        return out[:, :entries].view(len(t), *like.shape)

    return gradient.linear(back, back, places.numel())


_names = [name for name in moves.FUNCTIONS if name is not F.pad]
pulls.function(*_names)(moved)
pulls.method(*moves.METHODS)(moved)
register_choices(pulls)


@pulls.method("to", "type_as")
def same(ctx: PullContext, x: Form, *types: Any, **named: Any) -> Pulled:
    return [(x, ctx.gradient)]


@pulls.module(*NOTHING)
def nothing(ctx: PullContext, module: nn.Module, x: Form) -> Pulled:
    return [(x, ctx.gradient)]


@pulls.module(PixelNormalize)
def pixels(ctx: PullContext, module: PixelNormalize, x: Form) -> Pulled:
    std = module.std.to(x.centre)
    return [(x, ctx.gradient.linear(lambda t: t / std, lambda t: t / std.abs(), 1))]
