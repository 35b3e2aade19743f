"""Certificates of a network as it is, one image at a time: what it can do on the ball around that image."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import AGAIN, Certificate, Certifier, Confirmation, Doubt
from certcli.checkpoint import Checkpoint
from certcli.enclosure.domain import LocalNetwork
from certcli.enclosure.form import Unbounded, l2_ball
from certcli.enclosure.memory import affordable, available
from certcli.enclosure.search import certified_radius
from certcli.engine.table import NoRule
from certcli.engine.tracer import Untraceable
from certcli.errors import DataError, NoBoundError
from certcli.models import load_double

METHOD = "local"
RUNG = "zonotope"
SQUARES = 128
"""Pixels up to which e e^T has columns of its own: 8,256 of them."""
_FEWEST = 64
_HINT = "--method smoothing takes any network; certvit adapt replaces layers"


class LocalCertifier(Certifier):
    """Enclosures of the ball around each image, in float64 with every rounding counted.

    symbols: box symbols a tensor may carry from block to block; fewer where memory does not last, which the rung says.
    steps: bisections after the first bracket, 4: within 4 % or so of the largest radius this rung can prove.
    """

    method = METHOD
    statement = "certificates: proven image by image; real arithmetic, every rounding of float64 counted"
    at_once = 1

    def __init__(self, model: nn.Module, size: tuple[int, int, int], *, symbols: int = 8000, steps: int = 4) -> None:
        self.model, self.steps = model, steps
        self._device = next(model.parameters()).device
        try:
            self.network = LocalNetwork(model, size)
        except (NoRule, Untraceable) as reason:
            raise NoBoundError(f"no local certificate: {reason}", _HINT) from reason
        kept = affordable(self.network, SQUARES, symbols, available(self._device))
        if kept is None:
            raise NoBoundError("no local certificate: enclosures of this network do not fit into memory", _HINT)
        self.symbols, self.asked = kept, symbols
        self.title = f"an enclosure of each image's neighbourhood, {kept:,} box symbols from block to block"
        if kept < symbols:
            self.title += f" (not {symbols:,}: memory)"
        self._guess = 1e-2

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"symbols": self.asked, "steps": self.steps}

    @property
    def rung(self) -> str:
        return RUNG if self.symbols == self.asked else f"{RUNG}, {self.symbols} symbols"

    @torch.no_grad()
    def batch(self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]) -> list[Certificate]:
        found = []
        for index, image, label in zip(indices, pixels.double().to(self._device), labels, strict=True):
            started = time.perf_counter()
            logits = self.model(image[None])[0]
            if not torch.isfinite(logits).all():
                raise DataError("the network gives NaN or infinite logits on these images")
            top = int(logits.argmax())
            radius = self.radius(image[None], top) if top == label else 0.0
            seconds = round(time.perf_counter() - started, 3)
            found.append(Certificate(index, label, top, radius, METHOD, 0.0, rung=self.rung, seconds=seconds))
        return found

    @property
    def attacked(self) -> nn.Module:
        return self.model

    @torch.no_grad()
    def confirm(self, claims: Sequence[Certificate], pixels: Tensor, doubt: Doubt) -> list[Confirmation]:
        """The stated radius is proven again, by one enclosure: a search begun elsewhere may end at another radius."""
        found = []
        for claim, image in zip(claims, pixels.double().to(self._device), strict=True):
            top = int(self.model(image[None])[0].argmax())
            if top != claim.prediction:
                told = Confirmation("refuted", f"class {claim.prediction} is stated, the network says {top}")
            elif claim.radius == 0 or self.proven(image[None], top, claim.radius * (1 - AGAIN)):
                told = Confirmation("verified", f"radius {claim.radius:.6g} is proven again")
            elif self.symbols < self.asked:
                told = Confirmation("not checked", f"memory lasts for {self.symbols} symbols only")
            else:
                told = Confirmation("refuted", f"radius {claim.radius:.6g} is stated, and not proven by this method")
            found.append(told)
        return found

    def radius(self, image: Tensor, label: int) -> float:
        """A pixel l2 radius at which every margin of `label` was proven positive; the search starts at the last one."""
        found = certified_radius(lambda r: self.proven(image, label, r), self._guess, steps=self.steps)
        self._guess = found or self._guess
        return found

    def proven(self, image: Tensor, label: int, radius: float) -> bool:
        """Whether no image (1, c, h, w) within `radius` is classified as anything but `label`."""
        try:
            start = l2_ball(image, radius, squares_up_to=SQUARES, limit=self.symbols)
            return bool((self.network.margins(start, label) > 0).all())  # False with NaN
        except Unbounded:
            return False
        except (MemoryError, RuntimeError) as failure:
            if "memory" not in str(failure).lower() and "alloc" not in str(failure).lower():
                raise
            if self.symbols < _FEWEST:
                raise NoBoundError(
                    "no local certificate: enclosures of this network do not fit into memory", _HINT
                ) from failure
            self.symbols //= 2  # the order is reduced, the rung says so, and this radius counts as not proven
            return False
        except NoRule as reason:
            raise NoBoundError(f"no local certificate: {reason}", _HINT) from reason


def prepare(checkpoint: Checkpoint, device: torch.device, options: Mapping[str, Any] = {}) -> LocalCertifier:
    """The checkpoint's network traced for local enclosures. NoBoundError names what has no relaxation."""
    model = load_double(checkpoint, device)
    return LocalCertifier(model, checkpoint.record.input.size)
