"""The shares of an audit, one row each: what every table and machine format shows; what changed
between two audits, at the same threat, on the same images only; and measured figures of undefended
networks (docs/results.md) beside them."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from certcli.evaluation.threat import (
    attacked_percent,
    attacked_radius,
    percent_ends,
    power_of_ten,
    proven_percent,
    proven_radius,
)
from certcli.report.document import Audit, Change, Dataset, Share

MEASURED = "measured"


@dataclass(frozen=True)
class ShareRow:
    """One share at one threat.

    Args:
        key: name in machine formats, "certified.smoothing@0.12".
        kind: "accuracy", "certified_accuracy" or "robust_accuracy".
        name, what: for a terminal, and for a page.
        size: radius or patch, rounded to what holds; empty for clean accuracy.
        holds: "proven", "measured", or the promise of each certificate.
    """

    key: str
    kind: str
    name: str
    what: str
    size: str
    share: Share
    holds: str
    dataset: Dataset

    @property
    def percent(self) -> str:
        if self.kind == "accuracy":
            return f"{100 * self.share.share:.1f} %"
        in_percent = attacked_percent if self.holds == MEASURED else proven_percent
        return in_percent(self.share.share)

    @property
    def between(self) -> str:
        return percent_ends(self.share.interval)

    @property
    def cells(self) -> list[str]:
        return [
            self.what,
            self.size or "0",
            self.percent,
            self.between,
            str(self.share.images),
            self.holds,
        ]


COLUMNS = ["share of the images", "radius or patch", "share", "95 % interval", "n", "holds"]
NUMBERS = (1, 2, 3, 4)
"""Columns that are set right."""


def share_rows(audit: Audit) -> Iterator[ShareRow]:
    """Clean accuracy, certificates, patches, attacks, in this order."""
    if audit.clean is not None and audit.dataset is not None:
        yield ShareRow(
            "clean", "accuracy", "clean", "clean", "", audit.clean, MEASURED, audit.dataset
        )
    for shares in audit.certificates:
        holds = "proven" if shares.failure == 0 else shares.promise
        for radius, share in shares.certified.items():
            at = proven_radius(radius)
            what = f"certified, {shares.method}"
            key = f"certified.{shares.method}@{radius}"
            name = f"{shares.method} at {at}"
            yield ShareRow(key, "certified_accuracy", name, what, at, share, holds, shares.dataset)
    if (behind := audit.patched) is not None:
        for size, share in behind.certified.items():
            key = f"patched.{behind.procedure}@{size}"
            name = f"{behind.procedure} against {size}"
            what = f"no patch changes it, {behind.procedure}"
            yield ShareRow(
                key, "certified_accuracy", name, what, size, share, "proven", behind.dataset
            )
    if (attack := audit.attack) is not None:
        for radius, share in attack.robust.items():
            at = attacked_radius(radius)
            key = f"robust@{radius}"
            what = f"after {', '.join(attack.attacks)}"
            yield ShareRow(
                key,
                "robust_accuracy",
                f"attacked at {at}",
                what,
                at,
                share,
                MEASURED,
                attack.dataset,
            )
    if (tried := audit.patch_attack) is not None:
        key = f"robust.patch@{tried.patch}"
        name = f"patched by {tried.patch}"
        what = "after patches, without masks"
        yield ShareRow(
            key, "robust_accuracy", name, what, tried.patch, tried.robust, MEASURED, tried.dataset
        )


CHANGES_TITLE = "Changed since the earlier audit; what was before, and of which images, is the word of that file"
CHANGE_COLUMNS = ["figure", "before", "after", "compared"]


def compare_audits(before: Audit, after: Audit) -> list[Change]:
    """Return every figure of either, in the order of `after`; `alike`: they can be compared."""
    return [*_bound_changes(before, after), *_share_changes(before, after)]


def _bound_changes(before: Audit, after: Audit) -> Iterator[Change]:
    same = before.network.input == after.network.input
    why = "" if same else "inputs of other sizes"
    bounds = ["not measured" if a.bound is None else a.bound.upper_text for a in (before, after)]
    weights = [
        "not measured" if weight is None else f"{weight:.2g}"
        for weight in (before.attention_weight, after.attention_weight)
    ]
    yield Change(figure="Lipschitz bound", before=bounds[0], after=bounds[1], alike=same, why=why)
    if set(weights) != {"not measured"}:
        first, last = weights
        yield Change(figure="attention's weight", before=first, after=last, alike=same, why=why)


def _share_changes(before: Audit, after: Audit) -> Iterator[Change]:
    old = {_subject(row): row for row in share_rows(before)}
    new = {_subject(row): row for row in share_rows(after)}
    for subject in [*new, *(one for one in old if one not in new)]:
        first = old.get(subject)
        last = new.get(subject)
        why = _unlike(first, last) or _other_attack(before, after, first)
        yield Change(
            figure=subject,
            before=_figure_text(first),
            after=_figure_text(last),
            alike=not why,
            why=why,
        )


def _subject(row: ShareRow) -> str:
    """Return the figure's name, which holds its method and its threat."""
    return f"{row.what} at {row.size}" if row.size else row.what


