"""Losses by name. Each maps (logits (b, k), labels (b,), pair constants (k, k), epsilon, settings) to a scalar."""

from certcli.registry import Entry, Registry

LOSSES = Registry(
    "loss",
    Entry("ce", "certcli.finetune.losses.plain:cross_entropy", "cross entropy on the logits; needs no bound"),
    Entry(
        "margin",
        "certcli.finetune.losses.margin:margin",
        "generalised cross entropy on margin-shifted logits, plus a little plain cross entropy",
        "Zhang & Sabuncu 2018 for the generalised cross entropy; per-pair shifts as in Tsuzuku et al. 2018",
    ),
)

NEEDS_BOUND = frozenset(("margin",))
"""Losses that read the pair constants."""
