"""Layers that arguments may name: closed tables from words to classes, without imports."""

from collections.abc import Callable, Mapping
from typing import Any

from timm.layers import create_act, create_norm
from torch import nn

from certcli.nn.norms import TokenBatchNorm
from certcli.system.errors import Refused, one_line

NORMS: Mapping[str, Callable[..., nn.Module]] = {
    **create_norm._NORM_MAP,
    "identity": nn.Identity,
    "batchnorm": TokenBatchNorm,  # over tokens; maps (b, c, h, w) have batchnorm2d
}
ACTIVATIONS: Mapping[str, Callable[..., nn.Module]] = create_act._ACT_LAYER_DEFAULT
_TABLES = {"norm_layer": NORMS, "act_layer": ACTIVATIONS}
NORM_EPS = "norm_eps"


def with_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments, with classes for words of `norm_layer`, `act_layer`; Refused lists them."""
    options = dict(arguments)
    for key, table in _TABLES.items():
        word = options.get(key)
        if isinstance(word, str):
            if word not in table:
                raise Refused(f"{key}={one_line(word)}: one of {', '.join(sorted(table))}")
            options[key] = table[word]
        elif word is not None:
            raise Refused(f"{key} is a word, not {one_line(repr(word))[:40]}")
    return options


def set_norm_eps(net: nn.Module, eps: float) -> None:
    """Set all norms' eps; Refused outside (0, 1], or without a norm that has one."""
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps <= 1:
        raise Refused(f"{NORM_EPS} is a number in (0, 1], not {one_line(repr(eps))[:40]}")
    named = [module for module in net.modules() if "norm" in type(module).__name__.lower()]
    norms: list[Any] = [module for module in named if hasattr(module, "eps")]
    if not norms:
        raise Refused(f"{NORM_EPS}={eps:g}, and the network has no norm with an eps")
    for norm in norms:
        norm.eps = float(eps)


def takes_no_norm_eps(failure: BaseException) -> bool:
    """Tell whether a constructor refused `norm_eps` as an unknown argument."""
    return (
        isinstance(failure, TypeError)
        and NORM_EPS in str(failure)
        and "unexpected keyword" in str(failure)
    )
