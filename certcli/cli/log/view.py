"""What `certvit log` shows: a checkpoint's steps and evidence, or several as a table.

Only evidence that `certcli.evaluation.evidence` understands is put into words. What nothing
recomputes is called measured.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.log.rows import FORMATS
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation.intervals import share_text
from certcli.evaluation.radii import (
    attacked_percent,
    confidence,
    power_of_ten,
    proven_percent,
    proven_radius,
    rounded_down,
    rounded_up,
)

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Evidence
    from certcli.evaluation.evidence import Decoded

NOT_UNDERSTOOD = "not understood, not shown"
STALE = "STALE: about another network, not these weights; nothing recomputes it, all of it is the author's word"
AS_STATED = "as the file states it; `certvit verify` recomputes what is proven, measured figures are the author's word"


def show(path: Path, checkpoint: Checkpoint, sink: Sink) -> None:
    from certcli.evaluation.evidence import command_of

    record = checkpoint.record
    outputs = f"{record.classes} classes" if record.classes else "no classifier"
    sink.text(f"{path}: {record.arch}, {outputs}, digest {checkpoint.digest[:16]}")
    sink.table(
        "Lineage, as the file tells it",
        ["step", "seed", "parent", "parameters"],
        [
            (s.command, str(s.seed), (s.parent or "-")[:12], ", ".join(spelled(s.shown)))
            for s in record.lineage
        ],
    )
    if record.evidence:
        sink.table(
            f"Evidence, {AS_STATED}",
            ["command", "about", "result"],
            [
                (
                    command_of(entry),
                    "this network" if entry.digest == checkpoint.digest else "STALE",
                    sentence(entry),
                )
                for entry in record.evidence
            ],
        )
    if any(entry.digest != checkpoint.digest for entry in record.evidence):
        sink.text(STALE)


def spelled(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Values by name, nested ones by paths of names; empty values and `no` are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from spelled(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, (Mapping, list, tuple)) for item in value
        ):
            yield f"{prefix}{name}: {len(value)} entries"
        elif value is True:
            yield f"{prefix}{name}"
        elif value is not None and value is not False and value not in ("", [], ()):
            yield f"{prefix}{name}={_number(value)}"


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def document_of(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the file tells, for programs. Until `certvit verify` nothing of it is checked."""
    from dataclasses import asdict

    from certcli.evaluation.evidence import as_json

    record = checkpoint.record
    return {
        "file": path.name,
        "digest": checkpoint.digest,
        "lineage": [
            {**asdict(step), "parameters": step.shown, "authors_word": True}
            for step in record.lineage
        ],
        "evidence": [
            {
                **as_json(entry, checkpoint.digest),
                "stale": entry.digest != checkpoint.digest,
                "status": "unverified",
            }
            for entry in record.evidence
        ],
    }


# ---- an entry of evidence as a sentence


def sentence(entry: Evidence) -> str:
    from certcli.evaluation.evidence import understood

    decoded = understood(entry)
    return (
        NOT_UNDERSTOOD
        if decoded is None
        else _WORDS[decoded.command](decoded.result, decoded.parameters)
    )


def _lipschitz(result: Any, about: Any) -> str:
    parts = [_bound_of(result)]
    if result.lower is not None:
        parts.append(f"slope {rounded_down(result.lower, 4)} (measured)")
    if result.attention_weight is not None:
        parts.append(f"attention weight {rounded_up(result.attention_weight, 2)} (measured)")
    return ", ".join(parts)


def _bound_of(result: Any) -> str:
    if result.log10_upper is None:
        return "bound 0 (proven)" if result.upper == 0 else "no bound"
    return f"bound {_power(result.log10_upper)} ({'proven, of features' if _of_features(result) else 'proven'})"


def _of_features(result: Any) -> bool:
    """Tell whether a bound is one of features: of a network without a classifier."""
    return getattr(result, "bound_of", "") == "features"


def _certify(result: Any, about: Any) -> str:
    n = result.images
    shares = ", ".join(
        f"{share_text(share, n, proven_percent)} at {threat.proven()}"
        for threat, share in result.shares
    )
    norm = {"l2": "", "linf": " (radii linf)", "patch": " (patches, pixels)"}[result.norm]
    text = f"{_images(result)}: clean {share_text(result.clean, n)}, certified {shares}{norm}"
    promise = _chance(result) or "proven"
    radius = result.average_radius
    mean = f", average radius {proven_radius(radius, 4)}" if isinstance(radius, float) else ""
    method = (
        f"{result.method}: {result.options.procedure}" if result.norm == "patch" else result.method
    )
    return f"{text} ({method}, {promise}){mean}"


