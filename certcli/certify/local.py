"""Certificates of a network as it is, image by image: what it can do on the ball around each."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify import certificate, forecast
from certcli.certify.branched import Branched, replay
from certcli.certify.lipschitz import ProvingCertifier
from certcli.certify.options import AUTO, BACKWARD, BRANCH, SECONDS, TOKENS, ZONOTOPE, Local
from certcli.checkpoint.file import Checkpoint
from certcli.enclosure.zonotopes.cuts import WALKS, Remainder, everywhere_positive
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import Further, lower_bounds, optimised
from certcli.enclosure.zonotopes.network import (
    LocalNetwork,
    affordable,
    available,
    fits_by_fibres,
    keep_pages,
)
from certcli.enclosure.zonotopes.search import BEYOND, certified_radius
from certcli.enclosure.zonotopes.space import rules as zonotope_rules
from certcli.engine.table import NoRule
from certcli.engine.tracer import Untraceable
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.perturbation import Region
from certcli.evaluation.threat import Norm
from certcli.models.build import load_double
from certcli.system.errors import NoBoundError
from certcli.system.memory import out_of_memory

METHOD = "local"
SYMBOLS = {ZONOTOPE: 4000, BACKWARD: 2000, BRANCH: 2000, TOKENS: 1}
"""Box symbols a tensor may carry from block to block; the way back needs fewer."""
SQUARES = 128
"""Numbers up to which e e^T has columns of its own: pixels, or what the first map makes of them."""
NOTHING_OPEN = (
    "no ReLU unit may change its sign at the radii tried: --effort branch is backward here"
)
FURTHER = 4
"""Walks over what is left of a margin by which `auto` decides a radius that is asked for."""
_ASCENT = 20
"""Steps that search for another class before them, each a quarter of the radius."""
_FEWEST = 64
_AT_ONCE = 8
"""Images in one walk: with 16 it is no faster."""
_SMALL = 512
"""Entries of the largest sum up to which a walk of one image is slow by the number of its operations;
beyond, several at once gain nothing."""
_VAIN = 3
"""Walks of several images that end without enclosures, after which no more are tried."""
_FIRST = 1e-2
"""The radius of the first walk of a search."""
_HINT = "--method smoothing takes any network"
_TOO_LARGE = "no local certificate: enclosures of this network do not fit into memory"

Found = tuple[float, str, dict[str, str]]
"""Radius, rung, splits."""
NORMS = "norms"
"""The rung of records that an earlier version proved by balls of norms."""


class LocalCertifier(ProvingCertifier):
    """What each image's neighbourhood can become, in float64 with every rounding counted.

    Attributes:
        symbols: box symbols a tensor may carry from block to block; fewer where memory does not
            last, which the rung says.
        steps: radii are tried on a grid of 2^steps points between a radius and its double; 4: 4.4 %
            from point to point.
    """

    method = METHOD

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, int, int],
        options: Local,
        *,
        symbols: int | None = None,
        steps: int = 4,
    ) -> None:
        super().__init__(model, size, options.arithmetic, (zonotope_rules,))
        self.steps = steps
        self.effort = options.effort
        self.at = options.at
        self.seconds = options.seconds or SECONDS
        self._interrupted = self._opened = self._by_cuts = False
        self._unbounded = ""
        self.norm: Norm = options.norm
        self.walked = self.effort
        self.squares = 0
        self._size = size
        self.domain = "all" if self._neighbours is None else "box"  # rounding is bounded on the box
        where = "" if self._neighbours is None else ", [0, 1] images"
        self.statement = f"certificates: proven image by image; {self.spoken_of}{where}"
        self._guess = _FIRST
        self._known = False
        self._symbols_asked = symbols
        self.most_symbols = 0
        self.network = self._enclosed()
        self.at_once = self._images_at_once()
        self._vain = 0
        self.title = f"an enclosure of each image's neighbourhood, {forecast.symbols_text(self)}"
        if self.at:
            self.title += "; the radii asked for are decided, no others tried"

    def _enclosed(self) -> LocalNetwork:
        """Return the network for zonotopes. NoBoundError: a part has no theorem, or memory is short."""
        try:
            network = LocalNetwork(self.model, self._size, self._neighbours)
        except (NoRule, Untraceable) as reason:
            raise NoBoundError(f"no local certificate: {reason}", reason.hint) from reason
        keep_pages()
        branches = self.effort == BRANCH and self.norm == "l2" and not network.opens
        chooses = branches or self.effort == AUTO
        if chooses:
            # e e^T has columns that pay, but for ReLU, which does better by the way back
            few = math.prod(self._size) <= SQUARES
            few |= network.numbers <= SQUARES and not network.opens
            self.walked = ZONOTOPE if self.norm == "l2" and few else BACKWARD
        symbols = self._fitting(network)
        if chooses and not symbols and self._fits_tokens(network):  # else minutes for little
            self.walked = TOKENS
            symbols = self._fitting(network)
        if symbols is None:
            raise NoBoundError(_TOO_LARGE, self._what_fits(network))
        self.symbols = symbols
        decides = bool(self.effort == AUTO and self.at) and self.walked == ZONOTOPE
        self.cuts = WALKS if branches else FURTHER if decides else 0
        return network

    def _images_at_once(self) -> int:
        """Return how many images share a walk: several where radii are asked for, and memory lasts."""
        _, stream, _, _ = self.network.sizes()
        decides = bool(self.at) and self.walked == ZONOTOPE and self.effort != BRANCH
        if not decides or stream > _SMALL:
            return 1
        each = available(self._device) / _AT_ONCE
        fits = affordable(self.network, self.squares, self.most_symbols, each) == self.symbols
        return _AT_ONCE if fits else 1

    def _fitting(self, network: LocalNetwork) -> int | None:
        """Return the symbols that fit into memory; None: not even the image's own."""
        memory = available(self._device)
        self.squares = SQUARES if self.walked == ZONOTOPE and self.norm == "l2" else 0
        if self.walked == TOKENS:
            self.most_symbols = SYMBOLS[TOKENS]
            return self.most_symbols if fits_by_fibres(network, memory) else None
        self.most_symbols = self._symbols_asked or SYMBOLS[self.walked]
        return affordable(network, self.squares, self.most_symbols, memory)

    def _fits_tokens(self, network: LocalNetwork) -> bool:
        """Tell whether attention needs, and memory lasts for, no more than an ellipsoid a token."""
        return network.attends and fits_by_fibres(network, available(self._device))

    def _what_fits(self, network: LocalNetwork) -> str:
        """Return a hint that names an effort for which memory lasts, where there is one."""
        fewer = self.walked != TOKENS and self._fits_tokens(network)
        return f"--effort {TOKENS} fits; {_HINT}" if fewer else _HINT

    @property
    def parameters(self) -> Mapping[str, Any]:
        settings: dict[str, Any] = {
            "effort": self.effort,
            "norm": self.norm,
            "symbols": self.most_symbols,
            "steps": self.steps,
        }
        if self.effort == BRANCH:
            settings["seconds"] = self.seconds
        return {**settings, "at": list(self.at)} if self.at else settings

    @property
    def rung(self) -> str:
        """Return the way that zonotopes were used."""
        further = self._by_cuts or (self.effort == BRANCH and self.cuts)
        name = BRANCH if further else self.walked
        return name if self.symbols == self.most_symbols else f"{name}, {self.symbols} symbols"

    @torch.no_grad()
    def expected(self, images: int, size: Sequence[int]) -> str:
        """Return what these images (c, h, w) will take, by one walk of a grey image."""
        if self.effort == BRANCH:
            return forecast.limited(self.seconds, images)
        grey = torch.full((1, *size), 0.5, dtype=torch.float64, device=self._device)
        radius = self.at[0] if self.at else forecast.RADIUS
        return forecast.walks(
            lambda: self.proven(grey, 0, radius), len(self.at), images, further=self.cuts > 0
        )

    @torch.no_grad()
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        if self._interrupted:  # during an image whose record now stands
            raise KeyboardInterrupt
        images = pixels.double().to(self._device)
        started = time.perf_counter()
        self._weights.require_unchanged()
        logits = torch.cat([self.model(image) for image in images.split(1)])
        certificate.require_logits(logits, images)
        predictions = logits.argmax(1)
        results: list[Found] = [(0.0, self.rung, {})] * len(images)
        right = [i for i, label in enumerate(labels) if int(predictions[i]) == label]
        margins = self.together(images[right], predictions[right])
        for i, walked in zip(right, margins, strict=True):
            results[i] = self._best(images[i : i + 1], labels[i], walked)
        seconds = round((time.perf_counter() - started) / max(1, len(images)), 3)
        rows = zip(indices, labels, predictions.tolist(), results, strict=True)
        certificates = [
            Certificate(index, label, top, radius, METHOD, 0.0, rung, seconds, splits)
            for index, label, top, (radius, rung, splits) in rows
        ]
        for row, image in zip(certificates, images.split(1), strict=True):
            self.require_classes_as_run([row], image)
        return certificates

    def together(self, images: Tensor, labels: Tensor) -> list[dict[float, Form]]:
        """Return each image's margins on its neighbourhoods at the radii asked for, by walks of all.

        Of a larger radius where those at the one before are positive; nothing where each image must
        be walked alone.
        """
        margins: list[dict[float, Form]] = [{} for _ in images]
        places = list(range(len(images)))
        for radius in (r * (1 + BEYOND) for r in self.at):
            if len(places) < 2 or self.at_once == 1 or self._vain == _VAIN:
                break
            try:
                start = self.start(images[places], radius, in_box=self.domain == "box")
                forms = self.network.margin_form(start, labels[places])
            except (Unbounded, NoRule, MemoryError, RuntimeError) as failure:
                if isinstance(failure, RuntimeError) and not out_of_memory(failure):
                    raise
                self._vain += 1
                break
            for row, place in enumerate(places):
                margins[place][radius] = forms.of_image(row)
            positive = (lower_bounds(forms) > 0).all(1).tolist()
            places = [place for place, holds in zip(places, positive, strict=True) if holds]
        return margins

    def _best(self, image: Tensor, label: int, walked: Mapping[float, Form]) -> Found:
        """Return one image's radius, its rung, and the splits that its proof took."""
        if self.effort == BRANCH:
            branched = self.branched(image, label)
            return branched.radius, self.rung, branched.splits.to_json()
        radius, rung = self.radius(image, label, walked), self.rung
        self._by_cuts = False
        return radius, rung, {}

    def branched(self, image: Tensor, label: int) -> Branched:
        """Return the search of one image by branching, ended."""
        note = self.within or (lambda part: None)
        until = time.monotonic() + self.seconds
        proof = lambda radius, further: self.proven(image, label, radius, further, until)  # noqa: E731
        outcome = Branched(label, proof, self.seconds, note)
        if self.at:
            outcome.at([radius * (1 + BEYOND) for radius in self.at])
        else:
            outcome.search(self._guess, self.steps, self._known)
        if outcome.radius:
            self._guess = outcome.radius
            self._known = True
        self._interrupted = outcome.interrupted
        self._opened |= outcome.open_units
        reason = f"--effort branch split nothing: {self._unbounded}"
        split = self._opened or (self.cuts and not self._unbounded)
        self.remark = "" if split else reason if self._unbounded else NOTHING_OPEN
        return outcome

    @torch.no_grad()
    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: certificate.RecheckSettings
    ) -> list[Claim]:
        """Prove the stated radius at once: another search may end at another radius."""
        self._weights.require_unchanged()
        self.cuts = WALKS if self.cuts else 0
        confirmations = []
        for claim, image in zip(claims, pixels.double().to(self._device), strict=True):
            top = self.model(image[None]).argmax(1)
            proven = int(top) == claim.prediction and (
                claim.radius == 0 or self._holds(image[None], top, claim)
            )
            others = {ZONOTOPE, BACKWARD, TOKENS} - {self.walked}
            # for a record of its rung, or `auto` takes another enclosure
            less = self.symbols < self.most_symbols
            less |= self.effort == AUTO and claim.rung.partition(",")[0] in others
            if int(top) == claim.prediction and not proven and claim.rung == NORMS:
                why = (
                    "this version has no balls of norms, and no enclosure proves it: certify again"
                )
                confirmations.append(claim.checked("unverified", why))
            elif int(top) == claim.prediction and not proven and less:
                why = "memory does not last here for the enclosure that it states"
                confirmations.append(claim.checked("unverified", why))
            else:
                confirmations.append(claim.proven_again(int(top), proven))
        return confirmations

    def _holds(self, image: Tensor, label: Tensor, claim: Certificate) -> bool:
        """Tell whether the radius is proven again."""
        radius = claim.radius * (1 - certificate.AGAIN)
        further = replay(int(label), claim.splits) if self.effort == BRANCH else optimised
        return self.proven(image, int(label), radius, further)

    def radius(
        self, image: Tensor, label: int, walked: Mapping[float, Form] = MappingProxyType({})
    ) -> float:
        """Return a pixel radius that proves every margin of `label`.

        Args:
            walked: margins at radii that were walked.
        """
        if self.effort == BRANCH:
            return self.branched(image, label).radius
        holds = lambda r: self.proven(image, label, r, margins=walked.get(r))  # noqa: E731
        if self.at:
            # a certificate holds at what its radius exceeds
            proven_radii = itertools.takewhile(holds, (r * (1 + BEYOND) for r in self.at))
            return max(proven_radii, default=0.0)
        radius = certified_radius(holds, self._guess, steps=self.steps, close=self._known)
        if radius > 0:
            self._guess = radius
            self._known = True
        return radius

    def start(self, image: Tensor, radius: float, *, in_box: bool) -> Form:
        """Return the form of the images (1, c, h, w) within `radius`, and [0, 1] if `in_box`."""
        back = self.walked in (BACKWARD, BRANCH)
        few = self.walked == TOKENS
        ball: Callable[..., Form] = partial(l2_ball, squares_up_to=self.squares)
        ball = linf_ball if self.norm == "linf" else ball
        return ball(image, radius, limit=self.symbols, tape=back, in_box=in_box, by_fibres=few)

    def proven(
        self,
        image: Tensor,
        label: int,
        radius: float,
        further: Further = optimised,
        until: float = math.inf,
        margins: Form | None = None,
    ) -> bool:
        """Tell whether no image (1, c, h, w) within `radius` is classified as anything but `label`.

        `further` bounds margins that are not proven without; from `until` on nothing more is cut.
        margins: there, where they were walked.
        """
        in_box = self.domain == "box"
        try:
            if margins is None:
                start = self.start(image, radius, in_box=in_box)
                margins = self.network.margin_form(start, label)
            if not self.cuts:
                with torch.no_grad():
                    return bool((lower_bounds(margins, further) > 0).all())  # False with NaN
            radii: list[float] = []

            def walk(centre: Tensor, radius: float) -> Form:
                radii.append(radius)
                part = self.start(centre, radius, in_box=in_box)
                return self.network.margin_form(part, label)

            self._opened = True
            near = Remainder.near(image, radius, in_box=in_box)
            fooled = partial(self.fooled, image, label, radius)
            positive = everywhere_positive(near, margins, walk, until, self.cuts, fooled)
            self._by_cuts |= positive and bool(radii)
            return positive
        except Unbounded as reason:
            self._unbounded = str(reason)
            return False
        except (MemoryError, RuntimeError) as failure:
            if not out_of_memory(failure):
                raise
            if not self.symbols:
                raise NoBoundError(_TOO_LARGE, self._what_fits(self.network)) from None
            # the order is reduced, the rung says so, and this radius counts as not proven
            self.symbols = self.symbols // 2 if self.symbols >= 2 * _FEWEST else 0
            return False
        except NoRule as reason:
            raise NoBoundError(f"no local certificate: {reason}", _HINT) from reason

    def fooled(self, image: Tensor, label: int, radius: float) -> bool:
        """Tell whether a few steps within the radius find an image (1, c, h, w) of another class."""
        region = Region(self.norm, radius)
        x = image
        for _ in range(_ASCENT):
            x = x.detach().requires_grad_(True)
            with torch.enable_grad():
                (logits,) = self.model(x)
                lead = logits - logits[label]
                lead[label] = -math.inf
                (rising,) = torch.autograd.grad(lead.max() + 0 * x.sum(), x)
            if bool((lead >= 0).any()):
                return True
            x = region.project(x + radius / 4 * region.steepest(rising), image)
        return False


def prepare_local(checkpoint: Checkpoint, device: torch.device, options: Local) -> LocalCertifier:
    """Return the network traced for local certificates. NoBoundError: no theorem for a part."""
    return LocalCertifier(load_double(checkpoint, device), checkpoint.record.input.size, options)
