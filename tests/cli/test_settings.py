"""Settings files of `audit`: a word on the command line, then certvit.toml, then pyproject.toml,
then what is built in.
"""

from pathlib import Path
from typing import Any

import pytest

from certcli.audit.plan import AuditPlan
from certcli.cli.audit import command
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt

PYPROJECT = (
    '[tool.certvit.audit]\nlimit = 7\nsigma = 0.25\nfail-on = ["clean<0.1"]\n[tool.other]\nx = 1\n'
)


class Seen(Exception):
    """What an audit was asked for, raised before any work."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run `certvit audit` in a folder, and return (what it asks for, its gates, its images)."""
    found: dict[str, Any] = {}

    def plan(
        self: command.AuditOptions, seed: int, batch_size: int, limit: int | None
    ) -> AuditPlan:
        found.update(
            radii=self.epsilon,
            sigma=self.sigma,
            seed=seed,
            batch_size=batch_size,
            attacks=self.attacks,
        )
        found.update(gates=self.fail_on, budget=self.time_budget, limit=limit)
        raise Seen

    monkeypatch.setattr(command.AuditOptions, "plan", plan)
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
        ("[audit]\nlimit = true", "bool is no value", ""),
        ("[audit]\nepsilon = [[1]]", "list is no value", ""),
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
    assert isinstance(outcome.exception, UsageError), outcome.exception
    assert "certvit.toml" in outcome.exception.message
    assert told in outcome.exception.message
    assert hint in outcome.exception.hint
    other = attempt("log", "m.safetensors")  # other commands do not read them
    assert not isinstance(other.exception, UsageError)


def test_settings_that_are_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certvit.toml").mkdir()
    outcome = attempt("audit", "m.safetensors")
    assert isinstance(outcome.exception, UsageError), outcome.exception
    assert "certvit.toml cannot be read: it is no regular file" in outcome.exception.message
