"""Which folders of a dataset are its splits, and which of them is judged."""

import re
import stat
from collections.abc import Mapping
from pathlib import Path

from certcli.system.errors import DataError, one_line
from certcli.system.reading import is_absent

ROLES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "validate", "dev", "development", "eval", "evaluation",
            "holdout", "heldout"),
    "test": ("test", "testing"),
}  # fmt: skip
"""What a folder of a dataset is used for -> its names, of which case and signs do not count."""


def role_of(name: str) -> str | None:
    plain_name = re.sub(r"[^a-z]", "", name.lower())
    return next((role for role, names in ROLES.items() if plain_name in names), None)


def folders_in(folder: Path) -> dict[str, Path]:
    """Return the folders below one, by name, without hidden ones; DataError: one cannot be looked
    at, such as a link to nothing, and may be a folder.
    """
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    try:
        return {each.name: each for each in inside if stat.S_ISDIR(each.stat().st_mode)}
    except OSError as failure:
        where = one_line(failure.filename)
        raise DataError(
            f"{where} cannot be read: {failure.strerror}", "mend or remove it"
        ) from failure


def splits_in(folder: Path) -> dict[str, Path]:
    """Return the folders of splits: those named so, and those of the same classes beside them.

    {} where folders named so hold images alone and stand beside others: they are classes then.
    """
    folders = folders_in(folder)
    classes = {name: set(folders_in(path)) for name, path in folders.items()}
    named = [name for name in folders if role_of(name)]
    shared = set().union(*(classes[name] for name in named))
    is_plain = not shared and all(is_absent(folders[name] / "labels.csv") for name in named)
    if is_plain and len(named) < len(folders):
        return {}
    return {name: folders[name] for name in folders if name in named or classes[name] & shared}


def chosen_split(splits: Mapping[str, Path], split: str | None) -> str | None:
    """Return the folder of a split, by its name or its use; of None, the one to be judged."""
    if split in splits:
        return split
    uses = [role_of(split) or ""] if split else ["test", "val", None, "train"]
    return next((name for use in uses for name in splits if role_of(name) == use), None)


def unused_folders(
    folder: Path, splits: Mapping[str, Path], split: str | None, chosen: str | None
) -> str:
    """Return a note on the folders beside the judged one that nobody would expect to be left out."""
    notes = []
    others = [name for name in folders_in(folder) if name not in splits]
    if others:
        notes.append(
            f"{one_line(others[0])}{', ...' * (len(others) > 1)} beside {', '.join(splits)} is no "
            "split that is known, and is left out"
        )
    if split is None and chosen and role_of(chosen) == "train":
        notes.append(f"training images are judged: no split beside {chosen} is known")
    rivals = [name for name in splits if chosen and role_of(name) == role_of(chosen)]
    if len(rivals) > 1 and split not in splits:
        notes.append(f"of {', '.join(rivals)} {chosen} is taken: --split names another")
    return "; ".join(notes)
