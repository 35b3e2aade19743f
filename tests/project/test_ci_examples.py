"""What the files of examples/ci and the Dockerfile run, run as far as no package is installed."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from certcli.cli.main import program

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
        '[audit]\nlimit = 8\ntime-budget = "10m"\n'
        'attack = ["fgsm"]\nepsilon = [0.05]\nmethod = ["lipschitz"]\nfail-on = ["clean<=1", "clean<0.1"]\n'
    )
    return tmp_path


def run_script(place: Path, script: list[str], **more: str) -> subprocess.CompletedProcess:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    python = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(script, cwd=place, env=env, capture_output=True, text=True, check=False)


STEPS = yaml.safe_load((EXAMPLES / "github.yml").read_text())["jobs"]["audit"]["steps"]
GITHUB = yaml.safe_load((EXAMPLES / "github.yml").read_text())["env"]
GITLAB = yaml.safe_load((EXAMPLES / "gitlab.yml").read_text())["certvit"]


def audited(place: Path, checkpoint: str) -> subprocess.CompletedProcess:
    """Run the audit of the GitHub workflow, its gate replaced by one that fails on every machine."""
    (script,) = [step["run"] for step in STEPS if step.get("name") == "Audit"]
    assert "certified@0.25<0.4" in script
    shell = [
        "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        "-c",
    ]  # what `shell: bash` is there
    return run_script(
        place,
        [*shell, script.replace("certified@0.25<0.4", "upper>1e-3")],
        CHECKPOINT=checkpoint,
        DATASET="digits",
    )


def test_a_failed_gate_leaves_every_report_that_is_kept(place: Path) -> None:
    done = audited(place, "model.safetensors")
    assert done.returncode == 7, done.stderr
    said = " ".join(done.stdout.split())
    assert "::error " in done.stdout
    assert re.search(r"Lipschitz bound: required at most 0.001, found \S+: failed", said)
    assert sorted(path.suffix for path in (place / "certvit-audit").iterdir()) == [
        ".html", ".json", ".sarif", ".txt", ".xml",
    ]  # fmt: skip
    uploads = [step["with"] for step in STEPS if "upload" in step.get("uses", "")]
    kept = [part.get("sarif_file", part.get("path")) for part in uploads]
    kept += [*GITLAB["artifacts"]["paths"], GITLAB["artifacts"]["reports"]["junit"]]
    assert all((place / path).exists() for path in kept)
    (summary,) = [step["run"] for step in STEPS if step.get("name") == "Summary"]
    run_script(place, ["bash", "-e", "-c", summary], GITHUB_STEP_SUMMARY=str(place / "summary.md"))
    fence, *lines, end = (place / "summary.md").read_text().splitlines()
    assert (fence, end) == ("```", "```")
    shown = [line for line in done.stdout.splitlines() if not line.startswith("::")]
    assert lines == shown


def test_gitlab_runs_the_same_commands() -> None:
    (github,) = [step["run"] for step in STEPS if step.get("name") == "Audit"]
    gitlab = " ".join(GITLAB["script"]).replace("set -o pipefail ", "")  # of GitHub's shell
    github = github.replace("\\\n", " ").replace("--format github ", "")  # annotations
    assert sorted(gitlab.split()) == sorted(github.split())


def test_an_audit_that_ends_early_is_the_only_error(place: Path) -> None:
    """`certvit` is replaced here by what it says of a missing file."""
    (place / "bin" / "certvit").write_text("#!/bin/sh\necho certvit: no such file >&2\nexit 3\n")
    done = audited(place, "nowhere.safetensors")
    assert done.returncode == 3, done.stderr
    for step in STEPS[1 + [step.get("name") for step in STEPS].index("Audit") :]:
        files = re.search(r"always\(\) && hashFiles\('([^']+)'\) != ''", step["if"])
        assert [path.name for path in place.glob(files[1])] == (
            ["audit.txt"] if files[1].endswith("*") else []
        )


def test_installing_takes_torch_and_torchvision_from_one_index_and_certvit_from_git(
    place: Path,
) -> None:
    """With a pip that writes down what it is called with."""
    (install,) = [step["run"] for step in STEPS if step.get("name") == "Install"]
    docker = " ".join(re.findall(r"^RUN (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for name in ("pip", "python"):
        (place / "bin" / name).write_text('#!/bin/sh\necho "$@" >> pip.log\n')
        (place / "bin" / name).chmod(0o755)
    (place / ".certvit").mkdir()
    (place / ".certvit" / "bin").symlink_to(place / "bin")
    settings = {"github": GITHUB, "gitlab": GITLAB["variables"]}
    scripts = {
        "github": install.replace("certvit --version", "false"),
        "gitlab": "\n".join(GITLAB["before_script"][:2]),
    }
    for service, script in scripts.items():
        (place / "pip.log").unlink(missing_ok=True)
        given = {name: str(value) for name, value in settings[service].items()}
        done = run_script(
            place, ["bash", "-e", "-c", script], **given, GITHUB_PATH=str(place / "path")
        )
        assert done.returncode == 0, done.stderr
        torch, certvit = [
            line
            for line in (place / "pip.log").read_text().splitlines()
            if line.startswith("install")
        ]
        assert torch == f"install torch<2.14 torchvision --index-url {given['TORCH_INDEX']}"
        assert certvit == f"install {given['CERTVIT']}"
        assert given["CERTVIT"].startswith("git+")
        assert 'install --no-cache-dir "$TORCH" torchvision --index-url "$TORCH_INDEX"' in docker
        assert (
            f'ARG TORCH="{given["TORCH"]}"\nARG TORCH_INDEX={given["TORCH_INDEX"]}'
            in (ROOT / "Dockerfile").read_text()
        )


def test_the_hook(place: Path) -> None:
    """It audits each file, and fails with the answer and the code of a failure; `certvit` itself is
    replaced here.
    """
    (hook,) = yaml.safe_load((EXAMPLES / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (place / "pre-commit.sh").write_text((EXAMPLES / "pre-commit.sh").read_text())
    (place / "bin" / "certvit").write_text(
        '#!/bin/sh\necho "certvit $*"\n[ "$2" = good.safetensors ] || exit 7\n'
    )
    words = [*shlex.split(hook["entry"]), "model.safetensors", "good.safetensors"]
    failed = run_script(place, words)
    assert (failed.returncode, failed.stdout) == (
        7,
        "model.safetensors\ncertvit audit model.safetensors --quiet\n",
    )
    assert run_script(place, [*words[:-2], "good.safetensors"]).returncode == 0
    with get_command(program()).commands["audit"].make_context("audit", failed.stdout.split()[3:]):
        pass


def test_torchattacks_and_what_it_pins_are_nobodys_dependency() -> None:
    """An extra names it; those who are given it get it without its dependencies, and certvit has
    all that it imports.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~\[]", line)[0] for line in project["dependencies"]}
    assert names.isdisjoint({"torchattacks", "requests", "urllib3", "idna", "chardet"})
    assert {"torch", "numpy", "scipy"} <= names  # torchvision comes with timm
    (needed,) = project["optional-dependencies"]["attacks"]
    for file in ("Makefile", "Dockerfile"):
        text = (ROOT / file).read_text().replace("$(ATTACKS)", f'"{needed}"')
        assert re.search(rf'pip install [^&\n]*--no-deps "{re.escape(needed)}"', text), file
