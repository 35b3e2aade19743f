"""--goal keep: what is tried alone adds up, what is taken keeps enough, and the file is the network
that was measured.

adapt --goal: the parts that it chooses, and what follows it.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import to_builtins

from certcli.adapt import keep as keeping
from certcli.adapt.keep import Keeper, RaisedFloor, cheapest_first
from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.cli.adapt.run import say_training_follows
from certcli.cli.shared.output import Sink
from certcli.evaluation.fidelity import ReferenceLogits
from certcli.images import datasets
from certcli.images.calibration import hold_out
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.real import INF
from certcli.models import build
from certcli.models import build as models
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit

CPU = torch.device("cpu")


def test_a_part_is_moved_on_at_a_rising_price() -> None:
    """The changes of one norm end at the most digits; none is dearer than a mixture of two others."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        draws = torch.rand(6, 2, generator=generator).tolist()
        tried = [RaisedFloor("norm", 1.0, digits - 0.2, error) for digits, error in draws]
        changes = cheapest_first(tried)
        corners = [(0.0, 0.0), *((each.digits, each.error**2) for each in changes)]
        prices = [max(0.0, b - a) / (y - x) for (x, a), (y, b) in pairwise(corners)]
        assert prices == sorted(prices)
        assert corners[-1][0] == max([0.0, *(each.digits for each in tried)])


@pytest.fixture(scope="module")
def split(plain: Checkpoint) -> Any:
    return hold_out(datasets.load_dataset("digits", plain.record.input, "train").limit(240), 3)


@pytest.mark.parametrize("keep", [0.97, 0.85])
def test_more_is_changed_as_far_as_enough_is_kept(
    plain: Checkpoint, split: Any, keep: float
) -> None:
    learnt, choosing = split
    keeper = Keeper(plain, AdaptSettings(keep=keep), learnt.tensors()[0], CPU)
    keeper.choose_by(ReferenceLogits(keeper.teacher, choosing))
    list(keeper.run())
    rungs = keeper.trade.rungs
    taken = next(rung for rung in rungs if rung.taken)
    assert taken.changes > 0
    assert rungs[0].changes == 0
    assert taken.agreement >= keep
    uppers = [rung.log10_upper for rung in rungs if rung.log10_upper is not None]
    assert len(uppers) == len(rungs)
    assert uppers == sorted(uppers, reverse=True)
    result = keeper.result()
    again = build.load(result)
    # the rung that was taken is the network in the file, its bound and its answers measured afresh
    assert prove_network(again, 10).upper.log10() == pytest.approx(taken.log10_upper, abs=1e-3)
    told = ReferenceLogits(build.load(plain), choosing).compare(
        ReferenceLogits(again, choosing).before
    )
    assert told.agreement == taken.agreement
    assert told.error == pytest.approx(taken.error, rel=1e-3)
    assert {each.kind for each in result.record.surgery} == {"floor-norm"}


def test_trials_leave_the_network_as_it_was(plain: Checkpoint, split: Any) -> None:
    """Whatever is tried is taken back: after all trials every tensor is what it was."""
    keeper = Keeper(plain, AdaptSettings(), split[0].tensors()[0], CPU)
    list(keeper.run())
    before = {name: value.clone() for name, value in keeper.student.net.state_dict().items()}
    tried = list(keeper.try_floors())
    assert len(tried) > 4
    assert cheapest_first(tried)
    after = keeper.student.net.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_without_a_bound_nothing_is_traded(
    plain: Checkpoint, split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No digits can be gained: the floors are all, and the record says None, which JSON can hold."""
    monkeypatch.setattr(keeping, "trial_upper", lambda *_: INF)
    learnt, choosing = split
    keeper = Keeper(plain, AdaptSettings(keep=0.5), learnt.tensors()[0], CPU)
    keeper.choose_by(ReferenceLogits(keeper.teacher, choosing))
    list(keeper.run())
    (rung,) = keeper.trade.rungs
    assert (rung.changes, rung.log10_upper, rung.taken) == (0, None, True)
    keeper.result().with_evidence("adapt", {}, {"trade": [to_builtins(rung)]}).write(
        tmp_path / "a.safetensors"
    )


def test_the_command_shows_the_trade_and_records_it(workshop: Path, tmp_path: Path) -> None:
    output = tmp_path / "kept.safetensors"
    words = [
        "adapt",
        str(workshop / "plain.safetensors"),
        "--dataset",
        "digits",
        "--limit",
        "100",
        "-o",
        str(output),
    ]
    done = attempt(*words, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert sum(rung["taken"] for rung in told["trade"]) == 1
    assert {"path", "change", "digits", "logits_error", "taken"} == set(told["options"][0])
    (evidence,) = [
        entry for entry in Checkpoint.read(output).record.evidence if entry.command == "adapt"
    ]
    assert evidence.result["trade"] == told["trade"]
    table = attempt(*words, "--force", "--quiet")
    assert "digits gained" in table.stdout
    named = attempt(*words, "--epochs", "-1", "--force", "--json", "--quiet")
    assert "trade" not in json.loads(named.stdout)
    adapted = Checkpoint.read(output).record.lineage[-1]
    assert adapted.parameters["calibration_images"] == 80  # none of those that would choose is lost
    for share, command in (
        ("0", []),
        ("0.9", ["--goal", "certify"]),
        ("0.9", ["--attention", "l2"]),
    ):
        refused = attempt(*words, "--force", "--keep", share, *command)
        assert isinstance(refused.exception, UsageError)


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
    told = attempt("adapt", workshop / "plain.safetensors", *options, *few, "-o", path)
    assert Checkpoint.read(path).record.lineage[-1].parameters["head"] == head
    assert told.exit_code == 0, told.output
    warns = "from that of --head 128,128 it learnt" in " ".join(told.output.split())
    assert warns is ("keep" in options)


def test_the_training_that_the_goal_asks_for_learns(workshop: Path, tmp_path: Path) -> None:
    """Typed as it is printed, for fewer epochs: above chance, and the command calls it done."""
    path, trained = tmp_path / "a.safetensors", tmp_path / "t.safetensors"
    certvit("adapt", workshop / "plain.safetensors", "--goal", "certify", "--limit", 100, "-o", path)  # fmt: skip
    certvit("finetune", path, "--loss", "margin", "--epochs", 3, "-o", trained)
