"""Certificates of a network as it is, image by image: what it can do on the ball around each."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify import certificate, forecast
from certcli.certify.branched import Branched, replay
from certcli.certify.lipschitz import ProvingCertifier
from certcli.certify.options import AUTO, BACKWARD, BRANCH, NORMS, SECONDS, TOKENS, ZONOTOPE, Local
from certcli.checkpoint.file import Checkpoint
from certcli.enclosure.balls.ball import rules as ball_rules
from certcli.enclosure.balls.network import NormsNetwork
from certcli.enclosure.zonotopes.cuts import Remainder, everywhere_positive
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import Further, optimised
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
_FEWEST = 64
_FIRST = 1e-2
"""A radius that norms prove of networks made for it; where they do not, `auto` takes walks."""
_HINT = "--method smoothing takes any network"

Found = tuple[float, str, dict[str, str]]
"""Radius, rung, splits."""
BY_NORMS = "balls of norms around one forward pass"


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
        super().__init__(model, size, options.arithmetic, (zonotope_rules, ball_rules))
        self.steps = steps
        self.effort = options.effort
        self.at = options.at
        self.seconds = options.seconds or SECONDS
        self._interrupted = self._opened = self.cuts = False
        self._unbounded = ""
        self.norm: Norm = options.norm
        self.walked = self.effort
        self.squares = 0
        self._size = size
        self.domain = "all" if self._neighbours is None else "box"  # rounding is bounded on the box
        where = "" if self._neighbours is None else ", [0, 1] images"
        self.statement = f"certificates: proven image by image; {self.spoken_of}{where}"
        self._norms: NormsNetwork | None = None
        self._guess = _FIRST
        self._known = self._refused = False
        self._symbols_asked = symbols
        self.most_symbols = 0
        self.zonotope = self._enclosed() if self.effort != NORMS else None
        if self.zonotope is None:
            self._balls()
            self.title = BY_NORMS
            if self.effort == AUTO:
                self.title += f" ({self._why})"
            return
        self.at_once = 1
        self.title = f"an enclosure of each image's neighbourhood, {forecast.symbols_text(self)}"
        if self.at:
            self.title += "; the radii asked for are decided, no others tried"

    def title_of(self, rows: Sequence[Certificate]) -> str:
        """Return the title, which names norms for those images whose records do."""
        by_norms = sum(row.rung == NORMS for row in rows)
        if self.zonotope is None or not by_norms:
            return self.title
        if by_norms == len(rows):
            return f"{BY_NORMS}, which proved enough of every image"
        return f"{self.title}; {BY_NORMS} for {by_norms} of {len(rows)} images"

    def _enclosed(self) -> LocalNetwork | None:
        """Return the network for zonotopes; None: `auto` does without. NoBoundError: asked."""
        try:
            network = LocalNetwork(self.model, self._size, self._neighbours)
        except (NoRule, Untraceable) as reason:
            self._why = str(reason)
            if self.effort == AUTO:
                return None
            raise NoBoundError(f"no local certificate: {reason}", reason.hint) from reason
        keep_pages()
        self.cuts = self.effort == BRANCH and self.norm == "l2" and not network.opens
        chooses = self.cuts or self.effort == AUTO
        if chooses:
            # e e^T has columns that pay, but for ReLU, which does better by the way back
            few = math.prod(self._size) <= SQUARES
            few |= network.numbers <= SQUARES and not network.opens
            self.walked = ZONOTOPE if self.norm == "l2" and few else BACKWARD
        symbols = self._fitting(network)
        if chooses and not symbols:  # without symbols it takes minutes for little
            self.walked = TOKENS
            symbols = self._fitting(network) if network.attends else None
        if symbols is None:
            self._why = "enclosures of this network do not fit into memory"
            if self.effort == AUTO:
                return None
            raise NoBoundError(
                f"no local certificate: {self._why}", f"--effort {NORMS} fits; {_HINT}"
            )
        self.symbols = symbols
        return network

    def _fitting(self, network: LocalNetwork) -> int | None:
        """Return the symbols that fit into memory; None: not even the image's own."""
        memory = available(self._device)
        self.squares = SQUARES if self.walked == ZONOTOPE and self.norm == "l2" else 0
        if self.walked == TOKENS:
            self.most_symbols = SYMBOLS[TOKENS]
            return self.most_symbols if fits_by_fibres(network, memory) else None
        self.most_symbols = self._symbols_asked or SYMBOLS[self.walked]
        return affordable(network, self.squares, self.most_symbols, memory)

    def _balls(self) -> NormsNetwork:
        if self._norms is None:
            try:
                self._norms = NormsNetwork(self.model, self._size, self._neighbours)
            except (NoRule, Untraceable) as reason:
                raise NoBoundError(f"no local certificate: {reason}", reason.hint) from reason
        return self._norms

    @property
    def network(self) -> LocalNetwork:
        """Return the network for zonotopes, where there is one."""
        assert self.zonotope is not None
        return self.zonotope

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
        name = BRANCH if self.cuts else self.walked
        return name if self.symbols == self.most_symbols else f"{name}, {self.symbols} symbols"

    @torch.no_grad()
    def expected(self, images: int, size: Sequence[int]) -> str:
        """Return what these images (c, h, w) will take, by one walk of a grey image."""
        if self.zonotope is None:
            return ""
        if self.effort == BRANCH:
            return forecast.limited(self.seconds, images)
        grey = torch.full((1, *size), 0.5, dtype=torch.float64, device=self._device)
        radius = self.at[0] if self.at else forecast.RADIUS
        return forecast.walks(lambda: self.proven(grey, 0, radius), len(self.at), images)

    @torch.no_grad()
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        if self._interrupted:  # during an image whose record now stands
            raise KeyboardInterrupt
        images = pixels.double().to(self._device)
        started = time.perf_counter()
        self._weights.require_unchanged()
        with certificate.whole_batch(images):
            logits = self.model(images)
        certificate.require_logits(logits, images)
        predictions = logits.argmax(1)
        rung = NORMS if self.zonotope is None else self.rung
        results: list[Found] = [(0.0, rung, {})] * len(images)
        right = [i for i, label in enumerate(labels) if int(predictions[i]) == label]
        if self.zonotope is None:
            radii = self.by_norms(images[right], predictions[right]).tolist() if right else []
            for i, radius in zip(right, radii, strict=True):
                results[i] = (radius, NORMS, {})
        else:
            for i in right:
                results[i] = self._best(images[i : i + 1], predictions[i : i + 1])
        seconds = round((time.perf_counter() - started) / max(1, len(images)), 3)
        rows = zip(indices, labels, predictions.tolist(), results, strict=True)
        certificates = [
            Certificate(index, label, top, radius, METHOD, 0.0, rung, seconds, splits)
            for index, label, top, (radius, rung, splits) in rows
        ]
        self.require_classes_as_run(certificates, images)
        return certificates

    def _best(self, image: Tensor, label: Tensor) -> "Found":
        """Return one image's radius, its rung, and the splits that its proof took."""
        if self.effort == BRANCH:
            branched = self.branched(image, int(label))
            return branched.radius, self.rung, branched.splits.to_json()
        below = self._below(image, label, self.at[0] * (1 + BEYOND) if self.at else _FIRST)
        radius = self.radius(image, int(label), below)
        if radius == 0 and not self.at:
            below = self._below(image, label, 0.0)
        if radius > below or below == 0:
            return radius, self.rung, {}
        return radius if self.at else below, NORMS, {}

    def _below(self, image: Tensor, label: Tensor, least: float) -> float:
        """Return `auto`'s radius by norms, which take a fraction of a walk; 0: not even `least`."""
        if self.effort != AUTO or self._refused:
            return 0.0
        at = image.new_full((1,), least)
        try:
            if least and not (self._balls().margins(image, at, label, norm=self.norm) > 0).all():
                return 0.0
            return float(self.by_norms(image, label))
        except (NoBoundError, NoRule):
            self._refused = True
            return 0.0

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

    def by_norms(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return radii (b,) by balls of norms, a few images at a time."""
        network = self._balls()
        step = network.at_once(available(self._device))
        try:
            parts = [
                network.radii(*part, self.steps, self.norm)
                for part in zip(images.split(step), labels.split(step), strict=True)
            ]
        except NoRule as reason:
            raise NoBoundError(f"no local certificate: {reason}", _HINT) from reason
        return torch.cat(parts)

    @torch.no_grad()
    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: certificate.RecheckSettings
    ) -> list[Claim]:
        """Prove the stated radius at once: another search may end at another radius."""
        self._weights.require_unchanged()
        confirmations = []
        for claim, image in zip(claims, pixels.double().to(self._device), strict=True):
            top = self.model(image[None]).argmax(1)
            proven = int(top) == claim.prediction and (
                claim.radius == 0 or self._holds(image[None], top, claim)
            )
            others = {ZONOTOPE, BACKWARD, TOKENS} - {self.walked}
            # for a record of its rung, or `auto` takes another enclosure
            less = self.zonotope is None or self.symbols < self.most_symbols
            less |= self.effort == AUTO and claim.rung.partition(",")[0] in others
            if int(top) == claim.prediction and not proven and less and claim.rung != NORMS:
                why = "memory does not last here for the enclosure that it states"
                confirmations.append(claim.checked("unverified", why))
            else:
                confirmations.append(claim.proven_again(int(top), proven))
        return confirmations

    def _holds(self, image: Tensor, label: Tensor, claim: Certificate) -> bool:
        """Tell whether one of the ways that `effort` allows proves this radius."""
        radius = claim.radius * (1 - certificate.AGAIN)
        further = replay(int(label), claim.splits) if self.effort == BRANCH else optimised
        walks = self.zonotope is not None
        if walks and claim.rung != NORMS and self.proven(image, int(label), radius, further):
            return True
        if self.effort in (NORMS, AUTO) and float(self.by_norms(image, label)) >= radius:
            return True
        return walks and claim.rung == NORMS and self.proven(image, int(label), radius, further)

    def radius(self, image: Tensor, label: int, below: float = 0.0) -> float:
        """Return a pixel radius that proves every margin of `label`; `below` is proven without a walk."""
        if self.effort == BRANCH:
            return self.branched(image, label).radius
        holds = lambda r: r <= below or self.proven(image, label, r)  # noqa: E731
        if self.at:
            # a certificate holds at what its radius exceeds
            proven_radii = itertools.takewhile(holds, (r * (1 + BEYOND) for r in self.at))
            return max(proven_radii, default=0.0)
        guess = max(self._guess, below * 2 ** (2.0**-self.steps))  # where a walk says something
        close = self._known or guess > self._guess
        radius = certified_radius(holds, guess, steps=self.steps, close=close)
        if radius > below:
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
    ) -> bool:
        """Tell whether no image (1, c, h, w) within `radius` is classified as anything but `label`.

        `further` bounds margins that are not proven without; from `until` on nothing more is cut.
        """
        in_box = self.domain == "box"
        try:
            start = self.start(image, radius, in_box=in_box)
            if not self.cuts:
                # False with NaN
                return bool((self.network.margins(start, label, None, further) > 0).all())
            margins = self.network.margin_form(start, label)
            self._opened = True
            return everywhere_positive(
                Remainder.near(image, radius, in_box=in_box),
                margins,
                lambda x, r: self.network.margin_form(self.start(x, r, in_box=in_box), label),
                until,
            )
        except Unbounded as reason:
            self._unbounded = str(reason)
            return False
        except (MemoryError, RuntimeError) as failure:
            if not out_of_memory(failure):
                raise
            if not self.symbols:
                raise NoBoundError(
                    "no local certificate: enclosures of this network do not fit into memory", _HINT
                ) from None
            # the order is reduced, the rung says so, and this radius counts as not proven
            self.symbols = self.symbols // 2 if self.symbols >= 2 * _FEWEST else 0
            return False
        except NoRule as reason:
            raise NoBoundError(f"no local certificate: {reason}", _HINT) from reason


def prepare_local(checkpoint: Checkpoint, device: torch.device, options: Local) -> LocalCertifier:
    """Return the network traced for local certificates. NoBoundError: no theorem for a part."""
    return LocalCertifier(load_double(checkpoint, device), checkpoint.record.input.size, options)
