"""Datasets in folders: of class folders, of splits of them, or of images beside a labels.csv."""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from PIL import Image

from certcli.checkpoint.record import InputSpec
from certcli.images.decoding import Ahead, Decoder, opened_image
from certcli.images.labelled import SPLITS, Images, require_split, split_training
from certcli.images.names import (
    chosen_split,
    folders_in,
    in_order,
    role_of,
    splits_in,
    unused_folders,
)
from certcli.system.errors import DataError, Refused, one_line, plain_text, raise_if
from certcli.system.reading import is_absent, open_bounded

LARGEST_TABLE = 2**28
"""Bytes of a labels.csv: five million rows."""
LONGEST_LINE = 2**18
"""Characters of one of its lines."""
LONGEST_NAME = 512
"""Characters of a file's name in records and reports; of a longer one the end is kept."""
IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
)


DATA_SUFFIXES = frozenset(
    (".csv", ".tsv", ".json", ".jsonl", ".txt", ".xml", ".parquet", ".xlsx", ".mat", ".npy")
)
"""Of files that may state labels."""


def _has_image_name(name: str) -> bool:
    """Return whether a file's name is an image's; "._a.png" is what macOS writes beside "a.png"."""
    return Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".")


def image_files(paths: Sequence[Path]) -> tuple[list[Path], list[str], str]:
    """Return the image files, and those in folders, sorted; the folders that cannot be read, each
    with the reason; and a note that counts the files that are no images.

    Raises:
        DataError: a file is missing, or a folder holds no images.
    """
    files: list[Path] = []
    unreadable: list[str] = []
    others: list[str] = []

    for path in paths:
        raise_if(
            is_absent(path),
            DataError,
            f"no file {one_line(path)}",
            "name image files, or folders of them",
        )
        if not path.is_dir():
            files.append(path)
            continue
        walked = os.walk(
            path, onerror=lambda why: unreadable.append(f"{why.filename} ({why.strerror})")
        )
        below = [Path(parent, name) for parent, _, names in walked for name in names]
        inside = sorted(each for each in below if _has_image_name(each.name))
        others += [each.name for each in below if not _has_image_name(each.name)]
        raise_if(
            not inside,
            DataError,
            f"{one_line(path)} holds no images{' that can be read' if unreadable else ''}",
            f"their names end in {', '.join(sorted(IMAGE_SUFFIXES))}",
        )
        files += inside
    return files, unreadable, _left_out(others, files)


def load_folder(folder: Path, spec: InputSpec, split: str | None) -> Images:
    """Load a folder of class folders, or train/, val/, test/ of them; its name is the dataset's."""
    return replace(_part_of_folder(folder, spec, split), name=folder.resolve().name)


def _part_of_folder(folder: Path, spec: InputSpec, split: str | None) -> Images:
    splits = splits_in(folder)
    if not splits:
        whole = _class_folder(folder, folder, spec, split or "all")
        if split in (None, "all") or whole.unlabelled:
            return whole
        require_split(folder.name, split, ("all", "train", "val"))
        return whole.select(split_training(whole.labels, split).tolist())
    chosen = chosen_split(splits, split)
    use = split or (chosen and role_of(chosen))
    has_validation = any(role_of(name) == "val" for name in splits)
    training = next((name for name in splits if role_of(name) == "train"), None)
    if use in ("train", "val") and training is not None and not has_validation:
        whole = _class_folder(folder, splits[training], spec, str(use))
        part = whole.select(split_training(whole.labels, str(use)).tolist())
    else:
        if chosen is None:
            require_split(folder.name, split or "", [*splits])
        name = str(chosen)
        shown = name if name in SPLITS else role_of(name) or name
        part = _class_folder(folder, splits[name], spec, shown)
    return replace(
        part,
        note="; ".join(filter(None, (unused_folders(folder, splits, split, chosen), part.note))),
    )


