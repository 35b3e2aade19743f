"""Is the traced graph the network? The bound is one of the graph. It is the network's if the network
runs that graph on every image, so here it is *run*, beside the model, and what differs is named:

- the model on an image of noise, before anything else: what a first run fills, such as a cache, is
  filled then; and the trace, of the same image: the graph, and the same logits,
- model and graph on a saturated image: the same operations on it and on what is made of it, with
  shapes and numbers, of which none returns a number; the same logits to the last places. What
  depends on the type of a tensor or on an earlier run is another value here than in the trace,
- the model on both images in one batch: each image's logits are those of its single run.

Before and after, the state of the model (tensors, attributes, training mode, hooks) and the
generators of random numbers are the same. The network may surprise; it does not hide from its own
user.
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
from torch.overrides import BaseTorchFunctionMode

from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace, example_of, refuse_hooks, result_of, trace_model
from certcli.engine.tracer import Untraceable, failure_reason
from certcli.engine.watched_run import (
    Operation,
    described,
    differs,
    first_other_step,
    state_of,
    watch_run,
)
from certcli.models.build import own_name

SAME_SHAPE = 64.0
"""Units of the last place of how far logits move: the same kernels on the same numbers, of which reductions may be split
over threads in another way. In all runs seen the difference was 0."""
_LAST_PLACES = 8.0
"""Units of the last place that a logit's own size may add: a constant logit is computed to
these."""


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
        example = example_of(model, size)
        generator = torch.Generator().manual_seed(20)
        images = [noise_like(example, generator), noise_like(example, generator).round()]
        refuse_hooks(model)  # before anything runs: training mode would change statistics
        first, _ = _run_one_image(model, images[0], watch=False)
        before = state_of(model)
        traced = trace_model(model, images[0], *tables)
        yield traced
        failure: Untraceable | None = None
        try:
            _require_same_logits(traced, model, images, first)
        except Untraceable as reason:
            failure = reason
            refuse_hooks(model)
        changed = differs(before, state_of(model))  # which changes the logits: named first
        if changed is not None:
            raise Untraceable(f"{changed} changes while the network runs")
        if failure is not None:
            raise failure


def _require_same_logits(
    traced: Trace, model: nn.Module, images: list[Tensor], first: Tensor
) -> None:
    """Graph and model run the same operations to the same logits, of images alone and in batch."""
    logits, operations = _run_one_image(model, images[1])
    for result in (logits, traced.result):
        _require_finite_logits(model, result)
    if logits.shape != traced.result.shape:
        raise Untraceable(f"the shape of the logits depends on the image: {tuple(logits.shape)}")
    replay, steps = _run_one_image(
        lambda x: result_of(replace(traced, graph=traced.ran), x), images[1]
    )
    alone = torch.cat([traced.result, logits])
    if traced.ran is not traced.graph and not logits_agree(
        result_of(traced, images[1]), replay, alone
    ):
        raise Untraceable("the network with its operations written out is another one")
    if operations != steps:
        difference = first_other_step(operations, steps)
        raise Untraceable(f"the network runs another graph than its trace: {difference}")
    last_places = SAME_SHAPE * torch.finfo(logits.dtype).eps * movement(alone)
    for ran, of_graph in ((logits, replay), (first, traced.result)):
        if not close(ran, of_graph, last_places):
            apart = _apart(ran, of_graph)
            raise Untraceable(f"the traced graph returns other logits than the network: {apart}")
    _require_same_in_a_batch(model, images, alone)


def _require_finite_logits(model: nn.Module, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
        cause = f": '{own_name(model, wrong)}' holds infinite numbers or NaN" if wrong else ""
        raise Untraceable(f"the logits of a random image are not finite{cause}")


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
        reason = failure_reason(failure)
        raise Untraceable(f"the network does not run on one image ({reason})") from failure
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


@torch.no_grad()
def _agrees_in_float64(
    model: nn.Module, images: list[Tensor], together: Tensor, alone: Tensor
) -> bool:
    """Tell whether a difference is the rounding of a narrow precision: in float64 it is gone.

    Logits that hardly move, of an untrained network, differ by what they cancel.
    """
    rounding = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if alone.dtype == torch.float64 or not close(together, alone, rounding):
        return False
    wide = copy.deepcopy(model).double()
    singles = torch.cat([wide(image.double()) for image in images])
    return logits_agree(wide(torch.cat(images).double()), singles)


def logits_agree(
    one: Tensor,
    other: Tensor,
    rows: Tensor | None = None,
    moves: Callable[[Tensor], float] | None = None,
) -> bool:
    """Tell whether logits are the same up to kernels' rounding: sqrt(eps) of how far those of
    `rows`, by default of the other, move from image to image, by `movement` or another measure.

    That is above the rounding of other kernels, below what a network does that mixes images.
    Relative to the size of logits, one large constant logit would hide a vote.
    """
    scale = (moves or movement)(other if rows is None else rows)
    return close(one, other, torch.finfo(other.dtype).eps ** 0.5 * scale)


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


@contextmanager
def _random_states_saved() -> Iterator[None]:
    """Untraceable where the body draws from generators that a process shares, which are restored."""
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *((one.get_state, one.set_state) for one in (torch.default_generator, *on_gpus)),
    ]
    saved = [read() for read, _ in generators]
    failure: Untraceable | NoRule | None = None
    try:
        yield
    except (Untraceable, NoRule) as reason:
        failure = reason
    finally:
        drawn = described([read() for read, _ in generators]) != described(saved)
        for (_, write), state in zip(generators, saved, strict=True):
            write(state)
    if drawn:
        failure = Untraceable("the network draws random numbers")
    if failure is not None:
        raise failure
