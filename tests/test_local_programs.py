"""Local certificates of programs with odd indexing and layouts: true, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import certcli.compat  # noqa: F401

# isort: split
from timm.layers import LayerScale
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.enclosure.domain import LocalNetwork
from certcli.enclosure.form import Form, l2_ball
from certcli.enclosure.norms.network import NormsNetwork
from certcli.enclosure.norms.table import rules as norms_rules
from certcli.enclosure.norms.value import settled
from certcli.enclosure.quadratic import weights
from certcli.enclosure.table import rules
from certcli.engine.table import NoRule
from certcli.errors import NoBoundError
from certcli.lipschitz.network import bound_network
from certcli.models import PixelModel
from certcli.nn.activations import MaxMin
from certcli.provenance import InputSpec
from tests.local_programs import SIZE, Found, Program, Writer, attack, check, quarters

PROGRAMS = (0, 2, 7, 31, 40, 44, 47, 62)
"""Seeds of which most broke a law before the fix."""


@pytest.mark.parametrize("seed", PROGRAMS)
def test_no_point_leaves_a_node_and_no_attack_succeeds(seed: int) -> None:
    found = Found()
    check(seed, found)
    assert not found.broken
    assert found.tried["zonotope nodes"] + found.tried["norms nodes"] + found.refused.total() > 0


def reordered(w: Writer) -> None:
    """head(norm(emb(x))[:, 0, order])"""
    embed, norm, order = w.part(nn.Linear(4, 6)), w.part(nn.LayerNorm(6)), w.order(6)
    w.add("tokens", lambda x: norm(embed(x[:, 0])))
    w.add("one token, reordered", lambda x: x[:, 0, order])


def windows(w: Writer) -> None:
    """Windows of two tokens on the batch axis, through attention."""
    embed, attention = w.part(nn.Linear(4, 6)), w.part(Attention(6, num_heads=2, qkv_bias=True))
    uneven = torch.tensor([0.1, 0.1, 4.0, 4.0]).double()[:, None]
    w.add("attention in windows", lambda x: attention(embed(uneven * x[:, 0]).reshape(2, 2, 6)))
    w.add("their mean", lambda x: x.reshape(1, -1, 6).mean(1))


def convolved(w: Writer) -> None:
    """Quarters on the batch axis, through a convolution."""
    conv = w.part(nn.Conv2d(1, 3, 2))
    w.add("mean of quarters", lambda x: conv(quarters(x)).flatten(1).unsqueeze(0).mean(1))


LAYOUTS = {"reordered": reordered, "windows": windows, "convolved": convolved}


def laid_out(kind: str, seed: int) -> Program:
    w = Writer(seed)
    LAYOUTS[kind](w)
    w.add("head", w.part(nn.Linear(w.x.shape[-1], 3)))
    return w.program.double().eval()


def misplaced(kind: str, seed: int, effort: str) -> float | None:
    """The least margin that attacks find at the certified radius; None where there is no certificate."""
    model = laid_out(kind, seed)
    pixels = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed)).double()
    label = int(model(pixels).argmax())
    try:
        (row,) = LocalCertifier(model, SIZE, effort=effort, steps=1).batch([0], pixels, [label])
    except NoBoundError:
        return None
    return attack(model, pixels, label, row.radius, seed) if row.radius > 0 else None


@pytest.mark.parametrize(("kind", "effort"), [("reordered", "zonotope"), ("reordered", "auto"), ("windows", "norms"),
                                              ("windows", "zonotope"), ("convolved", "norms"), ("convolved", "zonotope")])
def test_layouts_keep_their_certificates_true(kind: str, effort: str) -> None:
    for seed in range(8):
        margin = misplaced(kind, seed, effort)
        assert margin is None or margin > 0, seed