def _class_folder(dataset: Path, folder: Path, spec: InputSpec, split: str) -> Images:
    listing = folder / "labels.csv"
    loose = sorted(path for path in folder.iterdir() if _has_image_name(path.name))
    # a table beside one folder, such as images/, names the images in it
    no_table = is_absent(listing)
    listed = not no_table and len(folders_in(folder)) <= 1
    if loose and no_table and not any(child.is_dir() for child in folder.iterdir()):
        images = unlabelled(folder.name, "all", loose, spec)
        no_images = [path.name for path in folder.iterdir() if not _has_image_name(path.name)]
        notes = filter(
            None, (_left_out(no_images, loose), _unread(dataset, folder, None), images.note)
        )
        return replace(images, note="; ".join(notes))
    if listed:
        paths, labels, classes = _images_in_table(folder, listing)
        others: list[str] = []
    else:
        paths, labels, classes, others = _foldered(folder)
    strange = next((name for name in classes if not name.isprintable()), None)
    raise_if(
        strange is not None,
        DataError,
        f"{folder} has a class whose name does not print: {strange!a}",
        "rename it",
    )
    images = _from_files(folder.name, split, paths, spec, dataset)
    unread = _unread(dataset, folder, listing if listed else None)
    notes = filter(None, (_left_out(others, paths), unread, images.note))
    return replace(
        images, classes=tuple(classes), labels=torch.tensor(labels), note="; ".join(notes)
    )


def unlabelled(name: str, split: str, paths: Sequence[Path], spec: InputSpec) -> Images:
    """Return images without labels from files in one folder."""
    for path in paths:
        raise_if(not path.is_file(), DataError, f"{path} is not a regular file", "remove it")
    within = paths[0].parent if paths else Path()
    return replace(_from_files(name, split, paths, spec, within), unlabelled=True)


def _from_files(
    name: str, split: str, paths: Sequence[Path], spec: InputSpec, dataset: Path
) -> Images:
    """Return the images of files below the dataset's folder, their labels zero."""
    decode = Decoder(spec)
    ahead = Ahead(lambda position: decode(paths[position]))
    return Images(
        name=name,
        split=split,
        classes=(),
        labels=torch.zeros(len(paths), dtype=torch.long),
        indices=torch.arange(len(paths)),
        fetch=ahead,
        note=_sizes(paths, spec),
        expect=ahead.expect,
        ahead=ahead,
        file=lambda position: _printable_name(paths[position].relative_to(dataset)),
    )


def _printable_name(path: Path) -> str:
    """Return a path in one line: slashes between folders, unprintable characters escaped."""
    text = plain_text(path.as_posix())
    return text if len(text) <= LONGEST_NAME else f"…{text[1 - LONGEST_NAME :]}"


