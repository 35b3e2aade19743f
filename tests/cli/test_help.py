"""Help, defaults from files, and the order of classes: what is said before a run is what the run
does.
"""

import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer import rich_utils
from typer.models import OptionInfo

from certcli.audit.plan import AuditPlan
from certcli.certify.methods import METHODS
from certcli.checkpoint.file import Checkpoint
from certcli.cli import main
from certcli.cli.audit.command import AuditOptions
from certcli.cli.shared.command import info_of, spelling
from certcli.images import datasets
from certcli.system import errors, interpreter
from tests.helpers.commands import attempt, certvit, console, document


def test_audit_comes_first() -> None:
    assert next(iter(main.COMMANDS)) == "audit"
    assert main.COMMANDS.keys() == {command.name for command in main.program().registered_commands}


MOST_LINES = 60
"""Of a help at 100 columns."""
MOST_NAMES = 109
"""Names of options, spellings and negations aside. It only falls: an option needs a recipe."""
HELPS = [(name, "--help") for name in main.COMMANDS]
HELPS += [("certify", "--method", method, "--help") for method in METHODS.names()]
HELPS += [("attack", "--norm", "patch", "--help")]


def options_of(name: str) -> set[str]:
    """Return the first long spelling of each option of a command."""
    notes = (info_of(one.annotation) for one in signature(main.COMMANDS[name]).parameters.values())
    named = signature(main.COMMANDS[name]).parameters
    return {
        next(word.split("/")[0] for word in spelling(option, note) if word.startswith("--"))
        for option, note in zip(named, notes, strict=True)
        if isinstance(note, OptionInfo)
    }


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_a_help_fits_a_screen_and_the_rest_waits_for_help_all(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_columns", 100)
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 100)
    shown = console(*words).out
    assert len(shown.splitlines()) <= MOST_LINES
    whole = console(words[0], "--help-all").out if "--help-all" in shown else shown
    assert options_of(words[0]) <= set(re.findall(r"--[a-z0-9-]+", whole))


@pytest.mark.parametrize("method", METHODS.names())
def test_a_method_shows_the_options_that_are_its_own(method: str) -> None:
    shown = console("certify", "--method", method, "--help").out
    for option, owners in {
        "--sigma": {"smoothing"},
        "--effort": {"local"},
        "--procedure": {"patch"},
        "--arithmetic": {"lipschitz", "box", "local-lip", "bcp"},
    }.items():
        assert (f"{option} " in shown) is (method in owners)


def test_no_option_comes_without_another_that_goes() -> None:
    names = set().union(*map(options_of, main.COMMANDS)) - {"--help-all"}
    assert len(names) <= MOST_NAMES


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_help_names_a_docs_page_that_exists(name: str) -> None:
    (last,) = [
        line for line in main.COMMANDS[name].epilog.splitlines() if line.startswith("More: ")
    ]
    assert Path(last.removeprefix("More: ")).is_file()


def test_forty_columns_keep_names_and_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = subprocess.run(
        [sys.executable, "-m", "certcli", "attack", "--help-all"], capture_output=True, text=True
    )
    assert {"--epsilon", "--min-robust", "--save-examples", "evaluation:"} <= set(
        shown.stdout.replace(",", " ").split()
    )
    assert "…" not in shown.stdout
    assert [line for line in shown.stdout.splitlines() if len(line) > 40] == []


