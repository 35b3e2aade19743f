"""Compares what is stated with what was found: agree, refute or cannot check, leaf by leaf and
record by record.
"""

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np

from check.documents import Unreadable, read_text, read_value
from check.norms import Array, Interval, Unknown
from check.tensors import Node, Tensor

AGREE = "agree"
REFUTE = "refute"
OPEN = "cannot check"
Verdict = namedtuple("Verdict", ("where", "status", "why"))


def shown(value: Fraction | None) -> str:
    """Return some digits of a number of any size."""
    return "inf" if value is None else f"{Decimal(value.numerator) / value.denominator:.12g}"


def falls_short(fields: Mapping[str, Any], value: Fraction | None) -> bool:
    """Tell whether a stated logarithm is below the value's; none is that of 0 or infinity."""
    if (log10 := fields.get("log10_upper")) is None or value == 0:
        return False
    return value is None or not (
        float(log10) + 1e-9 >= float((Decimal(value.numerator) / value.denominator).log10())
    )


def judge(where: str, claimed: Fraction | None, proven: Interval) -> Verdict:
    """A stated bound agrees at or above the own upper bound, and is refuted below the own lower
    bound.
    """
    status = (
        AGREE
        if claimed is None or claimed >= proven.high
        else REFUTE
        if claimed < proven.low
        else OPEN
    )
    return Verdict(
        where, status, f"{shown(claimed)} stated, {shown(proven.low)} to {shown(proven.high)} found"
    )


def judge_proof(document: Mapping[str, Any], root: Node) -> Iterator[Verdict]:
    """Yield a verdict on each leaf, on each node that is not the network's or breaks its law, and
    on the headline.
    """
    if document.get("schema") != 1:
        raise Unreadable("its schema is not 1, the one that is read here")
    try:
        rows = [
            (str(r["path"]), str(r["law"]), read_value(r["value"]), list(r["parts"]))
            for r in document["proof"]
        ]
        heads = [
            read_value([document["upper"], 0]),
            read_text(document.get("upper_text", "inf")),
        ]
        pairs = zip((*document["proof"], document), [*rows, *rows[-1:]])
        short = [falls_short(fields, row[2]) for fields, row in pairs]
    except (KeyError, TypeError, ValueError, ArithmeticError) as failure:
        raise Unreadable(
            f"the proof cannot be read ({type(failure).__name__}: {failure})"
        ) from failure
    if not rows or any(
        type(p) is not int or not 0 <= p < number for number, row in enumerate(rows) for p in row[3]
    ):
        raise Unreadable("the proof is empty, or a node refers to one that does not come before it")
    stack = [(len(rows) - 1, root)]
    visited = set[tuple[int, int]]()
    top = rows[-1][2]
    while stack:
        number, node = stack.pop()
        (path, law, claimed, parts), where = rows[number], f"node {number} ({node.path})"
        if (number, id(node)) in visited:
            continue
        visited.add((number, id(node)))
        if claimed is not None and (path, law, len(parts)) != (
            node.path,
            node.law,
            len(node.parts),
        ):
            network_text = f"the network has a {node.law} of {len(node.parts)} at '{node.path}'"
            yield Verdict(where, REFUTE, f"a {law} of {len(parts)} parts is stated, {network_text}")
            continue
        stack += reversed(list(zip(parts, node.parts)))
        if law == "theorem":
            yield judge(where, claimed, node.value)
        elif claimed is not None:
            values = [value for part in parts if (value := rows[part][2]) is not None]
            # side by side squares add
            power = 1 + (law == "concatenation")
            adds = law in ("sum", "concatenation")
            low = Fraction(sum(value**power for value in values) if adds else prod(values))
            if len(values) < len(parts) or claimed**power < low:
                yield Verdict(
                    where, REFUTE, f"{shown(claimed)} is stated, its law '{law}' gives more"
                )
    if len({number for number, _ in visited}) < len(rows):
        yield Verdict("proof", REFUTE, "it has nodes that no part of the network leads to")
    for number in (number for number, row in enumerate(rows) if short[number]):
        yield Verdict(f"node {number}", REFUTE, f"log10_upper is below {shown(rows[number][2])}")
    if short[-1] or any(head is not None and (top is None or head < top) for head in heads):
        yield Verdict("headline", REFUTE, f"the root is {shown(top)}, above what is stated")
    yield judge("root", top, root.value)


def find_images(
    rows: Sequence[Mapping[str, Any]], batches: Sequence[np.ndarray]
) -> list[Array | None]:
    """Return each record's image, by the digest of label and pixels that it carries; none is two
    records' own.
    """
    keys = {(row["label"], row["pixels"]) for row in rows}
    labels = {row["label"] for row in rows}
    pools: dict[tuple[int, str], list[Array]] = {key: [] for key in keys}
    for image in (image for batch in batches for image in batch):
        data = f"{image.dtype.str}\0{image.shape}\0".encode() + image.tobytes()
        for key in keys & {
            (label, sha256(f"{label}\0".encode() + data).hexdigest()[:16]) for label in labels
        }:
            pools[key].append(image.astype(np.float64))
    return [pool.pop() if (pool := pools[row["label"], row["pixels"]]) else None for row in rows]


def judge_radii(tensor: Tensor, rows: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """Yield a verdict on each record: its radius against margin / (constant |w_i - w_j|), at the
    logits' tensor.
    """
    last = tensor.pending
    logits = tensor.settled()
    slope = tensor.node.value
    if last is None or logits.batch is None:
        raise Unknown("logits behind attention, norms or convolutions")
    error = 2.01 * float(last.error) + 1e-150
    slack = (
        2.0**-40 + last.matrix.shape[1] * 2.0**-50
    )  # of lengths of rows, quotients and conversions
    for row, z, rounded in zip(rows, logits.batch, np.broadcast_to(logits.lost, len(rows))):
        top = int(z.argmax())
        off = float(rounded) * 1.4143 + 1e-300  # |e_i - e_j| <= sqrt(2) |e|
        radius = float(row["radius"])
        where = f"image {row['index']}"
        others = np.arange(len(z)) != top
        margins = z[top] - z[others]
        distances = np.linalg.norm(last.matrix[others] - last.matrix[top], axis=1)
        with np.errstate(divide="ignore", over="ignore"):
            steepest = (distances * (1 + slack) + error) * (
                float(slope.high) * (1 + slack)
            ) + 1e-290
            gentlest = np.fmax(distances * (1 - slack) - error, 0.0) * (
                float(slope.low) * (1 - slack)
            )
            low = np.fmax((margins * (1 - slack) - off) / steepest, 0.0).min() * (1 - slack)
            high = ((margins * (1 + slack) + off) / gentlest).min() * (1 + slack)
        if row.get("prediction") != top:
            yield Verdict(
                where,
                REFUTE if low > 0 else OPEN,
                f"class {row.get('prediction')} stated, {top} found",
            )
        else:
            status = AGREE if radius <= low else OPEN if radius <= high else REFUTE
            yield Verdict(
                where,
                status,
                f"radius {radius:.9g} stated, {low:.9g} to {high:.9g} in real arithmetic",
            )
