"""A safetensors file written tensor by tensor: the writer never holds all of them."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from certcli.system.files import atomic_file

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names of types."""


def in_file_order(likes: Mapping[str, Tensor]) -> list[str]:
    """Return the names, those of the widest type first, so that every tensor is aligned."""
    return sorted(likes, key=lambda name: (-likes[name].itemsize, name))


def write_one_by_one(
    path: Path,
    likes: Mapping[str, Tensor],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
    ending: tuple[str, Callable[[], str]] | None = None,
) -> None:
    """Write a safetensors file atomically.

    Args:
        likes: name to a tensor of the type and shape to be written; meta tensors will do.
        tensors: the values, in the order of `in_file_order(likes)`.
        ending: A text that occurs once in the metadata, and what gives the text of the same length
            that replaces it once all tensors are written.

    Raises:
        OutputError: the file cannot be written.
        ValueError: a tensor differs from its `like` in type or shape.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order = in_file_order(likes)
    offset = 0
    for name in order:
        like = likes[name]
        end = offset + like.numel() * like.itemsize
        header[name] = {
            "dtype": CODES[like.dtype],
            "shape": list(like.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in zip(order, tensors, strict=True):
            like = likes[name]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                raise ValueError(
                    f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, not as it was announced"
                )
            file.write(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        if ending is not None:
            blank, text_of = ending
            file.seek(8 + text.index(blank.encode()))
            file.write(text_of().encode())
