"""Published formulas, for comparison: `python -m benchmarks.formulas NAME CKPT`. NONE of them is a
certificate; each says why.

They are evaluated as printed, on the checkpoint's own matrices, with float64 singular values. Their
results have a type of their own, so that no bound can be built on them.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
from timm.layers.attention import Attention
from torch import Tensor, nn

from benchmarks.tables.jacobians import module_inputs
from certcli.models.build import load, own_name
from certcli.models.open import open_checkpoint
from certcli.nn.attention_variants import L2Attention
from certcli.system.errors import UsageError
from certcli.system.registry import one_of


@dataclass(frozen=True)
class AttentionLayer:
    """The numbers of one attention layer: per-head maps (dh, d), W_O, token count, Frobenius norm
    of its input.
    """

    path: str
    query: tuple[Tensor, ...]
    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    out: Tensor
    tokens: int
    input_norm: float

    @property
    def width(self) -> int:
        return len(self.query[0])


@dataclass(frozen=True)
class Formula:
    """A formula's value for each layer, and the flaw for which it certifies nothing."""

    name: str
    source: str
    flaw: str
    layers: tuple[tuple[str, float], ...]

    @property
    def log10_total(self) -> float:
        return sum(math.log10(value) if value > 0 else -math.inf for _, value in self.layers)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2))


def _phi_inverse(tokens: int) -> float:
    """Return x with x e^(x+1) = n - 1, that is W((n - 1) / e), by Newton's method."""
    target = (tokens - 1) / math.e
    x = math.log1p((tokens - 1) / math.e)
    for _ in range(50):
        x -= (x * math.exp(x) - target) / (math.exp(x) * (1 + x))
    return x


