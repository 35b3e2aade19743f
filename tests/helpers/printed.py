"""Commands that certvit prints, and the same on small networks: what a reader pastes is typed by a
test.
"""

import ast
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from certcli.cli.main import COMMANDS, program
from tests.helpers.commands import built_program

ROOT = Path(__file__).parents[2]
FIRST_PAGES = (
    "README.md",
    "docs/howto/*.md",
    "docs/tutorial.md",
    "docs/audit.md",
    "docs/patch.md",
    "docs/smoothing.md",
)
"""Whose commands the quick tests type; `make test-commands` types those of every page."""
SCRIPTS = ("proven_vit.sh",)
OTHER_PAGES = ("CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", "docs/**/*.md")
GENERATED = ("docs/commands.md", "docs/tables.md")
"""From the commands themselves, and from rows that other tests run."""
BLOCK = re.compile(
    r"^```(?:console|bash|sh)?\n(.*?)^```|((?:^ {4}.*\n)+)", re.DOTALL | re.MULTILINE
)
INLINE = re.compile(r"(?<!`)`(certvit [a-z]+ [^`]+)`(?!`)")
COMMAND = re.compile(r"\s*(?:\$ )?(certvit [a-z]+\b[^#|]*)")
MENTIONED = re.compile(r"certvit ([a-z]+)((?: +[^\s`]+)*)")


@dataclass(frozen=True)
class Printed:
    """A command and the page, help or hint that prints it."""

    where: str
    line: str


def pages_of(patterns: tuple[str, ...]) -> list[Path]:
    pages = [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]
    return [page for page in pages if page.relative_to(ROOT).as_posix() not in GENERATED]


def of_pages(pages: list[Path]) -> list[Printed]:
    """Return the commands in code blocks, continued lines joined, and those between backticks."""
    lines: dict[str, str] = {}
    for page in pages:
        text = page.read_text()
        blocks = "\n".join("".join(block) for block in BLOCK.findall(text))
        commands = map(COMMAND.match, blocks.replace("\\\n", " ").splitlines())
        found = [match[1] for match in commands if match]
        found += [line.partition("|")[0] for line in INLINE.findall(BLOCK.sub("", text))]
        for line in found:
            lines.setdefault(" ".join(line.split()), page.name)
    lines = {line: where for line, where in lines.items() if line.split()[1] in COMMANDS}
    return [Printed(where, line) for line, where in lines.items()]


