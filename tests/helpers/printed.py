"""Commands that certvit prints, and the same on small networks: what a reader pastes is typed by a
test.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from certcli.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/howto/*.md",
    "docs/tutorial.md",
    "docs/audit.md",
    "docs/patch.md",
    "docs/smoothing.md",
)
"""Whose commands are typed end to end; those of the others are parsed (`tests/project/test_docs.py`)."""


@dataclass(frozen=True)
class Printed:
    """A command and the page, help or hint that prints it."""

    where: str
    line: str


def of_pages() -> list[Printed]:
    """Return the commands in the code blocks of PAGES, continued lines joined."""
    found: dict[str, str] = {}
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            blocks = re.findall(
                r"^```(?:console)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
            )
            for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
                match = re.match(r"(?:\$ )?(certvit [a-z]+\b[^#]*)", line)
                if match:
                    found.setdefault(" ".join(match[1].split()), page.name)
    return [Printed(where, line) for line, where in found.items()]


def of_helps() -> list[Printed]:
    """Return the examples at the end of each `--help`."""
    found = []
    for name, command in COMMANDS.items():
        for line in getattr(command, "epilog", "").splitlines():
            if line.strip().startswith("certvit "):
                found.append(Printed(f"{name} --help", line.strip()))
    return found


def of_ci() -> list[Printed]:
    """Return the audits of the CI examples, as GitHub runs them."""
    text = (ROOT / "examples" / "ci" / "github.yml").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ +(certvit audit [^|\n]*)", text, re.MULTILINE)
    return [Printed("github.yml", " ".join(line.split())) for line in lines]


PHOTO = ("vit_tiny_patch16_224", "tuned.safetensors", "small_photo")
CERTIFIED = ("certified", "audited", "constrain")
NOT_HERE = {
    "--member": "needs two trained networks (tests/nn/test_mean_network.py)",
    "--pretrained": "fetches weights from the hub",
    "--arch": "a downloaded file (tests/models/test_open.py)",
    "--norm patch": "looks for patches at many places (tests/cli/test_patch.py)",
    "--target": "searches for a minute (tests/constrain/test_targets.py)",
    "doctor": "looks at the whole installation (tests/cli/test_help.py)",
}
"""What is parsed only, with its reason."""
SHORT = {
    "finetune": ("--epochs", "1", "--limit", "20", "--batch-size", "10"),
    "adapt": ("--limit", "20", "--epochs", "1"),
    "constrain": ("--limit", "20"),
    "audit": ("--limit", "2", "--time-budget", "1s"),
    "certify": ("--limit", "2"),
    "attack": ("--limit", "2", "--no-checks"),
}
"""Options that make a command short, in place of its own."""
GIVEN = {"--dataset": "", "--band-width": "1", "--precision": "float32", "--head": "8,8"}
"""Options with another value here; the images of the network's kind where it is empty."""
SMALLER = {
    "flip,bands:3,cutout-random:2x96": "flip,bands:3,cutout-random:2x16",
}
"""Words that name places in images of 224 pixels, and the same for 64."""
LENGTHS = (
    "--epochs",
    "--steps",
    "--limit",
    "--time-budget",
    "--batch-size",
    "--data-dir",
    "--sample",
    "--split",
)


def once(printed: list[Printed]) -> list[Printed]:
    """Return those that are not the same once they are shortened."""
    names = ("photo", "plain", "certified", "folder", "photos")
    files = {name: Path(name) for name in names}
    kept: dict[str, Printed] = {}
    for each in printed:
        words = [each.line] if reason(each.line) else shortened(each.line, files)
        outputs = [
            "o" if before in ("-o", "--html") else word for before, word in pairwise(["", *words])
        ]
        kept.setdefault(shlex.join(outputs), each)
    return list(kept.values())


def reason(line: str) -> str | None:
    """Return why a command is not typed here; None where it is."""
    return next((why for words, why in NOT_HERE.items() if words in line), None)


def shortened(line: str, files: dict[str, Path]) -> list[str]:
    """Return the words of the same command on a small network of its kind, made short.

    Args:
        files: networks "photo", "plain" and "certified"; "folder" of labelled photos, "photos"
            without labels.
    """
    words = shlex.split(line.replace("[", "").replace("]", ""))[1:]
    words = words[: words.index(">")] if ">" in words else words
    command = words[0]
    photo = any(name in line for name in PHOTO) or "photos/" in line
    network = "photo" if photo else "plain"
    if any(name in words[1] for name in CERTIFIED) or "--loss margin" in line:
        network = "certified"
    data = str(files["folder"]) if photo else "digits"
    kept = [command]
    position = 1
    while position < len(words):
        word = words[position]
        if word in LENGTHS:
            position += 2
        elif word in GIVEN:
            kept += [word, GIVEN[word] or data]
            position += 2
        else:
            is_network = word.endswith(".safetensors") or word in PHOTO or "$CHECKPOINT" in word
            before = words[position - 1]
            if is_network and before not in ("-o", "--output"):
                word = str(files["plain" if before == "--compare" else network])
            if word in ("PHOTOS", "FOLDER", "photo.jpg"):
                word = str(files["photos"])
            kept.append(SMALLER.get(word, word))
            position += 1
    if command == "predict" and network == "plain":
        kept = [str(files["photo"]) if word == str(files["plain"]) else word for word in kept]
    needs = command in ("finetune", "certify", "attack")
    if needs and "--dataset" not in kept:
        kept += ["--dataset", data]
    if "smoothing" in kept:
        kept += ["--n0", "4", "-n", "40"]
    short = SHORT.get(command, ())
    if "local" in kept:
        short = ("--limit", "1")
    return [*kept, *(() if "--list" in kept else short)]
