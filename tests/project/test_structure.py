"""The code keeps to the picture of ARCHITECTURE.md, and `--help` needs no torch."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from tests.soundness.mutants.rooms import ROOMS

PACKAGE = Path(__file__).parents[2] / "certcli"
DOMAINS = ("engine", "lipschitz", "enclosure", "rounding", "verification")
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imported(path: Path) -> set[str]:
    """Return every certcli module named in an import, at any depth of the file."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.startswith("certcli")}


def room_of_module(dotted: str) -> str:
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
        assert here == "__main__" or {room_of_module(name) for name in imported(path)} <= allowed, (
            path
        )


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


def test_what_commands_share_imports_no_command() -> None:
    commands = {folder.name for folder in (PACKAGE / "cli").iterdir()} - {"shared", "main.py"}
    for path in (PACKAGE / "cli" / "shared").glob("*.py"):
        parts = [name.split(".") for name in imported(path) if name.startswith("certcli.cli.")]
        assert not {part[2] for part in parts} & commands, path


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
        for node in nodes(path):
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
    ("report/page.py", "save"): "into memory, for a page",
    ("cli/shared/streams.py", "open"): "/dev/null",
    ("api/__init__.py", "save"): "a checkpoint, by the one writer",
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


def files_that_call(matches: Callable[[ast.Call], bool]) -> set[str]:
    """Return the files of the package with a call that matches."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Call) and matches(node)
    }


def calls_named(*names: str) -> Callable[[ast.Call], bool]:
    """Return whether a call is of a method or a function, by its last name."""
    return lambda call: ast.unparse(call.func).rpartition(".")[2] in names


def _reads(call: ast.Call) -> bool:
    """Tell whether a call opens a file by its name: of `open` only those with a mode, or nothing."""
    words = [*call.args, *(word.value for word in call.keywords)]
    is_open = calls_named("open")(call) and ast.unparse(call.func) not in (
        "Image.open",
        "webbrowser.open",
    )
    by_name = is_open and (not words or any(isinstance(word, ast.Constant) for word in words))
    return (
        by_name
        or ast.unparse(call.func) == "os.open"
        or calls_named("read_text", "read_bytes")(call)
    )


READ_ELSEWHERE = {
    "audit/document_builder.py": "/proc/cpuinfo",
    "images/datasets.py": "the package's own digits",
    "report/page.py": "the package's own template",
    "report/shares.py": "the package's own table",
    "system/files.py": "the writer: what it has written, and folders, to lock them",
    "system/memory.py": "/proc and the control group",
    "system/torch_modes.py": "/proc/cpuinfo",
    "system/reading.py": "the reader",
    "checkpoint/tensor_files.py": "the temporary file that it writes",
    "cli/shared/streams.py": "/dev/null",
}
"""Files of the system and of the package, which no stranger writes."""
DECODED_ELSEWHERE = {
    "api/arguments.py": "values of Python",
    "checkpoint/tensor_files.py": "entries of a header that the door has let in",
    "checkpoint/schema.py": "the door",
    "cli/shared/inputs.py": "the text of an option",
    "cli/verify/run.py": "what this run states, as a file would hold it",
    "evaluation/record_lines.py": "the same",
    "report/document.py": "the same",
    "report/shares.py": "the package's own table",
    "system/processes.py": "messages of this run's other processes",
}
"""JSON that no stranger writes. All other goes through `decode`, and has ranges."""
LOOKED_AT = {
    "audit/plan.py": "which folder must be told from timm's network of its name",
    "checkpoint/file.py": "what is no regular file is refused",
    "checkpoint/outputs.py": "which inputs and folders could be overwritten; a lock on a state",
    "checkpoint/tensor_files.py": "which files of an index could be deleted",
    "certify/smoothing/denoiser.py": "what is no folder is read as a file",
    "cli/log/run.py": "what is no folder is read as a file",
    "cli/shared/inputs.py": "where an output goes by default",
    "cli/verify/run.py": "what is no folder is read as a file",
    "images/folders.py": "what is no regular file is refused",
    "images/names.py": "what is no folder is refused",
    "models/open.py": "what is no folder is read as a file, what is no regular file is refused",
    "system/files.py": "what is no folder is refused",
}
"""Who asks what a name is, and what becomes of everything else."""


def _decodes(call: ast.Call) -> bool:
    decoders = ("json.load", "json.loads", "msgspec.json.decode", "msgspec.convert")
    return ast.unparse(call.func) in decoders or calls_named("JSONDecoder", "literal_eval")(call)


LISTED: dict[str, tuple[Callable[[ast.Call], bool], Collection[str]]] = {
    "one reader, or a file of a terabyte is read whole": (_reads, READ_ELSEWHERE),
    "one door decodes JSON, or a number has no range": (_decodes, DECODED_ELSEWHERE),
    # a broken link as labels.csv counted as no labels, and the network's own answers were judged
    "what is unreadable is not absent": (
        calls_named("exists", "lexists", "isfile", "isdir"),
        ["report/figures.py"],  # usetex
    ),
    "who asks what a name is": (calls_named("is_file", "is_dir"), LOOKED_AT),
}


@pytest.mark.parametrize("law", LISTED)
def test_calls_stand_where_they_are_listed(law: str) -> None:
    matches, files = LISTED[law]
    assert files_that_call(matches) == set(files)


def test_json_is_decoded_under_its_own_name() -> None:
    imports = {alias.name for path in MODULES for node in nodes(path)
               if isinstance(node, ast.ImportFrom) for alias in node.names
               if node.module in ("json", "msgspec.json")}  # fmt: skip
    assert not imports


def test_the_rooms_of_the_mutants_name_what_is_there() -> None:
    places = [
        *(PACKAGE / source for room in ROOMS.values() for source in room.sources),
        *(PACKAGE.parent / "tests" / test for room in ROOMS.values() for test in room.tests),
    ]
    assert [str(place) for place in places if not place.exists()] == []
