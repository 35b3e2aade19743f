"""Certificates from the global bound that know that pixels end at 0 and 1.

A margin of slope K that is m(a) at an image a of the box is positive at every x' with |x' - a| <
m(a) / K. So an image x is certified at r for a pair of classes if one such ball, around any a,
holds all images of the box within r of x (`geometry.reach`). a = x gives the certificate of
`lipschitz`; where pixels of x are 0 or 1, others give more: the margin may rise along them, and no
x' lies on the far side. Source: ours; the theorem: docs/bounds.md, section 12.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from certcli.certify.box.climb import STEPS, climb
from certcli.certify.box.geometry import reach
from certcli.certify.certificate import (
    AGAIN,
    Certificate,
    RecheckSettings,
    whole_batch,
)
from certcli.certify.executed_network import as_executed
from certcli.certify.lipschitz import METHOD as GLOBAL
from certcli.certify.lipschitz import LipschitzCertifier, pair_radii
from certcli.certify.proof_options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.claim import Claim
from certcli.evaluation.radii import proven_radius
from certcli.images.labelled import sent
from certcli.lipschitz.network import prove
from certcli.models.build import load_double

METHOD = "box"
SMALLEST = 1 / 255
"""Radius from which on anchors are sought: nearer than a grey level of one pixel there is no other image of 8 bits."""
FURTHEST = 1.5
MOST = 16
"""An image has anchors for the pairs of classes whose radius is below FURTHEST times its own: the MOST nearest of them."""
_AT_ONCE = 256
_PIXELS = 2**22
"""Pairs that are climbed together, and pixels of all their images, at most."""


class BoxCertifier(LipschitzCertifier):
    """`LipschitzCertifier` with an anchor for each pair of classes; its radii are never less."""

    method = METHOD
    taken_at = ", from second images of the box"
    kept_back = 0.002  # measured between batches and threads: 0.00007

    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        return self._certified(indices, pixels, labels, STEPS)

    def _certified(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int], steps: int
    ) -> list[Certificate]:
        plain = super().batch(indices, pixels, labels)
        images = sent(pixels, self._device).double()
        initial_radii = torch.tensor(
            [row.radius for row in plain], dtype=torch.float64, device=self._device
        )
        predictions = torch.tensor([row.prediction for row in plain], device=self._device)
        right = predictions == torch.tensor(labels, device=self._device)
        rows = (right & (initial_radii >= SMALLEST) & initial_radii.isfinite()).nonzero().squeeze(1)
        radii = torch.zeros_like(initial_radii)
        if len(rows):
            radii[rows] = self._radii(
                images[rows], predictions[rows], initial_radii[rows], steps
            ) * (1 - self.kept_back)
        return [
            replace(
                row,
                method=METHOD,
                radius=max(row.radius, new),
                rung=METHOD if new > row.radius else GLOBAL,
            )
            for row, new in zip(plain, radii.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _radii(
        self, images: Tensor, predictions: Tensor, initial_radii: Tensor, steps: int
    ) -> Tensor:
        """Return what all pairs of classes allow: near ones by anchors, others by image."""
        logits, rounding = self.evaluated(images, predictions)
        on_box = 0.0 if self._neighbours is None else self._neighbours.on_box[predictions]
        pairs = pair_radii(logits, rounding + on_box, self._pairs, predictions)
        nearest = pair_radii(logits, rounding, self._pairs, predictions)
        last = nearest.kthvalue(min(MOST, nearest.shape[1]), dim=1, keepdim=True).values
        near = nearest <= FURTHEST * nearest.amin(1, keepdim=True)
        rows, others = (near & (nearest <= last)).nonzero(as_tuple=True)
        step = min(_AT_ONCE, max(1, _PIXELS // images[0].numel()))
        for row, other in zip(rows.split(step), others.split(step), strict=True):
            anchors = self._anchors(images[row], predictions[row], other, initial_radii[row], steps)
            within = self._within(anchors, predictions[row], other)
            new = reach(images[row].flatten(1), anchors.flatten(1), within)
            pairs[row, other] = torch.maximum(pairs[row, other], new)
        return pairs.amin(1)

    def _anchors(
        self, images: Tensor, predictions: Tensor, others: Tensor, initial_radii: Tensor, steps: int
    ) -> Tensor:
        slopes = self._pairs[predictions, others].float()

        def margins(anchors: Tensor) -> Tensor:
            with whole_batch(images):
                logits = self._climbed(anchors.view(images.shape))
            margins_of_pairs = logits.gather(1, predictions[:, None]) - logits.gather(
                1, others[:, None]
            )
            return margins_of_pairs.squeeze(1) / slopes

        anchors = climb(margins, images.flatten(1).float(), initial_radii.float(), steps)
        return anchors.double().clamp(0.0, 1.0).view(images.shape)

    def _within(self, anchors: Tensor, predictions: Tensor, others: Tensor) -> Tensor:
        """Return each anchor's radius within which its pair keeps its order, as executed."""
        logits, rounding = self.evaluated(anchors, predictions)

        def of_pair(rows: Tensor, nearby: Tensor | float = 0.0) -> Tensor:
            pair = pair_radii(logits[rows], rounding[rows] + nearby, self._pairs, predictions[rows])
            return pair.gather(1, others[rows, None]).squeeze(1)

        every = torch.arange(len(anchors), device=self._device)
        return as_executed(self._neighbours, anchors, predictions, of_pair(every), of_pair)

    @cached_property
    def _climbed(self) -> Callable[[Tensor], Tensor]:
        """The network in float32, which is enough to search."""
        return copy.deepcopy(self.model).float().eval().requires_grad_(False)

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """Search again, twice as long where it falls short, and compare with all that is found."""
        margin_kept = self.kept_back
        self.kept_back = 0.0
        try:
            return self._confirmed(claims, pixels, doubt)
        finally:
            self.kept_back = margin_kept

    def _confirmed(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        first = super().confirm(claims, pixels, doubt)
        confirmations = []
        for claim, image, confirmed in zip(claims, pixels, first, strict=True):
            if confirmed.status == "refuted" and claim.prediction is not None:
                (repeated,) = self._certified(
                    [claim.index], image[None], [claim.prediction], 2 * STEPS
                )
                if claim.prediction == repeated.prediction and claim.radius <= repeated.radius * (
                    1 + AGAIN
                ):
                    confirmed = claim.checked(
                        "verified", f"radius {proven_radius(claim.radius)} is proven again"
                    )
            confirmations.append(confirmed)
        return confirmations


def prepare(checkpoint: Checkpoint, device: torch.device, options: Proof) -> BoxCertifier:
    """Make the checkpoint's proven bound ready. NoBoundError when none is finite."""
    model = load_double(checkpoint, device)
    return BoxCertifier(model, prove(model, checkpoint.record.classes), options.arithmetic)
