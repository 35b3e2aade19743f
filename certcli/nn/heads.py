"""Classifier heads that see every token, in place of pooling, which loses a factor sqrt(n) of gradient norm."""

from collections.abc import Sequence
from itertools import pairwise

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.nn.activations import MaxMin
from certcli.system.errors import ArchitectureError


class FlatHead(nn.Module):
    """Tokens side by side, then linear layers with MaxMin between them: (b, n, d) -> (b, k).

    With `widths` empty it is one linear map, which suitable weights make equal to mean or class-token pooling and a head.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [features, *widths]
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.act = MaxMin()
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.act(layer(x))
        return self.out(x)


def build_flat_head(net: nn.Module, widths: Sequence[int] = ()) -> nn.Module:
    """Give a plain timm ViT a head over all its tokens, in place; return it with pooling switched off."""
    if type(net) is not VisionTransformer or net.attn_pool is not None or net.pos_embed is None:
        raise ArchitectureError("a flat head replaces the head of timm's plain VisionTransformer only")
    if not isinstance(net.head, nn.Linear):
        raise ArchitectureError("the network has no linear head to replace")
    if any(width % 2 for width in widths):
        raise ArchitectureError(f"head widths {list(widths)} must be even: MaxMin compares the two halves")
    tokens = net.patch_embed.num_patches + net.num_prefix_tokens
    net.global_pool = ""
    net.head = FlatHead(tokens * net.embed_dim, widths, net.head.out_features)
    return net
