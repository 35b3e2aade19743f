"""Losses by name: (logits (b, k), labels (b,), needs, epsilon) -> scalar."""

from dataclasses import dataclass
from typing import Literal

from certcli.system.registry import Entry, Registry


@dataclass(frozen=True)
class Loss(Entry):
    """A loss and its third argument.

    Attributes:
        needs: "nothing" (None is passed), "pairs" (constants (k, k) of the network, for each pair
            of logits), "chain" (slopes (b, k) of the images at hand, from a neighbourhood carried
            through a chain of layers), or "enclosure" (margins (e, k) that an enclosure leaves to
            the first e images).
    """

    needs: Literal["nothing", "pairs", "chain", "enclosure"] = "nothing"


_BOUNDS = "certcli.finetune.losses.bounds"

LOSSES = Registry(
    "loss",
    Loss(
        "ce",
        f"{_BOUNDS}:cross_entropy",
        "cross entropy on the logits; needs no bound",
        needs="nothing",
    ),
    Loss(
        "margin",
        f"{_BOUNDS}:margin_loss",
        "generalised cross entropy on margin-shifted logits, plus a little plain cross entropy",
        "Zhang & Sabuncu 2018 for the generalised cross entropy; per-pair shifts as in Tsuzuku et al. 2018",
        needs="pairs",
    ),
    Loss(
        "gloro",
        f"{_BOUNDS}:gloro",
        "cross entropy with one more class, which wins where the prediction is not certified",
        "Leino, Wang, Fredrikson 2021",
        needs="pairs",
    ),
    Loss(
        "lmt",
        f"{_BOUNDS}:lmt",
        "cross entropy on margin-shifted logits",
        "Tsuzuku, Sato, Sugiyama 2018",
        needs="pairs",
    ),
    Loss(
        "emma",
        f"{_BOUNDS}:emma",
        "lmt with the radius of every pair capped by what the sample has reached",
        "Hu, Zou, Wang, Leino, Fredrikson 2023",
        needs="pairs",
    ),
    Loss(
        "trades",
        f"{_BOUNDS}:trades",
        "cross entropy, plus the divergence of the worst case within the radius",
        "Leino et al. 2021 after Zhang et al. 2019",
        needs="pairs",
    ),
    Loss(
        "hinge-kr",
        f"{_BOUNDS}:hinge_kr",
        "hinge at the radius of every pair, plus the Kantorovich-Rubinstein term",
        "Serrurier et al. 2021",
        needs="pairs",
    ),
    Loss(
        "bcp",
        f"{_BOUNDS}:worst_logits",
        "cross entropy of the worst logits in a box and a ball carried through a chain of layers",
        "Lee, Lee & Park 2020",
        needs="chain",
    ),
    Loss(
        "local-lip",
        f"{_BOUNDS}:worst_logits",
        "the same with units that are constant near the image left out of linear layers' norms",
        "Huang et al. 2021",
        needs="chain",
    ),
    Loss(
        "local-lip-gloro",
        f"{_BOUNDS}:worst_logit_rejects",
        "the same worst logits in GloRo's form: the largest of them is one more class",
        "Huang et al. 2021, their code for MNIST",
        needs="chain",
    ),
    Loss(
        "local",
        "certcli.finetune.losses.local:local",
        "cross entropy of the worst logits in an enclosure of a vision transformer, for local certificates",
        needs="enclosure",
    ),
)

NEEDS_PAIRS = frozenset(loss.name for loss in LOSSES if loss.needs == "pairs")
NEEDS_CHAIN = frozenset(loss.name for loss in LOSSES if loss.needs == "chain")
NEEDS_ENCLOSURE = frozenset(loss.name for loss in LOSSES if loss.needs == "enclosure")
