"""Random edits of JSON, of bytes and of ONNX files, and the campaigns that count how a program ends on them."""

import argparse
import contextlib
import copy
import itertools
import json
import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from certcli.models.onnx.call import READERS
from certcli.system.errors import CertvitError

Raw = dict[str, Any]
BAIT = "evil.pth"
MARK = "zzmark"
"""Text that no honest file holds: where it is shown as a fact, a file has spoken for itself."""
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        60,
        255,
        1000,
        10**6,
        10**12,
        10**30,
        2**63,
        2**70,
        10**400,
    ),
    *(0.0, 0.25, 0.5, -0.5, 0.9, 0.001, 0.999, 1.0, 1e-300, 1e-30, 1e308, 127.5, 58 / 60, 0.9749),
    *(
        "",
        "x",
        "1",
        "nan",
        "inf",
        "0.5",
        "0.50",
        "5e-1",
        " 0.5",
        "0" * 64,
        "x" * 5000,
        "é\u202e",
        "\x1b[31m",
    ),
    *(
        "l2",
        "linf",
        "proof",
        "probability 0.999",
        "probability 1",
        "lipschitz",
        "local",
        "smoothing",
        "bcp",
        "relu",
    ),
    *(
        "digits",
        "val",
        "test",
        "train",
        "torch/mnist",
        "vit_giant_patch14_224",
        "certvit_4c3f",
        "builtins.print",
    ),
    *(BAIT, f"../{BAIT}", f"./{BAIT}", "hf-hub:a/b", "local-dir:.", "http://127.0.0.1:9/x.pth"),
    *(f"0.01 (proven) {MARK}", f"ImageNet-1k {MARK}", MARK),
    *([], {}, [1], [[]], [[1]], [None], [0.5, 0.5, 0.5], [10**6] * 3),
    *({"a": 1}, {"clean": 1.0}, {"9": 1.0}, {"path": "", "kind": "relu", "args": {}}),
)
KEYS = (
    *(
        "clean",
        "certified",
        "bound",
        "norm",
        "images",
        "denoiser_file",
        "0.50",
        "5e-1",
        "nan",
        " 0.3",
        "0.3",
        "9",
        MARK,
    ),
    *(
        "checkpoint_path",
        "pretrained",
        "pretrained_cfg",
        "cache_dir",
        "features_only",
        "scriptable",
        "depth",
        "embed_dim",
    ),
    *(
        "img_size",
        "patch_size",
        "num_classes",
        "act_layer",
        "norm_layer",
        "block_fn",
        "device",
        "mlp_ratio",
    ),
    *(
        "global_pool",
        "class_token",
        "reg_tokens",
        "qk_norm",
        "init_values",
        "weight_init",
        "dynamic_img_size",
    ),
    *("surgery", "x", ""),
)
TOKENS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "[" * 5000,
    '{"a":' * 3000,
    "\\ud800",
    "\x00",
    "'",
    "\ufeff",
    "0x10",
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path into a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for key, part in inner for found in paths(part, (*path, key)))]


def value_at_path(value: Any, path: Sequence[Any]) -> Any:
    """Return the part of a JSON value to which a path leads."""
    for key in path:
        value = value[key]
    return value


def edit(root: Any, rng: random.Random, others: Sequence[Any] = ()) -> None:
    """Change one value below the root: another value, a number nearby, one value more, one less, or
    a part of others.
    """
    *way, last = rng.choice([path for path in paths(root) if path])
    place = value_at_path(root, way)
    kind = rng.random()
    value = place[last]
    if kind < 0.4:
        place[last] = copy.deepcopy(rng.choice(VALUES))
    elif kind < 0.55 and isinstance(value, (int, float)) and abs(value) < 1e9:
        factor = rng.choice((0.0, 0.5, 0.999, 1 - 2e-6, 1 + 2e-6, 1.001, 2, 10, -1, 1e6))
        place[last] = value * factor + rng.choice((0, 0, 1e-3, 1))
    elif kind < 0.65 and way:
        del place[last]
    elif isinstance(value, dict):
        value[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif isinstance(value, list):
        value.append(copy.deepcopy(rng.choice(VALUES)))
    elif others:
        other = rng.choice(others)
        place[last] = copy.deepcopy(value_at_path(other, rng.choice(paths(other))))


def edit_text(text: str, rng: random.Random) -> str:
    """Return JSON text after one to three edits of its values or its characters."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            position = rng.randrange(len(text) + 1)
            text = text[:position] + rng.choice(TOKENS) + text[position + rng.randrange(3) :]
            continue
        try:
            root = [json.loads(text)]
        except (ValueError, RecursionError):
            return text
        edit(root, rng)
        text = json.dumps(root[0])
    return text


def edit_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes after one to five cuts, flips, overwritings or insertions, more often near the
    beginning.
    """
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        position = rng.randrange(
            max(1, min(len(found), 2000) if rng.random() < 0.7 else len(found))
        )
        kind = rng.random()
        if kind < 0.2:
            del found[position:]
        elif kind < 0.6 and found:
            found[position % len(found)] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            found[position : position + 8] = rng.randbytes(8)
        else:
            found[position:position] = rng.randbytes(rng.randrange(1, 20))
    return bytes(found)


NUMBERS = (-(2**63), -(2**31), -5, -1, 0, 1, 2, 3, 8, 1000, 10**6, 10**12, 2**31, 2**63 - 1)


def edited_onnx(data: bytes, rng: random.Random) -> bytes:
    """Return the file with a few bytes changed, or with an operator, a number or a tensor changed."""
    import onnx

    if rng.random() < 0.3:
        return edit_bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice((edit_node, edit_numbers, edit_tensor, edit_sizes))(model.graph, rng)
    return model.SerializeToString()


def edit_node(graph: Any, rng: random.Random) -> None:
    node = rng.choice(graph.node)
    names = [name for other in graph.node for name in (*other.input, *other.output)]
    kind = rng.randrange(5)
    if kind == 0:
        node.op_type = rng.choice([*READERS, "If", "Loop", "Scan", "NonZero"])
    elif kind == 1 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, "", "nowhere"])
    elif kind == 2:
        node.domain = "com.example"
    elif kind == 3:
        node.ClearField(rng.choice(("attribute", "input", "output")))
    else:
        node.output.append(rng.choice(names))


