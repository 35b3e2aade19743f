"""What the GitHub Action and the pre-commit hook of examples/ci run, run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from certcli.cli.main import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ci"
yaml = pytest.importorskip("yaml")  # timm needs it


@pytest.fixture
def place(workshop: Path, tmp_path: Path) -> Path:
    """A repository with a checkpoint, quick settings, and `certvit` on the path."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "certvit"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m certcli "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "model.safetensors").write_bytes((workshop / "certified.safetensors").read_bytes())
    (tmp_path / "certvit.toml").write_text(
        '[audit]\nlimit = 8\ntime-budget = "10m"\nattack = ["fgsm"]\nepsilon = [0.05]\nfail-on = ["clean<=1", "clean<0.1"]\n'
    )
    return tmp_path


def run(place: Path, script: list[str], **more: str) -> subprocess.CompletedProcess:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    python = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(script, cwd=place, env=env, capture_output=True, text=True, check=False)


def test_the_action(place: Path) -> None:
    action = yaml.safe_load((EXAMPLES / "action.yml").read_text())
    steps = action["runs"]["steps"]
    (script,) = [step for step in steps if step.get("id") == "audit"]
    named = {value.split("inputs.")[1].split(" ")[0] for value in script["env"].values()}
    assert named <= set(action["inputs"])
    given = dict(zip(script["env"], ("model.safetensors", "digits", "clean<0.05\nupper>1e-3\n", "10m"), strict=True))
    done = run(
        place, ["bash", "-eo", "pipefail", "-c", script["run"]], **given, GITHUB_STEP_SUMMARY=str(place / "summary.md")
    )
    assert done.returncode == 7, done.stderr
    assert "Gate upper>1e-3: failed" in done.stdout
    assert "Gate clean<0.05: passed" in done.stdout
    assert sorted(path.suffix for path in (place / "certvit-audit").iterdir()) == [
        ".html", ".json", ".md", ".sarif", ".txt", ".xml",
    ]  # fmt: skip
    assert "## Robustness" in (place / "summary.md").read_text()
    uploaded = [step["with"] for step in steps if "uses" in step]
    assert all((place / next(v for k, v in part.items() if k in ("path", "sarif_file"))).exists() for part in uploaded)


def test_the_hook(place: Path) -> None:
    """It audits each file, and fails with the answer and the code of a failure; `certvit` itself is replaced here."""
    (hook,) = yaml.safe_load((EXAMPLES / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (place / "pre-commit.sh").write_text((EXAMPLES / "pre-commit.sh").read_text())
    (place / "bin" / "certvit").write_text('#!/bin/sh\necho "certvit $*"\n[ "$2" = good.safetensors ] || exit 7\n')
    words = [*shlex.split(hook["entry"]), "model.safetensors", "good.safetensors"]
    failed = run(place, words)
    assert (failed.returncode, failed.stdout) == (7, "model.safetensors\ncertvit audit model.safetensors --quiet\n")
    assert run(place, [*words[:-2], "good.safetensors"]).returncode == 0
    with get_command(app).commands["audit"].make_context("audit", failed.stdout.split()[3:]):
        pass
