"""From batches to records, summaries, presets, checks and saved examples."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from certcli.attack import catalogue, checks, findings, run
from certcli.attack.settings import PRESETS, AttackSettings, planned_attacks, preset
from certcli.evaluation import image_records, perturbation
from certcli.system.errors import DataError, UsageError
from tests.helpers.attack_nets import (
    NORMS,
    ROUNDING,
    SHORT,
    batches,
    exact_distances,
    labelled,
    linear_classifier,
    on_stairs,
    random_pictures,
    scaled_logits,
    small_perceptron,
)


def test_cascade_asks_each_image_once_and_independence_asks_all() -> None:
    model = small_perceptron(5)
    images = random_pictures(20)
    labels = labelled(model, images, wrong=3)
    names = ["fgsm", "margin-pgd", "pgd-5"]
    data = batches(images, labels, 20)
    region = perturbation.Region("l2", 0.15)
    cascade = list(run.attack_images(model, data, names, region, AttackSettings()))
    alone = list(run.attack_images(model, data, names, region, AttackSettings(), independent=True))
    for record in cascade:
        outcomes = [record.robust[name] for name in names]
        if record.correct and not record.withstood:
            fallen = outcomes.index(False)
            assert outcomes == [True] * fallen + [False] + [None] * (len(names) - fallen - 1)
            assert record.broken_by == names[fallen]
    assert all(None not in record.robust.values() for record in alone)
    nearest = [
        *run.attack_images(
            model,
            data,
            ["fab", "fgsm"],
            perturbation.Region("l2", 1.0),
            AttackSettings(steps=20),
            independent=True,
        )
    ]
    least = [
        *run.attack_images(
            model, data, ["fab"], perturbation.Region("l2", 1.0), AttackSettings(steps=20)
        )
    ]
    assert [record.norm for record in nearest] == [record.norm for record in least]
    in_turn = run.robust_accuracy(cascade)
    separate = run.robust_accuracy(alone)
    assert in_turn.clean == separate.clean == 17 / 20
    assert (
        in_turn.robust
        == in_turn.attacks["pgd-5"]
        <= in_turn.attacks["margin-pgd"]
        <= in_turn.attacks["fgsm"]
    )
    assert separate.robust <= min(separate.attacks.values())
    assert in_turn.attacks["fgsm"] == separate.attacks["fgsm"]
    assert in_turn.images == 20
    assert all(
        low <= in_turn.attacks[name] <= high
        for name, (low, high) in in_turn.intervals.items()
        if name in names
    )


def test_a_curve_falls_and_carries_what_fell() -> None:
    model = small_perceptron(5)
    images = random_pictures(20)
    labels = labelled(model, images, wrong=3)
    radii = (0.4, 0.05, 0.1, 0.2)
    records = list(
        run.attack_images(
            model,
            batches(images, labels),
            ["fgsm", "pgd"],
            perturbation.growing("l2", radii),
            AttackSettings(),
        )
    )
    summaries = run.robust_curve(records)
    assert [summary.epsilon for summary in summaries] == sorted(radii)
    robust = [summary.robust for summary in summaries]
    assert robust == sorted(robust, reverse=True)
    assert robust[0] > robust[-1]
    assert all(summary.attacks["pgd"] <= summary.attacks["fgsm"] for summary in summaries)
    assert any(record.robust["fgsm"] is False for record in records)
    first: dict[int, image_records.AttackRecord] = {}
    for record in records:
        if record.broken_by == "fgsm":
            assert record.robust == {"fgsm": False, "pgd": None}
        if record.index in first:
            assert (record.norm, record.broken_by) == (
                first[record.index].norm,
                first[record.index].broken_by,
            )
        elif record.norm is not None:
            first[record.index] = record
    with pytest.raises(DataError, match="several radii"):
        run.robust_accuracy(records)


def test_plans() -> None:
    settings = AttackSettings(steps=3, seed=9)
    fgsm, twenty, cut = planned_attacks(["fgsm", "margin-pgd-20", "apgd-ce"], settings)
    assert (fgsm.attack, fgsm.settings) == ("fgsm", settings)
    assert (twenty.label, twenty.attack, twenty.settings) == (
        "margin-pgd-20",
        "margin-pgd",
        replace(settings, steps=20),
    )
    assert (cut.attack, cut.settings.steps) == ("apgd-ce", 3)
    for wrong in ([], ["nonsense"], ["pgd-0"], ["nonsense-3"], ["pgd", "pgd"]):
        with pytest.raises(UsageError):
            planned_attacks(wrong, settings)


@pytest.mark.parametrize(
    "choice",
    [
        {"steps": 0},
        {"restarts": 0},
        {"relative_step": float("nan")},
        {"learning_rate": -1.0},
        {"precision": "fp8"},
    ],
)
def test_settings_refuse_nonsense(choice: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        AttackSettings(**choice)


def test_misuse_is_refused() -> None:
    model = small_perceptron(3)
    images = random_pictures(4)
    data = batches(images, labelled(model, images))
    with pytest.raises(UsageError, match="l2"):
        list(run.attack_images(model, data, ["cw"], perturbation.Region("linf", 0.1), SHORT))
    with pytest.raises(UsageError, match="radius"):
        list(run.attack_images(model, data, ["pgd"], perturbation.growing("l2", ()), SHORT))
    with pytest.raises(UsageError, match="training"):
        list(
            run.attack_images(
                small_perceptron(3).train(), data, ["pgd"], perturbation.Region("l2", 0.1), SHORT
            )
        )
    with pytest.raises(UsageError, match="Square"):
        catalogue.ATTACKS.load("square")(
            model,
            torch.rand(1, 1, 4, 9),
            torch.zeros(1).long(),
            perturbation.Region("l2", 0.1),
            SHORT,
        )
    with pytest.raises(DataError):
        run.robust_accuracy([])


def test_preset_radii_are_the_papers() -> None:
    radii = {
        name: [(part.region.norm, part.region.radius) for part in entry.parts]
        for name, entry in PRESETS.items()
    }
    assert radii == {
        "certvit": [("l2", 36 / 255)],
        "specformer-standard": [("linf", 2 / 255)],
        "specformer-adversarial": [("linf", 8 / 255)],
        "cauchy": [("linf", 2 / 255), ("l2", 2.0), ("l2", 260.0)],
        "cauchy-l2": [("l2", 2.0)],
    }
    with pytest.raises(UsageError, match="unknown preset"):
        preset("cifar")


def test_preset_steps_are_the_papers() -> None:
    """2.5 radius / steps where a paper names no size, whatever the default of an attack becomes."""
    steps = {
        (name, entry.label, entry.settings.steps): entry.settings.relative_step
        for name, paper in PRESETS.items()
        for part in paper.parts
        for entry in part.plan
        if entry.attack != "cw"
    }
    assert steps == {
        ("certvit", "pgd-50", 50): 2.5,
        ("specformer-standard", "fgsm", None): 2.5,
        ("specformer-standard", "pgd-2", 2): 2.5,
        ("specformer-adversarial", "cw-20", 20): 2.5,
        ("specformer-adversarial", "pgd-20", 20): 2.5,
        ("specformer-adversarial", "pgd-100", 100): 2.5,
        ("cauchy", "fgsm", None): 2.5,
        ("cauchy", "pgd-7", 7): pytest.approx(0.7),  # of two norms: the last, 0.2 at radius 2
        ("cauchy", "pgd-20", 20): 2.0,
        ("cauchy-l2", "pgd-7", 7): pytest.approx(0.7),
        ("cauchy-l2", "pgd-20", 20): 2.0,
    }
    for paper, step in (("certvit", 2.5 * 36 / 255 / 50), ("cauchy", 2 / 255), ("cauchy-l2", 0.2)):
        part = PRESETS[paper].parts[0]
        last = part.plan[-1].settings
        lengths = [last.step(part.region, n, last.steps, random_pictures(1)).item() for n in (0, 1)]
        assert lengths == pytest.approx([step] * 2)


def test_checks_of_the_model() -> None:
    images = random_pictures(40)
    plain = small_perceptron(4)
    soft = nn.Sequential(small_perceptron(4), nn.Softmax(dim=1)).eval()
    logarithmic = nn.Sequential(small_perceptron(4), nn.LogSoftmax(dim=1)).eval()
    cases = {
        "plain": (plain, set()),
        "softmax": (soft, {"probabilities"}),
        "log softmax": (logarithmic, {"probabilities"}),
        "saturated": (scaled_logits(1e4), set()),
        "rounded": (on_stairs(), {"zero gradients"}),
    }
    for name, (model, expected) in cases.items():
        labels = labelled(model.eval(), images)
        flags = checks.inspect_model(
            model, images, labels, checks.first_pass(model, images, labels)
        )
        assert {flag.check.name for flag in checks.raised(flags)} == expected, name
        assert not any(flag.check.fatal for flag in flags)


def flags_of(
    model: nn.Module,
    region: perturbation.Region,
    settings: AttackSettings,
    attacks: Sequence[str] = ("pgd",),
) -> list[checks.Flag]:
    images = random_pictures(40)
    labels = labelled(model, images)
    plan = planned_attacks(attacks, settings)
    records = list(run.attack_images(model, batches(images, labels, 40), plan, region, settings))
    attacked = checks.Attacked(images, labels, records, plan, region)
    return list(
        checks.inspect_attacks(
            model, attacked, checks.first_pass(model, images, labels), settings, 1000
        )
    )


class Waves(nn.Module):
    """Logits (cos(20 t), 0, -cos(20 t)) at the coordinate t along (1, ..., 1): steps of one length
    pass over the first place where the class changes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        along = (x - 0.5).flatten(1).sum(1, keepdim=True) / x[0].numel() ** 0.5
        wave = torch.cos(20 * along)
        return torch.cat([wave, torch.zeros_like(wave), -wave], 1)


