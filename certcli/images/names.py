"""The names of datasets, their splits and their classes, without torch: wrong ones are refused before
any loading, and the order of class folders is told where timm and torchvision differ."""

import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from certcli.system.errors import DataError, one_line, raise_if
from certcli.system.reading import is_absent
from certcli.system.registry import one_of

DIGITS = "digits"
PHOTOGRAPHS = "photographs"
TORCHVISION = {
    "torch/mnist": "MNIST",
    "torch/fashion_mnist": "FashionMNIST",
    "torch/kmnist": "KMNIST",
    "torch/cifar10": "CIFAR10",
    "torch/cifar100": "CIFAR100",
}


def require_named(name: str) -> None:
    """Raise DataError for a name that is no dataset's and no folder's."""
    if name in (DIGITS, PHOTOGRAPHS, *TORCHVISION):
        return
    raise_if(
        name.startswith("torch/"), DataError, f"unknown dataset '{name}'", one_of(name, TORCHVISION)
    )
    try:
        is_folder = Path(name).resolve().is_dir()
    except (OSError, ValueError) as failure:
        raise DataError(
            f"cannot read folder {one_line(name)} ({one_line(failure)})",
            "check name and permissions",
        ) from failure
    raise_if(
        not is_folder,
        DataError,
        f"unknown dataset '{name}'",
        f"{one_of(name, (DIGITS, PHOTOGRAPHS, *TORCHVISION))}, or a folder of class folders",
    )


def names_of_classes(
    classes: int, in_record: Sequence[str] | None, of_dataset: Sequence[str] = ()
) -> list[str]:
    """Return a name for each of the k classes; their numbers where nobody names them."""
    names = known_class_names(classes, in_record, of_dataset)
    return names or [str(number) for number in range(classes)]


def known_class_names(
    classes: int, in_record: Sequence[str] | None, of_dataset: Sequence[str] = ()
) -> list[str] | None:
    """Return a name for each of the k classes: as the checkpoint states, else ImageNet's, else the
    dataset's; None where nobody names them.
    """
    if in_record is not None and len(in_record) == classes:
        return list(in_record)
    if classes == 1000:
        import certcli.system.compat  # noqa: F401

        # isort: split
        from timm.data import ImageNetInfo

        info = ImageNetInfo("imagenet-1k")
        return [info.index_to_description(number).split(",")[0] for number in range(classes)]
    return list(of_dataset) if len(of_dataset) == classes else None


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
    """Return a note on the folders beside the judged one that nobody would expect to be left
    out."""
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


def order_note(classes: Sequence[str]) -> str:
    """Return a note where torchvision and timm number the classes differently, with the order
    taken."""
    if sorted(classes) == sorted(classes, key=_natural):
        return ""
    order = "in the order of the numbers (2 before 10), as timm has them"
    if list(classes) == sorted(classes):
        order = "by name, capitals first, as torchvision has them (timm counts no case, and numbers as numbers)"
    shown = one_line(", ".join(classes[:6]))[:120]
    return f"classes are numbered {order}: {shown}{', ...' * (len(classes) > 6)}; folders named 0, 1, ... fix another order"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """timm's natural_key: without case, and each number by its size.

    By length first: Python refuses to read a hostile number of many thousand digits."""
    parts = (
        part.lstrip("0") if part.isdigit() else part for part in re.split(r"([0-9]+)", name.lower())
    )
    return tuple((len(part) * (place % 2), part) for place, part in enumerate(parts))


def in_order(names: Iterable[str]) -> list[str]:
    """Return the classes by name; where all are numbers, by number."""
    estimates = list(names)
    if not all(name.isascii() and name.isdigit() for name in estimates):
        return sorted(estimates)
    return sorted(estimates, key=lambda name: (_natural(name), name))
