"""Names of image files: beside their indexes wherever a dataset is a folder, and hostile ones stay
text.
"""

import json
import os
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets, folders
from tests.helpers.commands import attempt, console, document

HOSTILE = ("=1+2.png", "<script>$\\x$.png", "a\x1b[31m\n\u202eb.png", os.fsdecode(b"\xff.png"))
"""A formula, a tag and mathematics, escapes, bytes that are no text."""
SHOWN = ("=1+2.png", "<script>$\\x$.png", "a\\x1b[31m\\n\\u202eb.png", "\\udcff.png")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, certified: Checkpoint) -> Path:
    """Digits as files below test/CLASS; the first four have hostile names."""
    root = tmp_path_factory.mktemp("pictures") / "digits files"
    images = datasets.load_dataset("digits", certified.record.input, "test").limit(30)
    names = iter(HOSTILE)
    pairs = sorted(
        zip(*images.tensors(), strict=True), key=lambda pair: int(pair[1])
    )  # class 0 has three of the names
    for index, (pixels, label) in enumerate(pairs):
        folder = root / "test" / str(int(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels[0] * 255).round().byte().numpy()).save(
            folder / next(names, f"{index}.png"), "PNG"
        )
    return root


@pytest.fixture(scope="module")
def records(workshop: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named") / "certified.jsonl"
    document(
        "certify", workshop / "certified.safetensors", "--dataset", pictures, "--records", made
    )
    return made


def rows_of(records: Path) -> list[dict]:
    return [json.loads(line) for line in records.read_text().splitlines()[1:]]


def test_names_are_relative_printable_and_short(
    pictures: Path, certified: Checkpoint, tmp_path: Path
) -> None:
    images = datasets.load_dataset(str(pictures), certified.record.input)
    names = images.file_of
    assert list(names) == list(range(30))
    assert all(name.isprintable() and name.startswith("test/") for name in names.values())
    assert {name.split("/", 2)[2] for name in names.values()} >= set(SHOWN)
    part = images.limit(7)
    assert part.file_of == {index: names[index] for index in part.indices.tolist()}
    assert part.select([3]).file_of == {int(part.indices[3]): names[int(part.indices[3])]}
    below = datasets.load_dataset(str(pictures / "test"), certified.record.input)
    assert {index: f"test/{name}" for index, name in below.file_of.items()} == names
    assert datasets.load_dataset("digits", certified.record.input).file_of == {}
    deep = Path(*["d" * 200] * 4)
    for label in "ab":
        (tmp_path / label / deep).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / label / deep / "x.png")
    long = datasets.load(str(tmp_path), certified.record.input).file_of.values()
    assert {len(name) for name in long} == {folders.LONGEST_NAME}
    assert all(name.startswith("…") and name.endswith("/x.png") for name in long)


def test_records_name_their_files_and_an_edited_name_is_refused(
    workshop: Path, pictures: Path, records: Path, tmp_path: Path
) -> None:
    checkpoint = workshop / "certified.safetensors"
    rows = rows_of(records)
    about = (checkpoint, "--dataset", pictures)
    assert all(
        pictures.joinpath(row["file"]).is_file()
        for row in rows
        if row["file"].rpartition("/")[2].isalnum()
    )
    assert {row["file"].rpartition("/")[2] for row in rows} >= set(SHOWN)
    named = {row["index"]: row["file"] for row in rows}
    assert all(
        named[claim["number"]] in claim["entry"]
        for claim in document("verify", records, *about, "--sample", 2)["claims"]
    )
    attacked = tmp_path / "attacked.jsonl"
    words = (
        "attack",
        checkpoint,
        "--dataset",
        pictures,
        "-a",
        "fgsm",
        "-e",
        2,
        "--no-checks",
        "--records",
        attacked,
    )
    document(*words, "--gallery", tmp_path / "gallery.svg")  # a name with dollars is no mathematics
    assert (tmp_path / "gallery.svg").stat().st_size > 10_000
    assert [row["file"] for row in rows_of(attacked)] == [row["file"] for row in rows]
    # a folder of splits and one of them are the same images
    document(
        "attack",
        checkpoint,
        "--dataset",
        pictures / "test",
        "-a",
        "fgsm",
        "--only-certified",
        records,
        "--no-checks",
    )
    edited = tmp_path / "edited.jsonl"
    old = tmp_path / "old.jsonl"
    edited.write_text(records.read_text().replace(rows[9]["file"], "test/0/other.png"))
    old.write_text("".join(json.dumps({k: v for k, v in json.loads(line).items() if k != "file"}) + "\n"
                           for line in records.read_text().splitlines()))  # fmt: skip
    failure = attempt("verify", edited, *about).exception
    assert "image 9 is test/0/other.png; its pixels are those of test/" in str(failure)
    assert document("verify", old, *about, "--sample", 1)["counts"]["refuted"] == 0


def test_an_audit_names_files_and_hostile_names_stay_text(
    workshop: Path, pictures: Path, tmp_path: Path
) -> None:
    made = {kind: tmp_path / f"audit.{kind}" for kind in ("json", "html")}
    reports = [word for path in made.values() for word in ("--report", path)]
    words = (
        "audit",
        workshop / "certified.safetensors",
        "--dataset",
        pictures,
        "-e",
        2,
        "-a",
        "fgsm",
        "--limit",
        12,
    )
    done = console(*words, *reports)
    assert done.code == 0, done.err
    found = json.loads(made["json"].read_text())["records"]
    names = {row["file"] for row in found}
    page = made["html"].read_text()
    captions = [
        unescape(text.partition("</figcaption>")[0])
        for text in page.split("<figcaption>image ")[1:]
    ]
    assert captions
    assert all(text.partition(" (")[2].partition("): ")[0] in names for text in captions)
    assert "<script>" not in page + done.out
    assert not {"\x1b", "\u202e"} & {*page, *done.out, *done.err}
