"""Arguments of an architecture: numbers, switches, plain words; no file, code or weights."""

import math
import re
from collections.abc import Mapping
from typing import Any

from certcli.system.errors import Refused, one_line, raise_if

LARGEST_SIDE = 4096
LARGEST_SIZE = (
    65_536  # of any integer in an architecture's arguments: the widest layer, the most classes
)
MOST_LAYERS = 512  # of an argument that repeats a module
MOST_ENTRIES = 1024  # of all lists in an architecture's arguments

# Words for files, URLs, callables, weights, devices, and results other than logits. Swin v2's
# pretrained window sizes and every drop_path are numbers of the architecture.
_FORBIDDEN = re.compile(
    r"checkpoint|pretrained(?!_window_sizes?\Z)|cache_|feature(s_only|_cls|_cfg)|out_indices|scriptable|exportable|no_jit"
    r"|pruned|(device|dtype)\Z"
    r"|(.*_)?(cfg|config|fn|func|cls|file|filename|dir|url|hub|id|weights|state_dict|args|kwargs|filter)s?\Z"
    r"|(?!(.*_)?drop_path\Z)(.*_)?paths?\Z"
)
_REPEATS = re.compile(
    r".*(depth|layers|blocks|repeats|stages|num_rep|branches|levels|block_num|num_block)"
)
_SIZES = re.compile(
    r".*(img_size|input_size|resolution|feat_size|grid_size|window|patch_size|stride|kernel)"
)
_WORD = re.compile(r"[A-Za-z0-9_.+\-]{0,64}\Z")
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\Z")


def arch_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON scalars and lists; Refused: a file, URL, callable or weights."""
    raise_if(len(arguments) > 128, Refused, f"{len(arguments)} architecture arguments")
    checked: dict[str, Any] = {}
    for key, value in arguments.items():
        raise_if(
            not isinstance(key, str) or not _KEY.match(key),
            Refused,
            f"architecture argument {one_line(repr(key))[:80]} is no name of an argument",
        )
        raise_if(
            _FORBIDDEN.match(key),
            Refused,
            f"architecture argument '{key}' is not taken from a file or the command line",
        )
        checked[key] = _plain_argument(key, value, [MOST_ENTRIES], 3)
        pair = key in ("img_size", "input_size") and isinstance(value, (list, tuple))
        raise_if(
            pair
            and (len(value) != 2 or not all(isinstance(side, int) and side > 0 for side in value)),
            Refused,
            f"architecture argument '{key}' is {one_line(value)[:80]}, not a height and a width",
        )
    return checked


def _plain_argument(key: str, value: Any, entries: list[int], depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        limit = (
            MOST_LAYERS
            if _REPEATS.match(key)
            else LARGEST_SIDE
            if _SIZES.match(key)
            else LARGEST_SIZE
        )
        if not -limit <= value <= limit:
            shown = str(value) if abs(value) < 10**18 else "an integer of more than 18 digits"
            raise Refused(f"architecture argument '{key}' is {shown}, beyond {limit:,}")
        return value
    if isinstance(value, float):
        raise_if(
            not math.isfinite(value) or abs(value) > 1e6,
            Refused,
            f"architecture argument '{key}' is {value}",
        )
        return value
    if isinstance(value, str):
        raise_if(
            not _WORD.match(value),
            Refused,
            f"architecture argument '{key}' is {one_line(repr(value))[:80]}: only plain words pass",
        )
        return value
    if isinstance(value, (list, tuple)) and depth:
        entries[0] -= len(value)
        raise_if(
            entries[0] < 0,
            Refused,
            f"architecture argument '{key}' has more than {MOST_ENTRIES:,} entries",
        )
        return [_plain_argument(key, item, entries, depth - 1) for item in value]
    raise Refused(
        f"architecture argument '{key}' is a {type(value).__name__}: only JSON scalars and lists pass"
    )
