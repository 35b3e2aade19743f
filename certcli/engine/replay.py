"""Is the traced graph the network? It runs beside the model, and what differs is looked at.

The bound is one of the graph. It is the network's if the network runs that graph on every image, so
here it is *run*. Each run has its own task:

- the model on an image of noise, before anything else: what a first run fills, such as a cache, is
  filled then,
- the trace, of the same image: the graph, and the same logits,
- the model on a saturated image: its operations on the image and on what is made of it, with shapes
  and numbers. No operation may return a number,
- the graph on that image: the same operations, and the same logits to the last places. What depends
  on the type of a tensor or on an earlier run is another value here than in the trace,
- the model on both images in one batch: each image's logits are those of its single run, so they
  depend neither on the batch's size, nor on the place in it, nor on the other image.

Before and after, the state of the model (tensors by their content, attributes, training mode,
hooks) and the generators of random numbers are the same. The network may surprise; it does not hide
from its own user.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from certcli.engine.table import RuleTable
from certcli.engine.trace import Trace, example_of, refuse_hooks, result_of, trace_model
from certcli.engine.tracer import Untraceable, failure_reason
from certcli.engine.watched_run import Operation, differs, first_other_step, state_of, watch_run
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
    two images, and reading the state twice.
    """
    with torch.no_grad(), _random_states_saved():
        images = _noise_and_saturated(model, size)
        refuse_hooks(model)  # before anything runs: training mode would change statistics
        first, _ = _run_one_image(model, images[0], watch=False)
        before = state_of(model)
        traced = trace_model(model, images[0], *tables)
        yield traced
        try:
            _require_same_logits(traced, model, images, first)
        except Untraceable:
            refuse_hooks(model)
            _require_same_state(before, model)  # names what changes before the logits do
            raise
        _require_same_state(before, model)


def _require_same_logits(
    traced: Trace, model: nn.Module, images: list[Tensor], first: Tensor
) -> None:
    """Graph and model run the same operations to the same logits, of images alone and in batch."""
    logits, operations = _run_one_image(model, images[1])
    for result in (logits, traced.result):
        _require_finite_logits(model, result)
    if logits.shape != traced.result.shape:
        raise Untraceable(
            f"the shape of the logits depends on the image: {_apart(logits, traced.result)}"
        )
    alone = torch.cat([traced.result, logits])
    as_it_ran = replace(traced, graph=traced.ran)
    replay, steps = _run_one_image(lambda x: result_of(as_it_ran, x), images[1])
    if traced.ran is not traced.graph and not logits_agree(
        result_of(traced, images[1]), replay, lambda _: movement(alone)
    ):
        raise Untraceable("the network with its operations written out is another one")
    if operations != steps:
        difference = first_other_step(operations, steps)
        raise Untraceable(f"the network runs another graph than its trace: {difference}")
    last_places = SAME_SHAPE * torch.finfo(logits.dtype).eps * movement(alone)
    for ran, of_graph in ((logits, replay), (first, traced.result)):
        if not close(ran, of_graph, last_places):
            raise Untraceable(
                f"the traced graph returns other logits than the network: {_apart(ran, of_graph)}"
            )
    _require_same_in_a_batch(model, images, alone)


def _require_finite_logits(model: nn.Module, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
        cause = (
            "" if wrong is None else f": '{own_name(model, wrong)}' holds infinite numbers or NaN"
        )
        raise Untraceable(f"the logits of a random image are not finite{cause}")


def _noise_and_saturated(model: nn.Module, size: tuple[int, ...]) -> list[Tensor]:
    """Noise, and a saturated image; the first two of a fixed generator."""
    example = example_of(model, size)
    generator = torch.Generator().manual_seed(20)
    noise = [noise_like(example, generator) for _ in range(2)]
    return [noise[0], noise[1].round()]


def noise_like(example: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return an image of noise, of a fixed generator where none is given."""
    generator = generator or torch.Generator().manual_seed(21)
    return torch.rand(example.shape, generator=generator, dtype=torch.float64).to(example)


def _run_one_image(
    function: Callable[[Tensor], Any], image: Tensor, watch: bool = True
) -> tuple[Tensor, list[Operation]]:
    """Return the logits of one image, and the operations where they are watched."""
    try:
        with BaseTorchFunctionMode():  # as in a watched run
            result, operations = (
                watch_run(function, image) if watch else (function(image.clone()), [])
            )
    except Untraceable:
        raise
    except Exception as failure:
        raise Untraceable(
            f"the network does not run on one image ({failure_reason(failure)})"
        ) from failure
    if not isinstance(result, Tensor):
        raise Untraceable("the network returns something other than one tensor of logits")
    if not result.dim():
        raise Untraceable("the network returns a single number for all images of a batch")
    return result, operations


def _require_same_in_a_batch(model: nn.Module, images: list[Tensor], alone: Tensor) -> None:
    """Raise Untraceable where an image's logits depend on its batch.

    Not for a network of single images: no wrong logits come of that. The batch is laid out channels
    last, in inference mode: a network that looks at these is another one there. The number of
    threads stays: a pool of threads that starts here would hang in processes that are forked.
    """
    batch = torch.cat(images)
    if batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)
    try:
        with torch.inference_mode():
            together = model(batch)
    except Exception:
        return
    if not isinstance(together, Tensor) or together.shape != alone.shape or len(alone) != 2:
        return
    if not logits_agree(together, alone) and not _agrees_in_float64(model, images, together, alone):
        raise Untraceable(f"the logits of an image depend on its batch: {_apart(together, alone)}")


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
        return logits_agree(wide(torch.cat(images).double()), singles)


def logits_agree(
    together: Tensor, alone: Tensor, moves: Callable[[Tensor], float] | None = None
) -> bool:
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
"""Units of the last place that a logit's own size may add: a constant logit is computed to
these."""


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


_GENERATORS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (
        lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
    (
        lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        lambda states: torch.cuda.set_rng_state_all(states) if states else None,
    ),
)
"""How the state of each generator that a process shares is read and written."""


@contextmanager
def _random_states_saved() -> Iterator[None]:
    """Untraceable where the body draws from shared generators, which are restored."""
    saved = [read() for read, _ in _GENERATORS]
    failure: Untraceable | None = None
    try:
        yield
    except Untraceable as reason:
        failure = reason
    finally:
        drawn = [repr(read()) for read, _ in _GENERATORS] != list(map(repr, saved))
        for (_, write), state in zip(_GENERATORS, saved, strict=True):
            write(state)
    if drawn:
        failure = Untraceable("the network draws random numbers")
    if failure is not None:
        raise failure


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
