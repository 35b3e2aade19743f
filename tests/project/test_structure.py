"""The code keeps to the picture of ARCHITECTURE.md, and `--help` needs no torch."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "certcli"
DOMAINS = ("engine", "lipschitz", "enclosure", "rounding", "verification")
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Return every certcli module named in an import, at any depth of the file."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.startswith("certcli")}


def room(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def reachable() -> dict[str, set[str]]:
    """Return the rooms to which the arrows of each room lead in ARCHITECTURE.md's picture."""
    arrows = re.findall(
        r"^ +(\w+) --> (\w+)$", (PACKAGE.parent / "ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    found = {
        name: {to for start, to in arrows if start == name} for arrow in arrows for name in arrow
    }
    while True:
        longer = {
            name: ends | {far for end in ends for far in found[end]} for name, ends in found.items()
        }
        if longer == found:
            return found
        found = longer


REACHABLE = reachable()


def test_the_picture_has_no_circle_and_every_room() -> None:
    assert not [name for name, ends in REACHABLE.items() if name in ends]
    rooms = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert rooms == REACHABLE.keys() - {"testing"}


def test_imports_follow_the_arrows() -> None:
    for path in MODULES:
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = REACHABLE.get(here, set()) | {here, ""}
        assert here == "__main__" or {room(name) for name in imported(path)} <= allowed, path


def is_for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def dependencies() -> dict[str, set[str]]:
    """Return the modules that each module imports when it runs, at any depth of its file."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES
    }
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        body = [
            node
            for node in tree(path).body
            if not isinstance(node, ast.If) or not is_for_types(node)
        ]
        for node in ast.walk(ast.Module(body, [])):
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


def test_domains_import_at_the_top_of_their_files() -> None:
    """An import inside a function hides which theorem rests on which."""
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] not in DOMAINS:
            continue
        inner = [
            node for node in tree(path).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        ]
        for node in ast.walk(ast.Module(inner, [])):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("certcli"), f"{path}:{node.lineno}"


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom certcli.cli.main import COMMANDS, program\n"
        "for words in [[], *[[command] for command in COMMANDS]]:\n"
        "    try:\n        program(words)([*words, '--help'])\n"
        "    except SystemExit as stop:\n        assert stop.code == 0, words\n"
        "    heavy = {'torch', 'timm', 'torchattacks', 'matplotlib', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_first() -> None:
    """torchvision beside a CPU torch must be mended before timm is imported, whichever module a
    user imports first.
    """
    for path in MODULES:
        top = [
            ast.unparse(node)
            for node in tree(path).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        if path.relative_to(PACKAGE).parts[0] == "cli" or not any("timm" in line for line in top):
            continue
        packages = [
            folder / "__init__.py"
            for folder in path.parents
            if PACKAGE in [folder, *folder.parents]
        ]
        assert any("certcli.system.compat" in file.read_text() for file in (path, *packages)), path


def test_no_pickle() -> None:
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "pickle" or node.attr == "UnpicklingError", path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(
                    k.arg == "weights_only" and ast.unparse(k.value) == "True"
                    for k in node.keywords
                ), path


WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "save", "savez", "imsave", "touch")
"""Methods and functions that write the file that they are told."""
OF_ANOTHER_KIND = {
    ("report/pixels.py", "save"): "into memory, for a page",
    ("cli/shared/streams.py", "open"): "/dev/null",
    ("cli/audit/view.py", "save"): "report.formats.save, which calls the writer",
}
"""Calls outside the one writer, and where they write."""


def _writes(call: ast.Call) -> str | None:
    """Return the name of a call that writes a file of its own, by the file modes of Python."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    modes = [
        word.value
        for word in [*call.args, *(word.value for word in call.keywords)]
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]
    opens = name == "open" and any(re.fullmatch(r"[rbt]*[wax+][rbtwax+]*", mode) for mode in modes)
    return name if name in WRITERS or opens else None


def _own_writes(node: ast.AST, inside: bool = False) -> Iterator[str]:
    """Yield the calls that write outside a `with atomic_file(...)`."""
    if isinstance(node, ast.With):
        inside = inside or "atomic_file(" in " ".join(ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Call) and not inside and (name := _writes(node)):
        yield name
    for child in ast.iter_child_nodes(node):
        yield from _own_writes(child, inside)


def test_one_writer_writes_every_file() -> None:
    """Else a file could be replaced that appeared during the run, or be left half written."""
    calls = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in MODULES
        if path != PACKAGE / "system/files.py"
        for name in _own_writes(tree(path))
    }
    assert calls == OF_ANOTHER_KIND.keys()


READERS = ("read_text", "read_bytes")
READ_ELSEWHERE = {
    "audit/document_builder.py": "/proc/cpuinfo",
    "report/page.py": "the package's own template",
    "report/published.py": "the package's own table",
    "system/memory.py": "/proc and the control group",
    "system/products.py": "/proc/cpuinfo",
}
"""Files of the system and of the package, which no stranger writes."""


def test_one_reader_reads_whole_files() -> None:
    """Else a file of a terabyte is read whole, and a pipe is waited for."""
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in READERS or ast.unparse(node.func) == "json.load")
    }
    assert files == READ_ELSEWHERE.keys()
