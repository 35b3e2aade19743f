"""What every command that judges images shares: which run this is, and its records on disk.

A file of records is JSON lines. The first is the header: all that decides the records (`Run`). Each
other line is one record, written and flushed as it is found, so an interrupted run is a shorter
run; it carries `pixels`, the digest of its image, so that records of two runs can be compared image
by image, and `file`, the image's name, where it has one.

Records that an earlier run left: what a gate or `-o` rests on is computed again. Anyone who can
write a file can write false records, and their digest too, so only computing them again shows
whether they are true. Figures that are only shown rest on a sample. The operating system's
generator draws it when the run has ended: no author of the file can have known the draw.
"""

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from unicodedata import normalize

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from certcli.checkpoint.schema import Json, convert_json
from certcli.evaluation import image_records, record_lines
from certcli.images.labelled import DIGESTED, SPLITS, Images
from certcli.system import errors, processes, reading
from certcli.system.files import is_stream, open_alone, open_stream, require_absent

Piece = TypeVar("Piece")
Kind = TypeVar("Kind", bound=image_records.ImageRecord)
LARGEST_RECORDS = 2 * 2**30
"""Bytes of a file of records: some ten million images."""


def digested(images: Images, team: processes.Team) -> Images:
    """The same images, digests computed by all processes: reading photographs takes long."""
    if not team.several:
        return images
    parts = [
        range(start, min(start + DIGESTED, len(images)))
        for start in range(0, len(images), DIGESTED)
    ]
    rows = [row for _, rows in team.deal(parts, images.digests_at) for row in rows]
    return images.with_digests(team.agree(lambda: rows))


def packed(rows: Iterable[image_records.ImageRecord]) -> list[Json]:
    """Return records as plain values, for another process."""
    return [row.to_json() for row in rows]


def unpacked(kind: type[Kind], rows: Iterable[Json]) -> list[Kind]:
    """Return the records of this type that another process packed."""
    return [convert_json(row, kind) for row in rows]


def deal_records(
    pieces: Sequence[Piece],
    keys: Callable[[Piece], Sequence[tuple[Any, ...]]],
    find: Callable[[Piece], list[Kind]],
    kind: type[Kind],
    file: "RecordFile | None" = None,
    team: processes.Team = processes.ALONE,
    require: Callable[[Piece, list[Kind]], None] = lambda piece, rows: None,
) -> Iterator[list[Kind]]:
    """Yield the records of each piece, in order: those that `file` holds are read, others found by
    the processes, each a piece in turn, and written. Only the leader is handed records.

    Args:
        keys: of the records of a piece, as `RecordFile` has them.
        require: raises DataError for records of the file that no such run writes.
    """

    def read(piece: Piece) -> list[Kind] | None:
        earlier = None if file is None else file.take(keys(piece))
        if earlier is not None:
            require(piece, earlier)
        return earlier

    for new, rows in team.deal(pieces, find, read, packed, partial(unpacked, kind)):
        if new and file is not None:
            file.write(rows)
        yield rows


