"""Types docs/tutorial.md again and writes what came back: `python examples/tutorial.py`, or `make
tutorial`.

The README's picture of an answer is drawn again as well: `--picture` draws nothing else.

A block of ```console holds commands ("$ certvit ...") and, below each, its output at 80 columns:
what a terminal shows, notes included, progress left out. The commands run in one folder, in the
page's order; figures that the page shows are copied to docs/img/.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"^epoch \d+, step .*\n", re.MULTILINE)
"""Lines that tell how far a run is: how many there are depends on the machine."""

ANSWER = "certvit audit certvit/digits --time-budget 60s"
"""What the picture of the README shows."""
WIDTH = 92
"""Columns of that picture."""


def run(command: str, folder: Path, columns: int = 80) -> str:
    """What a terminal of so many columns shows."""
    environment = {**os.environ, "COLUMNS": str(columns)}
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


def picture(command: str, output: str) -> str:
    """Return the first parts of what a command answered, as the SVG of a terminal: the words, the
    paragraph behind them, and the table.
    """
    parts = output.strip().split("\n\n")
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {command}\n", style="bold green"))
    text = "\n\n".join(parts[:3])
    end = re.search(r"^(How large|For comparison|Next: )", text, re.MULTILINE)
    verdict = text[: end.start() if end else 0]
    console.print(Text(verdict, style="bold"), Text(text.removeprefix(verdict)), sep="")
    # no fonts from a server: any monospaced one
    form = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="certvit", code_format=form, unique_id="answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=DOCS / "tutorial.md")
    parser.add_argument("--folder", type=Path, help="keep the files here; an empty folder")
    parser.add_argument(
        "--only",
        default="",
        help="type only commands that begin so, in the --folder of an earlier run",
    )
    parser.add_argument("--picture", action="store_true", help="draw the README's picture alone")
    asked = parser.parse_args()
    page = asked.page.read_text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        answer = run(ANSWER, folder, WIDTH)
        (DOCS / "img" / "answer.svg").write_text(picture(ANSWER, answer))
        if asked.picture:
            return
        written = typed_again(page, folder, asked.only)
        asked.page.write_text(written)
        for name in re.findall(r"\]\(img/([\w.-]+)\)", page):
            shutil.copyfile(folder / name, DOCS / "img" / name)


if __name__ == "__main__":
    main()
