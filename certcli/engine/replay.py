"""Is the traced graph the network? It runs beside the model, and what differs is looked at.

The bound is one of the graph. It is the network's if the network runs that graph on every image, so
here it is *run*. Each run has its own task:

- the trace, of an image of noise: the graph, and its logits there. A cache that a first run fills
  shows in the state,
- the model on a saturated image: its operations on the image and on what is made of it, with shapes
  and numbers. A branch
  that no image shows is seen by what it reads: no operation may return a number,
- the graph on that image: the same operations, and the same logits to the last places. What depends
  on the image behind torch's back, on the type of a tensor or on an earlier run is another value
  here than in the trace,
- the model on both images in one batch: each image's logits are those of its single run, so they
  depend neither on the batch's size, nor on the place in it, nor on the other image,
- the model on the noise alone, as the graph.

Before and after, the state of the model (tensors by their content, attributes, training mode,
hooks, the globals of code that is no library's) and the generators of random numbers are the same.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.engine.state import differs, state_of
from certcli.engine.table import RuleTable
from certcli.engine.trace import Trace, example_of, refuse_hooks, trace_model
from certcli.engine.tracer import Untraceable, reason_of
from certcli.engine.watched_run import Operation, first_difference, followed
from certcli.models.build import own_name

SAME_SHAPE = 64.0
"""Units of the last place of how far logits move: the same kernels on the same numbers, of which reductions may be split
over threads in another way. In all runs seen the difference was 0."""


@contextmanager
def replayed(model: nn.Module, size: tuple[int, ...], *tables: RuleTable) -> Iterator[Trace]:
    """`trace_model` for the body; at its end the graph is the network, as far as runs can tell.

        with replayed(model, size, rules) as traced:
            found = walk(traced, domain)

    Untraceable says what differs, but only where the body had no reason of its own to refuse: that
    one names a module. Costs one run of the graph and two of the model besides the trace, one of
    two images, and reading the state three times.
    """
    with torch.no_grad(), _random_states_saved():
        images = _images(model, size)
        refuse_hooks(model)  # before anything runs: training mode would change statistics
        traced, before = _trace(model, images[0], tables)
        yield traced
        try:
            _require_same_logits(traced, model, images)
        except Untraceable:
            refuse_hooks(model)
            _require_same_state(before, model)  # names what changes before the logits do
            raise
        _require_same_state(before, model)


def _trace(
    model: nn.Module, image: Tensor, tables: Sequence[RuleTable]
) -> tuple[Trace, dict[str, Any]]:
    """Return a trace and its unchanged state; where a first run fills a cache, of a second."""
    before = state_of(model)
    try:
        traced = trace_model(model, image, *tables)
    except Untraceable:
        try:
            model(image.clone())
        except Exception as failure:
            raise Untraceable(
                f"the network does not run on one image ({reason_of(failure)})"
            ) from failure
    else:
        after = state_of(model)
        if differs(before, after) is None:
            return traced, after
    before = state_of(model)
    return trace_model(model, image, *tables), before


def _require_same_logits(traced: Trace, model: nn.Module, images: list[Tensor]) -> None:
    """Graph and model run the same operations to the same logits, of images alone and in batch."""
    noise, saturated = images
    logits, operations = _run(model, saturated)
    _require_finite(model, logits)
    _require_finite(model, traced.result)
    if logits.shape != traced.result.shape:
        raise Untraceable(
            f"the shape of the logits depends on the image: {_apart(logits, traced.result)}"
        )
    alone = torch.cat([traced.result, logits])
    as_it_ran = replace(traced, graph=traced.ran)
    replay, steps = _run(lambda x: result_of(as_it_ran, x), saturated)
    if traced.ran is not traced.graph and not agree(
        result_of(traced, saturated), replay, lambda _: movement(alone)
    ):
        raise Untraceable("the network with its operations written out is another one")
    same = _SameRun(replay, steps, movement(alone))
    same.require(logits, operations)
    _require_same_in_a_batch(model, images, alone)
    replace(same, logits=traced.result).require(*_run(model, noise))


@dataclass(frozen=True)
class _SameRun:
    """The graph on an image: logits, operations, and how far logits move between images."""

    logits: Tensor
    steps: list[Operation]
    movement: float

    def require(self, logits: Tensor, operations: list[Operation]) -> None:
        """Raise Untraceable for a run of the network that is another one."""
        if operations != self.steps:
            difference = first_difference(operations, self.steps)
            raise Untraceable(f"the network runs another graph than its trace: {difference}")
        if not close(
            logits, self.logits, SAME_SHAPE * torch.finfo(logits.dtype).eps * self.movement
        ):
            raise Untraceable(
                f"the traced graph returns other logits than the network: {_apart(logits, self.logits)}"
            )


def _require_finite(model: nn.Module, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
        cause = (
            "" if wrong is None else f": '{own_name(model, wrong)}' holds infinite numbers or NaN"
        )
        raise Untraceable(f"the logits of a random image are not finite{cause}")


def _images(model: nn.Module, size: tuple[int, ...]) -> list[Tensor]:
    """Noise, and a saturated image; the first two of a fixed generator."""
    example = example_of(model, size)
    generator = torch.Generator().manual_seed(20)
    noise = [noise_like(example, generator) for _ in range(2)]
    return [noise[0], noise[1].round()]


def noise_like(example: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return an image of noise, of a fixed generator where none is given."""
    generator = generator or torch.Generator().manual_seed(21)
    return torch.rand(example.shape, generator=generator, dtype=torch.float64).to(example)


