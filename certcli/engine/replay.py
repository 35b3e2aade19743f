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

A count of votes, or a vote that a patch beside it could move, needs of every batch that its rows
have no influence on each other. Comparing numbers shows it of one batch. It is proven of all by the
operations: none of those that a run executes reads a value, compares, sorts or makes whole numbers,
so each batch of the size runs the same ones, and a NaN goes through each of `FAITHFUL`. NaN in some
images then comes out wherever these images have any influence.
"""

import copy
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.engine.table import RuleTable
from certcli.engine.trace import Trace, example_of, refuse_hooks, result_of, trace_model
from certcli.engine.tracer import Untraceable, failure_reason, tensors_in
from certcli.models.build import own_name
from certcli.system.torch_modes import OperationMode

SAME_SHAPE = 64.0
"""Units of the last place of how far logits move: the same kernels on the same numbers, of which reductions may be
split over threads in another way. In all runs seen the difference was 0."""
_LAST_PLACES = 8.0
"""Units of the last place that a logit's own size may add: a constant logit is computed to
these."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, range)
_CODE = (nn.Module, ModuleType, type)
_GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
]
"""Of random numbers, which a process shares."""


@contextmanager
def replayed(model: nn.Module, size: tuple[int, ...], *tables: RuleTable) -> Iterator[Trace]:
    """`trace_model` for the body; at its end the graph is the network, as far as runs can tell.

        with replayed(model, size, rules) as traced:
            found = walk(traced, domain)

    Untraceable says what differs, but only where the body had no reason of its own to refuse: that
    one names a module. Costs one run of the graph and two of the model besides the trace, one of
    two images, and reading the state twice.
    """
    drawn_from = [read() for read, _ in _GENERATORS]
    try:
        with torch.no_grad():
            example = example_of(model, size)
            generator = torch.Generator().manual_seed(20)
            images = [noise_like(example, generator), noise_like(example, generator).round()]
            refuse_hooks(model)  # before anything runs: training mode would change statistics
            first, _ = _run_one_image(model, images[0])
            before = state_of(model)
            traced = trace_model(model, images[0], *tables)
            if described([read() for read, _ in _GENERATORS]) != described(drawn_from):
                raise Untraceable("the network draws random numbers")
            yield traced
            why = _difference(traced, model, images, first)
            refuse_hooks(model)
            changed = differs(before, state_of(model))
            if changed is not None:  # which changes the logits: named first
                why = f"{changed} changes while the network runs"
            if why:
                raise Untraceable(why)
    finally:
        for (_, write), state in zip(_GENERATORS, drawn_from, strict=True):
            write(state)


def _difference(traced: Trace, model: nn.Module, images: list[Tensor], first: Tensor) -> str:
    """Say where graph and model part: other operations, or other logits, of images alone and in
    batch."""
    logits, operations = _run_one_image(model, images[1])
    for result in (logits, traced.result):
        _require_finite_logits(model, result)
    if logits.shape != traced.result.shape:
        return f"the shape of the logits depends on the image: {tuple(logits.shape)}"
    as_ran = replace(traced, graph=traced.ran)
    replay, steps = _run_one_image(lambda x: result_of(as_ran, x), images[1])
    alone = torch.cat([traced.result, logits])
    if traced.ran is not traced.graph and not logits_agree(
        result_of(traced, images[1]), replay, alone
    ):
        return "the network with its operations written out is another one"
    if operations != steps:
        run, of_trace = ([step.text for step in each] for each in (operations, steps))
        return f"the network runs another graph than its trace: {first_other_step(run, of_trace)}"
    last_places = SAME_SHAPE * torch.finfo(logits.dtype).eps * movement(alone, centred=False)
    for ran, of_graph in ((logits, replay), (first, traced.result)):
        if not close(ran, of_graph, last_places):
            return f"the traced graph returns other logits than the network, by {_apart(ran, of_graph):.3g}"
    return _difference_in_a_batch(model, images, alone)


def _difference_in_a_batch(model: nn.Module, images: list[Tensor], alone: Tensor) -> str:
    """Say where an image's logits depend on its batch. The batch is laid out channels last: a network
    that looks at that is another one there. The number of threads stays: a pool of threads that
    starts here would hang in processes that are forked.

    A difference may be the rounding of a narrow precision, of logits that hardly move: then it is
    small, and in float64 it is gone.
    """
    batch = torch.cat(images)
    if batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)
    apart = difference_in_company(model, batch)
    root = torch.finfo(alone.dtype).eps ** 0.5
    if apart and alone.dtype != torch.float64 and apart <= root * float(alone.abs().max()):
        apart = difference_in_company(copy.deepcopy(model).double(), batch.double())
    if apart <= root * movement(alone, centred=False):
        return ""
    return f"the logits of an image depend on its batch: they differ by {apart:.3g}"