def test_at_two_radii_all_attacks_are_tried() -> None:
    """FGSM alone breaks fewer images at .2 than at .1, where its one step is too long."""
    model = Waves().eval()
    flags = flags_of(model, perturbation.Region("l2", 0.1), AttackSettings(), ["fgsm", "pgd-20"])
    assert not checks.raised(flags)
    (rising,) = checks.raised(
        flags_of(model, perturbation.Region("l2", 0.1), AttackSettings(), ["fgsm"])
    )
    assert "of 40 images from radius 0.1 to 0.2" in rising.measured


def test_checks_of_the_attacks() -> None:
    flags = flags_of(small_perceptron(4), perturbation.Region("l2", 0.15), AttackSettings())
    assert not checks.raised(flags)
    assert [flag.check.name for flag in flags] == ["rising accuracy", "weak iteration"]
    # a step so small that PGD never leaves the neighbourhood of its start, while FGSM goes the
    # whole way
    flags = flags_of(
        small_perceptron(4),
        perturbation.Region("linf", 0.05),
        AttackSettings(relative_step=1e-5, steps=2),
    )
    assert "weak iteration" in {flag.check.name for flag in checks.raised(flags)}
    assert checks.rising_accuracy({0.1: 0.5, 0.2: 0.55, 0.4: 0.1}, 100).raised
    assert not checks.rising_accuracy({0.1: 0.5, 0.2: 0.52, 0.4: 0.1}, 100).raised
    assert not checks.rising_accuracy({0.1: 0.5, 0.2: 0.6}, 10).raised
    assert not checks.weak_iteration(10, 11, 20).raised