def _sizes(paths: Sequence[Path], spec: InputSpec) -> str:
    """Return a note where some image is smaller than the input, or coloured for a grey network."""
    channels, height, width = spec.size
    for path in paths[:: max(1, len(paths) // 8)]:
        try:
            with opened_image(path) as image:
                (across, down), bands = image.size, image.getbands()
        except (OSError, ValueError, DataError, Image.DecompressionBombError):
            continue  # reading it will raise the error
        if across < width or down < height:
            return f"images such as {path.name}, {down}x{across}, are enlarged to {height}x{width}"
        if channels == 1 and len(bands) >= 3:
            return f"images such as {path.name} are in colour, and the network sees grey"
    return ""


def _left_out(others: Sequence[str], images: Sequence[Path]) -> str:
    """Return a note that counts the files that are no images, and names one."""
    if not others:
        return ""
    total = len(others) + len(images)
    example = one_line(min(others))
    return f"{len(images)} of {total} files are images (left out: {example}{', ...' * (len(others) > 1)})"


_LABELS_FROM = "labels come from class folders, or from labels.csv (columns file and class)"


def _unread(dataset: Path, folder: Path, listing: Path | None) -> str:
    """Return a note on the files of data beside the images that are not read."""
    inside = [path for each in sorted({dataset, folder}) for path in sorted(each.iterdir())]
    data = [path.name for path in inside if path != listing and _is_data(path.name)]
    notes = []
    if listing is not None and (folders := folders_in(folder)):
        notes.append(f"the labels of {', '.join(folders)} are those of {listing.name}")
    if data:
        several = ", ..." * (len(data) > 1)
        notes.append(f"{one_line(data[0])}{several} is not read: {_LABELS_FROM}")
    return "; ".join(notes)


def _is_data(name: str) -> bool:
    return Path(name).suffix.lower() in DATA_SUFFIXES and not name.lower().startswith("readme")


def _foldered(folder: Path) -> tuple[list[Path], list[int], list[str], list[str]]:
    classes = in_order(folders_in(folder))
    raise_if(
        not classes,
        DataError,
        f"{folder} holds no class folders",
        "one folder a class, its images inside",
    )
    paths: list[Path] = []
    labels: list[int] = []
    others: list[str] = []
    for label, name in enumerate(classes):
        files = sorted(_images_below(folder / name, others))
        if not files:
            raise DataError(
                f"class folder {folder / name} holds no images",
                f"{one_line(min(others))} is not read: {_LABELS_FROM}"
                if any(map(_is_data, others))
                else "remove it, or put its images there",
            )
        paths += files
        labels += [label] * len(files)
    return paths, labels, classes, others


def _images_below(folder: Path, others: list[str]) -> Iterator[Path]:
    """Image files at any depth; the names of other files go into `others`.

    OSError where a folder cannot be read: its images would be missing in silence."""

    def stop(failure: OSError) -> None:
        raise failure

    for parent, _, names in os.walk(folder, onerror=stop):
        for name in names:
            path = Path(parent, name)
            if not _has_image_name(name):
                others.append(name)
                continue
            raise_if(not path.is_file(), DataError, f"{path} is not a regular file", "remove it")
            yield path


def _lines(handle: IO[str], listing: Path) -> Iterator[str]:
    """Yield the lines of a table; DataError for one that is too long."""
    while line := handle.readline(LONGEST_LINE):
        raise_if(
            len(line) == LONGEST_LINE,
            DataError,
            f"{listing} has a line of {LONGEST_LINE:,} characters or more",
            "is it a table?",
        )
        yield line


_FILE_COLUMNS = ("file", "filename", "path", "image", "name")
_CLASS_COLUMNS = ("synset", "wnid", "class", "label", "index")


def _images_in_table(folder: Path, listing: Path) -> tuple[list[Path], list[int], list[str]]:
    """Return the images beside a labels.csv, which has a header and columns for file and class.

    Classes come in the order of their names, as those of folders do; where all are numbers, in the
    order of the numbers.
    """
    try:
        with open_bounded(listing, LARGEST_TABLE) as file:
            # Excel begins with a mark
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.DictReader(_lines(text, listing), restkey="", restval="")
            rows = list(reader)
    except OSError as failure:
        raise DataError(
            f"cannot read {listing}: {failure.strerror}", "remove it, if there are no labels"
        ) from failure
    except (Refused, UnicodeError, csv.Error) as failure:
        raise DataError(
            f"{listing} is not a table of text ({one_line(failure)})", "columns 'file' and 'class'"
        ) from failure
    columns = list(reader.fieldnames or ()) if rows else []
    name_columns = [c for c in columns if c.lower() in _FILE_COLUMNS]
    class_columns = [c for c in columns if c.lower() in _CLASS_COLUMNS]
    if not name_columns or not class_columns:
        shown = one_line(", ".join(columns) or "none")
        raise DataError(f"{listing} needs the columns 'file' and 'class'", f"it has: {shown}")
    name_column, class_column = name_columns[0], class_columns[0]
    empty = next((row for row in rows if not row[name_column] or not row[class_column]), None)
    if empty is not None:
        raise DataError(
            f"{listing} has a row without file or class", f"line {rows.index(empty) + 2}"
        )
    classes, labels = _numbered(rows, class_column)
    for other in class_columns[1:]:
        raise_if(
            other == class_column or _numbered(rows, other)[1] != labels,
            DataError,
            f"{listing} has two columns of classes that disagree: {class_column}, {other}",
            "leave one of them",
        )
    paths = [folder / row[name_column] for row in rows]
    for row, path in zip(rows, paths, strict=True):
        raise_if(
            ".." in path.parts or Path(row[name_column]).is_absolute(),
            DataError,
            f"{listing} names {one_line(row[name_column])}, which is not in its folder",
        )
        raise_if(
            not path.is_file(),
            DataError,
            f"{listing} names {one_line(path.name)}, which does not exist",
        )
    return paths, labels, classes


def _numbered(rows: Sequence[Mapping[str, str]], column: str) -> tuple[list[str], list[int]]:
    """Return the classes that a column names, in order, and the number of each row's."""
    classes = in_order({row[column] for row in rows})
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, [number_of[row[column]] for row in rows]
