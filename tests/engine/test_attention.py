"""timm's attention with an option, or with a part of another kind, is not the module that the
domains have theorems for.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.enclosure.balls.ball import rules as balls
from certcli.enclosure.zonotopes.space import rules as zonotopes
from certcli.engine.attention import require_no_mask
from certcli.engine.table import NoRule, RuleTable
from certcli.lipschitz.network import bound_network  # noqa: F401 (registers the rules)
from certcli.lipschitz.table import rules as lipschitz


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


OPTIONS: dict[str, Callable[[Any], object]] = {
    "q_norm": lambda m: nn.LayerNorm(4),
    "k_norm": lambda m: nn.LayerNorm(4),
    "norm": lambda m: nn.LayerNorm(8),
    "gate": lambda m: nn.Linear(8, 8),
    "qkv": lambda m: Doubled(8, 24),
    "proj": lambda m: Doubled(8, 8),
    "attn_drop": lambda m: nn.ReLU(),
    "proj_drop": lambda m: nn.ReLU(),
    "num_heads": lambda m: 1,
    "scale": lambda m: 2 * m.scale,
}


@pytest.mark.parametrize(
    "table", [lipschitz, zonotopes, balls], ids=["lipschitz", "zonotopes", "balls"]
)
def test_options_of_attention_leave_it_without_a_rule(table: RuleTable) -> None:
    assert table.find(Attention(8, 2)) is not None
    assert table.find(Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)) is None
    for name, value in OPTIONS.items():
        module: Any = Attention(8, 2)
        setattr(module, name, value(module))
        assert table.find(module) is None, name
    module = Attention(8, 2)
    module.head_dim = 2
    module.scale = 2**-0.5
    assert table.find(module) is None


@pytest.mark.parametrize("mask", [None, torch.zeros(1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_under_a_mask_has_no_rule(mask: torch.Tensor | None, is_causal: bool) -> None:
    masked = mask is not None or is_causal
    with pytest.raises(NoRule, match="mask") if masked else nullcontext():
        require_no_mask(mask, is_causal)
