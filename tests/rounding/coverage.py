"""Write docs/rounding.md and the tables beside it: python -m tests.rounding.coverage."""

import csv
import inspect
import io
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from certcli.rounding import PRECISIONS
from certcli.rounding.arithmetics import ALGORITHMS, covered
from certcli.rounding.operation_errors import rules
from tests.helpers.executions import FORMATS, KERNELS

PAGE = Path(__file__).parents[2] / "docs" / "rounding.md"
HEAD = """# Which executions a rounding bound covers

After this page you know by which algorithms of a library a network may be executed so that its certificate with
`--arithmetic` still holds. A library may compute an operation by several, depending on memory format, batch, processor
and switches. So each rule of `certcli/rounding` states the algorithms for which its bound holds, and tests execute every
rule in all of these ways.
`python -m tests.rounding.coverage` writes this page.

| algorithm | |
|---|---|
"""
RUNS = """**What is run.** `tests/rounding/test_every_rule.py` runs networks of the rules at neighbours, in
{precisions} (tf32 with factors truncated in the test), in batches of one and of several (65 under `make soundness`), with
sums in turn, backwards and in blocks, and with biases of 3,000 that cancel, in each of these memory formats of the input
tensors: {formats}; and with these kernels: {kernels}. The default suite takes them in turn, `make soundness` takes every
pair."""
REFUSED = """
**What is refused.** An operation without a rule, and a convolution in float32 with oneDNN off and NNPACK on: torch then
runs batches of 16 and more by Winograd's and Fourier's transforms, whose error was 1.4 times the bound of sums of
products. For channels-last batches torch computes GroupNorm in one pass; the bound includes that.

## On a GPU

Nothing is claimed: on a GPU certificates are `real`. `tests/rounding/test_on_a_gpu.py` runs every rule there as above.
On an H200 with torch 2.11, 29 of some 1,310 rows failed. Twelve were fp16 at an offset of 3,000, where the test compared
inf - inf, of logits beyond 65,504, with an infinite bound; with the test mended they were not run again on a GPU. Six are
float64 (hardswish, and two rows of spelled functions): the two run again lost more than is proven. Ten are one row whose
kernel does not run (`channel_shuffle` of a channels-last tensor), one is BatchNorm of rows in float32 at 3,000, which
passed when it was run again. cuDNN may also take Winograd's transforms.
"""
TABLE = """
## Rules

Run in {precisions}.

[cells/rounding.csv](cells/rounding.csv)
"""


def _entries() -> Iterator[tuple[str, Callable[..., Any]]]:
    for kind, module_rule in rules.modules.items():
        yield kind.__name__, module_rule.apply
    for function, rule in rules.functions.items():
        yield getattr(function, "__name__", str(function)), rule
    for method, rule in rules.methods.items():
        yield f".{method}", rule


def _rows() -> str:
    """Return the rules, the entries that take each, and the algorithms that it covers, as CSV."""
    grouped: dict[tuple[str, str, tuple[str, ...]], set[str]] = defaultdict(set)
    for name, rule in _entries():
        function = inspect.unwrap(rule)
        file = Path(inspect.getfile(function)).stem
        title = function.__name__
        if title in ("<lambda>", "rounding", "apply", "of_module", "of_call"):
            title = "curve" if "curve" in file else name
        grouped[file, title, covered(rule)].add(name)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rule", "entries", "algorithms"])
    for (file, title, algorithms), names in sorted(grouped.items()):
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        table.writerow([f"`{file}`: {title}", listed, ", ".join(algorithms)])
    return text.getvalue()


def documents() -> dict[Path, str]:
    """Return the page and its tables, from the registries, by the files that hold them."""
    every = ", ".join(PRECISIONS)
    runs = RUNS.format(
        precisions=every, formats="as they are, " + ", ".join(FORMATS), kernels=", ".join(KERNELS)
    )
    lines = [
        HEAD + "\n".join(f"| {name} | {says} |" for name, says in ALGORITHMS.items()),
        "",
        *textwrap.wrap(runs, 120, break_long_words=False, break_on_hyphens=False),
        REFUSED,
        TABLE.format(precisions=every).rstrip("\n"),
    ]
    cells = PAGE.parent / "cells" / "rounding.csv"
    return {PAGE: "\n".join(lines) + "\n", cells: _rows()}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)