@pytest.mark.parametrize("norm", NORMS)
def test_certified_above_attacked_is_fatal(norm: perturbation.Norm) -> None:
    model = linear_classifier(2)
    images = random_pictures(10)
    labels = labelled(model, images, wrong=2)
    exact = exact_distances(model, images, labels, "l2")
    region = perturbation.Region(norm, 2.0 if norm == "l2" else 0.5)
    records = list(run.attack_images(model, batches(images, labels), ["margin-pgd"], region, SHORT))
    honest = {index: float(exact[index]) * (1 - ROUNDING) for index in range(10)}
    honest |= dict.fromkeys(
        range(2), 1.0
    )  # a certified radius speaks of the prediction, right or wrong
    flag = checks.certified_above_attacked(records, honest)
    assert not flag.raised
    assert not checks.certified_above_attacked(
        records, {record.index: record.l2 or 0.0 for record in records}
    ).raised
    broken = next(record for record in records if record.correct and record.l2 is not None)
    flag = checks.certified_above_attacked(records, {**honest, broken.index: broken.l2 * 1.01})
    assert flag.raised
    assert flag.check.fatal
    assert f"index {broken.index} " in flag.measured


def test_examples_are_proofs_by_themselves() -> None:
    """Whoever loads the tensors can check them without us: norm, box, flip."""
    model = small_perceptron(5)
    images = random_pictures(12)
    labels = labelled(model, images, wrong=2)
    region = perturbation.Region("l2", 0.2)
    records = list(
        run.attack_images(
            model,
            batches(images, labels),
            ["margin-pgd"],
            perturbation.growing("l2", (0.1, 0.2)),
            SHORT,
            keep_images=True,
        )
    )
    saved = findings.collect([record for record in records if record.fell])
    assert (
        len(saved["indices"])
        == len(saved["indices"].unique())
        == sum(
            record.correct and record.norm is not None
            for record in records
            if record.epsilon == 0.2
        )
    )
    assert torch.equal(saved["images"], images[saved["indices"]])
    assert region.contains(saved["adversarial"], saved["images"]).all()
    measured = perturbation.image_norms(
        saved["adversarial"].double() - saved["images"].double(), "l2"
    )
    assert torch.equal(measured, saved["norms"])
    assert (saved["norms"] <= saved["epsilons"]).all()
    with torch.no_grad():
        assert (model(saved["adversarial"]).argmax(dim=1) != saved["labels"]).all()
    assert torch.equal(saved["perturbations"], saved["adversarial"] - saved["images"])
