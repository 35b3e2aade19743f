"""Local certificates of programs with odd indexing and layouts: true, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers import LayerScale
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.columns import weights
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.space import rules
from certcli.engine.table import NoRule
from certcli.lipschitz.network import bound_network
from certcli.models.pixels import PixelModel
from certcli.nn.layers import MaxMin
from certcli.system.errors import NoBoundError
from tests.helpers.grids import EVERY
from tests.soundness.edits import Found
from tests.soundness.local_laws import check_program, least_margin_by_attack
from tests.soundness.local_programs import SIZE, Program, Writer, quarters

PROGRAMS = (
    1_000_003,
    40_000_013,
    *(0, 2, 7, 31, 40, 44, 47, 62, 5129, 9007, 1_000_007, 41_000_044) * EVERY,
)
"""Seeds of which most broke a law before the fix, and four with later parts."""


@pytest.mark.parametrize("seed", PROGRAMS)
def test_no_point_leaves_a_node_and_no_attack_succeeds(seed: int) -> None:
    found = Found()
    check_program(seed, found)
    assert not found.broken
    assert found.tried["zonotope nodes"] + found.refused.total() > 0


def reordered(w: Writer) -> None:
    """head(norm(emb(x))[:, 0, order])"""
    embed, norm, order = w.part(nn.Linear(4, 6)), w.part(nn.LayerNorm(6)), w.order(6)
    w.add("tokens", lambda x: norm(embed(x[:, 0])))
    w.add("one token, reordered", lambda x: x[:, 0, order])


def windows(w: Writer) -> None:
    """Windows of two tokens on the batch axis, through attention."""
    embed, attention = w.part(nn.Linear(4, 6)), w.part(Attention(6, num_heads=2, qkv_bias=True))
    w.add("attention in windows", lambda x: attention(embed(x[:, 0]).reshape(2, 2, 6)))
    w.add("the last window", lambda x: x[-1:, 0])


def quarters_convolved(w: Writer) -> None:
    """Quarters on the batch axis, through a convolution."""
    conv = w.part(nn.Conv2d(1, 3, 2))
    w.add("mean of quarters", lambda x: conv(quarters(x)).flatten(1).unsqueeze(0).mean(1))


LAYOUTS = {"reordered": reordered, "windows": windows, "convolved": quarters_convolved}


def laid_out(kind: str, seed: int) -> Program:
    w = Writer(seed)
    LAYOUTS[kind](w)
    w.add("head", w.part(nn.Linear(w.x.shape[-1], 3)))
    return w.program.double().eval()


def misplaced(kind: str, seed: int, effort: str) -> float | None:
    """The least margin that attacks find at the certified radius; None where there is no
    certificate.
    """
    model = laid_out(kind, seed)
    pixels = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed)).double()
    label = int(model(pixels).argmax())
    try:
        (row,) = LocalCertifier(model, SIZE, Local(effort=effort), steps=1).batch(
            [0], pixels, [label]
        )
    except NoBoundError:
        return None
    return (
        least_margin_by_attack(model, pixels, label, row.radius, seed) if row.radius > 0 else None
    )


FALSE = {"reordered": (4, 17), "windows": (0, 24), "convolved": (0, 4, 23, 29)}
"""Seeds whose certificates an attack refuted when domains believed a layout."""


@pytest.mark.parametrize("effort", ["zonotope", "auto"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_keep_their_certificates_true(kind: str, effort: str) -> None:
    for seed in FALSE[kind] if EVERY else FALSE[kind][:1]:
        margin = misplaced(kind, seed, effort)
        assert margin is None or margin > 0, seed


class Net(nn.Module):
    """A forward given as a function of its parts and the image."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def scaled_tokens() -> nn.Module:
    net = Net(lambda m, x: m.h(m.s(x[:, 0])[:, 1]), s=LayerScale(4), h=nn.Linear(4, 3))
    net.s.gamma = nn.Parameter(torch.rand(4, 4))
    return net


