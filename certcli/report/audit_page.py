"""An audit as a page, its figures and its words; and the formats of an audit by suffix."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from certcli.evaluation import intervals, record_lines, threat
from certcli.images.labelled import OWN
from certcli.report import document, machine, page
from certcli.report.shares import (
    CHANGE_COLUMNS,
    CHANGES_TITLE,
    COLUMNS,
    NUMBERS,
    change_cells,
    share_rows,
)
from certcli.system.files import atomic_file

NOTE = (
    "Certified: correct, and no image within the radius has another class, proven or with the given probability. Attacked: "
    "still correct after all attacks; the true share lies between proven and attacked. Smoothing is about the smoothed "
    "network, which is another function. Vertical lines are 95 % intervals of the shares."
)
CONSTANTS = (
    "Proven constant of each part; their product is the bound, {bound}. The bar is the constant's logarithm, hatched where "
    "the constant is below 1."
)
WORDS = [
    ("l2, radius", "the length of the whole change of an image, pixels in [0, 1]"),
    (
        "attacked, fooled",
        "a search found a changed copy within the radius with another answer; there may be more",
    ),
    ("proven", "no changed copy within the radius has another answer: a mathematical statement"),
    (
        "with smoothing",
        "of a majority vote over noisy copies, another classifier than the network itself",
    ),
    ("behind masks", "of a vote over masked copies, another classifier than the network itself"),
    ("95 % interval", "where the share among all such images lies, of which these are a sample"),
    ("not decided", "the interval of a share holds the demand of its gate: more images decide it"),
]
"""What the page's words mean."""
PURPOSES = {
    "certvit audit": "Judge your images, or more of them:",
    "--method smoothing": "Certify more images, deployed with smoothing:",
    "certvit certify": "Write down which images are certified, and how far:",
    "certvit attack": "Try to break these certificates:",
    "--noise": "Train under noise: smoothing then certifies more images:",
    "--enclosure-penalty": "Train it so that it is proven image by image, its parts as they are:",
    "certvit finetune": "Train for a proof:",
    "certvit adapt": "Make a copy that proofs can reach:",
    "certvit constrain": "Make a copy with a smaller bound:",
}
"""What a command is for, by words in it; the first that match."""
Pictures = Mapping[str, page.Gallery]
"""One fooled image under "first", a patch under "patch", more fooled images under "fooled"."""


def page_of(audit: document.Audit, pictures: Pictures) -> dict[str, Any]:
    network = audit.network
    dataset = audit.dataset
    bound = audit.bound
    machine = audit.machine
    size = " x ".join(str(side) for side in network.input)
    images = (
        "no images"
        if dataset is None
        else f"up to {intervals.number_of(dataset.images)} of {dataset.name} ({dataset.split})"
    )
    return {
        "title": f"Audit of {network.name}",
        "subtitle": f"{network.arch}, {network.parameters:,} parameters, {network.classes} classes, input {size}; {images}; "
        f"{audit.date.replace('T', ' ')} UTC, certvit {audit.versions.get('certvit', '')}",
        "chip": _chip(audit),
        "headline": "" if audit.points else audit.headline,
        "points": audit.points,
        "first": pictures["first"].figures[0] if "first" in pictures else None,
        "about": [line for line in (audit.scale, audit.reference) if line],
        "next": [(purpose(line), line) for line in audit.next],
        "examples": [pictures["patch"]] if "patch" in pictures else [],
        "verdict": [*([audit.headline] if audit.points else []), *audit.verdict],
        "words": WORDS,
        "doubts": audit.doubts,
        "gates": [
            (row.verdict, row.reason.rpartition(": ")[0] or row.reason) for row in audit.gate.judged
        ],
        "tables": [table for table in _tables(audit) if table.rows],
        "curves": list(curves(audit)),
        "curve_note": NOTE,
        "constants": [] if bound is None else bound.blocks,
        "constants_note": "" if bound is None else CONSTANTS.format(bound=bound.upper_text),
        "galleries": [pictures["fooled"]] if "fooled" in pictures else [],
        "commands": [
            (
                "The same audit (how many images fit into its time depends on the machine):",
                audit.reproduce,
            ),
            (
                "An audit with -o FILE.safetensors keeps its evidence beside the weights; this proves and certifies it "
                "again:",
                "certvit verify FILE.safetensors",
            ),
        ],
        "facts": [
            f"Network (digest of its function): {audit.checkpoint}",
            *(
                []
                if dataset is None
                else [f"Images (digest of pixels and labels): {dataset.digest}"]
            ),
            *(
                []
                if machine is None
                else [
                    f"{audit.date} UTC; {machine.cpu or machine.device}, threads {machine.threads}"
                ]
            ),
            *([audit.left_out] if audit.left_out else []),
            "Versions: "
            + ", ".join(f"{name} {version}" for name, version in audit.versions.items()),
            "Radii are pixel l2, images in [0, 1]; normalisation is the network's first layer.",
        ],
    }


def purpose(line: str) -> str:
    """Return the purpose of a command of `next`; "" for any other line."""
    return next((why for words, why in PURPOSES.items() if words in line), "")