def edit_numbers(graph: Any, rng: random.Random) -> None:
    """Change an attribute, as shapes, axes and kernels are."""
    attributes = [one for node in graph.node for one in node.attribute]
    if attributes:
        one = rng.choice(attributes)
        one.i, one.f = rng.choice(NUMBERS), rng.choice((float("nan"), 1e38, -1.0, 0.0))
        if one.ints:
            one.ints[rng.randrange(len(one.ints))] = rng.choice(NUMBERS)


def edit_tensor(graph: Any, rng: random.Random) -> None:
    """Change whole numbers, which are shapes, or the size, type or place of a tensor."""
    import onnx

    stored = [one.t for node in graph.node for one in node.attribute if one.HasField("t")]
    whole = [one for one in stored if one.data_type == onnx.TensorProto.INT64]
    tensor = rng.choice([*graph.initializer, *stored, *whole * 3])
    kind = rng.randrange(4)
    if kind == 0 and tensor in whole:
        with contextlib.suppress(ValueError):  # an edit before may have left it without an array
            values = onnx.numpy_helper.to_array(tensor).copy().reshape(-1)
            values[rng.randrange(len(values))] = rng.choice(NUMBERS)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.reshape(tuple(tensor.dims))))
    elif kind == 1:
        tensor.dims.append(rng.choice(NUMBERS))
    elif kind == 2:
        tensor.data_type = rng.randrange(25)
    else:
        tensor.data_location = 1
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "evil.pth"


def edit_sizes(graph: Any, rng: random.Random) -> None:
    sizes = graph.input[0].type.tensor_type.shape.dim
    sizes[rng.randrange(len(sizes))].dim_value = rng.choice(NUMBERS)


Case = Callable[[random.Random], tuple[str, list[str]]]
"""One edit and its trial: how it ended, and the laws that it broke."""


def campaign(
    case: Case, count: int, seed: int = 0, enough: Callable[[list[str]], bool] = lambda _: False
) -> Raw:
    """Try `count` cases, each with a generator of its own, or fewer once there are findings
    `enough`.

    Returns:
        edits; outcomes, counted; findings: each broken law, and each exception that is not
        certvit's own.
    """
    rng = random.Random(seed)
    outcomes = Counter[str]()
    findings = list[str]()
    for number in range(count):
        try:
            outcome, broken = case(random.Random(rng.random()))
        except CertvitError as refusal:
            outcome, broken = f"refused {refusal.code}", []
        except Exception:
            outcome, broken = "bug", [traceback.format_exc(limit=-3)]
        outcomes[outcome] += 1
        findings += [f"{number}: {law}" for law in broken]
        if enough(findings):
            break
        if number % 1000 == 999:
            print(f"{number + 1} edits, {len(findings)} findings", file=sys.stderr, flush=True)
    return {"edits": count, "outcomes": dict(sorted(outcomes.items())), "findings": findings}


def asked_for(purpose: str, **defaults: Any) -> argparse.Namespace:
    """Return what the command line of a campaign asks for: --seed, and options by their defaults.

    False is a switch, a list an option that may be repeated, a tuple the words that one may have.
    """
    parser = argparse.ArgumentParser(description=purpose)
    for name, value in {"seed": 0, **defaults}.items():
        kinds: dict[type, Raw] = {
            bool: {"action": "store_true"},
            list: {"action": "append"},
            tuple: {"choices": value},
        }
        usual = {"type": type(value), "default": value}
        parser.add_argument(f"--{name}", **kinds.get(type(value), usual))
    return parser.parse_args()


@dataclass
class Found:
    """What a campaign saw: counts of what was tried, the largest share by what it is of, what was
    refused, and what broke the laws.
    """

    tried: Counter[Any] = field(default_factory=Counter)
    tightest: dict[tuple[str, str], float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def ended(self) -> int:
        """Print what is broken, and return the exit code of the campaign."""
        for line in self.broken:
            print(f"VIOLATED: {line}")
        return int(bool(self.broken))


EDGES = (0.999, 0.9, 0.5, 0.1)
"""Of the shares in a table."""


def bands(shares: Mapping[str, float]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a table: shares between two edges in words, and the names that have them."""
    for high, low in itertools.pairwise((math.inf, *EDGES, -1.0)):
        names = sorted(name for name, share in shares.items() if low < share <= high)
        yield f"above {low:g}" if low > 0 else f"at most {high:g}", names


def run_edits(purpose: str, cases: contextlib.AbstractContextManager[Case]) -> int:
    """Run a campaign as --count and --seed ask, print its report, and return 1 where it has
    findings.
    """
    options = asked_for(purpose, count=1000)
    with cases as case:
        report = campaign(case, options.count, options.seed)
    print(json.dumps(report, indent=1))
    return int(bool(report["findings"]))
