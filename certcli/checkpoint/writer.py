"""A safetensors file written tensor by tensor, so that whoever writes it never holds all of them."""

import json
from collections.abc import Iterable, Mapping
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
"""The format's names of types."""


def in_file_order(likes: Mapping[str, Tensor]) -> list[str]:
    """Names of the widest type first, so that each tensor begins where its type may."""
    return sorted(likes, key=lambda name: (-likes[name].itemsize, name))


def write_one_by_one(
    path: Path, likes: Mapping[str, Tensor], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """`tensors` come in the order of `in_file_order(likes)`, with the types and shapes of `likes` (meta tensors will do).

    Atomic: `path` holds the old bytes or all the new ones. Errors: OutputError; ValueError for a tensor unlike its `like`.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order, offset = in_file_order(likes), 0
    for name in order:
        like = likes[name]
        end = offset + like.numel() * like.itemsize
        header[name] = {"dtype": CODES[like.dtype], "shape": list(like.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in zip(order, tensors, strict=True):
            like = likes[name]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                raise ValueError(f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, not as it was announced")
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