@pytest.mark.parametrize(
    "said", ["", "ImportError: libc", "RuntimeError: operator torchvision::nms does not exist"]
)
def test_the_doctor_finds_what_breaks_a_program_without_certvit(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what another process says that imports timm; `make install` asks a real one."""
    done = subprocess.CompletedProcess([], int(bool(said)), "", said)
    monkeypatch.setattr(interpreter, "run_isolated", lambda _: done)
    found = document("doctor", code=7 if said else 0)
    parts = {part["part"]: part for part in found["parts"]}
    assert parts["torchvision"]["broken"] is bool(said)
    assert found["gate"]["passed"] is not bool(said)
    assert ("--index-url" in parts["torchvision"]["remark"]) is ("torchvision::" in said)


PYPROJECT = (
    '[tool.certvit.audit]\nlimit = 7\nsigma = 0.25\nfail-on = ["clean<0.1"]\n[tool.other]\nx = 1\n'
)


class Seen(Exception):
    """What an audit was asked for, raised before any work."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run `certvit audit` in a folder, and return (what it asks for, its gates, its images)."""
    found: dict[str, Any] = {}

    def plan(self: AuditOptions, seed: int, batch_size: int, limit: int | None) -> AuditPlan:
        found.update(
            radii=self.epsilon,
            sigma=self.sigma,
            seed=seed,
            batch_size=batch_size,
            attacks=self.attacks,
        )
        found.update(gates=self.fail_on, budget=self.time_budget, limit=limit)
        raise Seen

    monkeypatch.setattr(AuditOptions, "plan", plan)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.safetensors").touch()  # a path is looked at before the settings

    def run(*words: str) -> dict[str, Any]:
        outcome = attempt("audit", "m.safetensors", *words)
        assert isinstance(outcome.exception, Seen), (outcome.output, outcome.exception)
        return found

    return run


def test_precedence(asked: Any, tmp_path: Path) -> None:
    assert asked()["sigma"] is None
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    found = asked()
    assert (found["sigma"], found["gates"], found["budget"]) == (0.25, ["clean<0.1"], "2m")
    (tmp_path / "certvit.toml").write_text(
        '[audit]\nsigma = "1/8"\ntime-budget = "9s"\nepsilon = [0.1, "36/255"]\nseed = 3\n'
    )
    found = asked()
    assert (found["sigma"], found["budget"], found["seed"]) == (0.125, "9s", 3)
    assert found["radii"] == [0.1, 36 / 255]
    assert found["gates"] == ["clean<0.1"]  # key by key: the other file's still holds
    found = asked("--sigma", "0.5", "--fail-on", "upper>3", "-e", "1")
    assert (found["sigma"], found["gates"], found["radii"]) == (0.5, ["upper>3"], [1.0])


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("[audit]\ntime-buget = '1m'", "no setting 'time-buget'", "did you mean 'time-budget'"),
        ("[audt]\nlimit = 3", "no settings for 'audt'", "did you mean 'audit'"),
        ("[audit]\noutput = 'x.safetensors'", "no setting 'output'", ""),
        ("[audit]\nforce = true", "no setting 'force'", ""),
        ("[audit]\nlimit = 'many'", "[audit] limit: ", "certvit audit --help"),
        ("[audit]\nlimit = true", "[audit] limit: ", "certvit audit --help"),
        ("[audit]\nepsilon = [[1]]", "[audit] epsilon: ", "certvit audit --help"),
        ("audit = 3", "no table", ""),
        ("[audit\n", "cannot be read", "TOML"),
    ],
)
def test_wrong_settings_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certvit.toml").write_text(text)
    outcome = attempt("audit", "m.safetensors")
    assert isinstance(outcome.exception, errors.UsageError), outcome.exception
    assert "certvit.toml" in outcome.exception.message
    assert told in outcome.exception.message
    assert hint in outcome.exception.hint
    other = attempt("log", "m.safetensors")  # other commands do not read them
    assert not isinstance(other.exception, errors.UsageError)


PER_CLASS = 12


@pytest.fixture(scope="module")
def numbered(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in folders c1 to c10, which torchvision and timm number differently."""
    folder = tmp_path_factory.mktemp("numbered")
    spec = Checkpoint.read(workshop / "plain.safetensors").record.input
    pixels, labels = datasets.load_dataset("digits", spec, "test").tensors()
    for label in range(10):
        (inside := folder / f"c{label + 1}").mkdir()
        for place, image in enumerate(pixels[labels == label][:PER_CLASS]):
            grey = (image[0] * 255).round().byte().numpy()
            Image.fromarray(grey).save(inside / f"{place:02}.png")
    return folder


ORDER = "classes are numbered by name, capitals first, as torchvision has them"
NUMBERED = {
    "certify": ("--method", "lipschitz", "-e", 0.01),
    "attack": ("-a", "fgsm", "-e", 0.01, "--no-checks"),
    "finetune": ("--epochs", 1, "--loss", "ce", "--lr", 1e-9),
}


@pytest.mark.parametrize("command", NUMBERED)
def test_a_permutation_of_the_classes_is_named(
    command: str, workshop: Path, numbered: Path, tmp_path: Path
) -> None:
    words = [*NUMBERED[command], "--dataset", numbered, "-o", tmp_path / "o.safetensors"]
    said = certvit(command, workshop / "plain.safetensors", *words).stderr
    assert ORDER in " ".join(said.split())
    if command != "finetune":
        assert "if the classes are numbered in another order (c10 " in " ".join(said.split())
