"""Logits, and how far rounding can have moved them: a running error analysis of the operations that
are executed.

Every operation of torch that the network runs is followed. Beside each tensor x that was computed
stands a number e: in real arithmetic the same operations give a tensor x* with |x - x*|_2 <= e,
over all entries of all images of the batch. A rule says how an operation passes e on (its slope at
the numbers that are there) and what its own rounding adds: gamma_k | |W| |x| |_2 for sums of k
products in any order.

Assumed of the machine, and of nothing else (`enclosure.rounding`): basic operations of float64 are
rounded to nearest, with gradual underflow; a matrix product or a convolution is a sum of its
products in some order (no Strassen, Winograd or Fourier transform; cuDNN stays off); exp, erf,
tanh, sin and what is put together of one of them are within `FUNCTION`. What is made without a
tensor (a scalar, `arange`) is a number of the network. An operation without a rule is refused, and
so is a number that is read back into Python.

Errors are sums and products of numbers that are not negative, so rounding makes each of them
smaller by a factor only: `ROUNDED`, applied at the end, covers 2^31 roundings on any path. Where
one is subtracted, the rule applies it itself.
Source: Higham 2002, Accuracy and stability of numerical algorithms, sections 3.1 and 3.3.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.enclosure.zonotopes.rounding import TINY
from certcli.engine.table import NoRule, runs_known_code
from certcli.engine.tracer import tensors_of
from certcli.models.build import own_name
from certcli.nn.activations import SoftMaxMin
from certcli.system.torch_modes import OperationMode

ROUNDED = 1 + 2.0**-20
"""Above (1 - u)^-n for n = 2^31 roundings."""

WithError = tuple[Any, Any]
"""An operation's result and its error: a size, an `Error`, or None where it is exact; of several results a list of each."""
RULES: dict[str, Callable[..., WithError]] = {}
PUT_TOGETHER: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[Callable[..., WithError]], Callable[..., WithError]]:
    """Register how operations pass errors: a function of the op and the arguments."""

    def register(function: Callable[..., WithError]) -> Callable[..., WithError]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def put_together(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation written out of others, which are executed and followed in its place."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PUT_TOGETHER.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Error:
    """size: bound on a tensor's l2 distance from real numbers. note: for its next user."""

    size: Tensor
    note: Any = None


@dataclass(frozen=True)
class Mean:
    """Means of `of` along some axes; own: the part of the error that is the mean's own rounding."""

    of: Tensor
    own: Tensor


@dataclass(frozen=True)
class Square:
    """Squares of the entries of `of`."""

    of: Tensor


@dataclass(frozen=True)
class TensorPiece:
    """One of the tensors that a tensor was cut into; whole: the size of that one's error."""

    cut: object
    place: int
    whole: Tensor


@dataclass(frozen=True)
class Sorted:
    """The larger ("maximum") or the smaller ("minimum") of two tensors, entry by entry."""

    name: str
    pair: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ExecutedOperation:
    """One operation: run() is its result, size(x) the error of an argument, None where it is exact."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    running: "Running"

    def run(self) -> Any:
        return self.call(*self.args, **self.kwargs)

    def note(self, x: Any) -> Any:
        error = self.running.errors.get(x) if isinstance(x, Tensor) else None
        return None if error is None else error.note

    def size(self, x: Any) -> Tensor | None:
        error = self.running.errors.get(x) if isinstance(x, Tensor) else None
        return None if error is None else error.size

    def norm(self, x: Tensor) -> Tensor:
        """Above |x|_2 over all entries, up to roundings; kept for the next user."""
        norm = self.running.norms.get(x)
        if norm is None:
            norm = torch.linalg.vector_norm(x) + TINY
            self.running.norms[x] = norm
        return norm

    @property
    def exact(self) -> bool:
        """Tell whether no argument has an error."""
        return all(self.size(x) is None for x in tensors_of((self.args, self.kwargs)))

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise NoRule(reason)


class Running(OperationMode):
    """Follows the operations of one forward pass.

    errors: of every tensor that is not exact. weights: where the network's own tensors lie; known:
        of them, what is known.
    """

    def __init__(self, model: nn.Module, weights: frozenset[int], cache: dict[Any, Any]) -> None:
        super().__init__()
        self.errors, self.norms = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.weights = weights
        self.known = cache
        self.made = WeakTensorKeyDictionary()  # every tensor that an operation returned
        self.refused: NoRule | None = None
        self.names = {id(module): own_name(model, name) for name, module in model.named_modules()}

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        try:
            if not tensors_of((args, kwargs)):
                return self._keep(func(*args, **kwargs), None)
            if name in PUT_TOGETHER:
                with self:
                    return PUT_TOGETHER[name](*args, **kwargs)
            if func._schema.is_mutable:
                return self._in_place(name, func, args, kwargs)
            return self._keep(*self._executed(ExecutedOperation(name, func, args, kwargs, self)))
        except NoRule as reason:
            self.refused = self.refused or NoRule(f"{self._module()}: {reason}")
            raise self.refused from None

    def _executed(self, op: ExecutedOperation) -> WithError:
        """Return a result with its error; integers and truth values stay exact."""
        rule_of_name = RULES.get(op.name)
        if rule_of_name is not None:
            try:
                return rule_of_name(op, *op.args, **op.kwargs)
            except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as failure:
                raise NoRule(
                    f"'{op.name}' is called with arguments its rule does not know ({failure})"
                ) from failure
        if op.exact:
            value = op.run()
            tensors = tensors_of(value)
            if tensors and not any(x.is_floating_point() for x in tensors):
                return value, None
        raise NoRule(f"no rounding error is known of the operation '{op.name}'")

    def _in_place(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """x.add_(y) as x + y, written to x. What else sees x's memory would not learn of the error."""
        target = args[0]
        plain = name.removesuffix("_")
        is_tracked = isinstance(target, Tensor) and target in self.made
        if not is_tracked or (plain not in RULES and plain != "fill") or plain == name:
            raise NoRule(f"no rounding error is known of '{name}', which writes to a tensor")

        def on_copy(first: Tensor, *rest: Any, **named: Any) -> Tensor:
            return func(first.clone(), *rest, **named)

        op = ExecutedOperation(plain, on_copy, args, kwargs, self)
        value, error = self._executed(op) if plain != "fill" else (op.run(), op.size(args[1]))
        if value.shape != target.shape:
            raise NoRule(f"'{name}' changes a tensor's shape")
        for x, noted in list(self.errors.items()):  # what was noted speaks of the numbers before
            self.errors[x] = Error(noted.size)
        storage = target.untyped_storage().data_ptr()
        for x in list(self.made):
            if x.untyped_storage().data_ptr() == storage:
                self.norms.pop(x, None)
                if error is not None:
                    self.errors[x] = Error(
                        torch.full((), torch.inf, dtype=torch.float64, device=x.device)
                    )
        target.copy_(value)
        self.errors.pop(target, None)
        return self._keep(target, error)

    def _keep(self, value: Any, error: Any) -> Any:
        if isinstance(value, (tuple, list)):
            for one, its in zip(
                value, [None] * len(value) if error is None else error, strict=True
            ):
                self._keep(one, its)
        elif isinstance(value, Tensor):
            if value.is_complex():
                raise NoRule("complex numbers")
            if error is not None and value.dtype != torch.float64 and value.is_floating_point():
                raise NoRule(f"a result in {value.dtype}")
            self.made[value] = None
            if error is not None:
                self.errors[value] = error if isinstance(error, Error) else Error(error)
        return value

    def _module(self) -> str:
        """Return the module that runs now: the innermost call of one on Python's stack."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = self.names.get(id(frame.f_locals.get("self")))
            if name:
                return name
            frame = frame.f_back
        return "the network"


@contextmanager
def _slopes_of_one(model: nn.Module, running: Running) -> Iterator[None]:
    """Modules of slope 1 add what they lose on the numbers that are there: |f'(x') - f(x)| <=
    |f'(x') - f(x')| + |x' - x|.

    Operation by operation, t tanh(c t) would count as a product whose factors may err apart: 1 + c
    max |t| times the error.
    """
    entering: list[Error | None] = []

    def enter(module: nn.Module, args: Any) -> Any:
        entering.append(running.errors.get(args[0]) if args else None)
        with _disable_current_modes():
            return tuple(x.clone() for x in args)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        error = running.errors.get(result)
        passed = entering.pop()
        if passed is not None:
            running.errors[result] = Error(
                passed.size if error is None else error.size + passed.size
            )

    hooks = []
    for module in model.modules():
        if runs_known_code(module, SoftMaxMin):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def written_out() -> Iterator[None]:
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


class ErrorAnalysis:
    """Logits with a bound on their rounding. model: float64, eval mode; weights stay."""

    def __init__(self, model: nn.Module) -> None:
        if float(torch.full((), 2.0**-1074, dtype=torch.float64) * 1.0) == 0:
            raise NoRule(
                "the network: denormal numbers are flushed to zero (torch.set_flush_denormal)"
            )
        self.model = model
        tensors = [*model.parameters(), *model.buffers()]
        self._weights = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
        self._known: dict[Any, Any] = {}

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and a bound on the error of each, infinite where nothing is known: (b, c, h, w)
        -> (b, k), (b, 1).

        An error is shared by the images of a batch; those for which it is too much are evaluated
        again in smaller ones. NoRule names the module with an operation that has no rule.

        Args:
            pixels: float64, taken as exact.
        """
        logits, error = self._once(pixels)
        if logits.shape[1] < 2:
            return logits, error.expand(len(logits), 1)
        errors = error.expand(len(logits), 1).clone()
        best = logits.topk(2, dim=1).values
        open_ones = (~(best[:, :1] - best[:, -1:] > 2 * errors)).flatten().nonzero().flatten()
        if len(pixels) > 1 and len(open_ones):
            parts = (
                [open_ones]
                if len(open_ones) < len(pixels)
                else open_ones.split(-(-len(pixels) // 2))
            )
            for part in parts:
                logits[part], errors[part] = self(pixels[part])
        return logits, errors

    def _once(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        running = Running(self.model, self._weights, self._known)
        with written_out(), _slopes_of_one(self.model, running), running:
            logits = self.model(pixels.clone())
        if running.refused is not None:  # the network caught it and went another way
            raise running.refused
        if not isinstance(logits, Tensor) or logits.dtype != torch.float64:
            raise NoRule("the logits are not computed in float64")
        error = running.errors.get(logits)
        size = logits.new_zeros(()) if error is None else error.size * ROUNDED
        return logits.clone(), torch.where(torch.isfinite(size), size, torch.inf)
