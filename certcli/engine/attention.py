"""Dot-product attention of every domain: timm's without options, and torch's fused function."""

import functools
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule, Register, Rule, RuleTable, runs_known_code
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if


def attention_module(table: RuleTable) -> Register:
    """Register a domain's rule for timm's multi-head attention; one with options is traced
    through."""
    return table.module(Attention, when=_has_no_options)


def _has_no_options(module: Any) -> bool:
    """Tell whether the module is softmax(scale q k^T) v between two linear maps; the fused function
    that timm calls takes 1 / sqrt(d) for the scale, whatever the module says.
    """
    identities = [getattr(module, name, None) for name in ("q_norm", "k_norm", "norm")]
    return (
        all(part is None or type(part) is nn.Identity for part in identities)
        and getattr(module, "gate", None) is None
        and all(runs_known_code(part, nn.Linear) for part in (module.qkv, module.proj))
        and all(
            type(part) in (nn.Dropout, nn.Identity) for part in (module.attn_drop, module.proj_drop)
        )
        and module.qkv.out_features == 3 * module.num_heads * module.head_dim
        and (
            module.scale == module.head_dim**-0.5
            or (module.fused_attn is False and type(module.scale) is float and module.scale > 0)
        )
    )


def fused_attention(table: RuleTable) -> Register:
    """Register a domain's rule (ctx, query, key, value, mask, scale) for torch's fused attention.

    The rule receives a mask of None where every token sees every other; a scale of None stands for
    1 / sqrt(width).
    """

    def register(rule: Rule) -> Rule:
        @table.function(functional.scaled_dot_product_attention)
        @functools.wraps(rule)
        def apply(
            ctx: Any,
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            raise_if(dropout_p or enable_gqa, NoRule, "attention with dropout or grouped queries")
            mask = CAUSAL if attn_mask is None and is_causal else attn_mask
            return rule(ctx, query, key, value, mask, scale)

        return rule

    return register


CAUSAL = object()
"""The mask under which a token sees those before it."""


def added_to_scores(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return the numbers that a mask adds to scores of this shape; None: no mask.

    Raises:
        NoRule: a mask of yes and no, an infinite or a causal one, or one that depends on the image.
    """
    if mask is None:
        return None
    tensor = mask.tensor if isinstance(mask, Constant) else mask
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise NoRule("attention with a mask of other than stored numbers")
    raise_if(not bool(tensor.isfinite().all()), NoRule, "attention with a mask that hides tokens")
    raise_if(
        torch.broadcast_shapes(tensor.shape, shape) != shape,
        NoRule,
        "attention with a mask of another shape",
    )
    return tensor


def require_no_mask(mask: Any, is_causal: bool = False) -> None:
    """Raise NoRule for attention under a mask."""
    if mask is not None or is_causal:
        raise NoRule("attention with a mask")
