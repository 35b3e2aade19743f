"""End to end: what counts as kept, how far a network may go, what `constrain --keep` finds, which
doubts are said.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.cli.shared import fidelity, output
from certcli.constrain import keep, network, settings
from certcli.evaluation.evidence import decode_evidence
from certcli.evaluation.fidelity import (
    PREDICTABLE,
    Fidelity,
    ReferenceLogits,
    expected_on_real,
    known_labels,
)
from certcli.images import datasets, labelled
from certcli.images.calibration import synthetic_photographs
from certcli.models import build
from tests.helpers import commands, constrain_layers, grids
from tests.helpers.workshop import shape

CPU = torch.device("cpu")


def images_of(
    pixels: Tensor, labels: Tensor | None = None, classes: tuple[str, ...] = ("a", "b", "c")
) -> labelled.Images:
    count = len(pixels)
    labels = torch.zeros(count, dtype=torch.long) if labels is None else labels
    return labelled.Images(
        "own",
        "train",
        classes,
        labels,
        torch.arange(count),
        lambda positions: pixels[list(positions)],
    )


class Counted(nn.Module):
    """A network that counts the images that it is run on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.images = 0

    def forward(self, images: Tensor) -> Any:
        self.images += len(images)
        return self.net(images)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).eval()


@pytest.fixture
def reference() -> ReferenceLogits:
    pixels = torch.rand(40, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    net = linear()
    with torch.no_grad():
        labels = net(pixels).argmax(1)
    return ReferenceLogits(net, images_of(pixels), labels)


@pytest.mark.parametrize("classes", [("a", "b", "c"), ()], ids=["dataset", "photographs"])
def test_a_trial_judges_as_all_images_do_and_runs_those_that_change_first(
    classes: tuple[str, ...],
) -> None:
    """A third of the judges of a dataset runs; all photographs do, whose logits count."""
    pixels = torch.rand(600, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    judges = ReferenceLogits(linear(), images_of(pixels, classes=classes), batch_size=32)
    numbers = []
    for size in (1e-3, 3e-3, 1e-2):
        with torch.no_grad():
            changed = linear()
            changed[1].weight.add_(size * torch.randn(3, 48))
        counter = Counted(changed)
        trial = judges.compare(judges.trial_logits(counter))
        assert counter.images == (200 if classes else 600)
        whole = judges.compare(judges.logits(changed))
        assert trial.agreement_at_least == pytest.approx(whole.agreement_at_least, abs=1e-9)
        assert trial.same == whole.same
        numbers.append(whole.same)
    assert 600 > numbers[1] > numbers[2]  # choices do change


def test_what_is_kept_is_counted(reference: ReferenceLogits) -> None:
    assert reference.compare(reference.before) == Fidelity(40, 40, 0.0, 1.0, 40, 40)
    after = reference.before.clone()
    after[:10] = -after[:10]
    found = reference.compare(after)
    assert found.same < 40
    assert found.right_after == found.same  # the labels are the old first choices
    assert found.error == pytest.approx(
        float(2 * reference.before[:10].norm() / reference.before.norm())
    )
    after[0, 0] = torch.nan
    assert reference.compare(after).agreement_at_least == 0
    low, high = found.to_json()["agreement_interval"]
    assert low < found.agreement < high


def test_the_reach_is_where_a_first_choice_goes(reference: ReferenceLogits) -> None:
    """On both sides of each image's t the straight line from old to new logits says so itself."""
    after = (
        reference.before
        + torch.randn(reference.before.shape, generator=torch.Generator().manual_seed(1)).double()
    )
    reach = reference.reach(after)
    old = reference.before.argmax(1)
    for shift, stays in ((1 - 1e-6, True), (1 + 1e-6, False)):
        for row in reach.isfinite().nonzero().flatten().tolist():
            there = reference.before[row] + shift * reach[row] * (
                after[row] - reference.before[row]
            )
            assert (int(there.argmax()) == int(old[row])) == stays
    assert bool(reach.isfinite().any())


def margins_of(draw: Tensor, shift: float) -> tuple[ReferenceLogits, Tensor]:
    """Return images of two classes with these margins, and their logits after each margin fell by
    `shift`.
    """
    pixels = torch.stack([draw, torch.zeros_like(draw)], dim=1).view(-1, 2, 1, 1)
    found = ReferenceLogits(nn.Flatten(), images_of(pixels, classes=("a", "b")))
    return found, found.before - torch.tensor([shift, 0.0])


@pytest.mark.parametrize(("count", "share"), grids.crossed([20, 40, 100, 500], [0.01, 0.02, 0.3]))
def test_the_share_told_is_kept_in_nine_of_ten_draws(count: int, share: float) -> None:
    """Margins in [0, 1], evenly spread: a fall by `share` changes the first choice of exactly that
    share of all images.
    """
    generator = torch.Generator().manual_seed(count)
    draws = [margins_of(torch.rand(count, generator=generator), share) for _ in range(200)]
    told = torch.tensor([found.compare(after).agreement_at_least for found, after in draws])
    # 0.9 less three standard deviations of a share of 200 draws
    assert float((told <= 1 - share).double().mean()) >= 0.836
    assert float(told.median()) >= 1 - 2 * share  # and it is worth telling


DOUBTS = {
    "few": (lambda pixels: images_of(pixels[:20]), None, "only 20 images"),
    "grey": (lambda pixels: images_of(pixels[:, :1].expand(-1, 3, -1, -1)), None, "are grey"),
    "one choice": (
        lambda pixels: images_of(pixels[:1].expand(60, -1, -1, -1)),
        None,
        "same first choice",
    ),
    "another network's classes": (
        lambda pixels: images_of(pixels),
        "wrong",
        "fewer than by chance: is this a permutation",
    ),
}


@pytest.mark.parametrize(("make", "labels", "said"), DOUBTS.values(), ids=DOUBTS)
def test_images_that_say_little_are_doubted(
    tiny: Checkpoint, make: Any, labels: str | None, said: str
) -> None:
    record = replace(tiny.record, input=InputSpec((3, 4, 4), (0.5,) * 3, (0.5,) * 3))
    pixels = torch.rand(60, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    net = linear()
    with torch.no_grad():
        wrong = (net(pixels).argmax(1) + 1) % 3
    found = ReferenceLogits(net, make(pixels), wrong if labels else None).doubts(record)
    assert any(said in doubt for doubt in found), found
    assert ReferenceLogits(net, images_of(pixels), None).doubts(record) == []


def test_labels_count_only_where_they_mean_the_network_s_classes(
    plain: Checkpoint, tiny: Checkpoint
) -> None:
    digits = datasets.load_dataset("digits", plain.record.input, "train").limit(20)
    assert known_labels(digits, plain.record)[0] is not None
    colour = replace(tiny.record, input=InputSpec((3, 32, 32), (0.5,) * 3, (0.5,) * 3))
    assert (
        known_labels(datasets.load_dataset("digits", colour.input, "train").limit(20), colour)[0]
        is None
    )
    assert known_labels(synthetic_photographs(colour.input, 2), colour) == (None, "")
    labels, why = known_labels(digits, replace(plain.record, classes=7, class_names=None))
    assert labels is None
    assert "10 classes" in why


@pytest.mark.parametrize("optimism", [1.0, 3.0, 0.2])
@pytest.mark.parametrize("truth", [0.0004, 0.003, 0.0083, 0.019, 0.021, 0.09, 0.3, 2.0])
def test_trials_find_the_largest_eta_or_end(truth: float, optimism: float) -> None:
    tried = []

    def trial(eta: float) -> tuple[bool, float]:
        tried.append(eta)
        return eta <= truth, 0.9 * min(optimism * truth, keep.FAR * eta)

    found = keep.search_eta(trial)
    assert len(tried) <= keep.TRIALS
    assert 0 < found <= keep.MOST
    if (
        optimism == 1.0 and truth > 0.001
    ):  # a line that tells the truth: a tenth is left for caution, a quarter is near
        assert 0.7 * min(truth, keep.MOST) <= found <= truth


@pytest.mark.parametrize("share", [0.9, 0.98])
def test_what_is_written_keeps_enough_whatever_trials_said(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials that change nothing keep everything, so that the search goes as far as it may: the
    weights themselves judge.
    """
    net = constrain_layers.small_net()
    judges = ReferenceLogits(net, images_of(constrain_layers.IMAGES), None)
    calibration = network.LayerCalibration(
        net, constrain_layers.PATHS, constrain_layers.IMAGES.split(4)
    )
    originals = {
        path: net.get_submodule(path).weight.detach().clone() for path in constrain_layers.PATHS
    }
    exact = keep.constrain_to
    monkeypatch.setattr(
        keep, "constrain_to", lambda *args: [] if args[1].tolerance == keep.ROUGH else exact(*args)
    )
    found = keep.constrain_keeping(
        calibration, settings.ConstrainSettings(ridge=0.3), share, judges
    )
    assert found.fidelity == judges.compare(judges.logits(net))
    assert found.fidelity.agreement >= share
    if not found.results:
        assert all(
            torch.equal(net.get_submodule(path).weight, weight)
            for path, weight in originals.items()
        )


@pytest.mark.parametrize("share", [0.8, 0.98])
def test_keep_is_kept_and_used_up(workshop: Path, tmp_path: Path, share: float) -> None:
    """As many first choices stay as were asked for, judged by the written file, and a lower --keep
    lowers the norms more.
    """
    source = workshop / "plain.safetensors"
    out = tmp_path / "out.safetensors"
    words = ["constrain", source, "--keep", share, "--limit", 400, "--json", "-o", out]
    outcome = commands.certvit(*words)
    report = json.loads(outcome.stdout)
    kept = report["kept"]
    assert kept["images"] == 500
    assert not kept["took_part"]
    assert kept["chose"]
    old, new = (build.load(Checkpoint.read(path), CPU) for path in (source, out))
    images = datasets.load_dataset("digits", Checkpoint.read(source).record.input, "train").limit(
        900, 0
    )
    pixels, labels = images.select([9 * row // 5 for row in range(500)]).tensors()
    with torch.no_grad():
        before = old(pixels)
        after = new(pixels)
    same = float((before.argmax(1) == after.argmax(1)).double().mean())
    assert same == kept["agreement"] >= share
    # kernels on batches of another size differ by some 1e-6 of the logits
    assert kept["logits_error"] == pytest.approx(
        float((after - before).norm() / before.norm()), rel=1e-3
    )
    assert kept["accuracy_before"] == float((before.argmax(1) == labels).double().mean())
    assert kept["accuracy_after"] == float((after.argmax(1) == labels).double().mean())
    assert all(layer["after"] <= layer["before"] for layer in report["layers"])
    assert len({layer["eta"] for layer in report["layers"]}) == 1
    # not timid: at least a tenth off the product of the layers' norms
    ratio = torch.tensor([layer["after"] / layer["before"] for layer in report["layers"]]).prod()
    assert float(ratio) < 0.9
    (evidence,) = [
        entry for entry in Checkpoint.read(out).record.evidence if entry.command == "constrain"
    ]
    assert evidence.result["agreement"] == kept["agreement"]


def test_without_data_a_network_of_photographs_is_judged_on_synthetic_ones(tmp_path: Path) -> None:
    source = tmp_path / "net.safetensors"
    out = tmp_path / "out.safetensors"
    commands.certvit("init", "certvit_vit_cifar10", *shape(patch_size=4), "-o", source)
    found = commands.certvit(
        "constrain", source, "--beta", 0.01, "--limit", 60, "--json", "-o", out
    )
    kept = json.loads(found.stdout)["kept"]
    assert (kept["dataset"], kept["accuracy_after"]) == ("synthetic photographs", None)
    assert 0.015 < kept["logits_error"] <= 0.05
    assert kept["agreement_at_least"] >= 0.95
    assert kept["logits_error_at_most"] > kept["logits_error"]
    assert "only 12 images" in found.stderr.replace("\n", " ")
    (evidence,) = [
        entry for entry in Checkpoint.read(out).record.evidence if entry.command == "constrain"
    ]
    decode_evidence(evidence)
    assert evidence.result["logits_error_at_most"] == kept["logits_error_at_most"]


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_images_to_hold_any_out_are_said(
    tiny: Checkpoint, tmp_path: Path, count: int
) -> None:
    source = tmp_path / "tiny.safetensors"
    tiny.write(source)
    outcome = commands.certvit(
        "adapt", source, "--limit", count, "--json", "-o", tmp_path / "out.safetensors"
    )
    assert json.loads(outcome.stdout)["kept"]["took_part"] is True
    assert "too few to hold any out" in outcome.stderr.replace("\n", " ")


def test_real_images_are_expected_to_keep_less_than_synthetic_ones() -> None:
    """A larger error promises less, and none promises more than real images were seen to keep."""
    errors = [step * PREDICTABLE / 10 for step in range(11)]
    found = [expected_on_real(Fidelity(80, 43, error, 1 - error), 3) for error in errors]
    for error, expected in zip(errors, found, strict=True):
        assert expected["logits_error_at_most"] > error
        assert 0 <= expected["agreement_at_least"] < 1 - error / 2
    assert [e["logits_error_at_most"] for e in found] == sorted(
        e["logits_error_at_most"] for e in found
    )
    assert expected_on_real(Fidelity(80, 43, 1.01 * PREDICTABLE, 0.7), 3) == {}
    assert expected_on_real(Fidelity(80, 80, 0.0, 1.0), 1) == {}


@pytest.mark.parametrize(
    ("error", "refitted", "warned"), [(0.10, False, False), (0.10, True, True), (0.40, False, True)]
)
def test_synthetic_photographs_do_not_vouch_for_large_changes(
    tiny: Checkpoint, error: float, refitted: bool, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    colour = replace(tiny.record, input=InputSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3))
    reference = ReferenceLogits(nn.Flatten(), synthetic_photographs(colour.input, 60))
    kept = fidelity.fidelity_document(
        reference, nn.Flatten(), colour, False, Fidelity(60, 43, error, 1 - error), refitted
    )
    fidelity.show_fidelity(kept, output.Sink(False, False))
    said = capsys.readouterr()
    assert ("use --dataset with images like yours" in " ".join(said.err.split())) == warned
    assert ("expected on real images" in said.out) == (not warned)
