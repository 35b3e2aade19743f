"""What nobody types: the papers' trainings by name, and that a trained network is not trained like a
fresh one, where a training that ruins it says so.
"""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, LineageStep, Record
from certcli.cli.finetune import ending
from certcli.cli.main import program
from certcli.finetune.presets import PRESETS, options_of_preset
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.start import (
    default_batch_size,
    defaults_of_start,
    start_of,
)
from certcli.models import build
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, document

PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"
RADII = {"mnist": 1.58, "cifar10": 36 / 255, "cifar100": 36 / 255, "tinyimagenet": 36 / 255}
"""At which the paper certifies each data set."""


def parsed(*words: str) -> dict[str, Any]:
    """Return the parameters of a call of finetune, which is not run."""
    command = get_command(program()).commands["finetune"]  # type: ignore[attr-defined]
    return dict(command.make_context("finetune", ["m.safetensors", *words]).params)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_options_and_trains_at_no_smaller_radius_than_it_certifies(
    name: str,
) -> None:
    taken = parsed("--preset", name)
    assert taken == parsed(*PRESETS[name].split()) | {"preset": name}
    assert taken != parsed() | {"preset": name}
    names = FinetuneSettings.__dataclass_fields__.keys() - {"batch_size"}
    settings = FinetuneSettings(**{key: value for key, value in taken.items() if key in names})
    assert settings.optimiser == ("sgd" if name.startswith(("cauchy", "specformer")) else "adamw")
    if settings.loss != "ce":
        assert settings.epsilon >= RADII[name.rpartition("-")[2]]
    assert f"| `{name}` | `{PRESETS[name]}` | " in PAGE.read_text()


@pytest.mark.parametrize(("option", "value"), [("epsilon", "0.5"), ("epochs", "7"), ("lr", "2e-3")])
def test_what_is_typed_comes_before_the_preset_also_where_it_is_the_default(
    option: str, value: str
) -> None:
    """0.5 is what --epsilon is without any word: only the place of the word tells the two apart."""
    words = ["--preset", "gloro-mnist"]
    typed = [f"--{option}", value]
    assert parsed(*words, *typed)[option] == float(value)
    assert parsed(*typed, *words)[option] == float(value)


@pytest.mark.parametrize(
    ("preset", "arch"),
    [
        ("local-lip-mnist", "certvit_4c3f"),
        ("cauchy", "certvit_vit_digits"),
        ("specformer-adversarial", "certvit_vit_digits"),
    ],
)
def test_each_kind_runs_and_its_lineage_holds_the_values(
    preset: str, arch: str, tmp_path: Path
) -> None:
    source = tmp_path / "net.safetensors"
    shape = {"img_size": 8} if "4c3f" in arch else {"depth": 1, "embed_dim": 8, "num_heads": 1}
    build.initialise(arch, shape).write(source, False)
    output = tmp_path / "out.safetensors"
    words = ("--dataset", "digits", "--limit", 16, "--steps", 1, "--batch-size", 8, "-o", output)
    attempt("finetune", source, "--preset", preset, *words, "--validation-limit", 10)
    (*_, step) = document("log", output)["lineage"]
    assert step["parameters"]["batch_size"] == 8
    for name in ("schedule", "loss"):
        assert step["parameters"][name] == options_of_preset(preset)[name]


def test_an_unknown_preset_is_refused_by_name() -> None:
    done = attempt("finetune", "m.safetensors", "--preset", "local-lip-imagenet")
    assert isinstance(done.exception, UsageError)
    assert "local-lip-imagenet" in done.exception.message


SPEC = InputSpec((1, 8, 8), (0.5,), (0.5,))


def record_of_steps(*steps: tuple[str, dict[str, Any]]) -> Record:
    lineage = tuple(LineageStep(name, parameters, 0, {}, None) for name, parameters in steps)
    return Record("certvit_vit_digits", {}, SPEC, 10, lineage=lineage)


FRESH = ("init", {"pretrained": False})
PUBLISHED = ("init", {"pretrained": True})
TUNED = ("finetune", {})
FLOORED = ("adapt", {"goal": "keep"})
REPLACED = ("adapt", {"goal": "certify"})
LOWERED = ("constrain", {})


@pytest.mark.parametrize(
    ("steps", "trained"),
    [
        ((), True),  # a file of others, a name on a hub
        ((FRESH,), False),
        ((PUBLISHED,), True),
        ((FRESH, LOWERED), False),
        ((FRESH, TUNED), True),
        ((FRESH, TUNED, FLOORED, LOWERED), True),
        ((FRESH, TUNED, REPLACED, LOWERED), False),  # its new parts are trained anew
        ((FRESH, TUNED, REPLACED, TUNED), True),
    ],
)
def test_the_lineage_shows_whether_a_network_is_trained(
    steps: tuple[tuple[str, dict[str, Any]], ...], trained: bool
) -> None:
    assert start_of(record_of_steps(*steps)).trained is trained


