"""What `certvit log` shows: the steps and the evidence of one checkpoint in words, several checkpoints as a table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.output import Sink, percent

if TYPE_CHECKING:
    from certcli.checkpoint import Checkpoint
    from certcli.provenance import Evidence

Result = Mapping[str, Any]


def show(path: Path, checkpoint: Checkpoint, sink: Sink) -> None:
    """One checkpoint: where it comes from, and what was found about it."""
    record = checkpoint.record
    sink.text(f"{path}: {record.arch}, {record.classes} classes, digest {checkpoint.digest[:16]}")
    sink.table(
        "Lineage",
        ["step", "seed", "parent", "parameters"],
        [(s.command, str(s.seed), (s.parent or "-")[:12], ", ".join(spelled(s.shown))) for s in record.lineage],
    )
    if record.evidence:
        sink.table(
            "Evidence",
            ["command", "about", "result"],
            [
                (entry.command, "this network" if entry.digest == checkpoint.digest else "STALE", sentence(entry))
                for entry in record.evidence
            ],
        )
    if any(entry.digest != checkpoint.digest for entry in record.evidence):
        sink.text("STALE: found of another network, an earlier step of this one; it says nothing about these weights")


def spelled(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Values by name, nested ones by the path of names; what is empty, or only says no, is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from spelled(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
            yield f"{prefix}{name}: {len(value)} entries"
        elif value is True:
            yield f"{prefix}{name}"
        elif value is not None and value is not False and value not in ("", [], ()):
            yield f"{prefix}{name}={_number(value)}"


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- an entry of evidence as a sentence


def sentence(entry: Evidence) -> str:
    """What was found, in words; a command that has no words of its own by its values."""
    tell = _WORDS.get(entry.command)
    try:
        return tell(entry.result, entry.parameters) if tell else ", ".join(spelled(entry.result))
    except (KeyError, TypeError, ValueError, AttributeError):  # a record of another version, or of another program
        return ", ".join(spelled(entry.result))


def _lipschitz(result: Result, about: Result) -> str:
    told = [f"bound {_power(result['log10_upper'])} (proven)" if result["log10_upper"] is not None else "no bound"]
    if result["log10_upper"] is None and result["why"]:
        told.append(result["why"])
    if result["lower"] is not None:
        told.append(f"slope {result['lower']:.4g} (measured)")
    if result["attention_weight"] is not None:
        told.append(f"attention weight {result['attention_weight']:.2g}")
    return ", ".join(told)


def _certify(result: Result, about: Result) -> str:
    shares = ", ".join(f"{percent(share)} at {radius}" for radius, share in result["certified"].items())
    promise = f", {result.get('promise', 'probability')}" if result.get("failure") else ", proven"
    norm = "" if _norm(result) == "l2" else f" (radii {_norm(result)})"
    told = f"{_images(result)}: clean {percent(result['clean'])}, certified {shares}{norm}"
    return f"{told} ({result['method']}{promise}), average radius {result['average_radius']:.4g}"


def _attack(result: Result, about: Result) -> str:
    each = ", ".join(f"{name} {percent(share)}" for name, share in result["attacks"].items())
    flags = f"; checks raised: {', '.join(map(str, result['flags']))}" if result["flags"] else ""
    radius = f"{result['norm']} {result['epsilon']:g}"
    told = f"{_images(result)}: clean {percent(result['clean'])}, withstand {radius} {percent(result['robust'])}"
    return f"{told} (measured; {each}){flags}"


def _finetune(result: Result, about: Result) -> str:
    bound = "none" if result.get("log10_upper") is None else result["upper_text"]
    certified = f"certified {percent(result['certified'])} at {about['epsilon']:g}"
    return f"validation images: clean {percent(result['clean'])}, {certified}, bound {bound} (proven)"


def _kept(result: Result, about: Result) -> str:
    told = [f"{result['images']} images of {result['dataset']}: first choice kept on {percent(result['agreement'])}"]
    told.append(f"logits to {percent(result['logits_error'])}")
    if result["accuracy_before"] is not None:
        told.append(f"accuracy {percent(result['accuracy_before'])} -> {percent(result['accuracy_after'])}")
    return ", ".join(told)


_WORDS: Mapping[str, Callable[[Result, Result], str]] = {
    "lipschitz": _lipschitz, "certify": _certify, "attack": _attack, "finetune": _finetune, "adapt": _kept,
    "constrain": _kept,
}  # fmt: skip


def _images(result: Result) -> str:
    images = result.get("dataset")
    return f"{result['images']} images" + (f" of {images['name']} ({images['split']})" if images else "")


# ---- several checkpoints


def compare(read: Sequence[tuple[Path, Checkpoint]], sink: Sink) -> None:
    """Fresh evidence only: what was found about another network says nothing about this one.

    A column says its radius and its number of images where they are the same in all rows, else each cell its own. What only
    training knows (validation images, which chose the epoch) says so.
    """
    found = [
        {entry.command: entry.result for entry in ckpt.record.evidence if entry.digest == ckpt.digest}
        for _, ckpt in read
    ]
    columns: dict[str, list[_Cell | None]] = {
        "clean": [_clean(each) for each in found],
        "attacked": [_attacked(each) for each in found],
        "certified": [_certified(each, _radius(found)) for each in found],
        "validation clean": [_validation(each, "clean") for each in found],
        "validation certified": [
            _validation(each, "certified", ckpt) for each, (_, ckpt) in zip(found, read, strict=True)
        ],
    }
    headings, cells = ["file"], [[name] for name in _names([path for path, _ in read])]
    for title, column in columns.items():
        if any(column):
            headings.append(_heading(title, column))
            for row, cell in zip(cells, column, strict=True):
                row.append("-" if cell is None else cell.text(column))
    for title, tell in (("Lipschitz bound", _bound), ("slope measured", _slope), ("attention weight", _weight)):
        told = [tell(each) for each in found]
        if set(told) != {"-"}:
            headings.append(title)
            for row, text in zip(cells, told, strict=True):
                row.append(text)
    told_of = [row for row in cells if set(row[1:]) - {"-"}]
    if told_of:
        sink.table("Evidence (proven unless it says measured or probability; radii pixel l2)", headings, told_of)
    if silent := [row[0] for row in cells if row not in told_of]:
        sink.text(f"nothing about accuracy or bounds: {', '.join(silent)} (certify, attack, lipschitz with -o add it)")
    judged = [each[command]["dataset"] for each in found for command in ("certify", "attack") if _judged(each, command)]
    seen = {images["digest"]: f"{images['images']} of {images['name']} ({images['split']})" for images in judged}
    if len(seen) > 1:
        sink.text(f"not the same images: {'; '.join(seen.values())}")


class _Cell:
    """A share with what it is about: images, radius, and how far it may be believed."""

    def __init__(self, share: float | None, images: int | None, radius: str | None, remark: str = "") -> None:
        self.share, self.images, self.radius, self.remark = share, images, radius, remark

    def text(self, column: Sequence[_Cell | None]) -> str:
        told = percent(self.share)
        if self.radius is not None and _common(column, "radius") is None:
            told += f" at {self.radius}"
        if self.images is not None and _common(column, "images") is None:
            told += f", n = {self.images}"
        return told + (f" ({self.remark})" if self.remark else "")


def _common(column: Sequence[_Cell | None], name: str) -> Any:
    """What all cells of the column have in common under this name; None where they differ."""
    values = {getattr(cell, name) for cell in column if cell is not None}
    return values.pop() if len(values) == 1 else None


def _heading(title: str, column: Sequence[_Cell | None]) -> str:
    radius, images = _common(column, "radius"), _common(column, "images")
    told = title + (" (measured)" if title == "attacked" else "")
    return told + (f" at {radius}" if radius else "") + (f", n = {images}" if images else "")


def _names(paths: Sequence[Path]) -> list[str]:
    """Files by the shortest path that tells them apart, without the ending that all of them have."""
    common = os.path.commonpath([path.absolute().parent for path in paths])
    names = [os.path.relpath(path.absolute(), common) for path in paths]
    return [name.removesuffix(".safetensors") for name in names]


def _judged(results: Result, command: str) -> bool:
    return bool((results.get(command) or {}).get("dataset"))


def _clean(results: Result) -> _Cell | None:
    result = results.get("certify") or results.get("attack")
    return None if result is None else _Cell(result.get("clean"), result["images"], None)


def _attacked(results: Result) -> _Cell | None:
    result = results.get("attack")
    return None if result is None else _Cell(result["robust"], result["images"], f"{result['epsilon']:g}")


def _in_l2(results: Result) -> Result:
    """What `certify` found, unless its radii are of another norm: the table has one."""
    result = results.get("certify") or {}
    return {} if _norm(result) != "l2" else result


def _norm(result: Result) -> str:
    """Of the radii of `certify`; none is stated where there is only one."""
    return str(result.get("parameters", {}).get("norm", "l2"))


def _radius(found: Sequence[Result]) -> str | None:
    """The radius that most certified shares can be shown at, the smaller one of equals."""
    radii = [radius for results in found for radius in _in_l2(results).get("certified", {})]
    return min(radii, key=lambda radius: (-radii.count(radius), float(radius)), default=None)


def _certified(results: Result, wanted: str | None) -> _Cell | None:
    """The share at this radius, else at the entry's smallest; a statement of chance says so."""
    result = _in_l2(results)
    if not result or not result["certified"]:
        return None
    radius = wanted if wanted in result["certified"] else min(result["certified"], key=float)
    chance = str(result.get("promise", "probability")) if result.get("failure") else ""
    return _Cell(result["certified"][radius], result["images"], radius, chance)


