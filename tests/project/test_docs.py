"""What is documented exists, and what exists is documented."""

import csv
import functools
import html
import re
import shlex
from pathlib import Path

import pytest
import typer

from certcli.attack import catalogue
from certcli.certify.methods import METHODS as CERTIFICATES
from certcli.cli.audit.command import METHODS
from certcli.cli.doctor import command as doctor
from certcli.cli.main import COMMANDS, program
from certcli.cli.shared.reference import reference
from certcli.constrain.settings import PENALTIES
from certcli.finetune.losses import LOSSES
from certcli.nn.surgery import REPLACEMENTS
from certcli.system import errors
from certcli.system.registry import Registry
from tests.helpers.lipschitz_cases import RULES

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
AT_THE_ROOT = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*DOCS, *(ROOT / name for name in AT_THE_ROOT)]
REGISTRIES = [catalogue.ATTACKS, CERTIFICATES, PENALTIES, LOSSES, REPLACEMENTS]


def test_the_reference_page_is_the_commands() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == reference(COMMANDS), (
        "run: python -m certcli.cli.shared.reference > docs/commands.md"
    )


@functools.cache
def _repository() -> dict[Path, str]:
    """Return its texts, but this file, which names what stands nowhere."""
    return {
        path.relative_to(ROOT): path.read_text(errors="ignore")
        for path in ROOT.rglob("*")
        if path.suffix in (".py", ".md", ".toml", ".sh", ".yml", "")
        and path.is_file()
        and path.name not in ("LICENSE", "test_docs.py")
        and not any(part.startswith((".", "demo-output")) for part in path.relative_to(ROOT).parts)
    }


NOWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "a merge that was left undone": (r"^(<<<<<<<|>>>>>>>) ", ()),
    # a stranger's `certcli.py` in the current folder would run; modules inside are for clones
    "the package run by its name": (
        r"-m certcli(?![.\w])",
        ("tests/", "benchmarks/", "certcli/__main__.py"),
    ),
    "a path of a machine": (r"/(home|root|work|Users)/", ()),
}
"""A fault -> its pattern, and where it is none."""


@pytest.mark.parametrize("fault", NOWHERE)
def test_no_file_holds(fault: str) -> None:
    pattern, elsewhere = NOWHERE[fault]
    faulty = re.compile(pattern, re.MULTILINE)
    assert len(_repository()) > 500
    found = [path.as_posix() for path, text in _repository().items() if faulty.search(text)]
    assert [path for path in found if not path.startswith(elsewhere)] == []


def test_several_processes_run_the_installed_command() -> None:
    assert "--no-python certvit" in (ROOT / "docs" / "several-processes.md").read_text()


