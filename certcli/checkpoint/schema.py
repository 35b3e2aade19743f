"""The schema of metadata: JSON becomes typed values in known ranges, or is refused in a line.

No other module reads raw metadata. A file may describe a network by a registered name, numbers and
switches; it may not name a file, a URL, a callable or weights, and no number in it may demand more
than a machine has.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from certcli.system.errors import Refused, one_line, raise_if
from certcli.system.reading import LARGEST_SIDE

LARGEST_SIZE = 65_536  # of any integer of an architecture: the widest layer, the most classes
MOST_CHANNELS = 256
LARGEST_IMAGE = 2**24  # values, channels x height x width
MOST_CLASSES = 65_536
LONGEST_RECORD = 16 * 2**20  # characters
LONGEST_TEXT = 65_536  # characters of one string
MOST_DIGITS = 20  # of an integer, its sign among them
DEEPEST = 24  # nested brackets in the parameters of a step or in a result
PIXEL_SCALE = (
    2.0  # beyond it, a mean or standard deviation belongs to pixels of another scale than [0, 1]
)
SMALLEST_STD = 1e-6

PATTERNS = {
    "name": (r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z", "a name of letters, digits, '_', '.', '-'"),
    "path": (
        r"\A([A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)?\Z",
        "the path of a module, such as blocks.0.attn",
    ),
    "text": (r"\A[^\x00-\x1f\x7f-\x9f]*\Z", "text without control characters"),
    "dataset": (
        r"\A(torch/)?(?!\.+\Z)[^/\\\x00-\x1f\x7f-\x9f]*\Z",
        "the name of a dataset, no path",
    ),
    "digest": (r"\A[0-9a-f]{64}\Z", "64 hexadecimal digits"),
    "shard": (
        r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors\Z",
        "the name of a .safetensors file in the same folder",
    ),
    "index": (r"\A[0-9]{1,9}\Z", "a number"),
}
"""Regular expressions for texts, each with the words for it in a refusal."""


def _like(name: str, longest: int | None = None, shortest: int | None = None) -> Meta:
    return Meta(pattern=PATTERNS[name][0], max_length=longest, min_length=shortest)


Name = Annotated[str, _like("name", 128, 1)]
Path = Annotated[str, _like("path", 256)]
Text = Annotated[str, _like("text", 512)]
Dataset = Annotated[str, _like("dataset", 256)]
Digest = Annotated[str, _like("digest")]
Side = Annotated[int, Meta(ge=1, le=LARGEST_SIDE)]
Channels = Annotated[int, Meta(ge=1, le=MOST_CHANNELS)]
Classes = Annotated[int, Meta(ge=0, le=MOST_CLASSES)]
CropPct = Annotated[float, Meta(ge=0.25, le=4)]
Statistic = Annotated[float, Meta(ge=-1e6, le=1e6)]
"""Of pixels; `require_statistics` says what is wrong with one of another scale."""
PerChannel = Annotated[tuple[Statistic, ...], Meta(min_length=1, max_length=MOST_CHANNELS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is shown or compared, and enters no further arithmetic."""
Measured = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Upper = Measured | Literal["inf"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
CropMode = Literal["center", "squash", "border"]
"""How an image becomes the input: its shorter side resized, both sides resized, or all of it
within a border."""
Json = dict[str, Any]
T = TypeVar("T")


class StrictStruct(Struct, forbid_unknown_fields=True):
    """A structure that refuses JSON with unknown keys."""


class NoArgs(StrictStruct):
    """No arguments."""


class FlatHeadArgs(StrictStruct):
    widths: Annotated[list[Annotated[int, Meta(ge=2, le=LARGEST_SIZE)]], Meta(max_length=16)] = []


class ConvArgs(StrictStruct):
    kernel: Annotated[int, Meta(ge=1, le=255)] | None = None


class MixingArgs(StrictStruct):
    tokens: Annotated[int, Meta(ge=1, le=LARGEST_SIZE)]


class EpsArgs(StrictStruct):
    eps: Annotated[float, Meta(gt=0, le=1)]


SURGERY: dict[str, type[Struct]] = {
    "l2-attention": NoArgs,
    "l2-untied-value-attention": NoArgs,
    "scsa-attention": NoArgs,
    "lnorm-attention": NoArgs,
    "conv-attention": ConvArgs,
    "orthogonal-attention": MixingArgs,
    "center-norm": NoArgs,
    "floor-norm": NoArgs,
    "identity": NoArgs,
    "convex-block": NoArgs,
    "weighted-block": NoArgs,
    "relu": NoArgs,
    "maxmin": NoArgs,
    "norm-eps": EpsArgs,
    "flat-head": FlatHeadArgs,
}
"""Arguments of every replacement of `certcli.nn.surgery`."""


LARGEST_INDEX = 64 * 2**20
"""Bytes of the index of a checkpoint in several files."""
ShardName = Annotated[str, _like("shard", 255)]


class IndexFields(Struct):
    """model.safetensors.index.json."""

    weight_map: Annotated[dict[str, ShardName], Meta(min_length=1)]
    metadata: Json | None = None


Index = Annotated[str, _like("index")]


class OptimiserFields(StrictStruct):
    state: dict[Index, Json]
    param_groups: list[Json]


class TrainingFields(StrictStruct):
    """The state of a training run, beside its tensors."""

    identity: Text
    epoch: Count
    step: Count
    best: Number
    best_epoch: Annotated[int, Meta(ge=-1, le=2**53)]
    steps: Count | None
    validation_limit: Count | None
    optimisers: list[OptimiserFields]
    parts: list[Name]
    digest: Digest
    changes: list[tuple[Count, Count]] = []


class AdaptFields(StrictStruct):
    """The state of an adaptation, beside its tensors."""

    identity: Text
    done: Count
    rate: Annotated[float, Meta(gt=0, le=1e300)]
    records: list[Json]
    digest: Digest


LARGEST_EXPONENT = 2**20
"""Of the values of a proof, on both sides: its decimal digits are computed in milliseconds."""
Share = Annotated[float, Meta(ge=0, le=1)]
Log10 = Annotated[float, Meta(ge=-1e6, le=1e6)]


class ProofFields(Struct):
    """One node of a proof."""

    path: str
    kind: str
    value: tuple[
        Annotated[float, Meta(ge=0, le=1)] | Literal["inf"],
        Annotated[int, Meta(ge=-LARGEST_EXPONENT, le=LARGEST_EXPONENT)],
    ]
    law: str
    parts: list[Count]
    log10_upper: Log10 | UnsetType | None = UNSET
    why: str | UnsetType = UNSET

    def as_dict(self) -> Json:
        return {
            "path": one_line(self.path),
            "value": list(self.value),
            "law": self.law,
            "parts": self.parts,
        }


class LayerFields(Struct):
    path: str
    upper: Upper
    log10_upper: Log10 | None
    log10_cumulative: Log10 | None
    kind: str | UnsetType = UNSET
    law: str | UnsetType = UNSET
    why: str | UnsetType = UNSET
    upper_finite: bool | UnsetType = UNSET
    upper_text: str | UnsetType = UNSET


class NearImageFields(Struct):
    """What `certvit lipschitz --around` says of one image that can be checked."""

    index: Count
    radius: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    prediction: Count
    upper: list[Upper]
    lower: list[Measured | None]
    margins: list[Number]
    rival: Count
    logits_upper: Upper
    certified: Measured
    certified_by_integral: Measured = 0.0


class AroundDataset(Struct):
    name: str
    split: str
    images: Count
    digest: str


class AroundFields(Struct):
    """Slopes near images."""

    norm: Literal["l2", "linf"]
    seed: Seed
    dataset: AroundDataset
    images: list[NearImageFields]


class ReportFields(Struct):
    """The fields of a report of `certvit lipschitz --json` that can be checked."""

    schema: Literal[1]
    checkpoint: Digest
    arch: Name
    input: tuple[Channels, Side, Side]
    upper: Upper
    log10_upper: Log10 | None
    upper_finite: bool
    upper_text: str
    layers: list[LayerFields]
    proof: list[ProofFields]
    why: str | UnsetType = UNSET
    bound_of: Literal["logits", "features"] = "logits"
    function: Json | UnsetType = UNSET
    lower: Measured | UnsetType | None = UNSET
    around: AroundFields | UnsetType = UNSET


def decode_json(text: str | bytes, kind: type[T]) -> T:
    """Decode JSON as the structure `kind`, or raise Refused."""
    try:
        value = msgspec.json.decode(text, type=kind)
        json.loads(text, object_pairs_hook=_each_once, parse_int=_bounded)
        return value
    except Refused:
        raise
    except RecursionError:
        raise Refused("JSON nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as failure:
        raise Refused(_reason(failure)) from failure


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    """Raise Refused where an object names a key twice: readers differ on which of the two
    counts."""
    names = set()
    for key, _ in pairs:
        raise_if(key in names, Refused, f"the key '{one_line(key)[:80]}' occurs twice")
        names.add(key)


def _bounded(digits: str) -> None:
    """Raise Refused for an integer that no field has: its arithmetic may not end."""
    raise_if(len(digits) > MOST_DIGITS, Refused, f"an integer of {len(digits):,} digits")


def is_name(text: str) -> bool:
    """Tell whether it can name a registered architecture: no path, URL or `hf-hub:`."""
    return len(text) <= 128 and re.match(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z", text) is not None


def convert_json(value: Any, kind: type[T]) -> T:
    """Convert decoded JSON to the structure `kind`, or raise Refused."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as failure:
        raise Refused(_reason(failure)) from failure


def _reason(failure: Exception) -> str:
    """Return msgspec's reason in one line, with words in place of a regular expression."""
    text = str(failure)
    for pattern, words in PATTERNS.values():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return one_line(text)


def surgery_arguments(path: str, kind: str, args: Mapping[str, Any]) -> None:
    """Raise Refused unless `kind` is known, with valid arguments for a module at `path`."""
    raise_if(kind not in SURGERY, Refused, f"unknown replacement '{one_line(kind)[:80]}'")
    raise_if((path == "") != (kind == "flat-head"), Refused, f"surgery '{kind}' at '{path}'")
    try:
        convert_json(args, SURGERY[kind])
    except Refused as refusal:
        raise Refused(f"surgery '{kind}' at '{path}': {refusal}") from refusal


def require_pixel_statistics(
    size: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]
) -> None:
    """Raise Refused unless (x - mean) / std, a pair a channel, normalises [0, 1] images."""
    raise_if(
        math.prod(size) > LARGEST_IMAGE,
        Refused,
        f"input size {'x'.join(map(str, size))} has more than {LARGEST_IMAGE:,} values",
    )
    raise_if(
        not len(mean) == len(std) == size[0],
        Refused,
        f"mean has {len(mean)} and std {len(std)} values for {size[0]} input channels: one each a channel",
    )
    require_statistics(mean, std)


def require_statistics(mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise Refused unless all are finite, scaled to [0, 1], and deviations are positive."""
    for name, values in (("mean", mean), ("std", std)):
        for value in values:
            raise_if(not math.isfinite(value), Refused, f"{name} {value} is not finite")
            raise_if(
                name == "std" and value < SMALLEST_STD,
                Refused,
                f"std {value:g} is not a positive standard deviation",
            )
            raise_if(
                abs(value) > PIXEL_SCALE,
                Refused,
                f"{name} {value:g} is of another scale than pixels in [0, 1]: divide statistics of pixels 0 to 255 by 255",
            )


def require_bounded_json(value: Any) -> None:
    """Raise Refused when free JSON is deeper, or holds longer texts, than anything certvit
    writes."""
    layer: list[Any] = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, (list, tuple)):
                below += item
            elif isinstance(item, str) and len(item) > LONGEST_TEXT:
                raise Refused(f"a text of more than {LONGEST_TEXT:,} characters")
        if not below:
            return
        layer = below
    raise Refused("JSON nested too deeply")
