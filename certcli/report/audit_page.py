"""An audit as a page: what is drawn, and in which words."""

from collections.abc import Iterator, Sequence

from certcli.evaluation.radii import attacked_radius, proven_percent, proven_radius
from certcli.report.document import Audit, Share
from certcli.report.page import Bar, Command, Curve, Gate, Page, Picture, Table

NOTE = (
    "Certified: correct, and no image within the radius has another class, proven or with the probability said. Attacked: "
    "still correct after all attacks; the true share lies between proven and attacked. Smoothing speaks of the smoothed "
    "network, which is another function."
)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def between(share: Share) -> str:
    low, high = share.interval
    return f"{100 * low:.1f} to {100 * high:.1f}"


def page_of(audit: Audit, pictures: Sequence[Picture] = ()) -> Page:
    """The whole page of an audit."""
    network, dataset = audit.network, audit.dataset
    size = " x ".join(str(side) for side in network.input)
    images = "no images" if dataset is None else f"{dataset.images} images at most of {dataset.name} ({dataset.split})"
    bound = audit.bound
    return Page(
        title=f"Audit of {network.name}",
        subtitle=f"{network.arch}, {network.parameters:,} parameters, {network.classes} classes, input {size}; {images}",
        verdict=audit.verdict,
        doubts=audit.doubts,
        gates=[Gate(row.passed, row.reason) for row in audit.gate.judged],
        tables=[table for table in _tables(audit) if table.rows],
        curves=list(curves(audit)),
        curve_note=NOTE,
        bars=[
            Bar(
                block.path or "(network)",
                block.log10,
                block.text,
                f"{block.kind} {block.path}: {block.text}. {block.why}",
            )
            for block in (bound.blocks if bound is not None else [])
        ],
        bar_note=""
        if bound is None
        else f"Proven constant of each part, on a logarithmic axis; their product is the bound, {bound.upper_text}. "
        "Rest the pointer on a bar for the law and the largest constants inside.",
        pictures=pictures,
        commands=list(_commands(audit)),
        facts=[
            f"Network (digest of its function): {audit.checkpoint}",
            *([] if dataset is None else [f"Images (digest of pixels and labels): {dataset.digest}"]),
            "Versions: " + ", ".join(f"{name} {version}" for name, version in audit.versions.items()),
            "Radii are pixel l2, images in [0, 1]; normalisation is the network's first layer.",
        ],
    )


def curves(audit: Audit) -> Iterator[Curve]:
    """Certified shares as the records have them, and what attacks left."""
    for found in audit.certificates:
        label = "proven" if found.failure == 0 else f"{found.promise}, smoothed"
        count = found.clean.images
        held = {row.index: row for row in audit.records if found.method in row.radius}
        radii = [
            float(row.radius[found.method]) if row.prediction == row.label or found.failure > 0 else -1.0
            for row in held.values()
        ]
        if found.failure > 0:  # it stops drawing beyond its radius: nothing is known of larger ones
            points = [(0.0, found.clean.share), *((float(at), share.share) for at, share in found.certified.items())]
            yield Curve(f"{found.method}, {label}, n = {count}", "probability", points, marked=True)
            continue
        yield Curve(f"{found.method}, {label}, n = {count}", "proven", steps(radii))
    if (attack := audit.attack) is not None:
        points = [(0.0, attack.clean.share), *((float(at), share.share) for at, share in attack.robust.items())]
        label = f"after {', '.join(attack.attacks)} (measured), n = {attack.clean.images}"
        yield Curve(label, "attacked", points, marked=True)


def steps(radii: Sequence[float]) -> list[tuple[float, float]]:
    """Certified radius of each image, negative where it is misclassified -> (radius, share certified beyond it)."""
    count = len(radii)
    finite = sorted({radius for radius in radii if 0 < radius < float("inf")})
    points = [(0.0, sum(radius >= 0 for radius in radii) / count)]
    points += [(at, sum(radius > at for radius in radii) / count) for at in finite]
    first_drop = sum(radius > 0 for radius in radii) / count
    return [points[0], (0.0, first_drop), *points[1:]] if first_drop < points[0][1] else points