@torch.no_grad()
def difference_in_company(
    run: Callable[[Tensor], Tensor], batch: Tensor, rows: Sequence[int] | None = None
) -> float:
    """Return how far logits of a batch lie from those of these rows, by default all, each alone, in
    the ordinary layout and torch's other inference mode; 0: no further than kernels round, or a
    network of single images."""
    rows = rows or range(len(batch))
    try:
        together = run(batch)[list(rows)]
        with torch.inference_mode(not torch.is_inference_mode_enabled()), torch.no_grad():
            alone = torch.cat(
                [run(batch[row][None].clone(memory_format=torch.contiguous_format)) for row in rows]
            )
    except Exception:
        return 0.0
    finite = bool(torch.isfinite(alone).all())
    same = together.shape != alone.shape or logits_agree(alone, together, together)
    return 0.0 if same or not finite else _apart(alone, together)


def logits_agree(one: Tensor, other: Tensor, rows: Tensor) -> bool:
    """Tell whether logits are the same up to kernels' rounding: sqrt(eps) of how far those of `rows`
    move from image to image.

    That is above the rounding of other kernels, below what a network does that mixes images.
    Relative to the size of logits, one large constant logit would hide a vote.
    """
    return close(one, other, torch.finfo(other.dtype).eps ** 0.5 * movement(rows))


def movement(logits: Tensor, centred: bool = True) -> float:
    """Return how far the logits that decide move between an image and the next: the median, (n, ...)
    -> (). A single image in which they move far is no scale for the others.

    These are the two largest of both images, by default less the mean of the two largest of their
    image: a number added to all logits moves nothing. A single logit is taken as it is.
    """
    flat = logits.reshape(len(logits), -1)
    if len(flat) < 2 or not flat.shape[1]:
        return 0.0
    top = flat.topk(min(2, flat.shape[1]), dim=1)
    if centred and flat.shape[1] > 1:
        flat = flat - top.values.mean(1, keepdim=True)
    moves = (flat - flat.roll(-1, 0)).abs()
    deciding = torch.cat([top.indices, top.indices.roll(-1, 0)], dim=1)
    return float(moves.gather(1, deciding).amax(1).median())


def close(a: Tensor, b: Tensor, tolerance: Tensor | float) -> bool:
    """Tell whether |a - b| <= tolerance, beside a few units of the last place of each entry."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    last_places = _LAST_PLACES * torch.finfo(a.dtype).eps * torch.maximum(a.abs(), b.abs())
    return bool(((a - b).abs() <= tolerance + last_places).all())


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def noise_like(example: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return an image of noise, of a fixed generator where none is given."""
    generator = generator or torch.Generator().manual_seed(21)
    return torch.rand(example.shape, generator=generator, dtype=torch.float64).to(example)


