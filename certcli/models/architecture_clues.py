"""What a file that names no architecture looks like: for the line that refuses it."""

import re
from collections.abc import Mapping

from torch import Tensor

_OTHERS = (
    (
        r"^(text_model|vision_model)\.",
        "transformers' CLIPModel or SiglipModel, which is no classifier",
    ),
    (
        r"^visual\.|^logit_scale$|^token_embedding\.",
        "an OpenCLIP model: a tower needs its timm architecture",
    ),
    (
        r"^(encoder|decoder)\.(block|layers)\.\d+\.(layer|self_attn)",
        "a sequence-to-sequence transformer",
    ),
    (r"^model\.layers\.\d+\.self_attn", "a language model"),
    (
        r"^(decoder_blocks|decoder_embed|mask_token)",
        "a pre-trained autoencoder (MAE), which has no classifier",
    ),
    (r"^layer1\.\d+\.conv1\.", "a ResNet: name timm's architecture, such as --arch resnet50"),
    (r"^(input_blocks|down_blocks|time_embed)", "a diffusion model"),
)
"""Names of tensors, and whose they are."""


def appearance(tensors: Mapping[str, Tensor]) -> str:
    """What the tensors' names and shapes tell, and what they cannot."""
    embedding = tensors.get("patch_embed.proj.weight")
    qkv = tensors.get("blocks.0.attn.qkv.weight")
    if embedding is None or qkv is None or embedding.dim() != 4:
        whose = next(
            (
                words
                for pattern, words in _OTHERS
                if any(re.search(pattern, name) for name in tensors)
            ),
            None,
        )
        if whose is not None:
            return f"has no certvit record; its tensors have the names of {whose}"
        examples = ", ".join(sorted(tensors)[:2])
        return f"has no certvit record, and its tensors ({examples}, ...) are not those of a timm vision transformer"
    width = embedding.shape[0]
    channels = embedding.shape[1]
    patch = embedding.shape[2]
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    return (
        f"looks like a timm vision transformer (width {width}, depth {depth}, patch {patch}, {channels} channels), but "
        "its number of heads, mean and std cannot be known from its tensors"
    )