def _validation(results: Result, name: str, checkpoint: Checkpoint | None = None) -> _Cell | None:
    result = results.get("finetune")
    if result is None or name not in result:
        return None
    entries = () if checkpoint is None else checkpoint.record.evidence
    radii = [entry.parameters.get("epsilon") for entry in entries if entry.result is result]
    return _Cell(result[name], None, f"{radii[0]:g}" if radii and radii[0] is not None else None)


def _bound(results: Result) -> str:
    result = results.get("lipschitz") or results.get("finetune")
    return "-" if result is None else _power(result.get("log10_upper"))


def _slope(results: Result) -> str:
    lower = (results.get("lipschitz") or {}).get("lower")
    return "-" if lower is None else f"{lower:.3g}"


def _weight(results: Result) -> str:
    weight = (results.get("lipschitz") or {}).get("attention_weight")
    return "-" if weight is None else f"{weight:.2g}"


def _power(log10: float | None) -> str:
    """A bound by its logarithm, rounded up in the last digit shown, as bounds are."""
    if log10 is None:
        return "none"
    if log10 >= 5:
        return f"10^{math.ceil(10 * log10 - 1e-9) / 10:.1f}"
    step = 10.0 ** (math.floor(log10) - 3)
    return f"{math.ceil(10**log10 / step - 1e-9) * step:.4g}"
