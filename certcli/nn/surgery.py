"""The module replacements that a record can name. A builder takes the old module and returns the
new one.

It reads no weights, which come from the checkpoint; `certcli.adapt` starts a new part from the old
weights.
"""

from certcli.system.registry import Entry, Registry

REPLACEMENTS = Registry(
    "replacement",
    Entry(
        "l2-attention",
        "certcli.nn.attention_variants:build_l2_attention",
        "tied L2 self-attention in place of timm's dot-product attention",
        "Kim et al. 2021, with the factor A_h",
    ),
    Entry(
        "l2-untied-value-attention",
        "certcli.nn.attention_variants:build_l2_untied_value_attention",
        "tied L2 attention with values of their own: a bound on tokens of bounded norm only",
        "the form that CertViT publishes",
    ),
    Entry(
        "scsa-attention",
        "certcli.nn.attention_variants:build_cosine_attention",
        "scaled cosine similarity attention",
        "Qi et al. 2023",
    ),
    Entry(
        "lnorm-attention",
        "certcli.nn.attention_variants:build_lipschitz_norm_attention",
        "attention with scores divided by their own size",
        "Dasoulas et al. 2021",
    ),
    Entry(
        "conv-attention",
        "certcli.nn.attention_variants:build_conv_attention",
        "parallel convolutions over the tokens in place of attention",
        "CoViT, the Cauchy paper",
    ),
    Entry(
        "orthogonal-attention",
        "certcli.nn.attention_variants:build_orthogonal_attention",
        "orthogonal matrices over the tokens in place of attention; takes their number",
    ),
    Entry(
        "center-norm",
        "certcli.nn.blocks:build_center_norm",
        "LayerNorm without the division",
        "Qi et al. 2023",
    ),
    Entry(
        "floor-norm",
        "certcli.nn.blocks:build_floor_norm",
        "LayerNorm whose deviation stays above a floor: slope 1 / floor",
    ),
    Entry(
        "identity",
        "certcli.nn.blocks:build_identity",
        "nothing in place of a module that was folded into the next",
    ),
    Entry(
        "convex-block",
        "certcli.nn.blocks:build_convex",
        "residuals (1 - t) x + t f(x), 0 <= t <= 1",
    ),
    Entry("weighted-block", "certcli.nn.blocks:build_weighted", "residuals x + a f(x), a learned"),
    Entry(
        "relu",
        "certcli.nn.layers:build_relu",
        "ReLU in place of GELU: slope 1 instead of 1.13",
    ),
    Entry(
        "maxmin",
        "certcli.nn.layers:build_maxmin",
        "MaxMin in place of GELU or ReLU",
        "Anil et al. 2019",
    ),
    Entry("norm-eps", "certcli.nn.blocks:build_norm_eps", "the same norm with an eps of its own"),
    Entry(
        "flat-head",
        "certcli.nn.layers:build_flat_head",
        "tokens side by side into a MaxMin MLP, in place of pooling",
    ),
)