def test_what_nobody_named_depends_on_the_start() -> None:
    trained = start_of(record_of_steps(FRESH, TUNED))
    fresh = start_of(record_of_steps(FRESH))
    plain = FinetuneSettings(loss="ce")
    assert defaults_of_start(fresh, plain, 5_000_000) == {}
    assert defaults_of_start(trained, plain, 5_000_000) == {"lr": 5e-5, "epochs": 3}
    assert defaults_of_start(trained, FinetuneSettings(loss="ce", lr=0.1), 5_000_000) == {
        "epochs": 3
    }
    assert defaults_of_start(trained, FinetuneSettings(loss="ce", epochs=9), 100)["lr"] == 5e-4
    assert (
        defaults_of_start(trained, FinetuneSettings(loss="margin"), 100) == {}
    )  # matrices begin anew
    assert (plain.lr, plain.epochs) == (0.001, 40)
    assert default_batch_size(trained, plain, 5_000_000, 100) == 32
    assert default_batch_size(fresh, plain, 5_000_000, 60_000) == 128
    orthogonal = FinetuneSettings(loss="margin")
    sizes = [default_batch_size(trained, orthogonal, 9, images) for images in (25_599, 25_600)]
    assert sizes == [128, 512]


DIGITS = ("--dataset", "digits", "--loss", "ce", "--limit", 40)


def test_the_command_says_what_it_took_and_how_long_it_takes(
    workshop: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.safetensors"
    done = attempt("finetune", workshop / "plain.safetensors", *DIGITS, "-o", out)
    assert "trained already (finetune in its lineage): --lr 0.0005, --epochs 10" in done.stderr
    assert "this takes about" in done.stderr
    parameters = Checkpoint.read(out).record.lineage[-1].parameters
    assert (parameters["lr"], parameters["epochs"]) == (5e-4, 10)
    again = tmp_path / "a.safetensors"
    named = ("--lr", 5e-4, "--epochs", 10, "-o", again)
    told = attempt("finetune", workshop / "plain.safetensors", *DIGITS, *named)
    assert "trained already" not in told.stderr
    assert Checkpoint.read(again).digest == Checkpoint.read(out).digest  # measuring left no trace


def test_training_that_ruins_a_network_is_not_done(workshop: Path, tmp_path: Path) -> None:
    """The file is written all the same, and the last line says it."""
    out = tmp_path / "o.safetensors"
    words = (
        "finetune",
        workshop / "plain.safetensors",
        *DIGITS,
        "--lr",
        30,
        "--epochs",
        1,
        "--batch-size",
        8,
    )
    done = attempt(*words, "-o", out, "--json")
    assert isinstance(done.exception, ending.EndedAtChanceError)
    assert done.exception.code == 1
    assert "training ended about chance, validation accuracy" in done.exception.message
    assert Checkpoint.read(out).record.evidence[-1].command == "finetune"
    assert '"done": false' in done.stdout
    fresh = attempt(
        "finetune", workshop / "init.safetensors", *DIGITS, "--epochs", 1, "-o", out, "--force"
    )
    assert fresh.exit_code == 0  # it began at chance, too
    assert "not done: training ended about chance" in fresh.stderr


def test_the_end_is_judged_by_the_start() -> None:
    begun = ending.Accuracy(230, 256)
    spec = record_of_steps(FRESH)
    assert ending.doubt_training(begun, 0.89, 140, spec) is None
    assert ending.doubt_training(None, 0.89, 140, spec) is None
    fallen, ruined = (ending.doubt_training(begun, share, 140, spec) for share in (0.7, 0.1))
    assert "below its start, validation accuracy 70.0 % (before training 89.8 %)" in fallen.message
    assert (fallen.ruined, ruined.ruined) == (False, True)
    # under noise a network gives clean accuracy for another one, and may not end at chance
    assert ending.doubt_training(begun, 0.7, 140, spec, under_noise=True) is None
    assert ending.doubt_training(begun, 0.1, 140, spec, under_noise=True) is not None


def test_the_checkpoint_is_there_before_the_proof(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"

    def cut(*given: object) -> None:
        assert Checkpoint.read(out).record.lineage[-1].command == "finetune"
        raise OSError("power cut")

    monkeypatch.setattr(ending, "prove_trained", cut)
    done = attempt("finetune", workshop / "plain.safetensors", *DIGITS, "--epochs", 1, "-o", out)
    assert isinstance(done.exception, OSError)
    assert out.exists()
