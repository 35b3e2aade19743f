"""BCP: certificates from a box and a ball carried through a chain of layers together.

Source: Lee, Lee & Park 2020, Lipschitz-certifiable training with a tight outer bound: the ball
grows by each layer's spectral norm, the box by interval arithmetic and by the ball, and the worst
logits are sought in the intersection. There the norms are power iterations, here they are proven.
"""

import torch

from certcli.certify.chains.local_lip import LocalLipCertifier
from certcli.certify.proof_options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.models.build import load_double


class BcpCertifier(LocalLipCertifier):
    """The same without dropping constant units: every norm is the layer's own."""

    method = "bcp"
    drop = False


def prepare(checkpoint: Checkpoint, device: torch.device, options: Proof) -> BcpCertifier:
    """BCP made ready for the checkpoint. NoBoundError where its network is no chain."""
    record = checkpoint.record
    return BcpCertifier(
        load_double(checkpoint, device), record.classes, record.input.size, options.arithmetic
    )
