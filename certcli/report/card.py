"""An audit for a model's page: a badge (SVG) and a block for its card (YAML, Markdown)."""

import json
import re
from collections.abc import Iterator
from itertools import groupby

from markupsafe import escape

from certcli.evaluation.intervals import interval_of_few
from certcli.evaluation.radii import confidence, proven_percent, proven_radius
from certcli.report.document import Audit, CertifiedShares, Dataset, Share
from certcli.report.shares import COLUMNS, share_rows

PROVEN = "#0060a8"
PROBABLE = "#00795a"
NONE = "#6e7781"
"""As in the charts of a page."""
CHARACTER = 6.6
"""Width of a character of the badge's font, about."""


def best(audit: Audit) -> tuple[CertifiedShares, str, Share] | None:
    """The badge's certificates: proofs that certify anything before statements of chance."""
    offered = [
        (
            shares_of_method.failure == 0 and share.hits > 0,
            -float(radius),
            share.share,
            shares_of_method,
            radius,
            share,
        )
        for shares_of_method in audit.certificates
        for radius, share in shares_of_method.certified.items()
    ]
    if not offered:
        return None
    *_, shares_of_method, radius, share = max(offered, key=lambda row: row[:3])
    return shares_of_method, radius, share


def as_badge(audit: Audit) -> str:
    """ "certified l2 0.12 | 52 % of 50, p 0.999", in one line of fixed height."""
    chosen = best(audit)
    if chosen is None:
        label = "certified"
        right = "not measured"
        colour = NONE
    else:
        shares, radius, share = chosen
        label = f"certified l2 {proven_radius(radius)}"
        promise = "proven" if shares.failure == 0 else f"p {confidence(shares.failure)}"
        few = interval_of_few(share.hits, share.images)
        right = f"{share.hits if few else proven_percent(share.share, 0)} of {share.images}{few}, {promise}"
        colour = NONE if not share.hits else PROVEN if shares.failure == 0 else PROBABLE
    first, second = (round(CHARACTER * len(text) + 14) for text in (label, right))
    title = escape(one_line(f"certvit audit of {audit.network.name}: {label}: {right}"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{first + second}" height="20" role="img">'
        f"<title>{title}</title>"
        f'<rect width="{first}" height="20" fill="#24292f"/><rect x="{first}" width="{second}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{first / 2:g}" y="14">{escape(label)}</text><text x="{first + second / 2:g}" y="14">{escape(right)}</text>'
        "</g></svg>\n"
    )


def as_card(audit: Audit) -> str:
    """Front matter with a `model-index`, answer and figures, for a hub's README."""
    lines = ["---", "model-index:", f"- name: {quoted(audit.network.name)}", "  results:"]
    for dataset, metrics in _metrics(audit):
        lines += ["  - task:", "      type: image-classification", "    dataset:"]
        lines += [f"      name: {quoted(dataset.name)}", f"      type: {quoted(dataset.name)}"]
        lines += [f"      split: {quoted(dataset.split)}", "    metrics:"]
        for kind, name, value in metrics:
            lines += [
                f"    - type: {kind}",
                f"      name: {quoted(name)}",
                f"      value: {value!r}",
            ]
    if lines[-1] == "  results:":
        lines[-1] = "  results: []"
    lines += ["---", "", "## Robustness", ""]
    lines += [
        f"{prose(line)}\n"
        for line in (audit.headline, audit.scale, audit.reference, *audit.verdict)
        if line
    ]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(prose, row.cells)) + " |" for row in share_rows(audit)]
    if audit.bound is not None:
        lines += [
            "",
            f"Lipschitz bound (proven, pixel l2, images in [0, 1]): {prose(audit.bound.upper_text)}",
        ]
    lines += ["", f"Digest of the network: `{audit.checkpoint}`. Made by certvit; repeated by:", ""]
    lines += [f"    {one_line(audit.reproduce)}", ""]
    lines += [prose(audit.left_out), ""] if audit.left_out else []
    return "\n".join(lines)


def quoted(text: str) -> str:
    """A double-quoted YAML string: JSON's are some, and hold no control character as such."""
    return json.dumps(text)


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def prose(text: str) -> str:
    """Text that Markdown shows as it is: its own characters escaped, HTML too."""
    return (
        re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", one_line(text))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
    )


def _metrics(audit: Audit) -> Iterator[tuple[Dataset, list[tuple[str, str, float]]]]:
    """Return (dataset, metrics) by group of images: every stage judged as many as fitted."""
    for _, group in groupby(share_rows(audit), key=lambda row: row.dataset.digest):
        rows = list(group)
        yield rows[0].dataset, [(row.kind, row.metric, row.share.share) for row in rows]
