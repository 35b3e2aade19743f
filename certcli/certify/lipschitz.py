"""Certificates from the global bound: a margin divided by how fast it can shrink."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from certcli.certify.certificate import Certificate, require_logits, whole_batch
from certcli.certify.executed_network import ProvingCertifier, as_executed
from certcli.certify.options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace
from certcli.images.labelled import sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import NetworkBound, prove_network
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.system.errors import NoBoundError

METHOD = "lipschitz"
_HINT = "--method smoothing takes any network"


def certified_radii(logits: Tensor, rounding: Tensor, slopes: Tensor) -> Tensor:
    """r = min_{j != i} r_ij of `pair_radii`, for the top class i: (b, k), (b, k), (k, k) -> (b,)."""
    radii_of_pairs = pair_radii(logits, rounding, slopes, logits.argmax(dim=1))
    return radii_of_pairs.amin(dim=1).nan_to_num(nan=0.0, posinf=torch.inf)


def pair_radii(logits: Tensor, rounding: Tensor, slopes: Tensor, classes: Tensor) -> Tensor:
    """r_ij = (z_i - z_j - E_ij) / K_ij, pixel l2: (b, k), (b, k), (k, k), (b,) -> (b, k).

    i is the class of each image.

    K_ij bounds the slope of z_i - z_j, so no image within r_ij changes the sign of this margin; 0
    where it is not positive, infinite for j = i. Every step rounds down; the quotient is multiplied
    by 1 - 2^-40. Where w_i = w_j exactly, K_ij = 0 and a positive margin never changes. Source:
    Tsuzuku et al. 2018, Prop. 1, per pair.

    Args:
        rounding: E_ij of the class i: how far z_i - z_j lies from that of real arithmetic, and
            there from what is executed at any neighbour.
    """
    if not logits.dtype == rounding.dtype == slopes.dtype == torch.float64:
        raise TypeError("certificates are computed in float64")
    top = classes[:, None]
    plain = logits.gather(1, top) - logits
    margins = plain - (rounding * (1 + 2.0**-40) + plain.abs() * 2.0**-50) * (1 + 2.0**-40)
    steepness = slopes[classes]
    radii = torch.where(
        margins > 0,  # not where it is NaN
        torch.where(
            steepness > 0, margins / steepness, torch.where(steepness == 0, torch.inf, 0.0)
        ),
        0.0,
    )
    return (radii.scatter(1, top, torch.inf) * (1 - 2.0**-40)).nan_to_num(nan=0.0, posinf=torch.inf)


class LipschitzCertifier(ProvingCertifier):
    """Margins over pair constants.

    Args:
        model: Pixels to logits, float64, eval mode.
        bound: Proven for exactly that model.
        arithmetic: Of the network that the certificates speak of, as in `Proof`.

    Attributes:
        rounding: of the float64 logits that margins are taken of.

    Raises:
        NoBoundError: There is no bound, or the rounding of an operation in this arithmetic is not
        proven.
    """

    method = METHOD
    domain = "box"
    taken_at: ClassVar[str] = ""

    def __init__(
        self, model: PixelModel, bound: NetworkBound, arithmetic: str | None = None
    ) -> None:
        if bound.pairs is None:
            raise NoBoundError(f"no certificate: {bound.bound.why}", bound.hint)
        self.bound = bound
        super().__init__(model, model.input_size, arithmetic, traced=bound.traced)
        self.rounding = self._of_float64(model.input_size, bound.traced)
        if self.rounding.rows != 1:
            message = f"{self.rounding.rows} rows of logits for 1 image"
            raise NoBoundError(f"no certificate: the network makes {message}", _HINT)
        self._pairs = bound.pairs.double().to(self._device)
        self.title = f"global bound {bound.upper}, per-pair margins{self.taken_at}"
        self.statement = f"certificates: {self.spoken_of}; the bound is proven on [0, 1] images"

    @property
    def about(self) -> Mapping[str, Any]:
        return {"bound": bound_document(self.bound.upper)}

    def _of_float64(self, size: tuple[int, ...], traced: Trace | None) -> NeighbourErrors:
        """Return the rounding of the float64 logits that margins are taken of."""
        if self._neighbours is not None and self.arithmetic == "float64":
            return self._neighbours
        try:
            return NeighbourErrors(
                self.model, size, PRECISIONS["float64"], traced=traced, as_traced=True
            )
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", _HINT) from reason

    def evaluated(self, pixels: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the graph's logits, and how far z_i - z_j may lie from real arithmetic's: (b, k).

        Args:
            classes: i, by default the top one, (b,).
        """
        self._weights.require_unchanged()
        with whole_batch(pixels):
            logits, rounding, _ = self.rounding.evaluated(pixels, classes)
        require_logits(logits, pixels)
        return logits, rounding

    @torch.no_grad()
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        images = sent(pixels, self._device).double()
        logits, rounding = self.evaluated(images)
        predictions = logits.argmax(1)
        stored = self.representable(images)
        exact = torch.equal(stored, images)
        self.require_as_run(stored, *((logits, rounding) if exact else self.evaluated(stored)))

        def radii_at(rows: Tensor, nearby: Tensor) -> Tensor:
            return certified_radii(logits[rows], rounding[rows] + nearby, self._pairs)

        radii = as_executed(
            self._neighbours,
            images,
            predictions,
            certified_radii(logits, rounding, self._pairs),
            radii_at,
        )
        rows = zip(indices, labels, predictions.tolist(), radii.tolist(), strict=True)
        return [
            Certificate(index, label, top, radius, METHOD, 0.0)
            for index, label, top, radius in rows
        ]


def lipschitz_certifier(
    model: PixelModel, classes: int, arithmetic: str | None = None
) -> LipschitzCertifier:
    """Prove the bound of a float64 network and certify by it. NoBoundError when none is finite."""
    return LipschitzCertifier(model, prove_network(model, classes), arithmetic)


def prepare_lipschitz(
    checkpoint: Checkpoint, device: torch.device, options: Proof
) -> LipschitzCertifier:
    """Make the checkpoint's proven bound ready. NoBoundError when none is finite."""
    return lipschitz_certifier(
        load_double(checkpoint, device), checkpoint.record.classes, options.arithmetic
    )
