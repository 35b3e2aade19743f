"""The code keeps to the picture of ARCHITECTURE.md, and `--help` needs no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from certcli.cli.main import COMMANDS

PACKAGE = Path(__file__).parents[2] / "certcli"
DOMAINS = ("engine", "lipschitz", "enclosure", "rounding", "verification")
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every certcli module named in an import, at any depth of the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.startswith("certcli")}


def room(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def reachable() -> dict[str, set[str]]:
    """Each room of ARCHITECTURE.md's picture, with every room that its arrows lead to."""
    arrows = re.findall(r"^ +(\w+) --> (\w+)$", (PACKAGE.parent / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    found = {name: {to for start, to in arrows if start == name} for arrow in arrows for name in arrow}
    while True:
        longer = {name: ends | {far for end in ends for far in found[end]} for name, ends in found.items()}
        if longer == found:
            return found
        found = longer


REACHABLE = reachable()


def test_the_picture_has_no_circle_and_every_room() -> None:
    assert not [name for name, ends in REACHABLE.items() if name in ends]
    rooms = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert rooms == REACHABLE.keys() - {"testing"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here == "__main__":
        return
    for name in imported(path):
        assert room(name) in REACHABLE.get(here, set()) | {here, ""}, f"{path} imports {name}"


def dependencies() -> dict[str, set[str]]:
    """Every certcli module with those that its file imports when it runs, at any depth of it."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        tree = ast.parse(path.read_text())
        typing = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        tree.body = [node for node in tree.body if node not in typing]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & names.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in names:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= parts & names.keys()
                if not parts <= names.keys():
                    graph[name].add(node.module)
    return graph


def test_no_import_circles() -> None:
    graph = dependencies()
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert not graph, f"these import one another, or what does: {sorted(graph)}"


@pytest.mark.parametrize("path", [p for p in MODULES if p.relative_to(PACKAGE).parts[0] in DOMAINS], ids=str)
def test_domains_import_at_the_top_of_their_files(path: Path) -> None:
    """An import inside a function hides which theorem rests on which."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.ClassDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    assert not (node.module or "").startswith("certcli"), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "words", [[], *[[command] for command in COMMANDS]], ids=lambda words: " ".join(words) or "certvit"
)
def test_help_imports_no_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom certcli.cli.main import app\n"
        f"try:\n    app({[*words, '--help']!r})\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'timm', 'torchattacks', 'matplotlib', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [p for p in MODULES if "cli" not in p.relative_to(PACKAGE).parts[:1]], ids=str)
def test_every_module_can_be_imported_first(path: Path) -> None:
    """torchvision beside a CPU torch must be mended before timm is imported, whichever module a user imports first."""
    tree = ast.parse(path.read_text())
    needs = [
        node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) and "timm" in ast.unparse(node)
    ]
    if not needs or "certcli.system.compat" in ast.unparse(tree):
        return
    packages = [folder / "__init__.py" for folder in path.parents if PACKAGE in [folder, *folder.parents]]
    assert any("certcli.system.compat" in package.read_text() for package in packages), path


def test_no_pickle() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
                assert node.attr == "UnpicklingError", path
