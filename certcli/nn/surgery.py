"""Names of the module replacements a record can replay. Each builder takes the old module and returns the new one's shape.

A builder never reads weights: they come from the checkpoint. How a new part is *started* from the weights of the part it
replaces is the business of `certcli.adapt`.
"""

from certcli.registry import Entry, Registry

REPLACEMENTS = Registry(
    "replacement",
    Entry(
        "l2-attention",
        "certcli.nn.l2_attention:build",
        "tied L2 self-attention in place of timm's dot-product attention",
        "Kim et al. 2021, with the factor A_h",
    ),
    Entry("center-norm", "certcli.nn.norms:build_center_norm", "LayerNorm without the division", "Qi et al. 2023"),
    Entry("identity", "certcli.nn.norms:build_identity", "nothing in place of a module that was folded into the next"),
    Entry("convex-block", "certcli.nn.residual:build_convex", "residuals (1 - t) x + t f(x), 0 <= t <= 1"),
    Entry("weighted-block", "certcli.nn.residual:build_weighted", "residuals x + a f(x), a learned"),
    Entry("maxmin", "certcli.nn.activations:build_maxmin", "MaxMin in place of GELU or ReLU", "Anil et al. 2019"),
    Entry(
        "flat-head", "certcli.nn.heads:build_flat_head", "tokens side by side into a MaxMin MLP, in place of pooling"
    ),
)
