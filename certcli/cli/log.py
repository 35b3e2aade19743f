"""certvit log: where a checkpoint comes from and what was found about it; several side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.command import command, group
from certcli.cli.groups import Machine, Talk
from certcli.cli.output import Gate, Sink, percent


@group("Verification")
class Verification:
    """What of the evidence is checked again, and on which images."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Prove bounds and certify again; exit 7 unless all of the evidence was verified."
        ),
    ] = False
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, metavar="N", help="Certify N images again, not all: an interval.")
    ] = None
    proven_only: Annotated[
        bool, typer.Option("--proven-only", help="Do not ask for measured results (attack), which are not run again.")
    ] = False
    dataset: options.Dataset = None
    data_dir: options.DataDir = None


@command("certvit log m.safetensors", "certvit log *.safetensors --verify --sample 500", page="threat-model.md")
def log(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...", help="Checkpoints that certvit wrote.")],
    asked: Verification = Verification(),
    machine: Machine = Machine(),
    talk: Talk = Talk(),
) -> None:
    """Lineage and evidence of a checkpoint; with several, one row each: accuracy, attacks, certificates, bound."""
    from dataclasses import asdict

    from certcli.checkpoint import Checkpoint

    sink = talk.sink()
    read = [(path, Checkpoint.read(path)) for path in checkpoints]
    documents = [
        {
            "file": path.name,
            "digest": ckpt.digest,
            "lineage": [asdict(step) for step in ckpt.record.lineage],
            "evidence": [{**asdict(entry), "stale": entry.digest != ckpt.digest} for entry in ckpt.record.evidence],
        }
        for path, ckpt in read
    ]
    if asked.verify:
        from certcli.cli.verified import Asked, verify_checkpoints

        gate = Gate()
        wanted = Asked(asked.dataset, asked.data_dir, asked.sample, not asked.proven_only, machine)
        found = verify_checkpoints({str(path): ckpt for path, ckpt in read}, wanted, gate, sink)
        documents = [{**document, "verification": claims} for document, claims in zip(documents, found, strict=True)]
        sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents}, gate)
        gate.enforce()
        sink.text("verified: all of the evidence")
        return
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents})
    if len(read) > 1:
        _compare(read, sink)
        return
    path, ckpt = read[0]
    record = ckpt.record
    sink.text(f"{path.name}: {record.arch}, {record.classes} classes, digest {ckpt.digest[:16]}")
    sink.table(
        "Lineage",
        ["step", "parameters", "seed", "parent"],
        [(s.command, _short(s.parameters), str(s.seed), (s.parent or "-")[:12]) for s in record.lineage],
    )
    if record.evidence:
        sink.table(
            "Evidence",
            ["command", "about", "result"],
            [
                (e.command, "this network" if e.digest == ckpt.digest else "STALE: another network", _short(e.result))
                for e in record.evidence
            ],
        )


def _short(values: Any) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def _compare(read: list[tuple[Path, Any]], sink: Sink) -> None:
    """Fresh evidence only: what was found about another network says nothing about this one.

    Each share says over how many images it is, and its radius where that is not the column's.
    """
    rows, seen = [], {}
    found = [
        {entry.command: entry.result for entry in ckpt.record.evidence if entry.digest == ckpt.digest}
        for _, ckpt in read
    ]
    radius = _radius(found)
    for (path, _), results in zip(read, found, strict=True):
        certified, attacked, audit = (results.get(command) for command in ("certify", "attack", "lipschitz"))
        for judged in ("certify", "attack"):
            if (images := (results.get(judged) or {}).get("dataset")) is not None:
                seen[images["digest"]] = f"{images['images']} of {images['name']} ({images['split']})"
        weight = audit.get("attention_weight") if audit else None
        rows.append(
            (
                path.name.partition(".")[0],
                _share(certified or attacked, (certified or attacked or {}).get("clean")),
                _share(attacked, attacked and attacked["robust"], attacked and f"{attacked['epsilon']:g}", radius),
                _certified(certified, radius),
                _power(audit.get("log10_upper")) if audit else "-",
                f"{audit['lower']:.3g}" if audit and audit.get("lower") is not None else "-",
                "-" if weight is None else f"{weight:.2g}",
            )
        )
    at = f" at {radius}" if radius else ""
    sink.table(
        "Stages (proven unless it says measured or probability; radii pixel l2)",
        ["stage", "clean", f"attacked{at}", f"certified{at}", "Lipschitz bound", "slope measured", "attention weight"],
        rows,
    )
    if len(seen) > 1:
        sink.text(f"not the same images: {'; '.join(seen.values())}")


def _radius(found: list[dict[str, Any]]) -> str | None:
    """The column's radius: the smallest certified, else the first attacked."""
    certified = [radius for results in found for radius in results.get("certify", {}).get("certified", {})]
    attacked = [f"{results['attack']['epsilon']:g}" for results in found if "attack" in results]
    return min(certified, key=float) if certified else next(iter(attacked), None)


def _share(result: Any, share: float | None, radius: str | None = None, column: str | None = None) -> str:
    if result is None:
        return "-"
    return f"{percent(share)}{f' at {radius}' if radius != column else ''}, n = {result['images']}"


def _certified(result: Any, column: str | None) -> str:
    """The share at the column's radius, else at this entry's smallest; a statement of chance says so."""
    if result is None or not result["certified"]:
        return "-"
    radius = column if column in result["certified"] else min(result["certified"], key=float)
    chance = f" ({result.get('promise', 'probability')})" if result.get("failure") else ""
    return _share(result, result["certified"][radius], radius, column) + chance


def _power(log10: float | None) -> str:
    if log10 is None:
        return "none"
    return f"{10**log10:.3g}" if log10 < 5 else f"10^{log10:.1f}"
