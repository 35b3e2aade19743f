"""Files that are no images are left out and counted; what macOS writes beside an image is none."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from certcli.checkpoint.record import InputSpec
from certcli.images.folders import image_files, load_folder

SPEC = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize("classes", [("a", "b"), ()])
def test_files_left_out_are_counted(tmp_path: Path, classes: tuple[str, ...]) -> None:
    for folder in [tmp_path / name for name in classes] or [tmp_path]:
        folder.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 100).save(folder / "1.png")
        (folder / "._1.png").write_bytes(b"\0\5\x16\7Mac OS X")
        (folder / "notes.gif").write_bytes(b"GIF89a")
    images = load_folder(tmp_path, SPEC, None)
    count = max(1, len(classes))
    assert len(images) == count
    assert torch.allclose(images.tensors()[0], torch.tensor(100 / 255))
    assert f"{count} of {3 * count} files are images (left out: ._1.png, ...)" in images.note
    files, _, note = image_files([tmp_path])  # of predict
    assert [path.name for path in files] == ["1.png"] * count
    assert note in images.note
    assert note


def test_a_folder_of_images_alone_says_nothing(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 100).save(tmp_path / "1.png")
    assert load_folder(tmp_path, SPEC, None).note == ""


@pytest.mark.parametrize("name", ["metadata.csv", "train.json", "list.TXT", "x.parquet"])
@pytest.mark.parametrize("where", [".", "images"])
def test_files_that_may_state_labels_are_named(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / where).mkdir(exist_ok=True)
    Image.new("L", (8, 8), 100).save(tmp_path / where / "1.png")
    (tmp_path / name).write_text("1.png,0")
    note = load_folder(tmp_path, SPEC, None).note
    assert f"{name} is not read: labels come from class folders, or from labels.csv" in note


def test_a_table_beside_a_folder_of_images_is_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 8), 100).save(tmp_path / "images" / "1.png")
    (tmp_path / "labels.csv").write_text("file,class\nimages/1.png,cat\n")
    images = load_folder(tmp_path, SPEC, None)
    assert images.classes == ("cat",)
    assert images.note == "the labels of images are those of labels.csv"