def _figure_text(row: ShareRow | None) -> str:
    return "not measured" if row is None else f"{row.percent} of {row.share.images} ({row.between})"


def _unlike(first: ShareRow | None, last: ShareRow | None) -> str:
    if first is None or last is None:
        return "measured in one of the two audits only"
    if first.dataset.digest == last.dataset.digest:
        return ""
    counts = f"{first.share.images} images before, {last.share.images} now"
    return (
        f"not the same images ({counts})"
        if first.share.images != last.share.images
        else "not the same images"
    )


def _other_attack(before: Audit, after: Audit, row: ShareRow | None) -> str:
    """Return that an attack of the same name had other settings, which makes another threat."""
    if (
        row is None
        or row.kind != "robust_accuracy"
        or before.attack is None
        or after.attack is None
    ):
        return ""
    # decided by the time
    old, new = ({**attack.settings, "batch_size": 0} for attack in (before.attack, after.attack))
    return "" if old == new else "attacks with other settings"


def change_cells(change: Change) -> list[str]:
    return [
        change.figure,
        change.before,
        change.after,
        "yes" if change.alike else f"no: {change.why}",
    ]


UNET = "256x256_diffusion_uncond.pt"
DENOISER = (
    "Without any training, behind one step of a diffusion model, Carlini et al. (2023) certified "
    "71.1, 54.3 and 38.1 % of ImageNet at l2 0.5, 1 and 1.5 (their figures, not ours) with two "
    f"downloads: {UNET} (2.2 GB, MIT, openaipublic.blob.core.windows.net/diffusion/jul-2021) and a "
    "BEiT-L (1.2 GB, Apache 2.0, timm's beit_large_patch16_512); the first alone serves this network, on a GPU."
)
"""For who may not retrain; the sizes are those of 553 and 305 million numbers in float32."""

ALIKE = 4.0
"""How many times more pixel values another input may have to be compared with."""


Published = dict[str, Any]
"""A network as it is published, or trained without any defence: name, images, input (c, h, w),
log10_bound; fooled, of the correct images, and smoothed, whose class stays with noise: hits of
images at an l2 radius; and the command that measured it."""


def published() -> list[Published]:
    text = files("certcli.report").joinpath("published.json").read_bytes()
    networks: list[Published] = json.loads(text)
    return networks


def published_sentence(network: Published) -> str:
    """Return the figures of a published network."""
    attack = network["fooled"]
    noisy = network["smoothed"]
    return (
        f"{network['name']} on {network['images']}: {attack['hits']} of {attack['images']} correct images "
        f"fooled at l2 {attacked_radius(attack['radius'])}, global bound "
        f"{power_of_ten(network['log10_bound'])}, with smoothing {noisy['hits']} of {noisy['images']} "
        f"certified at l2 {proven_radius(noisy['radius'])}."
    )


def nearest_published(size: Sequence[int]) -> Published | None:
    """Return the network of about as many pixel values; None: none is alike. size: (c, h, w)."""

    def distance(entry: Published) -> float:
        return abs(math.log(math.prod(entry["input"]) / math.prod(size)))

    closest = min(published(), key=distance)
    alike = distance(closest) <= math.log(ALIKE) and closest["input"][0] == size[0]
    return closest if alike else None
