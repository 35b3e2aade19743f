"""What no local theorem is about: both local domains refuse it, and take the same network without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.models.build import PixelModel
from certcli.system.errors import NoBoundError
from tests.enclosure.test_zonotope_networks import SIZE, SPEC, directions, image

Middle = Callable[["Tokens", Tensor], Any]


class Tokens(nn.Module):
    """Four tokens of 6 entries, something between, and four logits."""

    def __init__(self, middle: Middle, width: int | None = None, **parts: Any) -> None:
        super().__init__()
        self.embed, self.middle = nn.Linear(4, 6), middle
        self.head = nn.Linear(24 if width is None else width, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        out = self.middle(self, self.embed(x.flatten(1).unflatten(1, (4, 4))))
        return self.head(out.flatten(1))


def sdpa(**options: Any) -> Middle:
    def middle(net: Tokens, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(2)

    return middle


def attention() -> Attention:
    return Attention(6, num_heads=2)


def read_twice(net: Any, x: Tensor) -> Tensor:
    """All tokens of a norm, and one of them."""
    y = net.norm(x)
    return (net.mix(y) + y)[:, 1]


SEEN = torch.ones(4, 4, dtype=torch.bool).tril()
# the network, and whether the local domains have theorems for it
NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "attention": (lambda: Tokens(lambda m, x: m.mix(x), mix=attention()), True),
    "attention, masked": (lambda: Tokens(lambda m, x: m.mix(x, attn_mask=SEEN), mix=attention()), False),
    "attention, causal": (lambda: Tokens(lambda m, x: m.mix(x, is_causal=True), mix=attention()), False),
    "fused attention": (lambda: Tokens(sdpa()), True),
    "fused attention, scaled": (lambda: Tokens(sdpa(scale=0.3)), True),
    "fused attention, masked": (lambda: Tokens(sdpa(attn_mask=SEEN)), False),
    "fused attention, causal": (lambda: Tokens(sdpa(is_causal=True)), False),
    "fused attention, dropout": (lambda: Tokens(sdpa(dropout_p=0.5)), False),
    "convolution": (lambda: Tokens(lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 1, 3, padding=1)), True),
    "convolution without a batch": (lambda: Tokens(lambda m, x: m.conv(x), conv=nn.Conv2d(1, 1, 3, padding=1)), False),
    "mean of tokens": (lambda: Tokens(lambda m, x: x.mean(1), 6), True),
    "mean of the batch": (lambda: Tokens(lambda m, x: x.mean(0, keepdim=True)), False),
    "mean of the batch, from behind": (lambda: Tokens(lambda m, x: x.mean(-3, keepdim=True)), False),
    "mean of all": (lambda: Tokens(lambda m, x: x + x.mean()), False),
    "tokens twice": (lambda: Tokens(lambda m, x: torch.cat([x, x], 1), 48), True),
    "images twice": (lambda: Tokens(lambda m, x: torch.cat([x, x], 0)), False),
    "RMSNorm": (lambda: Tokens(lambda m, x: F.rms_norm(x, (6,), eps=0.1)), True),
    "RMSNorm of the dtype's eps": (lambda: Tokens(lambda m, x: F.rms_norm(x, (6,))), False),
    "RMSNorm of all tokens": (lambda: Tokens(lambda m, x: F.rms_norm(x, (4, 6), eps=0.1)), False),
    "LayerNorm": (lambda: Tokens(lambda m, x: m.norm(x), norm=nn.LayerNorm(6, eps=0.1)), True),
    "LayerNorm of all tokens": (lambda: Tokens(lambda m, x: m.norm(x), norm=nn.LayerNorm((4, 6), eps=0.1)), False),
    "norm read twice": (lambda: Tokens(read_twice, 6, mix=attention(), norm=nn.LayerNorm(6, eps=0.1)), True),
    "half": (lambda: Tokens(lambda m, x: x / 2), True),
    "divided by what depends on the image": (lambda: Tokens(lambda m, x: x / (3 + x)), False),
    "divided by 0": (lambda: Tokens(lambda m, x: (x / 0).clamp(0, 1)), False),
    "a convolution with mirrored edges": (
        lambda: Tokens(
            lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        ),
        False,
    ),
    "logits of every token": (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 4)), False),
    "one logit": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), False),
}  # fmt: skip


@pytest.mark.parametrize("effort", ["norms", "zonotope"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_without_a_local_theorem_is_refused(name: str, effort: str) -> None:
    torch.manual_seed(5)
    build, known = NETWORKS[name]
    model = PixelModel(SPEC, build()).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    pixels = image()
    label = int(model(pixels).flatten().argmax())
    try:
        certifier = LocalCertifier(model, SIZE, Local(effort=effort, at=[2e-3]), symbols=100, steps=0)
        (row,) = certifier.batch([0], pixels, [label])
    except NoBoundError:
        assert not known
    else:
        assert known
        assert row.radius > 1e-3
        moved = pixels + row.radius * directions(model, pixels, label, 40).view(-1, *SIZE)
        assert (model(moved).argmax(1) == label).all()
