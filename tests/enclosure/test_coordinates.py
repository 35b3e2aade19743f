"""Fewer numbers than pixels: the same certificates, and enclosures that hold whatever the basis is."""

import pytest
import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.models.vision_transformer import VisionTransformer

from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.network import LocalNetwork, changed
from certcli.enclosure.zonotopes.space import Coordinates, coordinates_of
from certcli.models.pixels import PixelModel
from tests.enclosure.test_zonotope_networks import largest_share
from tests.helpers.grids import EVERY
from tests.soundness.local_laws import share_of_form

SIZE = (1, 8, 8)


def network(act: type[nn.Module] = nn.GELU, seed: int = 0) -> PixelModel:
    """A ViT of one block whose patches of 16 pixels become 6 numbers each: 24 for 64."""
    torch.manual_seed(seed)
    net = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=4, embed_dim=6, depth=1, num_heads=2, act_layer=act
    )  # fmt: skip
    for parameter in net.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
        parameter.requires_grad_(False)
    return PixelModel(InputSpec(size=SIZE, mean=(0.4,), std=(0.6,)), net).double().eval()


def image(seed: int = 0) -> Tensor:
    """Half of the pixels are at 0 or 1."""
    pixels = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed)).double()
    return (2 * pixels - 0.5).clamp(0, 1)


def moves(count: int = 40) -> Tensor:
    e = torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).double()
    return e / e.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("act", "tape", "in_box"),
    [
        (nn.GELU, False, True),
        (nn.ReLU, True, False),
        *[(nn.GELU, False, False), (nn.ReLU, True, True)] * EVERY,
    ],
)
def test_margins_are_those_of_the_pixels(act: type[nn.Module], tape: bool, in_box: bool) -> None:
    model = network(act)
    pixels = image()
    fewer, whole = (LocalNetwork(model, SIZE) for _ in range(2))
    whole.narrow = None
    assert (fewer.numbers, whole.numbers) == (24, 64)
    fewer.margins(l2_ball(pixels, 0.0, squares_up_to=0, limit=400), 1)  # which shows no map
    start = l2_ball(pixels, 0.05, squares_up_to=0, limit=400, tape=tape, in_box=in_box)
    bounds = fewer.margins(start, 1)
    assert fewer.coordinates.basis.shape == (4, 16, 6)
    assert torch.allclose(bounds, whole.margins(start, 1), rtol=1e-9, atol=1e-11)
    if not tape:
        with_squares = l2_ball(pixels, 0.05, squares_up_to=24, limit=400, in_box=in_box)
        assert (fewer.margins(with_squares, 1) > bounds).all()


@pytest.mark.parametrize("squares", [0, 24, 64])
def test_every_node_holds_at_points_of_the_ball(squares: int) -> None:
    local = LocalNetwork(network(), SIZE)
    assert largest_share(local, image(), 0, 0.1, squares, 400) <= 1


def test_any_basis_is_sound() -> None:
    """Also one that forgets most of the map: the slack holds what it cannot say."""
    pixels = image()
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).double()
    x = l2_ball(pixels, 0.3, squares_up_to=0, limit=9).linear(
        lambda t: (t.flatten(1) @ weight.T)[:, None], lambda t: (t.flatten(1) @ weight.abs().T)[:, None], 64
    )  # fmt: skip
    for scale, ranks in ((1.0, 3), (1e-3, 2), (7.0, 4)):
        basis = (
            scale * torch.randn(1, 64, ranks, generator=torch.Generator().manual_seed(4)).double()
        )
        form = changed(x, Coordinates.of(torch.arange(64)[None], basis, 64))
        truth = ((pixels.flatten() + 0.3 * moves()) @ weight.T)[:, None]
        assert share_of_form(form, moves(), truth) <= 1
        assert float(form.space.symbols(moves()).norm(dim=1).max()) <= 1
        assert (form.slack > 0.05 * x.radius).all()
        left = x.ball[:, 0] - basis[0] @ (basis[0].T @ x.ball[:, 0])  # at e along it
        lost = left.norm(dim=0)
        assert (lost <= form.slack * (1 + 1e-12)).all()
        assert (form.slack <= lost * (1 + 1e-9)).all()


def test_the_stretch_is_no_less_than_the_length_of_any_image_of_the_ball() -> None:
    basis = torch.eye(8, 4)[None].double() * (1 + 2.0**-45)
    assert float(Coordinates.of(torch.arange(8)[None], basis, 8).stretch) > 1 + 2.0**-45
    assert float(Coordinates.of(torch.arange(8)[None], 3 * basis, 8).stretch) > 3


def test_patches_have_blocks_of_their_own_and_other_maps_one() -> None:
    draw = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    found = coordinates_of(torch.block_diag(draw, draw.flip(0)))
    assert found.pixels.tolist() == [list(range(8)), list(range(8, 16))]
    found = coordinates_of(torch.block_diag(draw, draw[:5]))
    assert (found.basis.shape, found.count) == ((1, 13, 6), 6)
    twice = coordinates_of(torch.cat([draw, draw], 1))
    assert twice.count == 3  # six results of rank three
    assert coordinates_of(torch.randn(4, 9).double()) is None


class Twice(nn.Module):
    """The pixels reach the logits beside their first map, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.other = model, nn.Linear(64, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.other(x.flatten(1))


def test_pixels_that_are_read_again_and_boxes_keep_their_own_symbols() -> None:
    model = Twice(network()).eval().requires_grad_(False)
    local = LocalNetwork(model, SIZE)
    assert len(local.narrow.all_input_nodes) == 2  # where the two ways have met
    local = LocalNetwork(network(), SIZE)
    assert local.last_form(linf_ball(image(), 1e-4, limit=400)).space.ball == 64