def _run(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Tensor, list[Operation]]:
    try:
        result, operations = followed(function, image)
    except Untraceable:
        raise
    except Exception as failure:
        raise Untraceable(f"the network does not run ({reason_of(failure)})") from failure
    if not isinstance(result, Tensor):
        raise Untraceable("the network returns something other than one tensor of logits")
    if not result.dim():
        raise Untraceable("the network returns a single number for all images of a batch")
    return result, operations


def result_of(traced: Trace, image: Tensor) -> Any:
    *_, (_, result) = executed(traced, image)
    return result


def executed(traced: Trace, image: Tensor) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the graph node by node, output last: modules as they are, constants as traced."""
    values: dict[fx.Node, Any] = {}
    for node, module, unused in traced.steps:
        args: Any = fx.node.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__) if node.kwargs else {}
        if module is not None:
            value = module(*args, **kwargs)
        elif node.op == "placeholder":
            value = image
        elif node.op == "get_attr":
            value = traced.constants[str(node.target)]
        elif node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            function: Any = node.target
            value = function(*args, **kwargs)
        else:
            value = args[0]
        values[node] = value
        yield node, value
        for argument in unused:
            del values[argument]


def _require_same_in_a_batch(model: nn.Module, images: list[Tensor], alone: Tensor) -> None:
    """Raise Untraceable where an image's logits depend on its batch.

    Not for a network of single images: no wrong logits come of that. The batch is laid out channels
    last, in inference mode: a network that looks at these is another one there. The number of
    threads stays: a pool of threads that starts here would hang in processes that are forked.
    """
    try:
        with torch.inference_mode():
            together, _ = followed(model, _channels_last(torch.cat(images)))
    except Untraceable:
        raise
    except Exception:
        return
    if not isinstance(together, Tensor) or together.shape != alone.shape or len(alone) != 2:
        return
    if not agree(together, alone) and not _agrees_in_float64(model, images, together, alone):
        raise Untraceable(f"the logits of an image depend on its batch: {_apart(together, alone)}")


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images


def _agrees_in_float64(
    model: nn.Module, images: list[Tensor], together: Tensor, alone: Tensor
) -> bool:
    """Tell whether a difference is the rounding of a narrow precision: in float64 it is gone.

    Logits that hardly move, of an untrained network, differ by the rounding of what they cancel.
    """
    if alone.dtype == torch.float64:
        return False
    rounding = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if not close(together, alone, rounding):
        return False
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        singles = torch.cat([wide(image.double()) for image in images])
        return agree(wide(torch.cat(images).double()), singles)


def agree(together: Tensor, alone: Tensor, moves: Callable[[Tensor], float] | None = None) -> bool:
    """Tell whether a batch's logits (n, k) are those of each image alone, up to kernels' rounding.

    sqrt(eps) of how far logits move from image to image (`movement` where no other measure is
    given): above the rounding of other kernels, below what a network does that mixes images.
    Relative to the size of logits, one large constant logit would hide a vote.
    """
    scale = (moves or movement)(alone)
    return close(together, alone, torch.finfo(alone.dtype).eps ** 0.5 * scale)


def movement(logits: Tensor) -> float:
    """Return how far each image's two largest logits move between images: (n, ...) -> ()."""
    flat = logits.reshape(len(logits), -1)
    if flat.shape[1] == 0:
        return 0.0
    deciding = flat.topk(min(2, flat.shape[1]), dim=1).indices.flatten().unique()
    moves = flat.amax(0) - flat.amin(0)
    return float(moves[deciding].max())


def movement_of_margins(logits: Tensor) -> float:
    """Return how far the logits that decide move between an image and the next, beside each other:
    the median, (n, k) -> ().

    These are the two largest of both images, less the mean of the two largest of their image: a
    number added to all logits moves nothing. A single image in which they move far is no scale for
    the others.
    """
    if logits.shape[1] < 2 or len(logits) < 2:
        return 0.0
    top = logits.topk(2, dim=1)
    centred = logits - top.values.mean(1, keepdim=True)
    moves = (centred - centred.roll(-1, 0)).abs()
    deciding = torch.cat([top.indices, top.indices.roll(-1, 0)], dim=1)
    return float(moves.gather(1, deciding).amax(1).median())


_LAST_PLACES = 8.0
"""Units of the last place that a logit's own size may add: a constant logit is computed to these."""


def close(a: Tensor, b: Tensor, tolerance: Tensor | float) -> bool:
    """Tell whether |a - b| <= tolerance, beside a few units of the last place of each entry."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    last_places = _LAST_PLACES * torch.finfo(a.dtype).eps * torch.maximum(a.abs(), b.abs())
    return bool(((a - b).abs() <= tolerance + last_places).all())


def _apart(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} of {a.dtype}, {tuple(b.shape)} of {b.dtype}"
    return f"they differ by {float((a - b).abs().max()):.3g}"


def _require_same_state(before: dict[str, Any], model: nn.Module) -> None:
    name = differs(before, state_of(model))
    if name is not None:
        raise Untraceable(f"{name} changes while the network runs")


@contextmanager
def _random_states_saved() -> Iterator[None]:
    """Untraceable where the body draws from shared generators, which are restored."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.is_initialized()

    def states() -> list[Any]:
        states: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
        states.append(
            [state.tolist() for state in torch.cuda.get_rng_state_all()] if cuda else None
        )
        if numpy is not None:
            name, keys, *rest = numpy.random.get_state()
            states.append((name, keys.tolist(), *rest))
        return states

    saved = states()
    torch_state = torch.get_rng_state()
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
