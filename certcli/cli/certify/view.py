"""What `certify` shows: its document, its table, its figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink, percent
from certcli.evaluation.intervals import number_of, share_text
from certcli.evaluation.radii import attacked_percent, percent_ends, proven_radius

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from certcli.cli.certify.run import Result
    from certcli.evaluation.threat import Threat
    from certcli.images.labelled import Images

EVIDENCE = (
    "dataset", "clean", "certified", "average_radius", "images", "method", "failure", "promise", "arithmetic", "parameters",
)  # fmt: skip
"""Keys that a checkpoint keeps, of each method."""


def document(
    results: Sequence[Result], reason: str | None, checkpoint: str, images: Images
) -> dict[str, Any]:
    """Return the one document: what was certified, of which network, on which images.

    It speaks of the first method; `methods` holds all of them when there are several, `reason` why
    auto took it.
    """
    from certcli.evaluation.records import describe

    fields: dict[str, Any] = {
        "checkpoint": checkpoint,
        "dataset": describe(images),
        **results[0].to_json(),
    }
    if reason is not None:
        fields["reason"] = reason
    if len(results) > 1:
        fields["methods"] = [result.to_json() for result in results]
    return fields


def evidence(result: Result, images: Images) -> dict[str, Any]:
    """Return the evidence of a method, at the radii it was drawn for, for the checkpoint."""
    from certcli.evaluation.records import describe

    fields = {**result.to_json(), "dataset": describe(images)}
    drawn = {
        key: share
        for key, share in fields["certified"].items()
        if key not in fields.get("not_drawn_for", ())
    }
    fields["certified"] = drawn or fields["certified"]
    return {name: fields[name] for name in EVIDENCE if name in fields}


def table(
    results: Sequence[Result], images: Images, attacked: dict[Threat, dict[int, bool]], sink: Sink
) -> None:
    """One method: certified accuracy by radius, with intervals. Several: a row for each method."""
    where = f"{images.name} ({images.split}), {number_of(len(images))}"
    shares = {threat: sum(at.values()) / len(at) for threat, at in attacked.items()}
    if len(results) == 1:
        _table(results[0], where, shares, sink)
    else:
        _side_by_side(results, where, shares, sink)
    if results[0].resumed is not None:
        sink.text(f"{results[0].resumed}")
    if attacked:
        count = len(next(iter(attacked.values())))
        message = "robust accuracy of the network itself, without noise"
        shown = ", ".join(
            f"{share_text(shares[threat], count, attacked_percent if threat.size else None)}"
            f" at {threat.attacked()}"
            for threat in sorted(attacked)
        )
        sink.text(
            f"after attacks (measured, as the file states, not run again): {message}, {count} of "
            f"these images: {shown}"
        )


def _side_by_side(
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


def _table(result: Result, where: str, attacked: Mapping[Threat, float], sink: Sink) -> None:
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


def plot(
    results: Sequence[Result],
    attacked: dict[Threat, dict[int, bool]],
    network: str,
    images: Images,
    path: Path,
    farthest: float,
    sink: Sink,
) -> None:
    """Certified and attacked shares over the images that all know."""
    from certcli.report.curve import draw_certified

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
    title = f"{network} on {images.name} ({images.split}), n = {len(common)}"
    draw_certified(curves, shares, path, farthest, title, results[0].certifier.norm)
    sink.note(f"wrote {path}")