def _tables(audit: Audit) -> Iterator[Table]:
    rows = []
    if audit.clean is not None:
        rows.append(
            ["clean", "0", percent(audit.clean.share), between(audit.clean), str(audit.clean.images), "measured"]
        )
    for found in audit.certificates:
        holds = "proven" if found.failure == 0 else found.promise
        rows += [
            [
                f"certified, {found.method}",
                proven_radius(at),
                proven_percent(share.share),
                between(share),
                str(share.images),
                holds,
            ]
            for at, share in found.certified.items()
        ]
    if (patched := audit.patched) is not None:
        rows += [
            [
                f"no patch changes it, {patched.procedure}",
                size,
                proven_percent(share.share),
                between(share),
                str(share.images),
                "proven",
            ]
            for size, share in patched.certified.items()
        ]
    if (attack := audit.attack) is not None:
        rows += [
            [
                f"after {', '.join(attack.attacks)}",
                attacked_radius(at),
                percent(share.share),
                between(share),
                str(share.images),
                "measured",
            ]
            for at, share in attack.robust.items()
        ]
    bound = "" if audit.bound is None else f"Lipschitz bound {audit.bound.upper_text} (proven)"
    slope = (
        ""
        if audit.slope is None
        else f"slope {audit.slope.lower:.4g} found (measured, images tried: {audit.slope.images})"
    )
    note = "; ".join(part for part in (bound, slope) if part)
    columns = ["share of the images", "radius or patch", "share", "95 % interval", "n", "holds"]
    yield Table("What was found", columns, rows, (1, 2, 3, 4), note)
    told = [[found.method, found.about, found.title, found.statement] for found in audit.certificates]
    if patched is not None:
        told.append(["patch", "the network behind masks", patched.title, patched.statement])
    if told:
        yield Table("What the certificates say", ["method", "about", "how", "promise"], told)
    if audit.skipped:
        yield Table("What was not done", ["stage", "why"], [[item.stage, item.why] for item in audit.skipped])
    if audit.lineage:
        told = [
            [str(number), step.command, str(step.seed), (step.parent or "-")[:12], short(step.parameters)]
            for number, step in enumerate(audit.lineage, 1)
        ]
        yield Table("Lineage, as the file tells it", ["step", "command", "seed", "parent", "parameters"], told)
    facts = [[name, _fact(value)] for name, value in audit.network.reading.items() if name != "doubts"]
    if facts:
        yield Table("What was assumed in reading the file", ["of", "value and where it is from"], facts)


def _fact(value: object) -> str:
    return f"{value.get('value')} ({value.get('from')})" if isinstance(value, dict) else str(value)


def short(values: object) -> str:
    """Parameters of a step in a cell."""
    if not isinstance(values, dict):
        return str(values)
    told = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
        if value not in (None, False, [], {}, "")
    ]
    text = ", ".join(told)
    return text if len(text) <= 400 else f"{text[:399]}…"


def _commands(audit: Audit) -> Iterator[Command]:
    yield Command("The same audit (how many images fit into its time depends on the machine):", audit.reproduce)
    for found in audit.certificates:
        count = found.dataset.images
        yield Command(
            f"The certificates of {found.method}, again, on the same {count} images:",
            certify_again(audit, found.method),
        )
    yield Command(
        "An audit with -o FILE.safetensors keeps its evidence beside the weights; this proves and certifies it again:",
        "certvit log FILE.safetensors --verify",
    )
    for line in audit.next[:1]:
        yield Command("What to do next:", line)


def certify_again(audit: Audit, method: str) -> str:
    """The command whose certificates are these."""
    found = next(item for item in audit.certificates if item.method == method)
    words = audit.reproduce.split(" -e ")[0].replace("certvit audit", "certvit certify", 1)
    radii = " ".join(f"-e {radius}" for radius in found.certified)
    seed = audit.reproduce.partition("--seed ")[2].partition(" ")[0]
    line = f"{words} {radii} --method {method} --limit {found.dataset.images} --seed {seed}"
    given = found.parameters
    if method == "smoothing":
        line += f" --sigma {given['sigma']:g} --n0 {given['n0']} -n {given['samples']} --enough {given['enough']:g}"
        line += " --decide" if given.get("decide") else ""
        line += "" if given["precision"] == "float32" else f" --precision {given['precision']}"
    return line
