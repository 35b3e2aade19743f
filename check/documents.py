"""Reads what is checked: checkpoints, proofs, records and images. Nothing here decides."""

import json
from collections.abc import Mapping
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "BOOL": "bool",
}
FUNCTION = ["arch", "arch_args", "classes", "surgery", "size", "mean", "std"]
FUNCTION += ["interpolation", "crop_pct"]


class Unreadable(Exception):
    """A file that cannot be read as what it should be."""


def once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(items)) < len(items):
        raise ValueError("a key occurs twice")
    return dict(items)


def read_json(text: bytes | str, where: object) -> dict[str, Any]:
    """Return a JSON object in which no key occurs twice."""
    try:
        return dict(json.loads(text, object_pairs_hook=once))
    except (ValueError, TypeError, RecursionError) as failure:
        raise Unreadable(f"{where}: no JSON object ({failure})") from failure


def read_checkpoint(
    path: Path, proof: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any], str]:
    """Return the tensors in float64, their function by the file's record (else by the proof), and
    the digest of both.
    """
    data = (path / "model.safetensors" if path.is_dir() else path).read_bytes()
    hasher = sha256()
    tensors = {}
    try:
        entries = dict(safetensors.deserialize(data))
        header = read_json(data[8 : 8 + int.from_bytes(data[:8], "little")], path)
        text = header.get("__metadata__", {}).get("certvit")
        record = (
            {"input": {}, **proof["function"]}
            if text is None
            else read_json(text, "the checkpoint's record")
        )
        flat = {**record, **record["input"]}
        function = {name: flat[name] for name in FUNCTION}
        if flat.get("crop_mode", "center") != "center":
            function["crop_mode"] = flat["crop_mode"]
        if flat.get("resized") is not None:
            function["resized"] = flat["resized"]
        for name in sorted(entries):
            kind, shape = TYPES[entries[name]["dtype"]], tuple(entries[name]["shape"])
            values = np.frombuffer(entries[name]["data"], "<u2" if kind == "bfloat16" else kind)
            hasher.update(f"{name}\0torch.{kind}\0{shape}\0".encode() + values.tobytes())
            wide = (values.astype("<u4") << 16).view("<f4") if kind == "bfloat16" else values
            tensors[name] = wide.astype(np.float64).reshape(shape)
    except (
        safetensors.SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as failure:
        raise Unreadable(
            f"{path}: no checkpoint that can be read ({type(failure).__name__}: {failure})"
        ) from failure
    about = json.dumps([function, hasher.hexdigest()], sort_keys=True, separators=(",", ":"))
    return tensors, function, sha256(about.encode()).hexdigest()


def read_value(pair: Any) -> Fraction | None:
    """Return [mantissa, exponent] as a number, None for infinity."""
    mantissa, exponent = pair
    if mantissa == "inf":
        return None
    if (
        type(mantissa) not in (int, float)
        or type(exponent) is not int
        or mantissa < 0
        or abs(exponent) > 2**20
    ):
        raise ValueError(f"{pair} is no value")
    return Fraction(mantissa) * Fraction(2) ** exponent


def read_text(text: Any) -> Fraction | None:
    """Return the number that a text spells, all of it, None for "inf". ValueError for one too long
    to be a bound's.
    """
    if type(text) is not str or len(text) > 24 or len(text.lower().partition("e")[2]) > 7:
        raise ValueError("a bound's text has at most 24 characters, 7 of its exponent")
    return None if text.lower() == "inf" else Fraction(text)


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the records of `certvit certify --records`."""
    lines = [read_json(line, path) for line in path.read_bytes().splitlines()]
    fields = (
        ("index", int),
        ("label", int),
        ("radius", (int, float, str)),
        ("method", str),
        ("pixels", str),
    )
    if not lines or any(
        not isinstance(row.get(name), kind) for row in lines[1:] for name, kind in fields
    ):
        raise Unreadable(f"{path}: no records of certificates")
    return lines[0], lines[1:]


def read_images(path: Path, size: list[int]) -> list[np.ndarray]:
    """Return the images of a .npz (`images`) or of MNIST's format: (n, c, h, w) float32, once for
    each scale that fits.
    """
    try:
        npz = path.suffix == ".npz"
        array = (
            np.load(path)["images"] if npz else np.fromfile(path, np.uint8, offset=16)
        ).reshape(-1, *size)
        return [
            array.astype(np.float32) / np.float32(s)
            for s in ((255, 16) if array.dtype.kind == "u" else (1,))
        ]
    except Exception as failure:  # numpy's readers raise errors of any type
        raise Unreadable(f"{path}: no images of {size} ({failure})") from failure
