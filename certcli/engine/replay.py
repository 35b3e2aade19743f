"""Is the traced graph the network? It is executed beside the model, and everything that the model could hide is looked at.

The bound is one of the graph. It is the network's if the network runs that graph on every image, so here it is *run*: on a
few images, one by one, in a batch, and again after it was run. Looked at are

- the logits of graph and model, which must agree to rounding,
- the operations that the model applies to the image and to what is made of it: the graph's, in the same order and of the
  same shapes, on every image. A branch that no example shows is seen by what it reads: none of these may return a number,
- the state of the model before and after: tensors by their content, attributes, training mode, hooks,
- the generators of random numbers.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.engine.state import differs, state_of
from certcli.engine.table import RuleTable
from certcli.engine.trace import Trace, example_of, refuse_hooks, trace_model
from certcli.engine.tracer import Untraceable, reason_of, tensors_of
from certcli.models.build import own_name

_READERS = frozenset(
    (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.untyped_storage)
)
"""What takes a tensor's numbers out of torch without an operation of torch's."""

_FROM_SHAPE = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
"""Operations whose result depends on the shape alone: the trace takes it for a constant."""

SAME_SHAPE = 64.0
"""Units of the last place, of the largest logit: the same kernels on the same numbers, of which reductions may be split
over threads in another way. In all runs seen the difference was 0."""

Operations = list[tuple[str, list[tuple[int, ...]], list[Any]]]


class _Reads(Exception):
    """The network takes a number out of a tensor that depends on the image."""


class _Follow(TorchDispatchMode):
    """The operations on the image and on what is made of it, in order, with the shapes of their results and their numbers."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: Operations = []
        self.known = WeakTensorKeyDictionary({image: None})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler at the first call, to tell it not to compile this one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _FROM_SHAPE or not self.knows(args, kwargs):
            return result
        made = tensors_of(result)
        if not made and result is not None:
            raise _Reads(name)
        self.known.update((tensor, None) for tensor in made)
        numbers = [value for value in args if isinstance(value, (bool, int, float))]
        self.operations.append((name, [tuple(tensor.shape) for tensor in made], numbers))
        return result

    def knows(self, *arguments: Any) -> bool:
        """Tell whether one of these depends on the image."""
        return any(tensor in self.known for tensor in tensors_of(arguments))


