"""A paper's training by name: its options as typed ones, the user's own before them, all on the page."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from certcli.cli.main import program
from certcli.finetune.presets import PRESETS
from certcli.finetune.settings import FinetuneSettings
from certcli.models import build
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit, document

PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"
RADII = {"mnist": 1.58, "cifar10": 36 / 255, "cifar100": 36 / 255, "tinyimagenet": 36 / 255}
"""At which the paper certifies each data set."""


def parsed(*words: str) -> dict[str, Any]:
    """Return the parameters of a call of finetune, which is not run."""
    command = get_command(program()).commands["finetune"]  # type: ignore[attr-defined]
    return dict(command.make_context("finetune", ["m.safetensors", *words]).params)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_options_are_when_typed(name: str) -> None:
    words = PRESETS[name].typed.split()
    assert parsed("--preset", name) == parsed(*words) | {"preset": name}
    assert parsed("--preset", name) != parsed() | {"preset": name}


@pytest.mark.parametrize("name", PRESETS)
def test_its_values_are_settings_and_train_at_no_smaller_radius_than_they_certify(
    name: str,
) -> None:
    taken = parsed("--preset", name)
    names = FinetuneSettings.__dataclass_fields__
    settings = FinetuneSettings(
        **{key: value for key, value in taken.items() if key in names and key != "batch_size"}
    )
    assert settings.optimiser == ("sgd" if name.startswith(("cauchy", "specformer")) else "adamw")
    if settings.loss != "ce":
        assert settings.epsilon >= RADII[name.rpartition("-")[2]]


ROWS = {
    "gloro": {"epochs": "Epochs", "batch_size": "Batch Size", "epsilon": "εtrain", "lr": "Init LR"},
    "local-lip": {
        "epochs": "Epochs",
        "batch_size": "Batch Size",
        "epsilon": "εtrain",
        "lr": "Init LR",
    },
    "certvit": {"epochs": "Epochs", "batch_size": "Batch Size", "lr": "Init LR"},
}
"""Kind -> option -> row of the paper's table."""
ENDS = {"gloro": "Table 7:", "local-lip": "Table 8:", "certvit": "Table 9:"}
DATA = ("mnist", "cifar10", "cifar100", "tinyimagenet")


def columns(kind: str) -> dict[str, list[float]]:
    """Return the rows of four numbers that stand before a table's caption in the paper's text."""
    folder = Path(os.environ["CERTVIT_PAPERS"])
    (text,) = [t for t in map(Path.read_text, sorted(folder.glob("*.txt"))) if "εtrain 1.74" in t]
    before = text[: text.index(ENDS[kind])]
    rows: dict[str, list[float]] = {}
    for line in before[before.rindex("Dataset MNIST CIFAR-10") :].splitlines():
        words = line.replace("1-e3", "1e-3").split()
        with contextlib.suppress(ValueError):
            rows[" ".join(words[:-4])] = [float(word) for word in words[-4:]]
    return rows


@pytest.mark.skipif("CERTVIT_PAPERS" not in os.environ, reason="a folder with the papers' texts")
@pytest.mark.parametrize("kind", ROWS)
def test_the_values_are_those_of_the_papers_tables(kind: str) -> None:
    table = columns(kind)
    for option, row in ROWS[kind].items():
        printed = dict(zip(DATA, table[row], strict=True))
        for data, value in printed.items():
            assert float(PRESETS[f"{kind}-{data}"].options[option]) == value, (data, option)


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
        ("gloro-mnist", "certvit_4c3f"),
        ("local-lip-mnist", "certvit_4c3f"),
        ("local-lip-tinyimagenet", "certvit_4c3f"),
        ("certvit-mnist", "certvit_vit_digits"),
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
        assert step["parameters"][name] == PRESETS[preset].options[name]


def test_an_unknown_preset_is_refused_by_name() -> None:
    done = attempt("finetune", "m.safetensors", "--preset", "local-lip-imagenet")
    assert isinstance(done.exception, UsageError)
    assert "local-lip-imagenet" in done.exception.message


def test_the_page_has_every_preset_with_its_options_and_how_it_is_read() -> None:
    text = PAGE.read_text()
    flat = " ".join(text.split())
    for name, preset in PRESETS.items():
        assert f"| `{name}` | `{preset.typed}` | {preset.table.source} |" in text, name
        assert preset.table.read_as in flat, name


def test_help_names_presets_that_exist() -> None:
    words = certvit("finetune", "--help-all").output
    assert all(name in PRESETS for name in ("gloro-mnist", "local-lip-cifar10", "cauchy"))
    assert "gloro-mnist" in words
