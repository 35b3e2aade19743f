"""The shares of an audit, one row each: what every table, card and machine format shows."""

from collections.abc import Iterator
from dataclasses import dataclass

from certcli.evaluation.radii import (
    attacked_percent,
    attacked_radius,
    percent_ends,
    proven_percent,
    proven_radius,
)
from certcli.report.document import Audit, Dataset, Share

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