def of_code() -> list[Printed]:
    """Return the commands that strings of the code name (hints, notes, messages), as far as they are
    words of a command: prose may follow.
    """
    commands = built_program(program()).commands
    lines: dict[str, str] = {}
    for path in sorted((ROOT / "certcli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if "(?P<" in node.value:  # a pattern, no sentence
                continue
            for name, words in MENTIONED.findall(" ".join(node.value.split())):
                if name in commands:
                    typed = words_of(words.split(), commands[name])
                    lines.setdefault(" ".join(["certvit", name, *typed]), path.name)
    return [Printed(where, line) for line, where in lines.items() if len(line.split()) > 2]


PLACES = ("...", "CKPT", "OUTPUT", "FOLDER", "PHOTOS")


def words_of(words: list[str], command: Any) -> list[str]:
    """Return the first words that are a command's: names of files, options and their values."""
    flags = {
        name: getattr(option, "is_flag", False) for option in command.params for name in option.opts
    }
    taken: list[str] = []
    value = False
    for word in words:
        bare = word.rstrip(",.;:)'\"")
        place = bare in PLACES or bare.endswith((".safetensors", ".jsonl", ".jpg"))
        quoted = any(mark in word for mark in "\"'")
        if quoted or not (value or word.startswith("-") or place or word == "..."):
            break
        taken.append(word if word == "..." else bare)
        value = bare.startswith("-") and not flags.get(bare, False)
        if bare != word and word != "...":
            break
    return taken[:-1] if value else taken


def of_helps() -> list[Printed]:
    """Return the examples at the end of each `--help`."""
    found = []
    for name, command in COMMANDS.items():
        for line in getattr(command, "epilog", "").splitlines():
            if line.strip().startswith("certvit "):
                found.append(Printed(f"{name} --help", line.strip()))
    return found


def of_examples() -> list[Printed]:
    """Return the commands of the example scripts that need no data of others."""
    lines = []
    for name in SCRIPTS:
        text = (ROOT / "examples" / name).read_text().replace("\\\n", " ")
        found = re.findall(r"^(certvit [^|>\n]*)", text, re.MULTILINE)
        lines += [Printed(name, " ".join(line.split())) for line in found]
    return lines


def of_ci() -> list[Printed]:
    """Return the audits of the CI examples, as GitHub runs them."""
    text = (ROOT / "examples" / "ci" / "github.yml").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ +(certvit audit [^|\n]*)", text, re.MULTILINE)
    return [Printed("github.yml", " ".join(line.split())) for line in lines]


PHOTO = ("vit_tiny_patch16_224", "vit_cifar10_p4_d128_l6_h4", "tuned.safetensors", "small_photo")
CERTIFIED = ("certified", "audited", "constrain")
NOT_HERE = {
    "certvit merge": "needs an adapter (tests/models/test_adapters.py)",
    "--member": "needs two trained networks (tests/nn/test_networks.py)",
    "--pretrained": "fetches weights from the hub",
    "--arch ": "a downloaded file (tests/models/test_open.py)",
    "--norm patch": "looks for patches at many places (tests/cli/test_patch.py)",
    "doctor": "looks at the whole installation (tests/cli/test_help.py)",
    "--denoiser": "needs a denoiser (tests/certify/test_denoisers.py)",
    "--shard-size": "a folder of shards (tests/checkpoint/test_shards.py)",
    "--device cuda": "needs a GPU",
    "local-lip": "a chain of layers (tests/cli/test_pipeline.py)",
    "bcp": "a chain of layers (tests/cli/test_pipeline.py)",
    "ibp_3_3_8": "a file of VNN-COMP (tests/nn/test_networks.py)",
}
"""What is parsed only, with its reason."""
SHORT = {
    "finetune": ("--epochs", "1", "--limit", "20", "--batch-size", "10"),
    "adapt": ("--limit", "20", "--epochs", "1"),
    "constrain": ("--limit", "20"),
    "audit": ("--limit", "2", "--time-budget", "1s"),
    "certify": ("--limit", "2"),
    "attack": ("--limit", "2", "--no-checks"),
    "lipschitz": ("--limit", "1"),
}
"""Options that make a command short, in place of its own."""
GIVEN = {
    "--dataset": "",
    "--enough": "0.1",
    "--precision": "float32",
    "--head": "8,8",
}
"""Options with another value here; the images of the network's kind where it is empty."""
SMALLER = {
    "voting:4": "voting:1",
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


def unknown_options(line: str) -> list[str]:
    """Return the options of a command line that its command does not have."""
    name, *words = line.replace("[", " ").replace("]", " ").split()[1:]
    command = built_program(program()).commands[name]
    options = {opt for option in command.params for opt in (*option.opts, *option.secondary_opts)}
    named = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return sorted(set(named) - options - {"-h", "--help"})


def is_form(line: str) -> bool:
    """Whether a line shows how a command is written, with words that stand for others, or names an
    option without a network.
    """
    if line.split()[2:3] != ["--list"] and re.match(r"certvit [a-z]+ -", line):
        return True
    return (
        re.search(r"\[|\b(NAME|N|R|K|A|B|ARCH|FILE|REPORT|LIST|shows)\b|--help", line) is not None
    )


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
    if command != "init" and (len(words) == 1 or words[1].startswith("-")):
        words.insert(1, "...")
    if command == "predict" and words[1] == "...":  # a network and images
        words.insert(2, "PHOTOS")
    photo = any(name in line for name in PHOTO) or "photos/" in line or "--patch 32" in line
    network = "photo" if photo else "plain"
    if any(name in words[1] for name in CERTIFIED) or "--loss margin" in line:
        network = "certified"
    if command == "finetune" and "--loss" not in line:  # whose default needs a finite bound
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
                word = str(files[network])
            if word in ("CKPT", "OUTPUT", "..."):
                word = str(files[network])
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
        kept += ["--n0", "8", "-n", "60"]
    short = SHORT.get(command, ())
    if "local" in kept and command == "certify":
        short = ("--limit", "1")
    return [*kept, *(() if "--list" in kept else short)]
