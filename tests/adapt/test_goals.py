"""adapt --goal: the parts that it chooses, and what follows it."""

import json
from pathlib import Path

import pytest
import torch

from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.cli.adapt.run import say_training_follows
from certcli.cli.shared.output import Sink
from certcli.images import datasets
from certcli.models import build as models
from tests.helpers.commands import attempt, certvit

CPU = torch.device("cpu")
GOALS = {
    "floors alone": (["--keep", 1], ("keep", "floor", "keep", 0)),
    "certify": (
        ["--goal", "certify", "--epochs", 1, "--distill", 1],
        ("l2", "center", "convex", 1),
    ),
    "certify, norms folded": (
        ["--goal", "certify", "--norm", "fold", "--epochs", 0],
        ("l2", "fold", "convex", 0),
    ),
    "what is named wins": (["--attention", "scsa", "--epochs", 0], ("scsa", "floor", "keep", 0)),
}


@pytest.mark.parametrize(("words", "chosen"), GOALS.values(), ids=GOALS)
def test_a_goal_chooses_the_parts_and_what_is_kept_is_told(
    workshop: Path, tmp_path: Path, words: list[str], chosen: tuple[str, str, str, int]
) -> None:
    """The headline is that of the written file on images that took no part."""
    source = workshop / "plain.safetensors"
    out = tmp_path / "out.safetensors"
    outcome = attempt("adapt", source, *words, "--limit", 150, "--json", "-o", out)
    assert outcome.exit_code == 0, outcome.exception
    report = json.loads(outcome.stdout)
    written = Checkpoint.read(out)
    step = written.record.lineage[-1].parameters
    assert tuple(step[name] for name in ("attention", "norm", "residual", "epochs")) == chosen
    old, new = (models.load(Checkpoint.read(path), CPU) for path in (source, out))
    pixels, labels = (
        datasets.load_dataset("digits", written.record.input, "train")
        .limit(150, 0)
        .select(range(0, 150, 5))
        .tensors()
    )
    with torch.no_grad():
        before = old(pixels)
        after = new(pixels)
    kept = report["kept"]
    assert kept["agreement"] == float((before.argmax(1) == after.argmax(1)).double().mean())
    assert kept["accuracy_after"] == float((after.argmax(1) == labels).double().mean())
    # kernels on batches of another size differ by some 1e-6 of the logits
    assert kept["logits_error"] == pytest.approx(
        float((after - before).norm() / before.norm()), rel=1e-3
    )
    assert report["log10_upper_after"] < report["log10_upper_before"]
    if chosen[0] == "keep":  # nothing but eps and rows below every floor seen can differ
        assert kept["agreement"] >= 0.95
        assert kept["logits_error"] < 0.05


@pytest.mark.parametrize(
    ("goal", "classes", "said"),
    [
        ("keep", 1000, ""),
        ("certify", 10, "needs training afterwards: certvit finetune 'a b' --loss margin"),
        ("certify", 1000, "'a b' --loss ce --lr 1e-5 --clip-grad 1)"),
    ],
)
def test_training_to_follow_is_announced(
    goal: str, classes: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_training_follows(
        AdaptSettings(goal), classes, ["certvit", "finetune", "a b"], Sink(False, False)
    )
    words = " ".join(capsys.readouterr().err.split())
    assert said in words
    assert bool(words) == bool(said)


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (("--goal", "certify"), [128, 128]),
        (("--goal", "certify", "--head", "keep"), None),
        (("--goal", "certify", "--head", "16"), [16]),
        ((), None),
    ],
)
def test_a_goal_that_needs_a_new_head_takes_one(
    options: tuple[str, ...], head: list[int] | None, workshop: Path, tmp_path: Path
) -> None:
    """What `finetune --loss margin` starts from; the next test types that training to its end."""
    path = tmp_path / "a.safetensors"
    few = ("--limit", 40, "--epochs", 0) if options else ("--limit", 40)
    source = workshop / "plain.safetensors"
    told = attempt("adapt", source, *options, *few, "-o", path)
    step = Checkpoint.read(path).record.lineage[-1]
    assert step.parameters["head"] == head
    assert told.exit_code == 0, told.output
    warns = "from that of --head 128,128 it learnt" in " ".join(told.output.split())
    assert warns is ("keep" in options)


def test_the_training_that_the_goal_asks_for_learns(workshop: Path, tmp_path: Path) -> None:
    """Typed as it is printed, for fewer epochs: above chance, and the command calls it done."""
    path, trained = tmp_path / "a.safetensors", tmp_path / "t.safetensors"
    certvit("adapt", workshop / "plain.safetensors", "--goal", "certify", "--limit", 100, "-o", path)  # fmt: skip
    certvit("finetune", path, "--loss", "margin", "--epochs", 3, "-o", trained)


def test_an_unknown_goal_is_refused_before_any_work(workshop: Path) -> None:
    refused = attempt("adapt", workshop / "plain.safetensors", "--goal", "win")
    assert "unknown --goal 'win'" in str(refused.exception)
