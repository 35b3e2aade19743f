"""Pointers of git-lfs: a text of three lines where a file of weights should be."""

import re
from pathlib import Path

from certcli.system.errors import CheckpointError, Refused
from certcli.system.reading import open_regular

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024
"""Bytes of a pointer at most, as its specification says."""


def require_no_pointer(path: Path) -> None:
    """Raise CheckpointError for a pointer, with the size of the file that it stands for."""
    try:
        with open_regular(path) as file:
            text = file.read(_LONGEST)
    except (OSError, Refused):
        return  # reading the file raises the error
    if not text.startswith(_BEGINNING):
        return
    size = re.search(rb"^size (\d{1,15})$", text, re.MULTILINE)
    size_text = "" if size is None else f" of {int(size[1]):,} bytes"
    raise CheckpointError(
        f"{path} is a pointer of git-lfs, not the file{size_text} that it stands for",
        "fetch the file itself: git lfs install, then git lfs pull in that folder, or `hf download OWNER/NAME`",
    )
