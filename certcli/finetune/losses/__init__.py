"""Losses by name. Each maps (logits (b, k), labels (b,), pair constants (k, k), epsilon, smoothing) to a scalar.

Those of CHAIN take slopes (b, k) of the images at hand in place of pair constants of the network.
"""

from certcli.system.registry import Entry, Registry

_PUBLISHED = "certcli.finetune.losses.published"

LOSSES = Registry(
    "loss",
    Entry("ce", "certcli.finetune.losses.plain:cross_entropy", "cross entropy on the logits; needs no bound"),
    Entry(
        "margin",
        "certcli.finetune.losses.margin:margin",
        "generalised cross entropy on margin-shifted logits, plus a little plain cross entropy",
        "Zhang & Sabuncu 2018 for the generalised cross entropy; per-pair shifts as in Tsuzuku et al. 2018",
    ),
    Entry(
        "gloro",
        f"{_PUBLISHED}:gloro",
        "cross entropy with one more class, which wins where the prediction is not certified",
        "Leino, Wang, Fredrikson 2021",
    ),
    Entry("lmt", f"{_PUBLISHED}:lmt", "cross entropy on margin-shifted logits", "Tsuzuku, Sato, Sugiyama 2018"),
    Entry(
        "emma",
        f"{_PUBLISHED}:emma",
        "lmt with the radius of every pair capped by what the sample has reached",
        "Hu, Zou, Wang, Leino, Fredrikson 2023",
    ),
    Entry(
        "trades",
        f"{_PUBLISHED}:trades",
        "cross entropy, plus the divergence of the worst case within the radius",
        "Leino et al. 2021 after Zhang et al. 2019",
    ),
    Entry(
        "hinge-kr",
        f"{_PUBLISHED}:hinge_kr",
        "hinge at the radius of every pair, plus the Kantorovich-Rubinstein term",
        "Serrurier et al. 2021",
    ),
    Entry(
        "bcp",
        "certcli.finetune.losses.chain:worst_logits",
        "cross entropy of the worst logits in a box and a ball carried through a chain of layers",
        "Lee, Lee & Park 2020",
    ),
    Entry(
        "local-lip",
        "certcli.finetune.losses.chain:worst_logits",
        "the same with units that are constant near the image left out of linear layers' norms",
        "Huang et al. 2021",
    ),
)

CHAIN = frozenset({"bcp", "local-lip"})
"""Losses that follow a neighbourhood of each image through a chain of layers."""

NEEDS_BOUND = frozenset(LOSSES.names()) - {"ce"} - CHAIN
"""Losses that read the pair constants."""
