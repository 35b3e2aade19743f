"""Names that are there and cannot be read."""

import os
from collections.abc import Callable
from pathlib import Path


def write_a_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a terabyte": write_a_terabyte,
    "a pipe": os.mkfifo,
    "a broken link": lambda path: path.symlink_to("no-such-file"),
    "a folder": Path.mkdir,
}
"""What makes each at a path. A folder is the last: some readers look for folders themselves."""
