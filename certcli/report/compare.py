"""What changed between two audits, by figure, at the same threat, on the same images only."""

from collections.abc import Iterator

from certcli.report.document import Audit, Change
from certcli.report.shares import ShareRow, share_rows

TITLE = "Changed since the earlier audit; what was before, and of which images, is the word of that file"
COLUMNS = ["figure", "before", "after", "compared"]


def changes(before: Audit, after: Audit) -> list[Change]:
    """Return every figure of either, in the order of `after`; `alike`: they can be compared."""
    return [*_bound_changes(before, after), *_share_changes(before, after)]


def _bound_changes(before: Audit, after: Audit) -> Iterator[Change]:
    same = before.network.input == after.network.input
    why = "" if same else "inputs of other sizes"
    bounds = ["not measured" if a.bound is None else a.bound.upper_text for a in (before, after)]
    weights = [
        "not measured" if a.attention_weight is None else f"{a.attention_weight:.2g}"
        for a in (before, after)
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


def cells(change: Change) -> list[str]:
    return [
        change.figure,
        change.before,
        change.after,
        "yes" if change.alike else f"no: {change.why}",
    ]
