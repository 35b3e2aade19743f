"""Local-Lip: certificates from how fast a chain moves near each image, constant units left out.

A ReLU unit that is 0 on the whole neighbourhood passes nothing on: its row and its column leave the
matrices on either side, whose norms fall. Source: Huang et al. 2021, Training certifiably robust
neural networks with efficient local Lipschitz bounds; there the norms are power iterations, here
they are proven, and margins use the box beside the ball. Convolutions keep their global norm: only
linear layers are masked.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from certcli.certify.certificate import AGAIN, RecheckSettings, require_logits
from certcli.certify.chains.sequential import SequentialNetwork, Values
from certcli.certify.lipschitz import ProvingCertifier, as_executed, certified_radii
from certcli.certify.options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.enclosure.zonotopes.columns import TINY
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.lipschitz.network import prove_network
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel

GLOBAL = "global"
_FIRST = 1e-6
"""Radius tried first, doubled, where the global bound certifies less."""
_DOUBLINGS = 24
_HALVINGS = 5


def _bisected(
    proves: Callable[[Tensor], Tensor], proven: Tensor, failed: Tensor, rounds: int
) -> Tensor:
    """Return proven radii (b,) nearer to those that failed, by their logarithms; of infinite ones
    nothing has failed.
    """
    for _ in range(rounds):
        middle = (proven.clamp(min=_FIRST / 2) * failed).sqrt()
        between = torch.isfinite(failed) & (middle > proven) & (middle < failed)
        if not between.any():
            break
        good = proves(torch.where(between, middle, 0.0))
        proven = torch.where(between & good, middle, proven)
        failed = torch.where(between & ~good, middle, failed)
    return proven


class LocalLipCertifier(ProvingCertifier):
    """Radii at which all margins of a chain are proven; never below the global bound's.

    A radius is doubled while its proof succeeds, then bisected in its logarithm: 2 % of it are lost
    at most. No monotony is assumed: what is reported was proven itself.

    Attributes:
        drop: leave constant units out of the norms.
        arithmetic: of the network that the certificates speak of, as in `Proof`.
    """

    method = "local-lip"
    drop: ClassVar[bool] = True
    domain = "box"
    at_once = 64

    def __init__(
        self,
        model: PixelModel,
        classes: int,
        size: tuple[int, int, int],
        arithmetic: str | None = None,
    ) -> None:
        self.network = SequentialNetwork(model, size)
        super().__init__(model, size, arithmetic)
        bound = prove_network(model, classes)
        self._pairs = None if bound.pairs is None else bound.pairs.double().to(self._device)
        self.statement = f"certificates: proven image by image; {self.spoken_of}, [0, 1] images"
        self.title = f"{self.method}: layer by layer around each image (global bound {bound.upper})"

    @torch.no_grad()
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        pixels, values, top = self._begun(pixels)
        right = (top == torch.tensor(labels, device=self._device)).nonzero().squeeze(1)
        start = self._start(values, top)
        radius = start.clone()
        if len(right):
            radius[right] = self.radii(pixels[right], values.of(right), top[right], start[right])

        def radii_at(rows: Tensor, nearby: Tensor) -> Tensor:
            chosen = values.of(rows)
            start[rows] = self._start(chosen, top[rows], nearby)
            return self.lowered(pixels[rows], chosen, top[rows], start[rows], radius[rows], nearby)

        radius = as_executed(self._neighbours, pixels, top, radius, radii_at)
        rows = zip(
            indices, labels, top.tolist(), radius.tolist(), (radius > start).tolist(), strict=True
        )
        certificates = [
            Certificate(
                index,
                label,
                prediction,
                r,
                self.method,
                0.0,
                rung=self.method if better else GLOBAL,
            )
            for index, label, prediction, r, better in rows
        ]
        self.require_classes_as_run(certificates, pixels)
        return certificates

    def _begun(self, pixels: Tensor) -> tuple[Tensor, Values, Tensor]:
        """Pixels in float64, what the chain computes there, and the class of each image."""
        self._weights.require_unchanged()
        pixels = pixels.double().to(self._device)
        values = self.network.values(pixels)
        require_logits(values.centre[-1], pixels)
        return pixels, values, values.centre[-1].argmax(1)

    def _start(self, values: Values, top: Tensor, nearby: Tensor | None = None) -> Tensor:
        """Return the global bound's radii."""
        if self._pairs is None:
            return values.centre[-1].new_zeros(len(top))
        errors = values.error[-1].expand_as(values.centre[-1])
        rounding = errors.gather(1, values.centre[-1].argmax(1, keepdim=True)) + errors
        return certified_radii(
            values.centre[-1], rounding if nearby is None else rounding + nearby, self._pairs
        )

    @torch.no_grad()
    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """Prove the stated radius again itself: a search from elsewhere may end at another radius."""
        pixels, values, top = self._begun(pixels)
        claimed_radii = [claim.radius for claim in claims]
        claimed = torch.tensor(claimed_radii, dtype=torch.float64, device=self._device) * (
            1 - AGAIN
        )
        nearby = None if self._neighbours is None else self._neighbours(pixels, claimed, top)
        verified = claimed <= self._start(values, top, nearby)
        verified |= self.proven(pixels, top, claimed.clamp(min=TINY), values, nearby)
        # the search may have used a lesser bound on rounding
        if self._neighbours is not None and not bool(verified.all()):
            recomputed = self.batch(range(len(pixels)), pixels, top.tolist())
            verified |= claimed <= torch.tensor([row.radius for row in recomputed]).to(claimed)
        rows = zip(claims, top.tolist(), verified.tolist(), strict=True)
        return [claim.proven_again(now, good) for claim, now, good in rows]

    def radii(self, pixels: Tensor, values: Values, labels: Tensor, start: Tensor) -> Tensor:
        """Return proven radii of images (b, c, h, w), from the proven `start` (b,) on."""
        proven = start.clone()
        failed = torch.full_like(start, torch.inf)
        for _ in range(_DOUBLINGS):
            (places,) = (torch.isfinite(proven) & torch.isinf(failed)).nonzero(as_tuple=True)
            if not len(places):
                break
            tried = (2 * proven[places]).clamp(min=_FIRST)
            verified = self.proven(pixels[places], labels[places], tried, values.of(places))
            proven[places[verified]] = tried[verified]
            failed[places[~verified]] = tried[~verified]
        return _bisected(
            lambda radii: self.proven(pixels, labels, radii, values), proven, failed, _HALVINGS
        )

    def lowered(
        self,
        pixels: Tensor,
        values: Values,
        labels: Tensor,
        start: Tensor,
        largest: Tensor,
        nearby: Tensor,
    ) -> Tensor:
        """Return radii from `start` to `largest` (only if one) with margins above `nearby`."""

        def proves(radii: Tensor) -> Tensor:
            return self.proven(pixels, labels, radii, values, nearby)

        open_ones = torch.isfinite(largest) & (largest > start)
        verified = proves(torch.where(open_ones, largest, 0.0)) & open_ones
        failed = torch.where(open_ones & ~verified, largest, torch.inf)
        return _bisected(proves, torch.where(verified, largest, start), failed, 2 * _HALVINGS)

    def proven(
        self,
        pixels: Tensor,
        labels: Tensor,
        radii: Tensor,
        values: Values | None = None,
        nearby: Tensor | None = None,
    ) -> Tensor:
        """Tell whether every image within each radius gets its label: (b,) bool.

        Args:
            nearby: how far execution may move z_i - z_j there, (b, k), which margins must exceed.
        """
        values = self.network.values(pixels) if values is None else values
        moves = self.network.moves(pixels, values, radii, drop=self.drop)
        margins = self.network.margins(values, moves, labels, drop=self.drop)
        return (margins > (0.0 if nearby is None else nearby)).all(dim=1)  # False with NaN


class BcpCertifier(LocalLipCertifier):
    """The same without dropping constant units: every norm is the layer's own.

    Source: Lee, Lee & Park 2020, Lipschitz-certifiable training with a tight outer bound: the ball
    grows by each layer's spectral norm, the box by interval arithmetic and by the ball, and the worst
    logits are sought in the intersection. There the norms are power iterations, here they are proven.
    """

    method = "bcp"
    drop = False


def prepare_local_lip(
    checkpoint: Checkpoint,
    device: torch.device,
    options: Proof,
    kind: type[LocalLipCertifier] = LocalLipCertifier,
) -> LocalLipCertifier:
    """The certifier made ready for the checkpoint. NoBoundError where its network is no chain."""
    record = checkpoint.record
    return kind(
        load_double(checkpoint, device), record.classes, record.input.size, options.arithmetic
    )


def prepare_bcp(checkpoint: Checkpoint, device: torch.device, options: Proof) -> LocalLipCertifier:
    """BCP, the same way."""
    return prepare_local_lip(checkpoint, device, options, BcpCertifier)
