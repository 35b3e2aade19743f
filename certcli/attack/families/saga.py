"""The self-attention gradient attack: ascent that leans towards the patches attended to."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.attack.families.gradient import PGD_STEPS, log_odds
from certcli.attack.families.margin import Stretch, ascend_gradient
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import seeded
from certcli.evaluation.perturbation import Region
from certcli.system.errors import UsageError

# least weight of a pixel: a patch that nobody attends to keeps a twentieth of its gradient
FLOOR = 0.05


def saga(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(R(x) * grad CE)), R the attention rollout of the image: (b, c, h,
    w), (b,) -> same.

    R = prod_l (A_l / 2 + I / 2), A_l the attention of block l averaged over heads, the row of the
    class token (without one the mean of the rows) spread over the pixels of each patch, at most 1
    and at least 0.05. 20 steps. Mahmood et al. multiply by the image as well, which never moves a
    black pixel; we do not. UsageError on a network without self-attention over patches. Source:
    Mahmood, Mahmood, van Dijk 2021, section 5; rollout: Abnar & Zuidema 2020.
    """
    if not len(images):
        return images.clone()
    with torch.no_grad(), seeded(images, settings.draw):
        weights = rollout(model, images)
    stretches = [Stretch(settings.steps or PGD_STEPS)]
    return ascend_gradient(
        model, images, labels, region, settings, log_odds, stretches, weights=weights
    )


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention rollout spread over the pixels: (b, c, h, w) -> (b, 1, h, w) in [0.05, 1]."""
    grid, prefix = _patch_grid(model)
    with _attention_of(model) as maps:
        model(images)
    tokens = grid[0] * grid[1] + prefix
    if not maps or any(attention.shape[-1] != tokens for attention in maps):
        raise UsageError(
            "saga needs self-attention over the patches of the whole image", "use --attack pgd"
        )
    flow = torch.eye(tokens, dtype=maps[0].dtype, device=images.device).expand(len(images), -1, -1)
    for attention in maps:
        flow = 0.5 * (attention @ flow) + 0.5 * flow
    token_weights = flow[:, 0, prefix:] if prefix else flow.mean(dim=1)
    token_weights = token_weights / token_weights.amax(dim=1, keepdim=True)
    spread = functional.interpolate(
        token_weights.view(-1, 1, *grid), size=images.shape[-2:], mode="nearest"
    )
    return spread.clamp_min(FLOOR).to(images.dtype)


def _patch_grid(model: nn.Module) -> tuple[tuple[int, int], int]:
    """Rows and columns of patches, and number of tokens before them, of timm's transformers."""
    for module in model.modules():
        embed: Any = getattr(module, "patch_embed", None)
        if getattr(embed, "grid_size", None) is not None and hasattr(module, "blocks"):
            return tuple(embed.grid_size), int(getattr(module, "num_prefix_tokens", 0))
    raise UsageError("saga needs a vision transformer with a grid of patches", "use --attack pgd")


@contextmanager
def _attention_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect every layer's (b, n, n) attention, averaged over heads; hooks are removed at exit."""
    from timm.layers.attention import Attention

    from certcli.nn.attention_variants import L2Attention

    maps: list[Tensor] = []

    def dot_product(layer: Any) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            b, n = output.shape[:2]
            q, k = output.reshape(b, n, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)[:2]
            q = layer.q_norm(q)
            k = layer.k_norm(k)
            maps.append((q @ k.transpose(-2, -1) * layer.scale).softmax(-1).mean(dim=1))

        return note

    def tied(layer: Any) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            b, n = output.shape[:2]
            q = output.reshape(b, n, layer.num_heads, -1).transpose(1, 2)
            maps.append((-torch.cdist(q, q).square() / layer.head_dim**0.5).softmax(-1).mean(dim=1))

        return note

    with ExitStack() as hooks:
        for layer in model.modules():
            if type(layer) is Attention:
                hooks.enter_context(layer.qkv.register_forward_hook(dot_product(layer)))
            elif type(layer) is L2Attention:
                hooks.enter_context(layer.query.register_forward_hook(tied(layer)))
        yield maps
