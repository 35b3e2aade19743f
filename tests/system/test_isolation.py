"""Free memory, and interpreters beside this one."""

import ast
import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from certcli.constrain.network import free_bytes as of_constrain
from certcli.system import interpreter, memory
from tests.helpers.grids import EVERY

PACKAGE = Path(__file__).parents[2] / "certcli"
STARTING = {"subprocess", "multiprocessing", "pty"}
HELPER = PACKAGE / "system" / "interpreter.py"


def test_only_the_helper_starts_processes() -> None:
    """The law: no module but the helper imports a starter of processes, or calls one of `os`."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        starts = any(word in text for word in (*STARTING, "os.", "sys.executable"))
        for node in ast.walk(ast.parse(text)) if starts else ():
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
    done = interpreter.run_isolated("import json, sys; print(len(sys.path))")
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_a_child_sees_the_users_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("value = 3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert interpreter.run_isolated("import mine; print(mine.value)").stdout == "3\n"


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


GIB = 2**30
UNLIMITED = 9223372036854771712
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
BOTH = [
    V1.format(root="/"),
    V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
]


def first(limit: int, usage: int = 0, cached: int = 0) -> dict[str, object]:
    stat = f"active_file 77\ntotal_inactive_file {cached // 2}\ntotal_active_file {cached - cached // 2}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def second(
    limit: object, usage: int = 0, cached: int = 0, high: object = "max"
) -> dict[str, object]:
    stat = f"anon 5\ninactive_file {cached}\nactive_file 0"
    return {"memory.max": limit, "memory.high": high, "memory.current": usage, "memory.stat": stat}


ROWS = {
    "no groups": ([], "", {}, 8 * GIB),
    "2: its own group": (
        [V2.format(root="/")],
        "0::/a",
        {"a": second(4 * GIB, 3 * GIB, GIB)},
        2 * GIB,
    ),
    "2: one above": (
        [V2.format(root="/")],
        "0::/a/b",
        {"a": second(3 * GIB, GIB), "a/b": second("max", GIB)},
        2 * GIB,
    ),
    "2: throttled": (
        [V2.format(root="/")],
        "0::/a",
        {"a": second(4 * GIB, 0, 0, 2 * GIB)},
        2 * GIB,
    ),
    "2: more than the machine": ([V2.format(root="/")], "0::/a", {"a": second(64 * GIB)}, 8 * GIB),
    "2: over its limit": ([V2.format(root="/")], "0::/a", {"a": second(GIB, 2 * GIB)}, 0),
    "2: a container's own top": ([V2.format(root="/")], "0::/", {"": second(GIB)}, GIB),
    "2: a path above what is seen": ([V2.format(root="/")], "0::/../x", {"": second(GIB)}, GIB),
    "2: no controller there": ([V2.format(root="/")], "0::/a", {"a": {}}, 8 * GIB),
    "1: unlimited": ([V1.format(root="/")], "4:memory:/a", {"memory/a": first(UNLIMITED)}, 8 * GIB),
    "1: its own group": (
        BOTH,
        "4:memory:/a\n0::/",
        {"memory/a": first(4 * GIB, 3 * GIB, GIB)},
        2 * GIB,
    ),
    "1: one above": (
        BOTH,
        "4:cpu,memory:/a/b\n0::/",
        {"memory/a": first(GIB), "memory/a/b": first(UNLIMITED)},
        GIB,
    ),
    "1: another controller": (BOTH, "4:cpu:/a\n0::/", {"memory/a": first(GIB)}, 8 * GIB),
    "1: docker, by the host's path": (
        [V1.format(root="/docker/4f")],
        "4:memory:/docker/4f",
        {"memory": first(GIB)},
        GIB,
    ),
}


@pytest.mark.parametrize(("mounts", "own", "groups", "expected"), ROWS.values(), ids=ROWS)
def test_free_memory_is_limited_by_the_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: list[str],
    own: str,
    groups: dict[str, dict[str, object]],
    expected: int,
) -> None:
    files: dict[str, object] = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * 2**20} kB",
        "proc/self/mountinfo": "\n".join(["22 1 254:0 / / rw - ext4 /dev/vda rw", *mounts]),
        "proc/self/cgroup": own,
    }
    files |= {
        f"sys/fs/cgroup/{group}/{name}": text
        for group, held in groups.items()
        for name, text in held.items()
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    assert of_constrain() == expected


def test_a_machine_without_meminfo_has_half_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    assert memory.free_bytes() > 2**20


@pytest.mark.parametrize(
    ("failure", "ran_out"),
    [
        (MemoryError(), True),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            ),
            True,
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (OSError(errno.ENOENT, "No such file", "out of memory.safetensors"), False),
    ],
    ids=["python", "torch", "system", "a library", "a file of that name"],
)
def test_memory_that_ran_out_is_known_from_other_failures(
    failure: Exception, ran_out: bool
) -> None:
    assert memory.out_of_memory(failure) is ran_out
    failure.__cause__ = failure
    assert memory.out_of_memory(failure) is ran_out
