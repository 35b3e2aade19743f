"""The work of `certvit log`: a checkpoint's steps and evidence in words, or several in one table.

Only evidence that `certcli.evaluation.evidence` understands is put into words. What nothing
recomputes is called measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Evidence
from certcli.checkpoint.tensor_files import ENDING, shards_of_index
from certcli.cli.shared import groups, output
from certcli.evaluation import evidence, intervals, record_lines
from certcli.evaluation.threat import (
    attacked_percent,
    confidence,
    power_of_ten,
    proven_percent,
    proven_radius,
    rounded_down,
    rounded_up,
)
from certcli.system.errors import CheckpointError


def report_checkpoints(checkpoints: Sequence[Path], talk: groups.Talk) -> None:
    """Show lineage and evidence of a checkpoint, or compare several in a table."""
    sink = talk.sink()
    read = [(path, Checkpoint.read(path)) for path in files_of(checkpoints)]
    documents = [document_of(path, checkpoint) for path, checkpoint in read]
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents})
    if len(read) > 1:
        compare_evidence(read, sink)
    else:
        show_checkpoint(*read[0], sink)


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


def compare_evidence(read: Sequence[tuple[Path, Checkpoint]], sink: output.Sink) -> None:
    """Print a row for each result of each checkpoint, and say where their images differ.

    Fresh evidence only: what was measured of another network says nothing about this one.
    """
    rows = []
    silent = []
    image_sets = {}
    for name, (_, checkpoint) in zip(_shortest_names(read), read, strict=True):
        fresh = [e for e in checkpoint.record.evidence if e.digest == checkpoint.digest]
        silent += [] if fresh else [name]
        for entry in fresh:
            rows.append((name, evidence.command_of(entry), evidence_sentence(entry)))
            decoded = evidence.understood(entry)
            images = decoded and entry.command in ("certify", "attack") and decoded.result.dataset
            if images:
                about = f"{images.images} of {images.name} ({images.split})"
                image_sets[images.digest] = about
    if rows:
        sink.table(f"Evidence, {AS_STATED}", ["file", "command", "result"], rows)
    if silent:
        sink.text(
            f"no accuracy or bound: {', '.join(silent)} (certify, attack and lipschitz add them with -o)"
        )
    if len(image_sets) > 1:
        sink.warn(f"not the same images: {'; '.join(image_sets.values())}")


def _shortest_names(read: Sequence[tuple[Path, Checkpoint]]) -> list[str]:
    """Files by the shortest path that tells them apart, without the ending that all of them have."""
    paths = [path.absolute() for path, _ in read]
    common = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, common).removesuffix(".safetensors") for path in paths]


NOT_UNDERSTOOD = "not understood, not shown"
STALE = "STALE: about another network, not these weights; nothing can recompute it"
AS_STATED = "as the file states it; `certvit verify` recomputes what is proven, measured figures are the author's word"


def show_checkpoint(path: Path, checkpoint: Checkpoint, sink: output.Sink) -> None:

    record = checkpoint.record
    outputs = f"{record.classes} classes" if record.classes else "no classifier"
    sink.text(f"{path}: {record.arch}, {outputs}, digest {checkpoint.digest[:16]}")
    sink.table(
        "Lineage, as the file tells it",
        ["step", "seed", "parent", "parameters"],
        [
            (
                s.command,
                str(s.seed),
                (s.parent or "-")[:12],
                ", ".join(record_lines.spelled_values(s.shown)),
            )
            for s in record.lineage
        ],
    )
    if record.evidence:
        sink.table(
            f"Evidence, {AS_STATED}",
            ["command", "about", "result"],
            [
                (
                    evidence.command_of(entry),
                    "this network" if entry.digest == checkpoint.digest else "STALE",
                    evidence_sentence(entry),
                )
                for entry in record.evidence
            ],
        )
    if any(entry.digest != checkpoint.digest for entry in record.evidence):
        sink.text(STALE)


def document_of(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the file tells, for programs. Until `certvit verify` nothing of it is checked."""

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
                **evidence.evidence_document(entry, checkpoint.digest),
                "stale": entry.digest != checkpoint.digest,
                "status": "unverified",
            }
            for entry in record.evidence
        ],
    }


# ---- an entry of evidence as a sentence