def _chance(result: Any) -> str:
    """The promise of certificates that hold with a probability; nothing for proofs."""
    return f"probability {confidence(result.failure)}" if result.failure else ""


def _attack(result: Any, about: Any) -> str:
    n = result.images
    each = ", ".join(
        f"{name} {share_text(share, n, attacked_percent)}" for name, share in result.attacks.items()
    )
    flags = f"; checks raised: {len(result.flags)}" if result.flags else ""
    radius = f"{result.norm} {result.threat.attacked()}"
    withstood = f"withstand {radius} {share_text(result.robust, n, attacked_percent)}"
    text = f"{_images(result)}: clean {share_text(result.clean, n)}, {withstood}"
    return f"{text} (measured; {each}){flags}"


def _finetune(result: Any, about: Any) -> str:
    count = result.dataset.images if result.dataset else about.images
    certified = f"certified {share_text(result.certified, count, proven_percent)} at {proven_radius(about.epsilon)}"
    images = (
        _images(result) if result.dataset else "all validation images, their number is not stated"
    )
    if not result.dataset and about.images is not None:
        images = f"{about.images} validation image{'s' * (about.images != 1)}"
    return f"{images}: clean {share_text(result.clean, count)}, and {certified} (proven), {_bound_of(result)}"


def _kept(result: Any, about: Any) -> str:
    n = result.images
    parts = [
        f"{n} images of {result.dataset}: first choice kept on {share_text(result.agreement, n)}"
    ]
    parts.append(f"logits to {percent(result.logits_error)}")
    if result.accuracy_before is not None:
        before, after = (
            share_text(share, n) for share in (result.accuracy_before, result.accuracy_after)
        )
        parts.append(f"accuracy {before} -> {after}")
    return ", ".join(parts) + " (measured)"


_WORDS: Mapping[str, Callable[[Any, Any], str]] = {
    "lipschitz": _lipschitz, "certify": _certify, "attack": _attack, "finetune": _finetune, "adapt": _kept,
    "constrain": _kept,
}  # fmt: skip


def _images(result: Any) -> str:
    """How many images of which dataset; attacks on certified images state fewer than it has."""
    images = result.dataset
    count = getattr(result, "images", None) or images.images
    text = f"{count} image{'s' * (count != 1)}"
    return f"{text} of {images.name} ({images.split})" if images else text


# ---- several checkpoints


def compare(
    read: Sequence[tuple[Path, Checkpoint]], sink: Sink, written: str | None = None
) -> None:
    """Print a row for each checkpoint, as a table or as `written`, of `rows.FORMATS`.

    Fresh evidence only: what was found about another network says nothing about this one.

    A column says its radius and its number of images where they are the same in all rows, else each
    cell its own. What only training knows (validation images, which chose the epoch) says so.
    """
    from certcli.evaluation.evidence import understood

    entries: list[dict[str, Decoded]] = []
    for _, ckpt in read:
        fresh = (understood(entry) for entry in ckpt.record.evidence if entry.digest == ckpt.digest)
        entries.append({entry.command: entry for entry in fresh if entry is not None})
    columns: dict[str, list[_Cell | None]] = {
        "clean": [_clean(each) for each in entries],
        "attacked": [_attacked(each) for each in entries],
        "certified": _certified(entries, "l2"),
        "certified against patches": _certified(entries, "patch"),
        "validation clean": [_validation(each, "clean") for each in entries],
        "validation certified": [_validation(each, "certified") for each in entries],
    }
    headings = ["file"]
    cells = [[name] for name in _names([path for path, _ in read])]
    for title, column in columns.items():
        if any(column):
            headings.append(_heading(title, column))
            for row, cell in zip(cells, column, strict=True):
                row.append("-" if cell is None else cell.text(column))
    for title, tell in (
        ("Lipschitz bound", _bound),
        ("slope measured", _slope),
        ("attention weight", _weight),
    ):
        column_texts = [tell(each) for each in entries]
        if set(column_texts) != {"-"}:
            headings.append(title)
            for row, text in zip(cells, column_texts, strict=True):
                row.append(text)
    rows_with_results = [row for row in cells if set(row[1:]) - {"-"}]
    if written is not None:
        for line in FORMATS[written](headings, cells).splitlines():
            sink.text(line)
    elif rows_with_results:
        sink.table(
            "Evidence (proven unless it says measured or probability; radii pixel l2)",
            headings,
            rows_with_results,
        )
        sink.text(f"Evidence: {AS_STATED}")
    silent = [row[0] for row in cells if row not in rows_with_results]
    if silent and written is None:
        sink.text(
            f"nothing about accuracy or bounds: {', '.join(silent)} (certify, attack, lipschitz with -o add it)"
        )
    judged = [
        each[name].result.dataset
        for each in entries
        for name in ("certify", "attack")
        if name in each
    ]
    image_sets = {
        images.digest: f"{images.images} of {images.name} ({images.split})"
        for images in judged
        if images
    }
    if len(image_sets) > 1:
        sink.warn(f"not the same images: {'; '.join(image_sets.values())}")


