"""Certificates from the global bound, a margin divided by how fast it can shrink; and what all have
in common that are proven of a network as it is executed.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from certcli.certify.certificate import (
    Certifier,
    PinnedWeights,
    RecheckSettings,
    require_logits,
    whole_batch,
)
from certcli.certify.options import REAL, Proof
from certcli.checkpoint.file import Checkpoint
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace
from certcli.evaluation.image_records import Certificate
from certcli.images.labelled import sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import NetworkBound, prove_network
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.system.errors import NoBoundError
from certcli.system.memory import out_of_memory

_NOTHING = 2.0**-20
"""A part of a radius that is not worth another look at the image."""


def neighbour_errors(
    model: nn.Module,
    size: tuple[int, ...],
    arithmetic: str | None,
    tables: Sequence[RuleTable] = (),
    traced: Trace | None = None,
) -> NeighbourErrors | None:
    """Return the rounding at neighbours of images of this size (c, h, w); None for real arithmetic.

    None too where nobody named an arithmetic, and float64 has no proof. A rounding bound holds for
    the kernels of a CPU. Those of a GPU are other algorithms (Winograd, statistics in half
    precision): nothing is claimed of them.

    Raises:
        NoBoundError: the rounding of an operation in the arithmetic that was named is not proven.
    """
    if arithmetic == REAL:
        return None
    device = next(model.parameters(), torch.empty(0)).device.type
    if device != "cpu":
        if arithmetic is None:
            return None
        raise NoBoundError(
            f"no certificate in {arithmetic}: the rounding of {device}'s kernels is not proven",
            f"--device cpu, or --arithmetic {REAL}",
        )
    try:
        return NeighbourErrors(model, size, PRECISIONS[arithmetic or "float64"], tables, traced)
    except NoRule as reason:
        if arithmetic is None:
            return None
        hint = f"--arithmetic {REAL} certifies in real arithmetic"
        raise NoBoundError(f"no certificate in {arithmetic}: {reason}", hint) from reason


class ProvingCertifier(Certifier):
    """A method that proves, for a float64 network in eval mode, images of size (c, h, w).

    Attributes:
        arithmetic: of the network that its certificates speak of, as in `Proof`.
        tables: of domains that walk its graph.
        traced: as in `NeighbourErrors`.
    """

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, int, int],
        arithmetic: str | None,
        tables: Sequence[RuleTable] = (),
        traced: Trace | None = None,
    ) -> None:
        self.model = model
        self._device = next(model.parameters(), torch.empty(0)).device
        self._weights = PinnedWeights(model)
        self._neighbours = neighbour_errors(model, size, arithmetic, tables, traced)
        self.arithmetic = REAL if self._neighbours is None else self._neighbours.precision.name

    @property
    def spoken_of(self) -> str:
        """Return in words what the certificates speak of."""
        if self._neighbours is None:
            return "real arithmetic, every rounding of float64 counted"
        if self.arithmetic == "tf32":  # no CPU has it
            return (
                "the network by the algorithms of docs/rounding.md in tf32, every rounding counted"
            )
        return f"the network as a CPU executes it in {self.arithmetic}, every rounding counted"

    @property
    def attacked(self) -> nn.Module:
        return self.model

    @cached_property
    def _executed(self) -> nn.Module:
        """The network in its arithmetic, if any machine runs it; else the attacked one."""
        if self._neighbours is None or self.arithmetic in ("float64", "tf32"):
            return self.model
        return copy.deepcopy(self.model).to(self._neighbours.precision.dtype).eval()

    @torch.no_grad()
    def require_as_run(self, images: Tensor, logits: Tensor, rounding: Tensor) -> None:
        """NoBoundError unless the network, as run, gives these margins up to proven errors.

        |(y_i - y_j) - (z_i - z_j)| <= e_ij + E_ij for the logits y as executed, i the top class and all j; e is the rounding
        of z, and E that of y; for real arithmetic y are logits of float64, and E is e.

        Args:
            images: That the arithmetic can represent, float64, (b, c, h, w).
            logits: z in real arithmetic up to `rounding` of z_i - z_j, (b, k) both.
        """
        weight = next(self._run.parameters(), images)
        try:
            with whole_batch(images):
                run = self._run(images.to(weight.dtype)).double()
        except RuntimeError as failure:
            if out_of_memory(failure) or weight.dtype in (torch.float64, torch.float32):
                raise
            raise NoBoundError(
                f"no certificate: the network does not run in {self.arithmetic} on this machine",
                "--arithmetic float32",
            ) from failure
        require_logits(run, images)
        predictions = logits.argmax(1)
        executed = rounding if self._neighbours is None else self._neighbours.on_box[predictions]
        allowed = (rounding + executed) * (1 + _NOTHING)
        differences = (
            _margins_of_classes(run, predictions) - _margins_of_classes(logits, predictions)
        ).abs()
        # a subtraction in each margin, of its own two logits: a large third one says nothing
        slack = (logits.gather(1, predictions[:, None]).abs() + logits.abs()) * 2.0**-50
        if not bool((differences <= allowed + slack).all()):
            raise NoBoundError(
                "no certificate: the network, run on a batch of these images in "
                f"{self.arithmetic if self._neighbours else 'float64'}, gives other logits than its proven graph",
                "its forward may depend on the batch, the precision or the memory format",
            )

    def require_classes_as_run(self, claims: Sequence[Certificate], images: Tensor) -> None:
        """NoBoundError unless the network, run on certified images in its arithmetic, gives their classes.

        Args:
            claims: A row an image (b, c, h, w). An image that the arithmetic cannot represent counts
                where what it stores lies within the radius.
        """
        stored = self.representable(images)
        distances = (stored - images).flatten(1).norm(dim=1)
        rows = [
            row
            for row, claim in enumerate(claims)
            if claim.radius > 0 and float(distances[row]) <= claim.radius
        ]
        if rows and not all(
            self.stands([claims[i] for i in rows], stored[rows], RecheckSettings(0, 0.0))
        ):
            raise NoBoundError(
                "no certificate: the network, run on a batch of these images in "
                f"{self.arithmetic}, gives other classes than its proven graph",
                "its forward may depend on the batch, the precision or the memory format",
            )

    @cached_property
    def _run(self) -> nn.Module:
        """The network as `require_as_run` runs it; float32 for TF32, nearer to real numbers."""
        if self.arithmetic == "tf32":
            return copy.deepcopy(self.model).float().eval()
        return self._executed

    def representable(self, images: Tensor) -> Tensor:
        weight = next(self._executed.parameters(), images)
        return images.to(weight.dtype).to(images.dtype)

    @torch.no_grad()
    def stands(
        self, claims: Sequence[Certificate], nearby: Tensor, doubt: RecheckSettings
    ) -> list[bool]:
        """Tell whether the executed network gives the claimed class, by finite logits."""
        try:
            logits = self._executed(
                nearby.to(next(self._executed.parameters(), nearby).dtype)
            ).double()
        except RuntimeError as failure:  # an operation that this machine has not in half precision
            if out_of_memory(failure):
                raise
            logits = self.model(nearby.double())
        finite = torch.isfinite(logits).all(1).tolist()
        predictions = logits.argmax(1).tolist()
        rows = zip(finite, predictions, claims, strict=True)
        return [holds and top == claim.prediction for holds, top, claim in rows]


def _margins_of_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Return z_i - z_j for the class i of each image: (b, k), (b,) -> (b, k)."""
    return logits.gather(1, classes[:, None]) - logits


def as_executed(
    neighbours: NeighbourErrors | None,
    images: Tensor,
    predictions: Tensor,
    radii: Tensor,
    radii_at: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the radii (b,) that hold as executed, of those in real arithmetic.

    By the rounding on the whole box where that takes next to nothing, as in float64; else by that
    near the image.

    Args:
        radii_at: (places among the images, bounds on the rounding of z_i - z_j there (n, k)) -> radii
            that hold nevertheless.
    """
    if neighbours is None:
        return radii
    enlarged = radii_at(
        torch.arange(len(radii), device=radii.device), neighbours.on_box[predictions]
    )
    (far,) = (enlarged < radii * (1 - _NOTHING)).nonzero(as_tuple=True)
    if len(far):
        nearby = neighbours(images[far], radii[far], predictions[far])
        enlarged[far] = torch.maximum(enlarged[far], radii_at(far, nearby))
    return enlarged


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
