"""Types docs/tutorial.md again and writes what came back: `python examples/tutorial.py`, or `make tutorial`.

A block of ```console holds commands ("$ certvit ...") and, below each, its output at 80 columns: what a terminal shows,
notes included, progress left out. The commands run in one folder, in the page's order; figures that the page shows are
copied to docs/img/.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"^epoch \d+, step .*\n", re.MULTILINE)
"""Lines that tell how far a run is: how many there are depends on the machine."""


def commands(page: str) -> Iterator[str]:
    """What the reader types, in order."""
    for block in BLOCK.findall(page):
        yield from re.findall(r"^\$ (.+)$", block, re.MULTILINE)


def run(command: str, folder: Path) -> str:
    """What a terminal of 80 columns shows."""
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}\nexit {done.returncode}")
    return "".join(f"{line.rstrip()}\n" for line in PROGRESS.sub("", done.stdout).splitlines())


def typed_again(page: str, folder: Path) -> str:
    """The page with the outputs of this run."""
    started = time.perf_counter()

    def block(found: re.Match[str]) -> str:
        shown = [f"$ {command}\n{run(command, folder)}" for command in commands(found.group(0))]
        return "```console\n" + "\n".join(shown) + "```"

    written = BLOCK.sub(block, page)
    minutes = (time.perf_counter() - started) / 60
    return re.sub(r"(took )\S+( minutes)", rf"\g<1>{minutes:.1f}\g<2>", written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=DOCS / "tutorial.md")
    parser.add_argument("--folder", type=Path, help="keep the files here; an empty folder")
    asked = parser.parse_args()
    page = asked.page.read_text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        asked.page.write_text(typed_again(page, folder))
        for name in re.findall(r"\]\(img/([\w.-]+)\)", page):
            shutil.copyfile(folder / name, DOCS / "img" / name)


if __name__ == "__main__":
    main()
