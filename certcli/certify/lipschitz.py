"""Certificates from the global bound: a margin divided by how fast it can shrink."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certificate, Certifier, PinnedWeights, require_logits, whole_batch
from certcli.certify.lipschitz_options import REAL, Global
from certcli.checkpoint.file import Checkpoint
from certcli.engine.table import NoRule
from certcli.engine.trace import example_of
from certcli.images.labelled import Images, sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import NetworkBound, prove
from certcli.models.build import PixelModel, load_double
from certcli.rounding import PRECISIONS, ErrorAnalysis, NeighbourErrors
from certcli.system.errors import NoBoundError

METHOD = "lipschitz"
_HINT = "--method smoothing takes any network"
_NOTHING = 2.0**-20
"""A part of a radius that is not worth another look at the image."""


def certified_radii(logits: Tensor, errors: Tensor, pairs: Tensor, nearby: Tensor | None = None) -> Tensor:
    """r = min_{j != i} (z_i - z_j - e_i - e_j - E_ij) / K_ij, pixel l2, for the top class i: (b, k), ..., (k, k) -> (b,).

    K_ij bounds the slope of z_i - z_j, so no image within r changes the sign of any margin. Every step rounds down; the
    quotient is multiplied by 1 - 2^-40. Where w_i = w_j exactly, K_ij = 0 and a positive margin never changes.
    Source: Tsuzuku et al. 2018, Prop. 1, per pair.

    Args:
        errors: How far each logit may lie from that of real arithmetic, (b, k or 1).
        nearby: E_ij of the top class i, (b, k): how far z_i - z_j as executed at any neighbour may lie from the real one.
    """
    if not logits.dtype == errors.dtype == pairs.dtype == torch.float64:
        raise TypeError("certificates are computed in float64")
    top, errors = logits.argmax(dim=1, keepdim=True), errors.expand_as(logits)
    plain = logits.gather(1, top) - logits
    lost = (errors.gather(1, top) + errors) * (1 + 2.0**-40) + plain.abs() * 2.0**-50
    margins = plain - (lost if nearby is None else (lost + nearby) * (1 + 2.0**-40))
    slopes = pairs[top.squeeze(1)]
    radii = torch.where(
        margins > 0,  # not where it is NaN
        torch.where(slopes > 0, margins / slopes, torch.where(slopes == 0, torch.inf, 0.0)),
        0.0,
    )
    radii = radii.scatter(1, top, torch.inf) * (1 - 2.0**-40)
    return radii.amin(dim=1).nan_to_num(nan=0.0, posinf=torch.inf)


class LipschitzCertifier(Certifier):
    """Margins over pair constants.

    Args:
        model: Pixels to logits, float64, eval mode.
        bound: Proven for exactly that model.
        arithmetic: Of the network that the certificates speak of, as in `Global`.

    Raises:
        NoBoundError: There is no bound, or the rounding of an operation in this arithmetic is not proven.
    """

    method = METHOD
    domain = "box"

    def __init__(self, model: PixelModel, bound: NetworkBound, arithmetic: str | None = None) -> None:
        if bound.pairs is None:
            raise NoBoundError(f"no certificate: {bound.bound.why}", "certvit adapt makes a plain ViT Lipschitz")
        self.model, self.bound = model, bound
        self._device = next(model.parameters()).device
        try:
            self._evaluated = ErrorAnalysis(model)
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", _HINT) from reason
        self._weights = PinnedWeights(model)
        self._pairs = bound.pairs.double().to(self._device)
        self._neighbours = self._executed(arithmetic)
        self.arithmetic = REAL if self._neighbours is None else self._neighbours.precision.name
        self.title = f"global bound {bound.upper}, per-pair margins"
        what = "real arithmetic, every rounding of float64 counted"
        if self._neighbours is not None:
            what = f"the network as executed in {self.arithmetic}, every rounding counted"
        self.statement = f"certificates: {what}; the bound is proven on [0, 1] images"

    def _executed(self, arithmetic: str | None) -> NeighbourErrors | None:
        """Return the rounding at neighbours; None for real arithmetic, and where nobody named the one that has no proof."""
        if arithmetic == REAL:
            return None
        try:
            precision = PRECISIONS[arithmetic or "float64"]
            return NeighbourErrors(self.model, self.model.input_size, precision, self.bound.traced)
        except NoRule as reason:
            if arithmetic is None:
                return None
            hint = f"--arithmetic {REAL} speaks of real numbers"
            raise NoBoundError(f"no certificate in {arithmetic}: {reason}", hint) from reason

    @property
    def about(self) -> Mapping[str, Any]:
        return {"bound": bound_document(self.bound.upper)}

    @property
    def attacked(self) -> nn.Module:
        return self.model

    def evaluated(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and their rounding errors. NoBoundError names what none is known of."""
        self._weights.require_unchanged()
        try:
            with whole_batch(pixels):
                return self._evaluated(pixels)
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", _HINT) from reason

    @torch.no_grad()
    def batch(self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]) -> list[Certificate]:
        images = sent(pixels, self._device).double()
        logits, errors = self.evaluated(images)
        require_logits(logits, images)
        radii = certified_radii(logits, errors, self._pairs)
        if self._neighbours is not None:
            radii = self._as_executed(self._neighbours, images, logits, errors, radii)
        rows = zip(indices, labels, logits.argmax(1).tolist(), radii.tolist(), strict=True)
        return [Certificate(index, label, top, radius, METHOD, 0.0) for index, label, top, radius in rows]

    def _as_executed(
        self, neighbours: NeighbourErrors, images: Tensor, logits: Tensor, errors: Tensor, radii: Tensor
    ) -> Tensor:
        """Return the radii (b,) that hold as executed, of those in real arithmetic.

        By the rounding on the whole box where that takes next to nothing, as in float64; else by that near the image.
        """
        tops = logits.argmax(1)
        found = certified_radii(logits, errors, self._pairs, neighbours.on_box[tops])
        (far,) = (found < radii * (1 - _NOTHING)).nonzero(as_tuple=True)
        if len(far):
            nearby = neighbours(images[far], radii[far], tops[far])
            near = certified_radii(logits[far], errors[far], self._pairs, nearby)
            found[far] = torch.maximum(found[far], near)
        return found


def lipschitz_certifier(model: PixelModel, classes: int, arithmetic: str | None = None) -> LipschitzCertifier:
    """Prove the bound of a float64 network and certify by it. NoBoundError when none is finite."""
    certifier = LipschitzCertifier(model, prove(model, classes), arithmetic)
    certifier.evaluated(example_of(model, model.input_size))
    return certifier


def prepare(checkpoint: Checkpoint, device: torch.device, options: Global) -> LipschitzCertifier:
    """Make the checkpoint's proven bound ready. NoBoundError when none is finite."""
    return lipschitz_certifier(load_double(checkpoint, device), checkpoint.record.classes, options.arithmetic)


def plain_accuracy(model: nn.Module, images: Images, batch_size: int = 256) -> float:
    """Share of images whose top logit is the label."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    right = 0
    with torch.no_grad():
        for _, pixels, labels in images.batches(batch_size):
            right += int((model(sent(pixels, device).to(dtype)).argmax(1).cpu() == labels).sum())
    return right / len(images)
