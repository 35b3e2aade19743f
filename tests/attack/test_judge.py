"""The judge believes nobody: what counts as broken, what is kept of an attack, also where its points lie
elsewhere than they should, and images of 8 bits a value.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from certcli.attack import judge, run, watched_model
from certcli.attack.families import ascent
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region
from certcli.models import build, open
from certcli.system.errors import ArchitectureError, DataError
from tests.helpers import attack_nets, commands


def test_judge_refuses_what_it_cannot_judge() -> None:
    images = attack_nets.random_pictures(3)
    labels = torch.zeros(3, dtype=torch.long)
    region = Region("l2", 1.0)
    with pytest.raises(DataError, match="outside"):
        judge.judge_points(
            attack_nets.linear_classifier(2),
            torch.where(images == images.max(), 1.5, images),
            labels,
            images,
            region,
        )  # one pixel
    with pytest.raises(DataError, match="disagree"):
        judge.judge_points(attack_nets.linear_classifier(2), images, labels[:2], images, region)
    with pytest.raises(DataError, match="disagree"):
        judge.judge_points(attack_nets.linear_classifier(2), images, labels, images[:2], region)
    middle = float(attack_nets.linear_classifier(2)(images).detach().median())
    for broken in (
        nn.Flatten(0),
        nn.Sequential(
            attack_nets.linear_classifier(2), nn.Unflatten(1, (2, 1))
        ),  # a grid of classes
        nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1))),  # one answer for all images
        nn.Sequential(attack_nets.linear_classifier(2), nn.Linear(2, 1)),
        nn.Sequential(attack_nets.linear_classifier(2), nn.Threshold(middle, float("nan"))),
    ):
        with pytest.raises(ArchitectureError):
            judge.judge_points(broken, images, labels, images, region)


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
    images = attack_nets.random_pictures(2)
    waver = Wavering((4, 0, 3), (0, 4, 3), (0.5, 0, 0))
    assert judge.predict_classes(waver, images, samples=3).tolist() == [2, 2]
    assert waver.calls == 3


def test_watched_model_keeps_the_first_success_of_a_row() -> None:
    model = attack_nets.linear_classifier(2)
    images = attack_nets.random_pictures(4)
    labels = attack_nets.labelled(model, images)
    direction = (model[1].weight[1 - labels] - model[1].weight[labels]).detach().view_as(images)
    region = Region("l2", 5.0)
    watched = watched_model.Watched(model, images, labels, region, True)
    watched(images)
    flip = images.clone()
    flip[:2] = (images + 5 * direction).clamp(0, 1)[:2]
    watched(flip).detach().scatter_(
        1, labels[:, None], 1e9
    )  # some attacks write into the logits they get
    logits = watched(
        images
    )  # the solved rows rest on their last logits although their pixels went back
    verdict = judge.judge_points(model, images, labels, watched.harvest(images), region)
    assert verdict.success.tolist() == [True, True, False, False]
    assert (logits.argmax(dim=1) != labels).tolist() == [True, True, False, False]
    watched.train()
    assert not model.training


RADII = (1 / 255, 0.004, 0.05, 0.4)
SUMMED = Fraction(1, 2**46)
"""Relative: 36 squares and a root in float64 round a length by less."""


class Elsewhere(nn.Module):
    """Class 0 at these images, class 1 at any other: whatever is let in is a success."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images

    def forward(self, x: Tensor) -> Tensor:
        away = (x[:, None].double() - self.images[None].double()).flatten(2).abs().amax(2).amin(1)
        return torch.stack([torch.full_like(away, 1e-12), away.nan_to_num(1.0, 1.0)], 1)


def pixels() -> Tensor:
    """Images of 8 bits: noise, black and white, nearly so."""
    noise = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    return torch.stack(
        [
            judge.rounded_to_8bit(noise[0]),
            noise[1].round(),
            judge.rounded_to_8bit(1 - 0.02 * noise[2]),
        ]
    )


def direction(images: Tensor, norm: Norm) -> Tensor:
    away = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    return away.sign() if norm == "linf" else away / away.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def one_pixel(images: Tensor, change: float) -> Tensor:
    moved = images.clone()
    moved[..., 2, 3] += torch.where(images[..., 2, 3] > 0.5, -change, change)
    return moved


RETURNED: dict[str, Callable[[Tensor, Region], Tensor]] = {
    "far": lambda x, r: x + 100 * direction(x, r.norm),
    "on the sphere": lambda x, r: x + r.radius * direction(x, r.norm),
    "a little outside": lambda x, r: x + (1 + 1e-5) * r.radius * direction(x, r.norm),
    "twice the radius": lambda x, r: x + 2 * r.radius * direction(x, r.norm),
    "the nearest level outside": lambda x, r: one_pixel(x, (int(r.radius * 255) + 1) / 255),
    "the last level inside": lambda x, r: one_pixel(x, int(r.radius * 255 + 1e-6) / 255),
    "off the grid": lambda x, r: one_pixel(x, r.radius * 0.97),
    "outside [0, 1]": lambda x, r: torch.where(x > 0.5, x + r.radius, x - r.radius),
    "negatives": lambda x, r: 1 - x,
    "not a number": lambda x, r: torch.full_like(x, torch.nan),
    "infinite": lambda x, r: one_pixel(x, torch.inf),
}


