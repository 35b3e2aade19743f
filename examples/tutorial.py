"""Types docs/tutorial.md again and writes what came back: `python examples/tutorial.py`, or `make
tutorial`.

The answers of `certvit audit`, in words, go into the README as well.

A block of ```console holds commands ("$ certvit ...") and, below each, its output at 80 columns:
what a terminal shows, notes included, progress left out. The commands run in one folder, in the
page's order; figures that the page shows are copied to docs/img/.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"^epoch \d+, step .*\n", re.MULTILINE)
"""Lines that tell how far a run is: how many there are depends on the machine."""

ANSWERS_IN_README = r"(trained for proofs:\n\n```\n).*?(\n```)"


def run(command: str, folder: Path) -> str:
    """What a terminal of 80 columns shows."""
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}\nexit {done.returncode}")
    return "".join(f"{line.rstrip()}\n" for line in PROGRESS.sub("", done.stdout).splitlines())


def typed_again(page: str, folder: Path, only: str = "") -> str:
    """The page with the outputs of this run; only: of the commands that begin with it, in the
    folder of an earlier run.
    """
    started = time.perf_counter()

    def block(match: re.Match[str]) -> str:
        shown = []
        for part in re.split(r"^\$ ", match.group(1), flags=re.MULTILINE)[1:]:
            command, _, before = part.partition("\n")
            is_run = command.startswith(only)
            shown.append(
                f"$ {command}\n{run(command, folder) if is_run else before.rstrip() + chr(10)}"
            )
        return "```console\n" + "\n".join(shown) + "```"

    written = BLOCK.sub(block, page)
    if only:
        return written
    minutes = (time.perf_counter() - started) / 60
    used = os.times()
    cpu = (used.children_user + used.children_system) / 60
    times = rf"\g<1>{minutes:.1f}\g<2>{cpu:.1f}\g<3>"
    return re.sub(r"(took )\S+( minutes by the clock, )\S+( of\s)", times, written)


def answers(page: str) -> str:
    """Return what `certvit audit` answered first about each network, a paragraph each."""
    parts = []
    for block in BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE):
            if part.startswith("certvit audit "):
                words = re.search(
                    r"^images: .*?\n(.*?)(?=^For comparison|^Next: )",
                    part,
                    re.DOTALL | re.MULTILINE,
                )
                parts.append(textwrap.fill(" ".join(words.group(1).split()), 118) if words else "")
    return "\n\n".join(parts)


def answered(readme: str, page: str) -> str:
    """The README with these answers in its first block of them."""
    return re.sub(
        ANSWERS_IN_README,
        lambda match: match.group(1) + answers(page) + match.group(2),
        readme,
        count=1,
        flags=re.DOTALL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=DOCS / "tutorial.md")
    parser.add_argument("--folder", type=Path, help="keep the files here; an empty folder")
    parser.add_argument(
        "--only",
        default="",
        help="type only commands that begin so, in the --folder of an earlier run",
    )
    asked = parser.parse_args()
    page = asked.page.read_text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        written = typed_again(page, folder, asked.only)
        asked.page.write_text(written)
        README.write_text(answered(README.read_text(), written))
        for name in re.findall(r"\]\(img/([\w.-]+)\)", page):
            shutil.copyfile(folder / name, DOCS / "img" / name)


if __name__ == "__main__":
    main()