def normalised_by(std: tuple[float, ...], then: nn.Module) -> PixelModel:
    return PixelModel(InputSpec(SIZE, (0.3,), std), then)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a head called by name": (lambda: Net(lambda m, x: m.h(input=x.flatten(1)), h=nn.Linear(16, 3)), "arguments"),
    "four rows of logits": (lambda: Net(lambda m, x: m.h(quarters(x).flatten(1)), h=nn.Linear(4, 3)), r"shape \(4, 3\)"),
    "logits without a batch": (lambda: Net(lambda m, x: m.h(x.flatten()), h=nn.Linear(16, 3)), r"shape \(3,\)"),
    "a mean over no axes": (lambda: Net(lambda m, x: m.h(x.mean(()).reshape(1, 1)), h=nn.Linear(1, 3)), "mean"),
    "a scale for each token": (scaled_tokens, "repeats"),
    "more deviations than channels": (
        lambda: normalised_by((0.5, 0.4, 0.3), nn.Sequential(nn.Flatten(), nn.Linear(48, 3))), "repeats",
    ),
    "MaxMin of odd width": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), MaxMin(), nn.Linear(4, 3)), "even number",
    ),
}  # fmt: skip


def certified_radius(model: nn.Module, image: Tensor, effort: str) -> float:
    certifier = LocalCertifier(model, SIZE, Local(effort=effort), symbols=100)
    return certifier.batch([0], image, [int(model(image).argmax())])[0].radius


@pytest.mark.parametrize("effort", ["zonotope", "auto"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_theorem_is_about_is_refused(name: str, effort: str) -> None:
    build, reason = REFUSED[name]
    model = build().double().eval().requires_grad_(False)
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(NoBoundError, match=reason):
        certified_radius(model, image, effort)


def test_a_norm_with_a_negative_eps_is_refused() -> None:
    """Its slope is no longer that of a projection onto a sphere: on small tokens it grows without
    bound.
    """
    model = Net(
        lambda m, x: m.h(m.n(m.e(x[:, 0]))[:, 0]),
        e=nn.Linear(4, 4),
        n=nn.LayerNorm(4, eps=-1e-3),
        h=nn.Linear(4, 3),
    )
    torch.manual_seed(1)
    model.e.weight.data.normal_(std=3)
    network = LocalNetwork(model.double().eval().requires_grad_(False), SIZE)
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(NoRule, match="eps"):
        network.margins(l2_ball(image, 1 / 64, squares_up_to=99, limit=99), 0)


def test_a_negative_deviation_bounds_as_its_mirror_image() -> None:
    """A constructor refuses a negative deviation, but a buffer can be changed afterwards."""
    uppers = []
    for sign in (1, -1):
        torch.manual_seed(3)
        rest = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        net = normalised_by((0.5,), rest).double().eval()
        net.normalize.std.mul_(sign)
        uppers.append(float(bound_network(net, SIZE, 3).upper))
    assert uppers[0] == pytest.approx(uppers[1], rel=1e-9)


def test_columns_of_the_square_weigh_in_float64() -> None:
    """torch.where of two Python numbers is float32: sqrt(2) was off by 1e-8, and every quadratic
    bound with it.
    """
    factors = weights(2, 1.0, 2**0.5, torch.device("cpu"), 1)
    assert factors.flatten().tolist() == [1.0, 2**0.5, 1.0]


def small_tokens() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.GELU(), nn.Linear(6, 3))
    return net.double().eval().requires_grad_(False)


WRONG: dict[str, Callable[[Any], Any]] = {
    "another shape": lambda x: x.linear(lambda t: t[..., 1:]),
    "another centre": lambda x: x.shift(torch.full((), 1e-3).double()),
    "other entries": lambda x: x.linear(lambda t: t.flip(-1)),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_wrong_is_found_beside_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph runs beside the walk: a mistake in any rule, of this or a later day, gives no
    radius.
    """
    known = rules.modules[nn.GELU]
    wrong = lambda ctx, module, x: WRONG[name](known.apply(ctx, module, x))  # noqa: E731
    monkeypatch.setitem(rules.modules, nn.GELU, type(known)(nn.GELU, wrong, known.when))
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    ball = l2_ball(image, 1e-4, squares_up_to=99, limit=99)
    with pytest.raises(
        NoRule, match={"another shape": "shape", "nothing": "NoneType"}.get(name, "excludes")
    ):
        LocalNetwork(small_tokens(), SIZE).margins(ball, 0)