class _Readers(TorchFunctionMode):
    """Refuses what reads a tensor that `follow` knows."""

    def __init__(self, follow: _Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READERS and self.follow.knows(args, kwargs):
            raise _Reads(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def replayed(model: nn.Module, size: tuple[int, ...], *tables: RuleTable) -> Iterator[Trace]:
    """`trace_model` for the body; at its end the graph is the network as far as running both can tell.

        with replayed(model, size, rules) as traced:
            found = walk(traced, domain)

    Untraceable says what differs, but only where the body had no reason of its own to refuse: that one names a module.
    Costs one run of the graph and five of the model besides the trace, and reading the model's state twice.
    """
    with torch.no_grad(), _random_states_saved():
        images = _images(model, size)
        refuse_hooks(model)
        example = example_of(model, size)
        first = _warm_up(model, example)
        before = state_of(model)
        traced = trace_model(model, size, *tables)
        yield traced
        try:
            _require_same_logits(traced, model, images, example, first)
        except Untraceable:
            _require_same_state(before, model)  # names what changes before the logits do
            raise
        _require_same_state(before, model)


def _warm_up(model: nn.Module, image: Tensor) -> Any:
    """Run the model once, which may fill a cache (timm's relative positions): later changes are the network's own."""
    try:
        return model(image.clone())
    except Exception as failure:
        raise Untraceable(f"the network does not run on one image ({reason_of(failure)})") from failure


def _require_same_logits(traced: Trace, model: nn.Module, images: list[Tensor], example: Tensor, first: Any) -> None:
    """Graph and model give the same logits on the example, on the last of `images`, and run the same operations on all.

    The graph's operations are the same for every image. Of the example, the trace holds the graph's logits, and the model's
    were found before it: that they are equal says as well that a run leaves nothing behind.
    """
    runs = [_run(model, image) for image in images]
    for logits, _ in runs:
        _require_finite(model, logits)
    replay, steps = _run(lambda x: result_of(traced, x), images[-1])
    for _, operations in runs:
        if operations != steps:
            raise Untraceable(f"the network runs another graph than its trace: {_first_difference(operations, steps)}")
    if not _close(runs[-1][0], replay, SAME_SHAPE):
        raise Untraceable(f"the traced graph returns other logits than the network: {_apart(runs[-1][0], replay)}")
    _require_same_batch(model, images, [logits for logits, _ in runs])
    if not isinstance(first, Tensor) or not _close(first, traced.result, SAME_SHAPE):  # the very first may fill a cache
        again, _ = _run(model, example)
        if not _close(again, traced.result, SAME_SHAPE):
            raise Untraceable("the network returns other logits when it is run again")


def _require_finite(model: nn.Module, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
        cause = "" if wrong is None else f": '{own_name(model, wrong)}' holds infinite numbers or NaN"
        raise Untraceable(f"the logits of a random image are not finite{cause}")


def _images(model: nn.Module, size: tuple[int, ...]) -> list[Tensor]:
    """Noise, and a saturated image; the first two of a fixed generator."""
    example, generator = example_of(model, size), torch.Generator().manual_seed(20)
    noise = [noise_like(example, generator) for _ in range(2)]
    return [noise[0], noise[1].round()]


def noise_like(example: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return an image of noise, of a fixed generator where none is given."""
    generator = generator or torch.Generator().manual_seed(21)
    return torch.rand(example.shape, generator=generator, dtype=torch.float64).to(example)


def _run(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Tensor, Operations]:
    image = image.clone()
    follow = _Follow(image)
    try:
        with _Readers(follow), follow:
            result = function(image)
    except _Reads as what:
        raise Untraceable(f"the network reads a tensor's value back into Python ({what})") from None
    except Untraceable:
        raise
    except Exception as failure:
        raise Untraceable(f"the network does not run ({reason_of(failure)})") from failure
    if not isinstance(result, Tensor):
        raise Untraceable("the network returns something other than one tensor of logits")
    if not result.dim():
        raise Untraceable("the network returns a single number for all images of a batch")
    return result, follow.operations


def result_of(traced: Trace, image: Tensor) -> Any:
    """Return the graph's result on an image."""
    *_, (_, result) = executed(traced, image)
    return result


def executed(traced: Trace, image: Tensor) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the graph on an image, node by node, its output last: modules as they are, constants as they were traced."""
    values: dict[fx.Node, Any] = {}
    last_use = {argument: node for node in traced.graph.nodes for argument in node.all_input_nodes}
    for node in traced.graph.nodes:
        args: Any = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: values[n])
        if node.op == "placeholder":
            values[node] = image
        elif node.op == "get_attr":
            values[node] = traced.constants[node.target]
        elif node.op == "call_module":
            values[node] = traced.root.get_submodule(str(node.target))(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        else:
            values[node] = args[0]
        yield node, values[node]
        for argument in node.all_input_nodes:
            if last_use[argument] is node:
                values.pop(argument)


def _require_same_batch(model: nn.Module, images: list[Tensor], logits: list[Tensor]) -> None:
    """An image's logits do not depend on what stands beside it. A network for single images is left alone.

    Other batches are computed by other kernels: sqrt(eps) of the largest logit is far above their rounding, and far below
    what a network does that mixes images.
    """
    try:
        together = model(torch.cat(images))
    except Exception:
        return  # it takes one image only: no wrong logits come of that
    alone = torch.cat(logits)
    if not isinstance(together, Tensor) or together.shape != alone.shape or logits[0].shape[0] != 1:
        return
    if not agree(together, alone):
        raise Untraceable(f"the logits of an image depend on its batch: {_apart(together, alone)}")


def agree(a: Tensor, b: Tensor) -> bool:
    """Tell whether two results are the same up to the rounding of different kernels."""
    return _close(a, b, torch.finfo(a.dtype).eps ** -0.5)


def _close(a: Tensor, b: Tensor, units: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(torch.maximum(a.abs().max(), b.abs().max())) if a.numel() else 0.0
    return bool(((a - b).abs() <= units * torch.finfo(a.dtype).eps * scale).all())


def _apart(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} of {a.dtype}, {tuple(b.shape)} of {b.dtype}"
    return f"they differ by {float((a - b).abs().max()):.3g}"


def _first_difference(ran: Operations, traced: Operations) -> str:
    for number, (one, other) in enumerate(zip(ran, traced)):
        if one != other:
            return f"step {number + 1} is {_shown(*one)}, in the trace {_shown(*other)}"
    longer, verb = (ran, "more") if len(ran) > len(traced) else (traced, "fewer")
    return f"{abs(len(ran) - len(traced))} {verb} operations, from {longer[min(len(ran), len(traced))][0]}"


def _shown(name: str, shapes: list[tuple[int, ...]], numbers: list[Any]) -> str:
    return f"{name}{tuple(numbers) if numbers else ''} to {', '.join(map(str, shapes)) or 'nothing'}"


def _require_same_state(before: dict[str, Any], model: nn.Module) -> None:
    name = differs(before, state_of(model))
    if name is not None:
        raise Untraceable(f"{name} changes while the network runs")


@contextmanager
def _random_states_saved() -> Iterator[None]:
    """Untraceable when the body draws from a generator that the process shares; they are put back either way."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.is_initialized()

    def states() -> list[Any]:
        found: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
        found.append([state.tolist() for state in torch.cuda.get_rng_state_all()] if cuda else None)
        if numpy is not None:
            name, keys, *rest = numpy.random.get_state()
            found.append((name, keys.tolist(), *rest))
        return found

    saved, torch_state = states(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state_all() if cuda else []
    try:
        try:
            yield
        except Untraceable as other:
            if states() != saved:
                raise Untraceable("the network draws random numbers") from other
            raise
        if states() != saved:
            raise Untraceable("the network draws random numbers")
    finally:
        random.setstate(saved[0])
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda_state)
        if numpy is not None:
            numpy.random.set_state(saved[3])