@dataclass(frozen=True)
class _Cell:
    """A share with what it is about: images, radius, and how far it may be believed."""

    share: str
    images: int | None
    radius: str | None
    remark: str = ""

    def text(self, column: Sequence[_Cell | None]) -> str:
        text = self.share
        if self.radius is not None and _common(column, "radius") is None:
            text += f" at {self.radius}"
        if self.images is not None and _common(column, "images") is None:
            text += f", n = {self.images}"
        return text + (f" ({self.remark})" if self.remark else "")


def _common(column: Sequence[_Cell | None], name: str) -> Any:
    """What all cells of the column have in common under this name; None where they differ."""
    values = {getattr(cell, name) for cell in column if cell is not None}
    return values.pop() if len(values) == 1 else None


def _heading(title: str, column: Sequence[_Cell | None]) -> str:
    radius = _common(column, "radius")
    images = _common(column, "images")
    text = title + (" (measured)" if title == "attacked" else "")
    return text + (f" at {radius}" if radius else "") + (f", n = {images}" if images else "")


def _names(paths: Sequence[Path]) -> list[str]:
    """Files by the shortest path that tells them apart, without the ending that all of them have."""
    common = os.path.commonpath([path.absolute().parent for path in paths])
    names = [os.path.relpath(path.absolute(), common) for path in paths]
    return [name.removesuffix(".safetensors") for name in names]


Found = Mapping[str, "Decoded"]
"""Of one checkpoint: evidence by its command."""


def _result(entries: Found, command: str) -> Any:
    return entries[command].result if command in entries else None


def _clean(entries: Found) -> _Cell | None:
    result = _result(entries, "certify") or _result(entries, "attack")
    remark = "" if "certify" in entries else "measured"
    if remark == "" and entries["certify"].result.norm == "patch":
        remark = "behind masks"
    return None if result is None else _Cell(percent(result.clean), result.images, None, remark)


def _attacked(entries: Found) -> _Cell | None:
    result = _result(entries, "attack")
    if result is None:
        return None
    norm = "" if result.norm == "l2" else f"{result.norm} "
    return _Cell(attacked_percent(result.robust), result.images, norm + result.threat.attacked())


def _certified(entries_of: Sequence[Found], kind: str) -> list[_Cell | None]:
    """Of each file the share at the size that most share, else at its smallest; one kind."""
    results = [
        result if (result := _result(each, "certify")) and result.norm == kind else None
        for each in entries_of
    ]
    shown = Counter(
        threat for result in results if result is not None for threat, _ in result.shares
    )
    cells: list[_Cell | None] = []
    for result in results:
        if result is None:
            cells.append(None)
            continue
        threat, share = min(result.shares, key=lambda one: (-shown[one[0]], one[0]))
        cells.append(_Cell(proven_percent(share), result.images, threat.proven(), _chance(result)))
    return cells


def _validation(entries: Found, name: str) -> _Cell | None:
    result = _result(entries, "finetune")
    if result is None:
        return None
    count = result.dataset.images if result.dataset else entries["finetune"].parameters.images
    if name == "clean":
        return _Cell(percent(result.clean), count, None)
    return _Cell(
        proven_percent(result.certified),
        count,
        proven_radius(entries["finetune"].parameters.epsilon),
    )


def _bound(entries: Found) -> str:
    result = _result(entries, "lipschitz") or _result(entries, "finetune")
    if result is None or result.log10_upper is None:
        return "-" if result is None else "none"
    return _power(result.log10_upper) + (" (of features)" if _of_features(result) else "")


def _slope(entries: Found) -> str:
    result = _result(entries, "lipschitz")
    return "-" if result is None or result.lower is None else rounded_down(result.lower, 3)


def _weight(entries: Found) -> str:
    result = _result(entries, "lipschitz")
    if result is None or result.attention_weight is None:
        return "-"
    return f"{rounded_up(result.attention_weight, 2)} (measured)"


def _power(log10: float) -> str:
    """A bound by its logarithm, rounded up in the last digit shown, as bounds are."""
    if not -300 < log10 < 5:
        return power_of_ten(log10)
    step = 10.0 ** (math.floor(log10) - 3)
    return f"{math.ceil(10**log10 / step * (1 - 1e-12)) * step:.4g}"