def _chip(audit: document.Audit) -> tuple[str, str]:
    """Return the verdict of the gates in two words, and their number."""
    gates = audit.gate.judged
    if audit.dataset is not None and audit.dataset.split == OWN and not gates:
        return "first answer", "about the network's own answers: the images have no labels"
    if not gates:
        return "no gate", "nothing was demanded (--fail-on)"
    met = sum(row.passed for row in gates)
    return audit.gate.verdict, f"{met} of {len(gates)} gates passed"


def curves(audit: document.Audit) -> Iterator[page.PlotLine]:
    """Return certified shares as the records have them, and what attacks left."""
    for shares in audit.certificates:
        label = "proven" if shares.failure == 0 else f"{shares.promise}, smoothed"
        label = f"{shares.method}, {label}, n = {shares.clean.images}"
        points, marks = _asked(shares.clean, shares.certified)
        # it stops drawing beyond its radius: nothing is known of larger ones
        if shares.failure > 0:
            yield page.PlotLine(label, "probability", page.proven_steps(points), marks)
            continue
        radii = [
            float(row.radius[shares.method]) if row.prediction == row.label else -1.0
            for row in audit.records
            if shares.method in row.radius
        ]
        yield page.PlotLine(label, "proven", certified_steps(radii), marks[1:])
    if (attack := audit.attack) is not None:
        label = f"after {', '.join(attack.attacks)} (measured), n = {attack.clean.images}"
        yield page.PlotLine(label, "attacked", *_asked(attack.clean, attack.robust))


def _asked(
    clean: document.Share, shares: Mapping[str, document.Share]
) -> tuple[list[tuple[float, float]], list[page.Mark]]:
    """Return points and marks of the shares at the radii of the plan, radius 0 first."""
    points = [(0.0, clean), *((float(at), share) for at, share in shares.items() if float(at) > 0)]
    return [(at, share.share) for at, share in points], [
        (at, share.share, *share.interval) for at, share in points
    ]


def certified_steps(radii: Sequence[float]) -> list[tuple[float, float]]:
    """Certified radii (negative: misclassified) -> (radius, share certified beyond it)."""
    count = len(radii)
    finite = sorted({radius for radius in radii if 0 < radius < float("inf")})
    points = [(0.0, sum(radius >= 0 for radius in radii) / count)]
    points += [(at, sum(radius > at for radius in radii) / count) for at in finite]
    first_drop = sum(radius > 0 for radius in radii) / count
    return [points[0], (0.0, first_drop), *points[1:]] if first_drop < points[0][1] else points


def _tables(audit: document.Audit) -> Iterator[page.Table]:
    facts = [] if audit.bound is None else [f"Lipschitz bound {audit.bound.upper_text} (proven)"]
    if audit.slope is not None:
        facts.append(
            f"slope {threat.rounded_down(audit.slope.lower, 4)} found (measured, images tried: {audit.slope.images})"
        )
    if audit.attention_weight is not None:
        facts.append(
            f"largest weight of attention in a residual sum {threat.rounded_up(audit.attention_weight, 2)} (measured)"
        )
    yield page.Table(
        "What was found",
        COLUMNS,
        [row.cells for row in share_rows(audit)],
        NUMBERS,
        "; ".join(facts),
    )
    yield page.Table(
        CHANGES_TITLE, CHANGE_COLUMNS, [change_cells(change) for change in audit.changes]
    )
    rows = [
        [shares.method, shares.about, shares.title, shares.statement]
        for shares in audit.certificates
    ]
    if (behind := audit.patched) is not None:
        rows.append(["patch", "the network behind masks", behind.title, behind.statement])
    yield page.Table("What the certificates say", ["method", "about", "how", "promise"], rows)
    yield page.Table(
        "What was not done", ["stage", "why"], [[item.stage, item.why] for item in audit.skipped]
    )
    rows = [
        [
            str(number),
            step.command,
            str(step.seed),
            (step.parent or "-")[:12],
            f"{', '.join(record_lines.spelled_values(step.parameters)):.400}",
        ]
        for number, step in enumerate(audit.lineage, 1)
    ]
    yield page.Table(
        "Lineage, as the file tells it", ["step", "command", "seed", "parent", "parameters"], rows
    )
    rows = [
        [name, _fact(value)] for name, value in audit.network.reading.items() if name != "doubts"
    ]
    yield page.Table(
        "What was assumed in reading the file", ["of", "value and where it is from"], rows
    )


def _fact(value: object) -> str:
    return f"{value.get('value')} ({value.get('from')})" if isinstance(value, dict) else str(value)


def save_text(path: Path, text: str) -> None:
    """Written whole or not at all, UTF-8, line ends as they are."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def as_json_text(audit: document.Audit) -> str:
    return json.dumps(document.to_json(audit), indent=1, sort_keys=True) + "\n"


TEXTS: Mapping[str, Callable[[document.Audit], str]] = {
    ".json": as_json_text,
    ".sarif": machine.as_sarif,
    ".xml": machine.as_junit,
}


def text_of(audit: document.Audit, suffix: str, pictures: Pictures | None = None) -> str:
    """The audit in the format of this suffix; .html or any other is a page, with its pictures."""
    make_text = TEXTS.get(suffix)
    return page.render(page_of(audit, pictures or {})) if make_text is None else make_text(audit)
