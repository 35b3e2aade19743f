"""What a run does: a description of the model's state, everything but its code, that changes
whenever the state does; every operation on the image and on what is made of it, in order; and
whether the rows of a batch have an influence on each other.

A count of votes, or a vote that a patch beside it could move, needs that of every batch. Comparing
numbers shows it of one batch. It is proven of all by the operations: none of those that a run
executes reads a value, compares, sorts or makes whole numbers, so each batch of the size runs the
same ones, and a NaN goes through each of `FAITHFUL`. NaN in some images then comes out wherever
these images have any influence.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations, islice, zip_longest
from math import comb
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.engine.tracer import Untraceable, tensors_in
from certcli.models.build import own_name
from certcli.system.torch_modes import OperationMode

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, range)
_CODE = (nn.Module, ModuleType, type)
_TITLES = {"training": "the training mode", "_forward_hooks": "a forward hook"}


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
            shown = _TITLES.get(attribute, f"'{attribute}'")
            return f"{shown} of {place}" if place else shown
    return None


def described(value: Any, depth: int = 4) -> Any:
    """Describe a value by its content, containers and objects by what they hold to this depth;
    classes and modules by identity."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), repr(value)
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
    if isinstance(value, dict):
        return [(repr(key), described(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return type(value), [described(item, depth - 1) for item in value]
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
    """One operation on what is made of the image: its first result's dtype; all of it in words."""

    name: str
    dtype: torch.dtype | None
    text: str

    def __str__(self) -> str:
        return self.text


class _Follow(OperationMode):
    """Write down the operations on an image and on what is made of it, in order.

    Attributes:
        reads: The first operation that gave a number: the network may catch the refusal.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: Untraceable | None = None
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FROM_SHAPE or not any(x in self.known for x in tensors_in((args, kwargs))):
            return result
        tensors = tensors_in(result)
        if not tensors and result is not None:
            self.reads = Untraceable(f"the network reads a tensor's value into Python ({name})")
            raise self.reads
        numbers = tuple(value for value in args if isinstance(value, (bool, int, float)))
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        dtype = tensors[0].dtype if tensors else None
        text = f"{name}{numbers or ''} to {shapes or 'nothing'} of {dtype}"
        self.operations.append(Operation(name, dtype, text))
        self.known.update(dict.fromkeys(tensors))
        return result


def watch_run(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations. Untraceable where one reads a number."""
    image = image.clone()
    follow = _Follow(image)
    with BaseTorchFunctionMode(), follow:  # torch's fused layers run their operations then
        result = function(image)
    if follow.reads is not None:
        raise follow.reads
    return result, follow.operations


def first_other_step(ran: Sequence[object], traced: Sequence[object]) -> str:
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
    other is not: sets of equal size, none within another. log2(n) runs and a few.
    """
    try:
        result, operations = watch_run(function, batch)
    except Untraceable:
        return False
    names = {step.name for step in operations}
    precise = all(step.dtype is not None and step.dtype.is_floating_point for step in operations)
    if not (precise and names <= FAITHFUL and _finite_rows(result).all()):
        return False
    members = _codes(len(batch)).to(batch.device)
    for poisoned in members.unbind(1):
        spoiled = batch.clone()
        spoiled[poisoned] = torch.nan
        if not torch.equal(_finite_rows(function(spoiled)), ~poisoned):
            return False
    return True


def _finite_rows(result: Tensor) -> Tensor:
    return torch.isfinite(result).flatten(1).all(1)


def _codes(rows: int) -> Tensor:
    """Return sets of rows as columns, (n, m) bool: each row is in half of them, no two in the
    same."""
    runs = next(m for m in range(1, rows + 2) if comb(m, m // 2) >= rows)
    codes = torch.zeros(rows, runs, dtype=torch.bool)
    for row, places in enumerate(islice(combinations(range(runs), runs // 2), rows)):
        codes[row, list(places)] = True
    return codes
