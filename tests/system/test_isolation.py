"""What certvit starts and imports is not decided by the folder it runs in."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from certcli.system.interpreter import run_isolated
from tests.helpers.grids import EVERY

PACKAGE = Path(__file__).parents[2] / "certcli"
STARTING = {"subprocess", "multiprocessing", "pty"}
HELPER = PACKAGE / "system" / "interpreter.py"


def test_only_the_helper_starts_processes() -> None:
    """The law: no module but the helper imports a starter of processes, or calls one of `os`."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                forbidden = ("os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn")
                assert not text.startswith((*forbidden, "sys.executable")) or path == HELPER, path
            assert not names & STARTING or path == HELPER, path


def hostile(folder: Path) -> Path:
    """Write modules that leave a file behind where they are imported."""
    for name in ("timm", "json", "torch", "sitecustomize", "usercustomize", "matplotlib"):
        text = f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n"
        (folder / f"{name}.py").write_text(text)
    return folder / "ran"


@pytest.mark.parametrize("places", [None, "", ".", f".{os.pathsep}", f"{os.pathsep}x"])
def test_a_child_imports_nothing_from_the_working_folder(
    places: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = hostile(tmp_path)
    monkeypatch.chdir(tmp_path)
    if places is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", places)
    done = run_isolated("import json, sys; print(len(sys.path))")
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_a_child_sees_the_users_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("value = 3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_isolated("import mine; print(mine.value)").stdout == "3\n"


FIGURE = """
from pathlib import Path
from certcli.report.figures import figure
with figure(Path("x.svg"), (2, 2), "t") as axes:
    axes.plot([0, 1])
"""


def drawn(folder: Path) -> bytes:
    """Return the figure that a process in this folder draws."""
    root = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", FIGURE], cwd=folder, env=root, check=True, timeout=60)
    return (folder / "x.svg").read_bytes()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """As the process of the tests draws it: it began in a folder without such a file."""
    folder = tmp_path_factory.mktemp("clean")
    with contextlib.chdir(folder):
        exec(FIGURE, {})
    return (folder / "x.svg").read_bytes()


@pytest.mark.parametrize("kind", ["latex", *["bytes", "fifo"] * EVERY])
def test_the_folders_matplotlibrc_changes_no_figure(
    kind: str, clean: bytes, tmp_path: Path
) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        text = b"text.usetex: True\nlines.linewidth: 40\nbackend: nowhere\n"
        (tmp_path / "matplotlibrc").write_bytes(text if kind == "latex" else b"\xff\xfe\x00")
    assert drawn(tmp_path) == clean
