"""Whatever an attack returns: what counts as its success lies in the ball and in [0, 1], and of an
attack on 8-bit images on their grid.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from certcli.attack.families import ascent
from certcli.attack.judge import judge_points, rounded_to_8bit
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region
from tests.helpers.attack_nets import NORMS

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
        [rounded_to_8bit(noise[0]), noise[1].round(), rounded_to_8bit(1 - 0.02 * noise[2])]
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
@pytest.mark.parametrize("norm", NORMS)
def test_the_judge_counts_nothing_outside(norm: Norm, exactly: bool) -> None:
    """Also of single and double precision."""
    counted = set()
    for dtype, region, (name, returned) in itertools.product(
        (torch.float32, torch.float64), regions(norm), RETURNED.items()
    ):
        images = pixels().to(dtype)
        labels = torch.zeros(len(images), dtype=torch.long)
        model = Elsewhere(images).eval()
        verdict = judge_points(
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
@pytest.mark.parametrize("norm", NORMS)
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
        for record in attack_images(
            Elsewhere(images).eval(), batch, ["fgsm"], several, settings, keep_images=True
        ):
            assert record.correct
            if record.norm is not None:
                fell += 1
                require_inside(record.adversarial, record.image, several[0], record.epsilon)
                assert not torch.equal(record.adversarial, record.image)
                if kind == "8bit":
                    assert torch.equal(record.adversarial, rounded_to_8bit(record.adversarial))
                    assert record.as_8bit
    assert fell > 30