def require_inside(point: Tensor, image: Tensor, region: Region, radius: float) -> None:
    """In rational arithmetic."""
    moves = [
        Fraction(float(a)) - Fraction(float(b))
        for a, b in zip(point.flatten(), image.flatten(), strict=True)
    ]
    if region.norm == "linf":
        assert max(map(abs, moves)) <= Fraction(radius)
    else:
        assert sum(move * move for move in moves) <= Fraction(radius) ** 2 * (1 + SUMMED)
    assert 0 <= float(point.min()) <= float(point.max()) <= 1


def regions(norm: Norm) -> list[Region]:
    return [*(Region(norm, radius) for radius in RADII), Region.each(norm, [0.01, 0.1, 0.3])]


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("norm", attack_nets.NORMS)
def test_the_judge_counts_nothing_outside(norm: Norm, exactly: bool) -> None:
    """Also of single and double precision."""
    counted = set()
    for dtype, region, (name, returned) in itertools.product(
        (torch.float32, torch.float64), regions(norm), RETURNED.items()
    ):
        images = pixels().to(dtype)
        labels = torch.zeros(len(images), dtype=torch.long)
        model = Elsewhere(images).eval()
        verdict = judge.judge_points(
            model, images, labels, returned(images, region), region, exactly=exactly
        )
        for row in verdict.success.nonzero().flatten().tolist():
            counted.add(name)
            point = verdict.adversarial[row]
            require_inside(point, images[row], region, float(region.radii(images)[row]))
            assert not torch.equal(point, images[row])
    assert {"the last level inside", "off the grid"} <= counted
    assert exactly <= {"far", "not a number", "infinite"}.isdisjoint(counted)


@pytest.mark.parametrize("kind", ["8bit", "float"])
@pytest.mark.parametrize("norm", attack_nets.NORMS)
def test_a_run_counts_nothing_outside(
    norm: Norm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At growing radii, where points of a smaller one are stretched, and at an image's own."""
    images, fell = pixels(), 0
    batch = [(torch.arange(3), images, torch.zeros(3, dtype=torch.long))]
    settings = AttackSettings(pixels=kind)
    growing, own = regions(norm)[:-1], regions(norm)[-1:]
    for returned, several in itertools.product(RETURNED.values(), (growing, own)):
        monkeypatch.setattr(ascent, "fgsm", lambda m, x, y, r, s, of=returned: of(x, r))
        for record in run.attack_images(
            Elsewhere(images).eval(), batch, ["fgsm"], several, settings, keep_images=True
        ):
            assert record.correct
            if record.norm is not None:
                fell += 1
                require_inside(record.adversarial, record.image, several[0], record.epsilon)
                assert not torch.equal(record.adversarial, record.image)
                if kind == "8bit":
                    assert torch.equal(
                        record.adversarial, judge.rounded_to_8bit(record.adversarial)
                    )
                    assert record.as_8bit
    assert fell > 30


RUN = ("--dataset", "digits", "-a", "pgd", "--limit", 20, "--no-checks")


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("radius", [0.004, 0.02, 0.12, 0.5])
def test_images_with_8_bits_stay_in_the_region_and_use_it(norm: str, radius: float) -> None:
    draw = torch.Generator().manual_seed(1)
    images = judge.rounded_to_8bit(torch.rand(6, 1, 8, 8, generator=draw))
    ascent = images + 0.01 * torch.randn(images.shape, generator=draw)
    region = Region(norm, radius)
    found = judge.nearest_within(ascent, images, region)
    assert torch.equal(found, judge.rounded_to_8bit(found))
    assert bool(region.contains(found, images).all())
    moved = (found - images).flatten(1).abs().amax(1) > 0
    if radius >= 0.02:  # 0.004 is one level
        assert bool(moved.all())
        lengths = (found - images).flatten(1).norm(dim=1) if norm == "l2" else None
        assert lengths is None or float(lengths.min()) > 0.5 * radius


@pytest.mark.parametrize("kind", ["float", "8bit"])
def test_records_examples_and_document_say_both(workshop: Path, tmp_path: Path, kind: str) -> None:
    records, saved = (tmp_path / name for name in ("r.jsonl", "e.safetensors"))
    net = workshop / "plain.safetensors"
    words = ("attack", net, *RUN, "-e", 0.2, "--pixels", kind)
    found = commands.document(*words, "--records", records, "--save-examples", saved)
    rows = [row for row in commands.record_lines(records) if row["broken_by"]]
    assert found["fooled"] == len(rows) > 0
    assert found["fooled_8bit"] == sum(row["as_8bit"] for row in rows)
    tensors = load_file(saved)
    model = build.load(open.open_checkpoint(str(net)))
    with torch.no_grad():
        classes = model(judge.rounded_to_8bit(tensors["adversarial"])).argmax(1)
    assert torch.equal(classes != tensors["labels"], tensors["as_8bit"])
    rounded = judge.rounded_to_8bit(tensors["adversarial"])
    assert kind == "float" or torch.equal(tensors["adversarial"], rounded)
    assert kind == "float" or found["fooled_8bit"] == found["fooled"]
    told = commands.attempt(*words).stdout
    assert f"As 8-bit files, {found['fooled_8bit']} of {found['fooled']}" in told
