"""What `certify` shows: its document, its table, its figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certcli.certify.certificate import CertifiedAccuracy, Certifier
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation import image_records, intervals, record_lines, records
from certcli.evaluation.threat import (
    Norm,
    Threat,
    attacked_percent,
    percent_ends,
    proven_percent,
    proven_radius,
)
from certcli.images.labelled import Images
from certcli.system.errors import DataError

EVIDENCE = (
    "dataset", "clean", "certified", "average_radius", "images", "method", "failure", "promise", "arithmetic", "parameters",
)  # fmt: skip
"""Keys that a checkpoint keeps, of each method."""

NOT_DRAWN_FOR = "not drawn for"
"""In place of a share at a radius beyond --enough: images reach it by chance only."""


@dataclass(frozen=True)
class Result:
    """The certificates of a method. seconds: an image; None where all was read from --records."""

    certifier: Certifier
    rows: Sequence[image_records.Certificate]
    accuracy: CertifiedAccuracy
    seconds: float | None
    resumed: records.Resumed | None = None

    def share(self, threat: Threat) -> str:
        return (
            proven_percent(self.accuracy.against(threat))
            if self.certifier.searches(threat)
            else NOT_DRAWN_FOR
        )

    def to_json(self) -> dict[str, Any]:
        certifier = self.certifier
        left_out = [
            threat.key for threat in self.accuracy.threats if not certifier.searches(threat)
        ]
        return {
            **self.accuracy.to_json(),
            **({"not_drawn_for": left_out} if left_out else {}),
            **{
                name: getattr(certifier, name)
                for name in ("promise", "norm", "arithmetic", "domain")
            },
            **certifier.about,
            "parameters": dict(certifier.parameters),
            **({} if self.resumed is None else {"resumed": self.resumed.to_json()}),
        }


def document(
    results: Sequence[Result], reason: str | None, checkpoint: str, images: Images
) -> dict[str, Any]:
    """Return the one document: what was certified, of which network, on which images.

    It speaks of the first method; `methods` holds all of them when there are several, `reason` why
    auto took it.
    """
    fields: dict[str, Any] = {
        "checkpoint": checkpoint,
        "dataset": record_lines.describe_images(images),
        **results[0].to_json(),
    }
    if reason is not None:
        fields["reason"] = reason
    if len(results) > 1:
        fields["methods"] = [result.to_json() for result in results]
    return fields


def evidence(result: Result, images: Images) -> dict[str, Any]:
    """Return the evidence of a method, at the radii it was drawn for, for the checkpoint."""
    fields = {**result.to_json(), "dataset": record_lines.describe_images(images)}
    drawn = {
        key: share
        for key, share in fields["certified"].items()
        if key not in fields.get("not_drawn_for", ())
    }
    fields["certified"] = drawn or fields["certified"]
    return {name: fields[name] for name in EVIDENCE if name in fields}


def show_certificates(
    results: Sequence[Result], images: Images, attacked: dict[Threat, dict[int, bool]], sink: Sink
) -> None:
    """One method: certified accuracy by radius, with intervals. Several: a row for each method."""
    where = f"{images.name} ({images.split}), {intervals.number_of(len(images))}"
    shares = {threat: sum(at.values()) / len(at) for threat, at in attacked.items()}
    if len(results) == 1:
        _show_method(results[0], where, shares, sink)
    else:
        _show_methods(results, where, shares, sink)
    if results[0].resumed is not None:
        sink.text(f"{results[0].resumed}")
    if attacked:
        count = len(next(iter(attacked.values())))
        message = "robust accuracy of the network itself, without noise"
        shown = ", ".join(
            f"{intervals.share_text(shares[threat], count, attacked_percent if threat.size else None)}"
            f" at {threat.attacked()}"
            for threat in sorted(attacked)
        )
        sink.text(
            f"after attacks (measured, as the file states, not run again): {message}, {count} of "
            f"these images: {shown}"
        )


def _show_methods(
    results: Sequence[Result], where: str, attacked: Mapping[Threat, float], sink: Sink
) -> None:
    threats = results[0].accuracy.threats
    columns = [f"certified at {threat.proven()}" for threat in threats]
    untouched = next((share for threat, share in attacked.items() if threat.size == 0), None)
    above = (
        "attack",
        "measured",
        percent(untouched),
        *(attacked_percent(attacked.get(threat)) for threat in threats),
        "-",
        "-",
    )
    sink.table(
        where,
        ["method", "promise", "clean", *columns, "average radius", "seconds an image"],
        [
            *([above] if attacked else []),
            *(
                (
                    result.certifier.method,
                    result.certifier.promise,
                    percent(result.accuracy.clean),
                    *(result.share(threat) for threat in threats),
                    proven_radius(result.accuracy.average_radius or 0.0, 4),
                    "-" if result.seconds is None else f"{result.seconds:.3g}",
                )
                for result in results
            ),
        ],
    )
    for result in results:
        sink.text(
            f"{result.certifier.method}: {result.certifier.title}. {result.certifier.statement}"
        )


def _show_method(result: Result, where: str, attacked: Mapping[Threat, float], sink: Sink) -> None:
    accuracy = result.accuracy

    def row(
        name: str, key: str, after_attacks: float | None, share: str, drawn: bool = True
    ) -> tuple[str, ...]:
        shown = percent if key == "clean" else attacked_percent
        interval = percent_ends(accuracy.intervals[key]) if drawn else "-"
        return name, *([shown(after_attacks)] if attacked else []), share, interval

    untouched = next((share for threat, share in attacked.items() if threat.size == 0), None)
    rows = [
        row("clean", "clean", untouched, percent(accuracy.clean)),
        *(
            row(t.proven(), t.key, attacked.get(t), result.share(t), result.certifier.searches(t))
            for t in accuracy.threats
        ),
    ]
    headings = ["after attacks"] if attacked else []
    of_patches = result.certifier.norm == "patch"
    columns = [
        "patch (pixels)" if of_patches else f"radius (pixel {result.certifier.norm})",
        *headings,
        "certified accuracy",
        "95 % interval",
    ]
    sink.table(f"{where}; {result.certifier.title}", columns, rows)
    if accuracy.abstained:
        sink.text(f"abstained: {percent(accuracy.abstained)}")
    taken = (
        f"; {result.seconds:.3g} seconds an image"
        if result.seconds is not None and result.seconds >= 0.01
        else ""
    )
    if of_patches:
        sink.text(f"clean: of the defended classifier{taken}")
    elif accuracy.average_radius is not None:
        sink.text(
            f"average radius: {proven_radius(accuracy.average_radius, 4)} (0 where the prediction is wrong){taken}"
        )
    sink.text(result.certifier.statement)


def draw_shares(
    results: Sequence[Result],
    attacked: dict[Threat, dict[int, bool]],
    network: str,
    images: Images,
    path: Path,
    farthest: float,
    sink: Sink,
) -> None:
    """Certified and attacked shares over the images that all know."""
    from certcli.report.figures import draw_certified

    common = set(next(iter(attacked.values()))) if attacked else set(images.digests)
    if len(common) < len(images):
        sink.note(
            f"the figure shows the {len(common)} of {len(images)} images that were attacked too"
        )
    curves: dict[str, list[float]] = {}
    for result in results:
        certifier = result.certifier
        shown = [certificate for certificate in result.rows if certificate.index in common]
        for certificate in shown if certifier.promise == "proof" else ():
            broken = [
                t
                for t, withstood in attacked.items()
                if certificate.holds_at(t) and not withstood[certificate.index]
            ]
            if broken:
                message = f"certified to {proven_radius(certificate.radius)} and broken at {broken[0].attacked()}"
                sink.warn(f"{images.named(certificate.index)} is {message}")
        promise = "proven" if certifier.promise == "proof" else certifier.promise
        label = f"{certifier.method}: certified ({promise})"
        curves[label] = [
            certificate.radius if certificate.correct else -1.0 for certificate in shown
        ]
    shares = {
        threat.radius: sum(withstood.values()) / len(withstood)
        for threat, withstood in attacked.items()
    }
    draw_certified(
        curves,
        shares,
        path,
        farthest,
        f"{network} on {images.name} ({images.split}), n = {len(common)}",
        results[0].certifier.norm,
    )
    sink.note(f"wrote {path}")


def attacked_shares(
    path: Path | None, checkpoint: str, images: Images, norm: Norm = "l2"
) -> dict[Threat, dict[int, bool]]:
    """Records of `attack` -> threat -> index -> withstood all attacks, where all radii were run.

    DataError when they are of another network, other images or other norms, or when no image was
    attacked at all radii.
    """
    if path is None:
        return {}
    run, rows = records.read_records(path, "attack")
    records.require_same_network(run, checkpoint, path)
    records.require_same_images(rows, images, path)
    outcomes: dict[Threat, dict[int, bool]] = {}
    clean: dict[int, bool] = {}
    for row in rows:
        if row.kind == norm and row.index in images.digests:
            at = outcomes.setdefault(Threat(norm, row.epsilon), {})
            at[row.index] = at.get(row.index, True) and row.withstood
            clean[row.index] = row.correct
    common = set.intersection(*map(set, outcomes.values())) if outcomes else set()
    if not common:
        raise DataError(
            f"none of these images has records in {norm} at every radius of {path}",
            "certvit attack this checkpoint on these images, with --epsilon and --records",
        )
    outcomes.setdefault(Threat(norm, 0.0), clean)
    return {
        threat: {index: withstood for index, withstood in sorted(at.items()) if index in common}
        for threat, at in outcomes.items()
    }