def test_every_page_is_in_the_index() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS} - {"README.md"}
    assert pages == set(
        re.findall(r"\]\((\w[\w/-]*\.md)\)", (ROOT / "docs" / "README.md").read_text())
    )
    shown = set(re.findall(r": ([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert shown - pages == set(AT_THE_ROOT)  # a page of no section stands under "More"


def test_every_test_that_a_page_names_exists() -> None:
    text = "\n".join(_sources("tests").values())
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(test_\w+)(?:\.py)?`", page.read_text()):
            assert f"def {name}(" in text or (ROOT / "tests" / f"{name}.py").exists(), (
                f"{page.name} names {name}"
            )


def test_cells_that_are_no_page_are_linked_and_rectangular() -> None:
    texts = {page: page.read_text() for page in DOCS}
    linked = {
        page.parent / name
        for page, text in texts.items()
        for name in re.findall(r"^\[([\w/-]+\.csv)\]", text, re.MULTILINE)
    }
    assert linked == set((ROOT / "docs").rglob("*.csv"))
    for path in linked:
        with path.open(newline="") as file:
            assert len({len(row) for row in csv.reader(file)}) == 1, path


def _anchors(page: str) -> set[str]:
    """GitHub's names of a page's headings: lower case, no punctuation, spaces as hyphens; a second
    one gets -1.
    """
    found: list[str] = []
    for title in re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE
    ):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert linked == ROOT or ROOT in linked.parents, (
            f"{page.name} links to {target}, outside of the repository"
        )
        if anchor:
            assert anchor in _anchors(linked.read_text()), (
                f"{page.name} links to {target}: no such heading"
            )


def typed_commands(page: Path) -> list[str]:
    """Return everything that begins with certvit in a code block, continued lines joined."""
    blocks = re.findall(r"^```(?:console)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [
        " ".join(match[1].split())
        for line in lines
        if (match := re.match(r"(?:\$ )?(certvit [^#]*)", line))
    ]


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_command_that_a_page_types_is_one(page: Path) -> None:
    """It parses: its command, its options and the values that are checked there; nothing is run."""
    commands = typer.main.get_command(program()).commands
    for line in typed_commands(page):
        words = shlex.split(line.replace("[", "").replace("]", "").removesuffix("&"))
        words = words[: words.index(">")] if ">" in words else words
        with commands[words[1]].make_context(words[1], words[2:], resilient_parsing=False):
            pass


def test_the_tutorial_shows_an_output_below_every_command() -> None:
    blocks = re.findall(
        r"```console\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL
    )
    shown = [
        part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part
    ]
    assert len(shown) > 10
    assert [part for part in shown if not part.partition("\n")[2].strip()] == []


def test_the_readme_is_short_and_shows_an_answer() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
    picture = html.unescape((ROOT / "docs" / "img" / "answer.svg").read_text()).replace("\xa0", " ")
    assert "http" not in picture.replace("http://www.w3.org", "")
    assert "certvit audit certvit/digits" in picture
    assert "keep their class" in picture


def test_lines_outside_tables_can_be_read_in_a_terminal() -> None:
    lines = [
        (page, line)
        for page in DOCS
        if page.name != "architectures.md"
        for line in page.read_text().splitlines()
    ]
    assert [found for found in lines if len(found[1]) > 126 and not found[1].startswith("|")] == []


def _sources(*folders: str) -> dict[Path, str]:
    return {
        path: path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def listed_items(label: str) -> list[str]:
    """What the lines "*label:* a, b." of docs/bounds.md name, one item a name."""
    lists = re.findall(
        rf"\*{label}:\*\s(.*?)(?:\.\s|\.?$)(?=\*|\n|$)",
        (ROOT / "docs" / "bounds.md").read_text(),
        re.DOTALL,
    )
    assert lists, f"no theorem has a line '*{label}:*'"
    return [item for text in lists for item in re.split(r"[,;]\s+", " ".join(text.split()))]


def test_every_cited_theorem_has_its_number() -> None:
    page = (ROOT / "docs" / "bounds.md").read_text()
    numbers = set(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", page, re.MULTILINE))
    cited = r"(?:Theorems?|Lemma|bounds\.md,(?: sections?)?) (\d+(?:\.\d+)?)(?:(?: to |, | / | and )(\d+\.\d+))*"
    found = 0
    for path, text in _sources("certcli", "tests").items():
        for match in re.finditer(cited, text):
            before = text[max(0, match.start() - 60) : match.start()]
            if re.search(r"(\d{4}, |Higham\W.{0,40}|SpecFormer\W.{0,40})$", before):
                continue  # a theorem of theirs
            for number in filter(None, match.groups()):
                found += 1
                assert number in numbers, (
                    f"{path.name} cites {match.group()}, which docs/bounds.md does not have"
                )
    assert found > 10


def test_functions_that_apply_a_theorem_exist() -> None:
    """`file.function`, the file without its folder; `file.py` for a whole one; the file of the
    first holds for the next.
    """
    sources: dict[str, str] = {}
    for path, text in _sources("certcli").items():
        sources[path.stem] = sources.get(path.stem, "") + text
    stem = ""
    for name in re.findall(r"`([\w.]+)`", " ".join(listed_items("Code"))):
        head, _, last = name.rpartition(".")
        if last == "py":
            assert head in sources, f"docs/bounds.md names {name}"
            continue
        stem = head or stem
        assert re.search(rf"^ *(def|class) {last}\b", sources.get(stem, ""), re.MULTILINE), (
            f"docs/bounds.md names {name}"
        )


def test_every_theorem_names_its_rows_and_every_row_has_its_theorem() -> None:
    rows = [
        name for item in listed_items("Rows") for name in re.findall(r"^`?([a-z0-9-]+)`?$", item)
    ]
    assert rows
    assert set(rows) <= set(RULES), f"docs/bounds.md names {sorted(set(rows) - set(RULES))}"
    assert set(RULES) <= set(rows), (
        f"no theorem of docs/bounds.md names the rows {sorted(set(RULES) - set(rows))}"
    )


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {str(kind.code) for kind in kinds if issubclass(kind, errors.CertvitError)} <= set(
        re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    )


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_registered_name_loads_and_says_what_it_is(registry: Registry) -> None:
    for entry in registry:
        assert entry.load() is not None
        assert entry.summary
    with pytest.raises(errors.UsageError, match="nobody"):
        registry.load("nobody")


NAMED_ON = {
    "certify.md": CERTIFICATES,
    "finetune.md": LOSSES,
    "attack.md": catalogue.ATTACKS,
    "constrain.md": PENALTIES,
    "adapt.md": REPLACEMENTS,
}
"""The page on which each name of a registry stands."""


@pytest.mark.parametrize("page", NAMED_ON)
def test_a_page_has_each_name_of_its_registry(page: str) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", (ROOT / "docs" / page).read_text()))
    names = NAMED_ON[page].names()
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", code)] == []


def test_every_registry_has_its_page() -> None:
    assert {id(one) for one in NAMED_ON.values()} == {id(one) for one in REGISTRIES}


def test_contents_name_every_section() -> None:
    pages = [page for page in DOCS if "**Contents.**" in page.read_text()]
    assert pages
    for page in pages:
        text = page.read_text()
        contents = text.partition("**Contents.**")[2].partition("\n\n")[0]
        numbered = re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
        listed = re.findall(r"\[(\d+) ([^\]]+)\]", " ".join(contents.split()))
        assert listed == numbered, page.name


NAMED = {
    "--attack": catalogue.ATTACKS.names(),
    "--loss": LOSSES.names(),
    "--method": CERTIFICATES.names(),
    "audit --method": METHODS,
    "--prox": PENALTIES.names(),
}


def test_help_names_every_value_of_an_option() -> None:
    """Or says which command lists them, where that does: `attack --list` is held to the registry in
    tests/attack.
    """
    held = set()
    for command, made in typer.main.get_command(program()).commands.items():
        for parameter in made.params:
            for spelled in NAMED.keys() & {f"{command} {parameter.opts[0]}", parameter.opts[0]}:
                if f"{command} {spelled}" in NAMED:
                    continue
                held.add(spelled)
                text = parameter.help or ""
                absent = [
                    name
                    for name in NAMED[spelled]
                    if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)
                ]
                assert not absent or "--list shows" in text, (
                    f"{command} {spelled} does not name {absent}"
                )
    assert held == set(NAMED)


def test_what_needs_torchattacks_is_said_as_the_registry_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only torchattacks:NAME: the doctor names no attack of the registry, and pages tell how to
    install it.
    """
    monkeypatch.setattr(doctor, "_installed_version", lambda package: "missing")
    (finding,) = doctor._torchattacks()
    assert catalogue.PREFIX + "NAME" in finding.remark
    assert [
        name for name in catalogue.ATTACKS.names() if name in re.findall(r"[\w-]+", finding.remark)
    ] == []
    page = (ROOT / "docs" / "attack.md").read_text()
    assert all(catalogue.INSTALL in text for text in (finding.remark, page))