def _require_finite_logits(model: nn.Module, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
        cause = f": '{own_name(model, wrong)}' holds infinite numbers or NaN" if wrong else ""
        raise Untraceable(f"the logits of a random image are not finite{cause}")


def _run_one_image(
    function: Callable[[Tensor], Any], image: Tensor
) -> tuple[Tensor, list["Operation"]]:
    """Return the logits of one image and the operations."""
    try:
        result, operations = watch_run(function, image)
    except Exception as failure:
        reason = failure_reason(failure)
        raise Untraceable(f"the network does not run on one image ({reason})") from failure
    if not isinstance(result, Tensor):
        raise Untraceable("the network returns something other than one tensor of logits")
    if not result.dim():
        raise Untraceable("the network returns a single number for all images of a batch")
    return result, operations


def state_of(model: nn.Module) -> dict[str, Any]:
    """Describe, by name, all tensors' content and all attributes of modules."""
    description: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = own_name(model, path) if path else ""
        for name, value in vars(module).items():
            parts = value if name in ("_parameters", "_buffers", "_modules") else {name: value}
            description |= {f"{where}.{inner}": described(item) for inner, item in parts.items()}
    return description


def differs(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the first name whose value changed, came or went, in words; None for equal states."""
    for name in before | after:
        if before.get(name, described) != after.get(name, described):
            place, _, attribute = name.rpartition(".")
            return f"'{attribute}' of {place}" if place else f"'{attribute}'"
    return None


def described(value: Any, depth: int = 4) -> Any:
    """Describe a value by its content, containers and objects by what they hold to this depth;
    classes and modules by identity."""
    # most attributes of modules first, all those of hooks: torch's own types are slow to ask for
    if depth and isinstance(value, dict):
        return [(repr(key), described(item, depth - 1)) for key, item in value.items()]
    if value is None or isinstance(value, _PLAIN):
        return type(value), repr(value)
    if depth and isinstance(value, (tuple, list, deque, set, frozenset)):
        whole = set(map(type, value)) == {int}  # as the hundreds of a generator of random numbers
        return type(value), repr(value) if whole else [described(item, depth - 1) for item in value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype, 0 if value.is_meta else tensor_checksum(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, zlib.crc32(value.tobytes())
    if isinstance(value, random.Random):
        return described(value.getstate())
    if isinstance(value, torch.Generator):
        return described(value.get_state())
    if isinstance(value, _CODE) or depth == 0:
        return id(value)
    return id(value), described(getattr(value, "__dict__", None), depth - 1)


def tensor_checksum(tensor: Tensor) -> int:
    """Return a checksum of content and order. It does not resist a deliberate collision."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


_FROM_SHAPE = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
)  # fmt: skip
"""Operations whose result depends on the shape alone: the trace takes it for a constant."""


class Operation(NamedTuple):
    """One operation on what is made of the image: its first result's dtype, or that of a tensor of
    whole numbers or truths that it reads; all of it in words."""

    name: str
    dtype: torch.dtype | None
    text: str


class _Follow(OperationMode):
    """Write down the operations on an image and on what is made of it, in order; one that reads a
    number has a result without a dtype."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        read = [x for x in tensors_in((args, kwargs)) if x in self.known]
        if name in _FROM_SHAPE or not read:
            return result
        tensors = tensors_in(result)
        numbers = tuple(value for value in args if isinstance(value, (bool, int, float)))
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        dtype = tensors[0].dtype if tensors else None
        # a pool gives the places of its largest entries: who reads them chooses by the image
        dtype = next((x.dtype for x in read if not x.is_floating_point()), dtype)
        if func is torch.ops.aten.view.dtype:  # half of a NaN's bits may be a number
            name = "view of bits"
        text = f"{name}{numbers or ''} to {shapes or 'a number'} of {dtype}"
        self.operations.append(Operation(name, dtype, text))
        self.known.update(dict.fromkeys(tensors))
        return result


def watch_run(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations."""
    image = image.clone()
    follow = _Follow(image)
    with BaseTorchFunctionMode(), follow:  # torch's fused layers run their operations then
        result = function(image)
    return result, follow.operations


def first_other_step(ran: Sequence[str], traced: Sequence[str]) -> str:
    """Say where two runs part."""
    steps = enumerate(zip_longest(ran, traced, fillvalue="nothing"), 1)
    number, (one, other) = next(step for step in steps if step[1][0] != step[1][1])
    return f"step {number} is {one}, in the trace {other}"


FAITHFUL = frozenset(
    """
    abs add add_ sub sub_ rsub mul mul_ div div_ neg reciprocal square sqrt rsqrt pow exp log sin cos
    tanh erf sigmoid silu silu_ mish gelu relu relu_ hardsigmoid hardswish hardswish_ hardtanh
    dropout leaky_relu elu softplus maximum minimum clamp clamp_min
    softmax _softmax log_softmax _log_softmax sum mean amax amin var var_mean std linalg_vector_norm
    addmm mm bmm baddbmm matmul linear einsum convolution conv1d conv2d _convolution
    layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm batch_norm
    native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_impl_index
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_attention_math
    avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d max_pool2d_with_indices
    upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pad constant_pad_nd
    pixel_shuffle pixel_unshuffle view _unsafe_view reshape reshape_as flatten unflatten _reshape_alias
    unfold permute transpose t numpy_T movedim alias expand expand_as squeeze unsqueeze cat stack split
    split_with_sizes chunk tensor_split unbind select slice narrow index index_select clone
    contiguous detach copy_ _to_copy to type_as float lift_fresh roll flip repeat where masked_fill
    """.split()  # noqa: SIM905
)
"""Operations of which a NaN comes out wherever that input has an influence. A condition of `where`
cannot depend on the images: that would take an operation that is not named here."""


def rows_are_apart(function: Callable[[Tensor], Tensor], batch: Tensor) -> bool:
    """Tell whether it is proven that no row of such a batch has an influence on another's result.

    Each ordered pair of rows is told apart by one run at least, in which the one is NaN and the
    other is not: those whose number has a bit, and those without. 2 log2(n) runs and one.
    """
    result, operations = watch_run(function, batch)
    faithful = FAITHFUL.issuperset(step.name for step in operations)
    precise = all(step.dtype is not None and step.dtype.is_floating_point for step in operations)
    if not (faithful and precise and _finite_rows(result).all()):
        return False
    numbers = torch.arange(len(batch), device=batch.device)
    for bit in range((len(batch) - 1).bit_length()):
        for side in (0, 1):
            poisoned = (numbers >> bit & 1) == side
            spoiled = batch.clone()
            spoiled[poisoned] = torch.nan
            if not torch.equal(_finite_rows(function(spoiled)), ~poisoned):
                return False
    return True


def _finite_rows(result: Tensor) -> Tensor:
    return torch.isfinite(result).flatten(1).all(1)