def evidence_sentence(entry: Evidence) -> str:

    decoded = evidence.understood(entry)
    return (
        NOT_UNDERSTOOD
        if decoded is None
        else _WORDS[decoded.command](decoded.result, decoded.parameters)
    )


def _lipschitz_words(result: Any, about: Any) -> str:
    parts = [_bound_of(result)]
    if result.lower is not None:
        parts.append(f"slope {rounded_down(result.lower, 4)} (measured)")
    if result.attention_weight is not None:
        parts.append(f"attention weight {rounded_up(result.attention_weight, 2)} (measured)")
    return ", ".join(parts)


def _bound_of(result: Any) -> str:
    if result.log10_upper is None:
        return "bound 0 (proven)" if result.upper == 0 else "no bound"
    of_features = getattr(result, "bound_of", "") == "features"
    bound = power_of_ten(result.log10_upper)
    if isinstance(result.upper, float) and result.log10_upper < 5:
        bound = rounded_up(result.upper, 4)
    return f"bound {bound} (proven{', of features' * of_features})"


def _certify_words(result: Any, about: Any) -> str:
    n = result.images
    shares = ", ".join(
        f"{intervals.share_text(share, n, proven_percent)} at {threat.proven()}"
        for threat, share in result.shares
    )
    norm = {"l2": "", "linf": " (radii linf)", "patch": " (patches, pixels)"}[result.norm]
    text = f"{_images_words(result)}: clean {intervals.share_text(result.clean, n)}, certified {shares}{norm}"
    promise = f"probability {confidence(result.failure)}" if result.failure else "proven"
    radius = result.average_radius
    mean = f", average radius {proven_radius(radius, 4)}" if isinstance(radius, float) else ""
    method = (
        f"{result.method}: {result.options.procedure}" if result.norm == "patch" else result.method
    )
    return f"{text} ({method}, {promise}){mean}"


def _attack_words(result: Any, about: Any) -> str:
    n = result.images
    each = ", ".join(
        f"{name} {intervals.share_text(share, n, attacked_percent)}"
        for name, share in result.attacks.items()
    )
    flags = f"; checks raised: {len(result.flags)}" if result.flags else ""
    radius = f"{result.norm} {result.threat.attacked()}"
    withstood = f"withstand {radius} {intervals.share_text(result.robust, n, attacked_percent)}"
    text = f"{_images_words(result)}: clean {intervals.share_text(result.clean, n)}, {withstood}"
    return f"{text} (measured; {each}){flags}"


def _finetune_words(result: Any, about: Any) -> str:
    count = result.dataset.images if result.dataset else about.images
    certified = f"certified {intervals.share_text(result.certified, count, proven_percent)} at {proven_radius(about.epsilon)}"
    images = (
        _images_words(result)
        if result.dataset
        else "all validation images, their number is not stated"
    )
    if not result.dataset and about.images is not None:
        images = f"{about.images} validation image{'s' * (about.images != 1)}"
    return f"{images}: clean {intervals.share_text(result.clean, count)}, and {certified} (proven), {_bound_of(result)}"


def _fidelity_words(result: Any, about: Any) -> str:
    n = result.images
    parts = [
        f"{n} images of {result.dataset}: same top-1 on {intervals.share_text(result.agreement, n)}"
    ]
    parts.append(f"logit error {output.percent(result.logits_error)}")
    if result.accuracy_before is not None or result.accuracy_after is not None:
        before, after = (
            "not stated" if share is None else intervals.share_text(share, n)
            for share in (result.accuracy_before, result.accuracy_after)
        )
        parts.append(f"accuracy {before} -> {after}")
    return ", ".join(parts) + " (measured)"


_WORDS: Mapping[str, Callable[[Any, Any], str]] = {
    "lipschitz": _lipschitz_words,
    "certify": _certify_words,
    "attack": _attack_words,
    "finetune": _finetune_words,
    "adapt": _fidelity_words,
    "constrain": _fidelity_words,
}


def _images_words(result: Any) -> str:
    """How many images of which dataset; attacks on certified images state fewer than it has."""
    images = result.dataset
    count = getattr(result, "images", None) or images.images
    text = f"{count} image{'s' * (count != 1)}"
    return f"{text} of {images.name} ({images.split})" if images else text
