"""Which certificate is worth having for a network."""

from dataclasses import dataclass

import torch

from certcli.certify.certificate import certified_accuracy
from certcli.certify.methods import certify, prepare
from certcli.checkpoint import Checkpoint
from certcli.errors import NoBoundError
from certcli.images import Images

USEFUL = 0.1
"""Share of the correctly classified images that a bound must certify to be worth more than a statement of chance."""
TRIED = 256
"""Images at most on which the bound is tried."""


@dataclass(frozen=True)
class Choice:
    """The method that is worth having, and why in a sentence. beside: others that cost next to nothing."""

    method: str
    reason: str
    beside: tuple[str, ...] = ()


def choose_method(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> Choice:
    """The proven bound where it is finite and certifies a tenth of what is correct at `radius`, else smoothing."""
    try:
        certifier = prepare("lipschitz", checkpoint, device)
    except NoBoundError as failure:
        return Choice("smoothing", f"this network has no finite bound ({failure.message}); noise needs none")
    sample = images.limit(TRIED)
    found = certified_accuracy([row for rows in certify(certifier, sample, batch_size) for row in rows], [radius])
    (share,) = found.certified.values()
    told = (
        f"the {certifier.title.partition(',')[0]} certifies {100 * share:.1f} % of {len(sample)} images at {radius:g}"
    )
    if share >= USEFUL * found.clean and share > 0:
        return Choice("lipschitz", f"{told}, with proof")
    return Choice("smoothing", f"{told}; noise may certify more, with probability", ("lipschitz",))
