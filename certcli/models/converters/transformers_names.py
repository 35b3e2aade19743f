"""transformers' tensor names and timm's: one table for each shape of network."""

from certcli.models.converters.base import Renames

TOKEN_NAMES: Renames = (
    (r"^(vit|deit|beit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.(cls|mask)_token$", r"\1_token"),
    (r"^embeddings\.distillation_token$", "reg_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.attention\.", ".attn."),
    (
        r"\.attention\.q_proj\.",
        ".attn.query.",
    ),  # transformers 5 in memory; its files keep the names of 4
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_(\d)$", r".gamma_\1"),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"\.attn\.relative_position_bias\.", ".attn."),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)

SWIN_NAMES: Renames = (
    (r"^swin(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^encoder\.", ""),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.self\.", ".attn."),
    (r"\.continuous_position_bias_mlp\.", ".cpb_mlp."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head.fc."),
)

CONVNEXT_NAMES: Renames = (
    (r"^convnext(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.", ""),
    (r"\.downsampling_layer\.", ".downsample."),
    (r"^(stages\.\d+)\.layers\.", r"\1.blocks."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.layernorm\.", ".norm."),
    (r"\.pwconv(\d)\.", r".mlp.fc\1."),
    (r"\.grn\.", ".mlp.grn."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"^layernorm\.", "head.norm."),
    (r"^classifier\.", "head.fc."),
)
