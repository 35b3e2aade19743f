"""--goal keep: what is tried alone adds up, what is taken keeps enough, and the file is the network
that was measured.
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
from certcli.evaluation.fidelity import ReferenceLogits
from certcli.images import datasets
from certcli.images.calibration import hold_out
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.real import INF
from certcli.models import build
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt

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
    images = datasets.load_dataset("digits", plain.record.input, "train").limit(240)
    return hold_out(images, 3)


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


def test_floors_leave_room_for_images_that_took_no_part(plain: Checkpoint, split: Any) -> None:
    """On 160 digits the network is the same function, up to LayerNorm's eps, though its floors have
    seen twelve.
    """
    learnt, _ = split
    pixels = learnt.tensors()[0]
    keeper = Keeper(plain, AdaptSettings(), pixels[:12], CPU)
    list(keeper.run())
    with torch.no_grad():
        before = keeper.teacher(pixels)
        after = keeper.student(pixels)
    assert float((after - before).norm() / before.norm()) < 10 * sum(
        part.error for part in keeper.records
    )


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
