"""The work of `certvit log`: one checkpoint in words, or several in one table, a row for each file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.tensor_files import ENDING, shards_of_index
from certcli.cli.log import view
from certcli.cli.log.view import AS_STATED, bound_words, bounds_features, promise_words
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation.evidence import Decoded, understood
from certcli.evaluation.radii import (
    attacked_percent,
    proven_percent,
    proven_radius,
    rounded_down,
    rounded_up,
)
from certcli.system.errors import CheckpointError

Entries = Mapping[str, Decoded]
"""Of one checkpoint: evidence by its command."""


def report_checkpoints(paths: Sequence[Path], sink: Sink) -> None:
    """Show lineage and evidence of a checkpoint, or compare several in a table."""
    read = [(path, Checkpoint.read(path)) for path in files_of(paths)]
    documents = [view.document_of(path, checkpoint) for path, checkpoint in read]
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents})
    if len(read) > 1:
        compare_evidence(read, sink)
    else:
        view.show_checkpoint(*read[0], sink)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The checkpoints among these; for a folder those in it, and in it alone."""
    files: list[Path] = []
    for path in paths:
        inside = _checkpoints_in(path) if path.is_dir() else [path]
        if not inside:
            raise CheckpointError(
                f"no checkpoint in the folder {path}", "certvit log FILE.safetensors"
            )
        files += inside
    return files


def _checkpoints_in(folder: Path) -> list[Path]:
    """Its files and indexes; neither states nor what an index names."""
    indexes = list(folder.glob(f"*{ENDING}"))
    parts = {part for index in indexes for part in shards_of_index(index)}
    files = [
        file
        for file in folder.glob("*.safetensors")
        if not file.name.endswith(".state.safetensors")
    ]
    return sorted([*indexes, *(file for file in files if file not in parts)])


def compare_evidence(read: Sequence[tuple[Path, Checkpoint]], sink: Sink) -> None:
    """Print a row for each checkpoint.

    Fresh evidence only: what was measured of another network says nothing about this one.

    A column says its radius and its number of images where they are the same in all rows, else each
    cell its own. What only training knows (validation images, which chose the epoch) says so.
    """
    entries: list[Entries] = []
    for _, ckpt in read:
        fresh = (understood(entry) for entry in ckpt.record.evidence if entry.digest == ckpt.digest)
        entries.append({entry.command: entry for entry in fresh if entry is not None})
    every: dict[str, list[_Cell | None]] = {
        "clean": [_clean_cell(each) for each in entries],
        "attacked": [_attacked_cell(each) for each in entries],
        "certified": _certified_cells(entries, "l2"),
        "certified against patches": _certified_cells(entries, "patch"),
        "validation clean": [_validation_cell(each, "clean") for each in entries],
        "validation certified": [_validation_cell(each, "certified") for each in entries],
        "Lipschitz bound": [_bound_cell(each) for each in entries],
        "slope measured": [_slope_cell(each) for each in entries],
        "attention weight": [_weight_cell(each) for each in entries],
    }
    columns = {title: column for title, column in every.items() if any(column)}
    rows = [
        [name, *(_spelled_cell(column[number], column) for column in columns.values())]
        for number, name in enumerate(_shortest_names([path for path, _ in read]))
    ]
    with_results = [row for row in rows if set(row[1:]) - {"-"}]
    if with_results:
        sink.table(
            "Evidence (proven unless it says measured or probability; radii pixel l2)",
            ["file", *(_heading(title, column) for title, column in columns.items())],
            with_results,
        )
        sink.text(f"Evidence: {AS_STATED}")
    silent = [row[0] for row in rows if row not in with_results]
    if silent:
        sink.text(
            f"no accuracy or bound: {', '.join(silent)} (certify, attack and lipschitz add them with -o)"
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
    images: int | None = None
    radius: str | None = None
    remark: str = ""


def _spelled_cell(cell: _Cell | None, column: Sequence[_Cell | None]) -> str:
    if cell is None:
        return "-"
    radius = cell.radius if _common_value(column, "radius") is None else None
    images = cell.images if _common_value(column, "images") is None else None
    text = cell.share + ("" if radius is None else f" at {radius}")
    text += "" if images is None else f", n = {images}"
    return text + (f" ({cell.remark})" if cell.remark else "")


def _common_value(column: Sequence[_Cell | None], name: str) -> Any:
    """What all cells of the column have in common under this name; None where they differ."""
    values = {getattr(cell, name) for cell in column if cell is not None}
    return values.pop() if len(values) == 1 else None


def _heading(title: str, column: Sequence[_Cell | None]) -> str:
    radius = _common_value(column, "radius")
    images = _common_value(column, "images")
    text = title + (" (measured)" if title == "attacked" else "")
    return text + (f" at {radius}" if radius else "") + (f", n = {images}" if images else "")


def _shortest_names(paths: Sequence[Path]) -> list[str]:
    """Files by the shortest path that tells them apart, without the ending that all of them have."""
    common = os.path.commonpath([path.absolute().parent for path in paths])
    names = [os.path.relpath(path.absolute(), common) for path in paths]
    return [name.removesuffix(".safetensors") for name in names]


def _result_of_entry(entries: Entries, command: str) -> Any:
    return entries[command].result if command in entries else None


def _clean_cell(entries: Entries) -> _Cell | None:
    result = _result_of_entry(entries, "certify") or _result_of_entry(entries, "attack")
    remark = "" if "certify" in entries else "measured"
    if remark == "" and entries["certify"].result.norm == "patch":
        remark = "behind masks"
    return None if result is None else _Cell(percent(result.clean), result.images, None, remark)


def _attacked_cell(entries: Entries) -> _Cell | None:
    result = _result_of_entry(entries, "attack")
    if result is None:
        return None
    norm = "" if result.norm == "l2" else f"{result.norm} "
    return _Cell(attacked_percent(result.robust), result.images, norm + result.threat.attacked())


def _certified_cells(entries_of: Sequence[Entries], kind: str) -> list[_Cell | None]:
    """Of each file the share at the size that most share, else at its smallest; one kind."""
    results = [
        result if (result := _result_of_entry(each, "certify")) and result.norm == kind else None
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
        cells.append(
            _Cell(proven_percent(share), result.images, threat.proven(), promise_words(result))
        )
    return cells


def _validation_cell(entries: Entries, name: str) -> _Cell | None:
    result = _result_of_entry(entries, "finetune")
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


def _bound_cell(entries: Entries) -> _Cell | None:
    result = _result_of_entry(entries, "lipschitz") or _result_of_entry(entries, "finetune")
    if result is None or result.log10_upper is None:
        return None if result is None else _Cell("none")
    return _Cell(
        bound_words(result.log10_upper) + (" (of features)" if bounds_features(result) else "")
    )


def _slope_cell(entries: Entries) -> _Cell | None:
    result = _result_of_entry(entries, "lipschitz")
    return None if result is None or result.lower is None else _Cell(rounded_down(result.lower, 3))


def _weight_cell(entries: Entries) -> _Cell | None:
    result = _result_of_entry(entries, "lipschitz")
    if result is None or result.attention_weight is None:
        return None
    return _Cell(f"{rounded_up(result.attention_weight, 2)} (measured)")
