"""Certificates from the global bound: a margin divided by how fast it can shrink."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.options import Options
from certcli.checkpoint.file import Checkpoint
from certcli.engine.table import NoRule
from certcli.images.labelled import Images, sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import NetworkBound, prove
from certcli.models.build import load_double
from certcli.rounding import Evaluation
from certcli.system.errors import DataError, NoBoundError

METHOD = "lipschitz"


def certified_radii(logits: Tensor, errors: Tensor, pairs: Tensor) -> Tensor:
    """r = min_{j != i} (z_i - z_j - e_i - e_j) / K_ij, pixel l2, for the top class i: (b, k), (b, k or 1), (k, k) -> (b,).

    errors: how far each logit may lie from that of real arithmetic. K_ij bounds the slope of z_i - z_j, so no image within
    r changes the sign of any margin. Every step rounds down; the quotient is multiplied by 1 - 2^-40. Where w_i = w_j
    exactly, K_ij = 0 and a positive margin never changes. Source: Tsuzuku et al. 2018, Prop. 1, per pair.
    """
    if not logits.dtype == errors.dtype == pairs.dtype == torch.float64:
        raise TypeError("certificates are computed in float64")
    top, errors = logits.argmax(dim=1, keepdim=True), errors.expand_as(logits)
    plain = logits.gather(1, top) - logits
    lost = (errors.gather(1, top) + errors) * (1 + 2.0**-40) + plain.abs() * 2.0**-50
    margins = plain - lost
    slopes = pairs[top.squeeze(1)]
    radii = torch.where(
        margins > 0,  # not where it is NaN
        torch.where(slopes > 0, margins / slopes, torch.where(slopes == 0, torch.inf, 0.0)),
        0.0,
    )
    radii = radii.scatter(1, top, torch.inf) * (1 - 2.0**-40)
    return radii.amin(dim=1).nan_to_num(nan=0.0, posinf=torch.inf)


class LipschitzCertifier(Certifier):
    """Margins over pair constants. model: pixels to logits, float64, eval mode; bound: proven for exactly that model."""

    method = METHOD
    statement = "certificates: real arithmetic, every rounding of float64 counted; the bound is proven on [0, 1] images"
    domain = "box"

    def __init__(self, model: nn.Module, bound: NetworkBound) -> None:
        if bound.pairs is None:
            raise NoBoundError(f"no certificate: {bound.bound.why}", "certvit adapt makes a plain ViT Lipschitz")
        self.model, self.bound = model, bound
        self._device = next(model.parameters()).device
        self._evaluated = Evaluation(model)
        self._pairs = bound.pairs.double().to(self._device)
        self.title = f"global bound {bound.upper}, per-pair margins"

    @property
    def about(self) -> Mapping[str, Any]:
        return {"bound": bound_document(self.bound.upper)}

    @property
    def attacked(self) -> nn.Module:
        return self.model

    def evaluated(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and their rounding errors. NoBoundError names what none is known of."""
        try:
            return self._evaluated(pixels)
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", "--method smoothing takes any network") from reason

    @torch.no_grad()
    def batch(self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]) -> list[Certificate]:
        logits, errors = self.evaluated(sent(pixels, self._device).double())
        if not torch.isfinite(logits).all():
            raise DataError("the network gives NaN or infinite logits on these images")
        radii = certified_radii(logits, errors, self._pairs)
        rows = zip(indices, labels, logits.argmax(1).tolist(), radii.tolist(), strict=True)
        return [Certificate(index, label, top, radius, METHOD, 0.0) for index, label, top, radius in rows]


def prepare(checkpoint: Checkpoint, device: torch.device, options: Options) -> LipschitzCertifier:
    """The checkpoint's proven bound, made ready. NoBoundError when none is finite."""
    model = load_double(checkpoint, device)
    certifier = LipschitzCertifier(model, prove(model, checkpoint.record.classes))
    certifier.evaluated(torch.full((1, *checkpoint.record.input.size), 0.5, dtype=torch.float64, device=device))
    return certifier


def plain_accuracy(model: nn.Module, images: Images, batch_size: int = 256) -> float:
    """Share of images whose top logit is the label."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    right = 0
    with torch.no_grad():
        for _, pixels, labels in images.batches(batch_size):
            right += int((model(sent(pixels, device).to(dtype)).argmax(1).cpu() == labels).sum())
    return right / len(images)