def autolip(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    return [(path, _norm(module.weight)) for path, module in layers]


def l2former(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    factors = []
    for layer in attentions:
        heads = sum(
            (_norm(q) * _norm(v)) ** 2 for q, v in zip(layer.query, layer.value, strict=True)
        )
        factor = math.sqrt(layer.tokens / layer.width) * (4 * _phi_inverse(layer.tokens) + 1)
        factors.append((layer.path, factor * math.sqrt(heads) * _norm(layer.out)))
    return factors


def certvit(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    inside = tuple(layer.path + "." for layer in attentions)
    activated = {path for path, module in model.named_modules() if path.endswith("mlp.fc1")}
    dense = [
        (p, v * (1.12 if p in activated else 1.0))
        for p, v in autolip(model, attentions)
        if not p.startswith(inside)
    ]
    return dense + l2former(model, attentions)


def specformer(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    factors = []
    for layer in attentions:
        size = layer.tokens * (layer.tokens + 1) * layer.input_norm**2
        heads = sum(
            (size * (_norm(v) * _norm(q) * _norm(k) + _norm(v))) ** 2
            for q, k, v in zip(layer.query, layer.key, layer.value, strict=True)
        )
        factors.append((layer.path, math.sqrt(heads) * _norm(layer.out)))
    return factors


def lnformer(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    factors = []
    for layer in attentions:
        heads = sum((_norm(q) * _norm(k)) ** 2 for q, k in zip(layer.query, layer.key, strict=True))
        factors.append((layer.path, 11 * _norm(layer.out) * math.sqrt(heads)))
    return factors


def lipsformer(model: nn.Module, attentions: Sequence[AttentionLayer]) -> list[tuple[str, float]]:
    tau = 12.0
    nu = 1.0
    root = 1e-6**-0.5
    factors = []
    for layer in attentions:
        q, k, v = (_norm(torch.cat(heads)) for heads in (layer.query, layer.key, layer.value))
        n = layer.tokens
        factors.append(
            (
                layer.path,
                nu * root * (2 * n * (n - 1) * tau * k + 2 * (n - 1) * tau * q + 2 * n * v),
            )
        )
    return factors


Evaluate = Callable[[nn.Module, Sequence[AttentionLayer]], list[tuple[str, float]]]

FORMULAS: dict[str, tuple[Evaluate, str, str]] = {
    "autolip": (
        autolip,
        "Scaman & Virmaux 2018: product of spectral norms",
        "residuals, attention and normalisation count as 1; it bounds plain chains of layers only",
    ),
    "certvit": (
        certvit,
        "CertViT, section 3.6: spectral norms, 1.12 for GELU, Kim et al.'s formula for attention",
        "its attention lacks the factor A_h and is not Lipschitz; |W_Q| should be squared; GELU's slope reaches 1.1289; "
        "residuals and norms count as 1",
    ),
    "specformer": (
        specformer,
        "SpecFormer, Theorem 4.3, at a grey image with delta = 0",
        "false as printed: it tends to 0 at X = 0, where the true constant is |W_V|; and it is local to one input",
    ),
    "l2former": (
        l2former,
        "Kim et al. 2021 as quoted in SpecFormer's eq. 40",
        "scaling W_Q by t multiplies the true constant by t^2 and this formula by t: it is exceeded for large |W_Q|",
    ),
    "lnformer": (
        lnformer,
        "Dasoulas et al. 2021 as quoted in SpecFormer's eq. 41",
        "W_V does not appear: with W_Q = 0 the true constant is |W_V| > 0 and the formula gives 0",
    ),
    "lipsformer": (
        lipsformer,
        "Qi et al. 2023 as quoted in SpecFormer's eq. 42, with nu = 1, tau = 12, epsilon = 1e-6",
        "it is for scaled cosine attention, which this checkpoint need not have",
    ),
}


def formula_value(name: str, model: nn.Module, size: tuple[int, ...]) -> Formula:
    """Evaluate one published formula; UsageError for an unknown name, or a network without a layer
    that it covers.
    """
    if name not in FORMULAS:
        raise UsageError(f"unknown formula '{name}'", one_of(name, FORMULAS))
    function, source, flaw = FORMULAS[name]
    layers = function(model, attention_layers(model, size))
    if not layers:
        raise UsageError(f"the network has no layer that the formula '{name}' covers")
    return Formula(
        name, source, flaw, tuple((own_name(model, path), value) for path, value in layers)
    )


def attention_layers(model: nn.Module, size: tuple[int, ...]) -> list[AttentionLayer]:
    """Return timm's dot-product attentions and our tied ones, with the size of their input at a
    grey image.
    """
    modules = {p: m for p, m in model.named_modules() if type(m) in (Attention, L2Attention)}
    parameter = next(model.parameters())
    grey = torch.full((1, *size), 0.5, dtype=parameter.dtype, device=parameter.device)
    return [
        _layer_of(path, modules[path], x)
        for path, (x, _) in module_inputs(model, grey, modules).items()
    ]


def _layer_of(path: str, module: Any, x: Tensor) -> AttentionLayer:
    heads = module.num_heads
    if isinstance(module, L2Attention):
        query = key = module.query.weight.chunk(heads)
        # `proj` holds W_O [W_h^T W_V,h / sqrt(dh)]_h; with W_O = proj the least W_V is sqrt(dh)
        # times the pseudo-inverse
        value = tuple(math.sqrt(len(w)) * torch.linalg.pinv(w.detach().double()).T for w in query)
    else:
        query, key, value = (part.chunk(heads) for part in module.qkv.weight.chunk(3))
    return AttentionLayer(
        path, query, key, value, module.proj.weight, x.shape[-2], float(x.double().norm())
    )


def main() -> None:
    """Print the value of formula NAME for the network of CKPT, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FORMULAS)
    parser.add_argument("checkpoint", metavar="CKPT")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.checkpoint)
    value = formula_value(options.name, load(checkpoint), checkpoint.record.input.size)
    total = {"log10_total": value.log10_total, "layers": value.layers, "flaw": value.flaw}
    print(json.dumps(total))


if __name__ == "__main__":
    main()