class RecordFile:
    """A run's records on disk, or nowhere without a path. A context: the file is open in it.

    keys: the fields that say which record a line is. With `resume` the lines of an existing file
    are handed out again by `take`; from the first one that is missing on, the file is written anew.
    UsageError when the file exists (without force or resume) or belongs to another run: the
    difference is named. network: what was assumed in reading the checkpoint, for the header; it
    decides nothing, since the digest says which function was judged.

    Attributes:
        taken: records that `take` handed out again.
        earlier: complete records that the file held when it was opened.
    """

    def __init__(
        self,
        path: Path | None,
        run: record_lines.Run,
        images: Images,
        keys: Sequence[str] = ("index",),
        *,
        resume: bool = False,
        force: bool = False,
        network: Mapping[str, Any] = {},
    ) -> None:
        self.path, self._run, self._keys, self._images = path, run, tuple(keys), images
        self._earlier: list[Any] = []
        self._ends: list[int] = []
        self.taken = 0
        self.earlier = 0
        self._reading = True
        self._handle: IO[bytes] | None = None
        self._streamed = False
        if path is None:
            if resume:
                raise errors.UsageError(
                    "--resume continues a file of records, and none is named",
                    "--records FILE.jsonl",
                )
            return
        self._streamed = is_stream(path)
        if self._streamed and resume:
            raise errors.UsageError(
                f"--resume reads {path} again, and it is no file", "--records FILE.jsonl"
            )
        require_absent(path, force or resume, "--records")
        try:
            if force and not resume and path.is_symlink() and not self._streamed:
                path.unlink()  # the records replace a link, never what it points to
            self._handle = handle = open_stream(path) if self._streamed else open_alone(path)
        except OSError as failure:
            raise errors.OutputError(
                f"cannot write {path}: {failure.strerror}", "choose another --records"
            ) from failure
        try:
            if resume:
                self._read(path, handle.read())
        except BaseException:
            handle.close()  # else it would keep out others while this object lives
            raise
        if not self._streamed:
            handle.seek(0)
        if not self._ends:
            if not self._streamed:
                handle.truncate()
            self._append([run.to_json() | ({"network": network} if network else {})])
            self._ends = [0 if self._streamed else self._handle.tell()]

    def _read(self, path: Path, data: bytes) -> None:
        if b"\n" not in data:
            return  # interrupted before its header was whole: nothing is lost by writing it anew
        header, rows, self._ends = image_records.parse_records(data, path)
        differences = list(self._run.differences(header))
        if differences:
            raise errors.UsageError(
                f"{path} holds records of another run: {'; '.join(differences[:3])}",
                "repeat that run's options, choose another --records, or pass --force without --resume",
            )
        require_same_images(rows, self._images, path, all_of_them=True)
        self._earlier, self.earlier = rows, len(rows)

    def take(self, keys: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """The stored records with these keys, in order; None when some are missing."""
        if not self._reading:
            return None
        rows = self._earlier[self.taken : self.taken + len(keys)]
        if [tuple(getattr(row, key) for key in self._keys) for row in rows] != list(keys):
            self._drop()
            return None
        self.taken += len(keys)
        return rows

    def _drop(self) -> None:
        """Forget what follows the records taken, on disk too: the file only grows from here."""
        self._reading = False
        if self._handle is not None and not self._streamed:
            self._handle.truncate(self._ends[self.taken])
            self._handle.seek(self._ends[self.taken])
        self._earlier = self._earlier[: self.taken]
        self._ends = self._ends[: self.taken + 1]

    def write(self, rows: Iterable[image_records.ImageRecord]) -> None:
        """Append records and flush them, each with the digest and the file of its image."""
        if self._handle is not None:
            files = self._images.file_of
            digests = self._images.digests
            named = (
                replace(row, file=files.get(row.index, UNSET), pixels=digests[row.index])
                for row in rows
            )
            self._append(packed(named))

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._handle is not None
        # keys are not sorted: the attacks of `robust` stand in the order in which they ran
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        try:
            self._handle.write(text.encode())
            self._handle.flush()
        except OSError as failure:
            handle, self._handle = self._handle, None
            with contextlib.suppress(OSError):  # it would try to write what is buffered once more
                handle.close()
            raise errors.OutputError(
                f"cannot write {self.path}: {failure.strerror}",
                "free some space, then repeat the command with --resume",
            ) from failure

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.close()


def read_records(path: Path, command: str) -> tuple[record_lines.Run, list[Any]]:
    """The run and the records of a file by `command`, but for a torn last line; else DataError."""
    try:
        data = reading.read_bounded(path, LARGEST_RECORDS)
    except errors.Refused as refusal:
        raise errors.DataError(
            f"cannot read {path}: {refusal}", "is it a file of records?"
        ) from refusal
    except OSError as failure:
        raise errors.DataError(
            f"cannot read {path}: {failure.strerror}",
            f"certvit {command} ... --records FILE writes it",
        ) from failure
    run, rows, _ = image_records.parse_records(data, path)
    if run.command != command:
        raise errors.DataError(f"{path} holds records of {run.command}, not of {command}")
    return run, rows


def require_same_images(
    rows: Iterable[image_records.ImageRecord],
    images: Images,
    where: Path | str,
    *,
    all_of_them: bool = False,
) -> None:
    """DataError for a record with other pixels, label or file than the image of its index.

    Args:
        all_of_them: also when it speaks of an image that is not among these.
    """
    labels = dict(zip(images.indices.tolist(), images.labels.tolist(), strict=True))
    for row in rows:
        index = row.index
        if index not in labels:
            if all_of_them:
                raise errors.DataError(
                    f"{where} has a record of image {index}, which is not among these images"
                )
        elif row.pixels != images.digests[index] or row.label != labels[index]:
            raise errors.DataError(
                f"{images.named(index)} is another one in {where}: its pixels or its label differ",
                "give the --dataset, --data-dir and --split of those records",
            )
        elif not _same_file_name(row.file, images.file_of.get(index)):
            raise errors.DataError(
                f"{where} says that image {index} is {row.file}; its pixels are those of {images.file_of[index]}",
                "the records were edited, or the files were renamed: certify or attack again",
            )


def _same_file_name(stated_name: str | UnsetType, current: str | None) -> bool:
    """Tell whether two names are one: alike, or one from further up, with the splits' folder."""
    if stated_name is UNSET or current is None:
        return True
    # file systems differ in how they spell accents
    short, long = sorted((normalize("NFC", name) for name in (stated_name, current)), key=len)
    return short == long or long in (f"{split}/{short}" for split in SPLITS)


def require_same_network(run: record_lines.Run, checkpoint: str, where: Path | str) -> None:
    """DataError when records speak of another function than the checkpoint with this digest."""
    if run.checkpoint != checkpoint:
        raise errors.DataError(
            f"{where} holds records of another network: digest {run.checkpoint[:16]}, this one has {checkpoint[:16]}",
            f"certvit {run.command} this checkpoint with --records",
        )


FEW = 16
USUAL = 0.02
ENOUGH = 128
"""Pieces that are all computed again; the share of more; and the most where nothing rests on them.
"""
HINT = "it was edited, or written on a machine that computes otherwise: leave out --resume"


@dataclass(frozen=True)
class Resumed:
    """Records that were read from a file, and how many of them were computed again and agree."""

    records: int
    repeated: int

    def to_json(self) -> dict[str, int]:
        return {"records": self.records, "computed_again": self.repeated}

    def __str__(self) -> str:
        return f"{self.records:,} records were read from the file; {self.repeated:,} of them were computed again and agree"


@dataclass(frozen=True)
class RecordBatch:
    """Records of a file that are computed together. hits: how many of them meet the gate."""

    records: int
    hits: int


def compute_again(
    pieces: Sequence[RecordBatch],
    disagreements: Callable[[Sequence[int]], Iterable[str]],
    *,
    gate: bool,
    every: bool,
    usual: int | None = None,
) -> Resumed:
    """Compute pieces of the file again.

    Args:
        disagreements: yields, for pieces by their places, what does not agree with the file.
        gate: a demand on a share rests on the records that meet it.
        every: a checkpoint's evidence rests on all records.
        usual: how many pieces are drawn in any case; None for `usual_draws`.

    Raises:
        DataError: a record does not agree.
    """
    chosen = places_to_repeat([piece.hits for piece in pieces], gate, every, usual)
    for problem in disagreements(chosen):
        raise errors.DataError(problem, HINT)
    counts = [piece.records for piece in pieces]
    return Resumed(sum(counts), sum(counts[place] for place in chosen))


def places_to_repeat(
    hits: Sequence[int], gate: bool, every: bool, usual: int | None = None
) -> list[int]:
    """Return the places of the pieces that are computed again, ascending."""
    places = range(len(hits))
    if every:
        return list(places)
    count = usual_draws(len(hits)) if usual is None else usual
    drawn = random.SystemRandom().sample(places, min(count, len(hits)))
    resting = [place for place in places if hits[place]] if gate else []
    return sorted({*drawn, *resting})


def usual_draws(count: int) -> int:
    """Return the number of pieces, out of `count`, to compute again where nothing rests on them."""
    return min(count, max(FEW, min(ENOUGH, round(USUAL * count))))
