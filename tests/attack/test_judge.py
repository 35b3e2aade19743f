"""The judge believes nobody: what counts as broken, and what is kept of an attack."""

import pytest
import torch
from torch import Tensor, nn

from certcli.attack.judge import judge_points, predict_classes, tuck_in
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched
from certcli.evaluation.perturbation import Norm, Region, image_norms
from certcli.system.errors import ArchitectureError, DataError
from tests.helpers.attack_nets import (
    NORMS,
    batches,
    exact_distances,
    labelled,
    linear_classifier,
    random_pictures,
    small_perceptron,
)


@pytest.mark.parametrize("norm", NORMS)
def test_judge_clips_before_it_believes(norm: Norm) -> None:
    """Points far outside the ball, outside the box, NaN and infinite points are never a success as
    they stand.
    """
    model = linear_classifier(2)
    images = random_pictures(6)
    labels = labelled(model, images)
    distance = exact_distances(model, images, labels, norm)
    region = Region(norm, float(distance.min()) * 0.99)
    direction = (model[1].weight[1 - labels] - model[1].weight[labels]).detach().view_as(images)
    candidates = images + 100 * direction
    candidates[1, 0, 0, 0] = float("nan")
    candidates[2, 0, 0, 0] = float("inf")
    verdict = judge_points(model, images, labels, candidates, region)
    assert verdict.robust.all()
    assert not verdict.success.any()
    assert torch.equal(verdict.adversarial, images)
    assert verdict.norm.isinf().all()


@pytest.mark.parametrize("radius", [0.0, 1e-7, 2 / 255, 0.5, 3.0])
@pytest.mark.parametrize("norm", NORMS)
def test_tucked_points_are_inside_by_exact_comparison(norm: Norm, radius: float) -> None:
    """Float32 clipping leaves points 1e-8 outside; they come inside without giving up more than 1
    part in 10,000.
    """
    images = torch.cat([random_pictures(20, size=16), random_pictures(20, seed=2, size=16).round()])
    region = Region(norm, radius)
    generator = torch.Generator().manual_seed(0)
    away = images + 10 * torch.randn(images.shape, generator=generator)
    point = tuck_in(away, images, region)
    assert region.contains(point, images).all()
    if norm == "linf" and 2 / 255 <= radius <= 0.5:
        # 3e-8 is the rounding of a pixel near 1: relative to the radius at most 4e-6, and shrinks
        # double until they do
        assert (image_norms(point.double() - images.double(), norm) >= radius * (1 - 1e-4)).all()


def test_judge_refuses_what_it_cannot_judge() -> None:
    images = random_pictures(3)
    labels = torch.zeros(3, dtype=torch.long)
    region = Region("l2", 1.0)
    with pytest.raises(DataError, match="outside"):
        judge_points(
            linear_classifier(2),
            torch.where(images == images.max(), 1.5, images),
            labels,
            images,
            region,
        )  # one pixel
    with pytest.raises(DataError, match="disagree"):
        judge_points(linear_classifier(2), images, labels[:2], images, region)
    with pytest.raises(DataError, match="disagree"):
        judge_points(linear_classifier(2), images, labels, images[:2], region)
    middle = float(linear_classifier(2)(images).detach().median())
    for broken in (
        nn.Flatten(0),
        nn.Sequential(linear_classifier(2), nn.Unflatten(1, (2, 1))),  # a grid of classes
        nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1))),  # one answer for all images
        nn.Sequential(linear_classifier(2), nn.Linear(2, 1)),
        nn.Sequential(linear_classifier(2), nn.Threshold(middle, float("nan"))),
    ):
        with pytest.raises(ArchitectureError):
            judge_points(broken, images, labels, images, region)


class Wavering(nn.Module):
    """A network that is random: its answers, the same for each image, come in turn."""

    def __init__(self, *answers: tuple[float, ...]) -> None:
        super().__init__()
        self.answers = torch.tensor(answers)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.answers[(self.calls - 1) % len(self.answers)].expand(len(images), -1)


def test_of_random_networks_the_mean_of_the_samples_counts() -> None:
    """The first answer, the last and what is left of the first have another class than the sum of
    the three.
    """
    images = random_pictures(2)
    waver = Wavering((4, 0, 3), (0, 4, 3), (0.5, 0, 0))
    assert predict_classes(waver, images, samples=3).tolist() == [2, 2]
    assert waver.calls == 3


def test_a_misclassified_image_is_not_robust_and_its_norm_is_zero() -> None:
    model = linear_classifier(2)
    images = random_pictures(3)
    labels = 1 - labelled(model, images)
    verdict = judge_points(model, images, labels, images.round(), Region("l2", 9.0))
    assert not verdict.success.any()
    assert not verdict.robust.any()
    assert torch.equal(verdict.adversarial, images)
    assert verdict.norm.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(verdict.adversarial_prediction, verdict.prediction)


def test_solved_rows_cost_nothing_more() -> None:
    """The forward passes of a run see fewer rows once images fall, and the images found are kept."""
    rows: list[int] = []
    model = small_perceptron(5)
    model.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    images = random_pictures(20)
    labels = labelled(model, images)
    list(
        attack_images(
            model, batches(images, labels, 20), ["pgd"], Region("l2", 1.0), AttackSettings(steps=20)
        )
    )
    early = sum(rows)
    rows.clear()
    settings = AttackSettings(steps=20, stop_early=False)
    list(attack_images(model, batches(images, labels, 20), ["pgd"], Region("l2", 1.0), settings))
    assert early < 0.8 * sum(rows)


def test_watched_model_keeps_the_first_success_of_a_row() -> None:
    model = linear_classifier(2)
    images = random_pictures(4)
    labels = labelled(model, images)
    direction = (model[1].weight[1 - labels] - model[1].weight[labels]).detach().view_as(images)
    region = Region("l2", 5.0)
    watched = Watched(model, images, labels, region, True)
    watched(images)
    flip = images.clone()
    flip[:2] = (images + 5 * direction).clamp(0, 1)[:2]
    watched(flip).detach().scatter_(
        1, labels[:, None], 1e9
    )  # some attacks write into the logits they get
    logits = watched(
        images
    )  # the solved rows rest on their last logits although their pixels went back
    verdict = judge_points(model, images, labels, watched.harvest(images), region)
    assert verdict.success.tolist() == [True, True, False, False]
    assert (logits.argmax(dim=1) != labels).tolist() == [True, True, False, False]
    watched.train()
    assert not model.training
