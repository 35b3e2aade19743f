"""Certificates from the global bound: a margin divided by how fast it can shrink."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from certcli.certify.certificate import Certificate, require_logits, whole_batch
from certcli.certify.executed_network import ProvingCertifier, as_executed
from certcli.certify.proof_options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, example_of, result_of
from certcli.images.labelled import sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import NetworkBound, prove
from certcli.lipschitz.propagate import trace_network
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel
from certcli.rounding import ErrorAnalysis
from certcli.rounding.running_error import written_out
from certcli.system.errors import NoBoundError

METHOD = "lipschitz"
_HINT = "--method smoothing takes any network"


def certified_radii(
    logits: Tensor, errors: Tensor, pairs: Tensor, nearby: Tensor | None = None
) -> Tensor:
    """r = min_{j != i} r_ij of `pair_radii`, for the top class i: (b, k), ..., (k, k) -> (b,)."""
    radii_of_pairs = pair_radii(logits, errors, pairs, logits.argmax(dim=1), nearby)
    return radii_of_pairs.amin(dim=1).nan_to_num(nan=0.0, posinf=torch.inf)


def pair_radii(
    logits: Tensor, errors: Tensor, pairs: Tensor, classes: Tensor, nearby: Tensor | None = None
) -> Tensor:
    """r_ij = (z_i - z_j - e_i - e_j - E_ij) / K_ij, pixel l2: (b, k), ..., (k, k) -> (b, k).

    i is the class of each image.

    K_ij bounds the slope of z_i - z_j, so no image within r_ij changes the sign of this margin; 0
    where it is not positive, infinite for j = i. Every step rounds down; the quotient is multiplied
    by 1 - 2^-40. Where w_i = w_j exactly, K_ij = 0 and a positive margin never changes. Source:
    Tsuzuku et al. 2018, Prop. 1, per pair.

    Args:
        errors: How far each logit may lie from that of real arithmetic, (b, k or 1).
        classes: i, (b,).
        nearby: E_ij of the class i, (b, k): how far z_i - z_j as executed at any neighbour may lie
            from the real one.
    """
    if not logits.dtype == errors.dtype == pairs.dtype == torch.float64:
        raise TypeError("certificates are computed in float64")
    top = classes[:, None]
    errors = errors.expand_as(logits)
    plain = logits.gather(1, top) - logits
    rounding = (errors.gather(1, top) + errors) * (1 + 2.0**-40) + plain.abs() * 2.0**-50
    margins = plain - (rounding if nearby is None else (rounding + nearby) * (1 + 2.0**-40))
    slopes = pairs[classes]
    radii = torch.where(
        margins > 0,  # not where it is NaN
        torch.where(slopes > 0, margins / slopes, torch.where(slopes == 0, torch.inf, 0.0)),
        0.0,
    )
    return (radii.scatter(1, top, torch.inf) * (1 - 2.0**-40)).nan_to_num(nan=0.0, posinf=torch.inf)


class LipschitzCertifier(ProvingCertifier):
    """Margins over pair constants.

    Args:
        model: Pixels to logits, float64, eval mode.
        bound: Proven for exactly that model.
        arithmetic: Of the network that the certificates speak of, as in `Proof`.

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
            raise NoBoundError(
                f"no certificate: {bound.bound.why}", "certvit adapt makes a plain ViT Lipschitz"
            )
        self.bound = bound
        self._size = model.input_size
        try:
            self._evaluated = ErrorAnalysis(model)
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", _HINT) from reason
        super().__init__(model, model.input_size, arithmetic, traced=bound.traced)
        self._pairs = bound.pairs.double().to(self._device)
        self.title = f"global bound {bound.upper}, per-pair margins{self.taken_at}"
        self.statement = f"certificates: {self.spoken_of}; the bound is proven on [0, 1] images"

    @property
    def about(self) -> Mapping[str, Any]:
        return {"bound": bound_document(self.bound.upper)}

    @cached_property
    def _graph(self) -> Trace:
        """The graph that was proven; traced here where another process proved the bound."""
        if self.bound.traced is not None:
            return self.bound.traced
        return trace_network(self.model, self._size)

    def evaluated(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and their rounding errors. NoBoundError names what none is known of."""
        self._weights.require_unchanged()
        try:
            with whole_batch(pixels):
                logits, errors = self._evaluated(pixels)
        except NoRule as reason:
            raise NoBoundError(f"no certificate: {reason}", _HINT) from reason
        self._require_graph(pixels, logits, errors)
        return logits, errors

    @torch.no_grad()
    def _require_graph(self, pixels: Tensor, logits: Tensor, errors: Tensor) -> None:
        """NoBoundError unless the proven graph gives each image these logits, within rounding.

        The graph is of one image: what a network does to a batch of another size is not in it.
        """
        require_logits(logits, pixels)
        traced = self._graph
        with written_out():
            alone = torch.cat([result_of(traced, image[None]) for image in pixels])
        slack = errors * (2 * (1 + 2.0**-20)) + logits.abs() * 2.0**-50
        if alone.shape != logits.shape or not bool(((alone - logits).abs() <= slack).all()):
            raise NoBoundError(
                f"no certificate: the logits of an image in a batch of {len(pixels)} are not those of the proven graph",
                "--batch-size 1, if they depend on the batch",
            )

    @torch.no_grad()
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        images = sent(pixels, self._device).double()
        logits, errors = self.evaluated(images)
        require_logits(logits, images)
        predictions = logits.argmax(1)
        stored = self.representable(images)
        exact = torch.equal(stored, images)
        self.require_as_run(stored, *((logits, errors) if exact else self.evaluated(stored)))

        def radii_at(rows: Tensor, nearby: Tensor) -> Tensor:
            return certified_radii(logits[rows], errors[rows], self._pairs, nearby)

        radii = as_executed(
            self._neighbours,
            images,
            predictions,
            certified_radii(logits, errors, self._pairs),
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
    certifier = LipschitzCertifier(model, prove(model, classes), arithmetic)
    certifier.evaluated(example_of(model, model.input_size))
    return certifier


def prepare(checkpoint: Checkpoint, device: torch.device, options: Proof) -> LipschitzCertifier:
    """Make the checkpoint's proven bound ready. NoBoundError when none is finite."""
    return lipschitz_certifier(
        load_double(checkpoint, device), checkpoint.record.classes, options.arithmetic
    )
