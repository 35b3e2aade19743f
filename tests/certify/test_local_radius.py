"""Networks of two pixels, whose nearest other class a fine grid finds: a local radius reaches near
it, and no farther.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.radii import Norm
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError

SIZE = (1, 1, 2)


class Tokens(nn.Module):
    """Each pixel as a token of 4 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.flatten(2).transpose(1, 2))


BODIES = {
    "affine": lambda: [nn.Flatten(), nn.Linear(2, 3)],
    "ReLU": lambda: [nn.Flatten(), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)],
    "GELU": lambda: [nn.Flatten(), nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 3)],
    "attention": lambda: [
        Tokens(),
        Attention(4, num_heads=2, qkv_bias=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ],
}
# body, norm, effort: the share of the distance found by the grid that the largest radius reaches
REACHED: dict[tuple[str, Norm, str], float] = {
    ("affine", "l2", "norms"): 0.95,
    ("affine", "linf", "norms"): 0.7,
    ("ReLU", "l2", "norms"): 0.2,
    ("GELU", "l2", "norms"): 0.15,
    ("attention", "l2", "norms"): 0.03,
    **{("affine", norm, effort): 0.9 for norm in ("l2", "linf") for effort in ("zonotope", "backward")},
    ("ReLU", "l2", "zonotope"): 0.9,
    ("ReLU", "linf", "zonotope"): 0.9,
    ("ReLU", "linf", "backward"): 0.9,
    ("GELU", "l2", "zonotope"): 0.9,
    ("GELU", "linf", "backward"): 0.85,
    ("attention", "l2", "zonotope"): 0.5,
    ("attention", "l2", "backward"): 0.4,
}  # fmt: skip


@functools.cache
def network(body: str) -> tuple[PixelModel, Tensor, list[int]]:
    """Return a network with its images and their classes."""
    torch.manual_seed(3)
    layers = nn.Sequential(*BODIES[body]())
    model = PixelModel(InputSpec(size=SIZE, mean=(0.3,), std=(0.25,)), layers).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    images = torch.rand(4, *SIZE, generator=torch.Generator().manual_seed(1)).double()
    return model, images, model(images).argmax(1).tolist()


@functools.cache
def nearest(body: str, norm: Norm) -> list[float]:
    """Return how far from each image the grid finds another class: 240 directions, 500 radii up to
    1.
    """
    model, images, tops = network(body)
    angles = torch.linspace(0, 2 * torch.pi, 240, dtype=torch.float64)
    moves = torch.stack([angles.cos(), angles.sin()], 1)
    moves = moves if norm == "l2" else moves / moves.abs().amax(1, keepdim=True)
    radii = torch.linspace(0.002, 1, 500, dtype=torch.float64)
    found = []
    for image, top in zip(images, tops, strict=True):
        points = image.flatten() + radii[:, None, None] * moves
        other = (model(points.view(-1, *SIZE)).argmax(1) != top).view(len(radii), -1).any(1)
        found.append(float(radii[other][0]) if bool(other.any()) else float("inf"))
    return found


@pytest.mark.parametrize(("body", "norm", "effort"), REACHED, ids=lambda part: part)
def test_a_radius_reaches_near_the_next_class_and_no_farther(
    body: str, norm: Norm, effort: str
) -> None:
    model, images, tops = network(body)
    certifier = LocalCertifier(
        model, SIZE, Local(effort=effort, norm=norm, arithmetic="real"), symbols=100
    )
    rows = certifier.batch(range(4), images, tops)
    shares = [row.radius / far for row, far in zip(rows, nearest(body, norm), strict=True)]
    assert max(shares) <= 1
    assert max(shares) >= REACHED[body, norm, effort]


@pytest.mark.parametrize("effort", ["zonotope", "backward"])
@pytest.mark.parametrize(("norm", "anywhere"), [("l2", 10**-0.5), ("linf", 0.25)])
def test_images_outside_0_and_1_count_for_real_arithmetic_alone(
    norm: Norm, anywhere: float, effort: str
) -> None:
    """A margin of 3 x + y - 0.2 at (0, 0.5): x cannot fall there, and y falls 0.3 before the class
    changes.
    """
    model = PixelModel(
        InputSpec(size=SIZE, mean=(0.0,), std=(1.0,)), nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    )
    with torch.no_grad():
        model.net[1].weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
        model.net[1].bias.copy_(torch.tensor([-0.2, 0.0]))
    image = torch.tensor([[[[0.0, 0.5]]]]).double()
    for arithmetic, far in (("real", 0.3 * anywhere), ("float64", 0.3)):
        certifier = LocalCertifier(
            model.double().eval(), SIZE, Local(effort, norm, arithmetic=arithmetic), symbols=100
        )
        (row,) = certifier.batch([0], image, [0])
        assert 0.95 * far < row.radius < far * (1 + 1e-7)  # 0.2 is stored in float32


@pytest.mark.parametrize("radii", [(0.0, 0.1), (0.1, float("inf")), (0.2, 0.1)], ids=str)
def test_radii_to_try_are_finite_above_0_and_ascending(radii: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="radii to try"):
        Local(at=radii)


@pytest.mark.parametrize(("effort", "walks"), [("zonotope", 8), ("auto", 4)])
def test_radii_that_are_asked_for_are_decided_in_a_walk_each(
    effort: str, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is walked once for each radius that norms do not prove, up to one not proven."""
    model, images, tops = network("affine")
    searched = LocalCertifier(model, SIZE, Local(arithmetic="real")).batch(range(4), images, tops)
    smallest = min(row.radius for row in searched)
    certifier = LocalCertifier(
        model, SIZE, Local(effort, at=[smallest / 2, 1e3], arithmetic="real")
    )
    assert "at most 2 for an image" in certifier.expected(4, SIZE)
    asked = list[float]()
    walk = certifier.proven

    def counted(image: torch.Tensor, label: int, radius: float) -> bool:
        asked.append(radius)
        return walk(image, label, radius)

    monkeypatch.setattr(certifier, "proven", counted)
    rows = certifier.batch(range(4), images, tops)
    assert len(asked) == walks
    assert all(row.radius > smallest / 2 for row in rows)
    assert {row.rung for row in rows} == {"norms" if effort == "auto" else effort}
    assert "decided" in certifier.title
    mixed = [rows[0], replace(rows[1], rung="norms"), replace(rows[2], rung="zonotope")]
    for part in (rows, mixed):
        by_norms = sum(row.rung == "norms" for row in part)
        title = certifier.title_of(part)
        assert ("enclosure" in title) == (by_norms < len(part)), "the title follows the records"
        assert (f"balls of norms around one forward pass for {by_norms} of 3" in title) == (
            part is mixed
        )
