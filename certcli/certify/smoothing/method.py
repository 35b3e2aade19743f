"""Randomised smoothing: what the network says of an image under Gaussian noise, and how far that cannot change.

g(x) = the class that f gives to x + sigma z most often, z ~ N(0, I), pixels unclipped. If the class c is given with
probability p > 1/2, no image within sigma Phi^-1(p) (pixel l2) has another g. p is bounded from below by drawing.
Source: Cohen, Rosenfeld & Kolter 2019, Theorem 1 and CERTIFY. Looks, early stops and their proofs: docs/smoothing.md.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certificate, Certifier, Confirmation, Doubt
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.functions import PRECISIONS, Classifier, Smoothed, out_of_memory
from certcli.evaluation.intervals import lower_confidence, upper_confidence
from certcli.evaluation.radii import confidence
from certcli.evaluation.record_lines import MOST_DRAWS
from certcli.images.labelled import sent
from certcli.system.errors import ArchitectureError, DataError, UsageError

METHOD = "smoothing"

MOST = MOST_DRAWS
"""Draws an image; none is ever drawn so often, and a file that asks for more is not to be trusted."""
EARLY_SHARE = 0.1
"""Of alpha, for all looks before the last together, when a certificate may be given early."""
HOPELESS = 1e-4
"""An image is given up when p <= 1/2 at this confidence. No certificate is wrong by it: it only abstains."""
UNLIKELY = 0.01
"""With `decide`, an image is given up when at this confidence it cannot be certified beyond `enough`."""
_DOWN = 1 - 1e-12
"""Relative: scipy's normal quantile errs by a few 1e-16."""
TIES = 1e-3
"""How far the probability behind a repeated radius may lie from the record's: other batches round otherwise, and an image
with noise near two classes may fall to the other. Far more draws have to be such than are; a forger gains no more."""
_SAME = 1e-9
"""Relative: radii of one count, computed by two versions of scipy; those of neighbouring counts differ by far more."""


@dataclass(frozen=True)
class Smoothing:
    """sigma of the noise; n0 draws choose the class, `samples` bound its probability, at confidence 1 - alpha an image.

    enough: stop drawing for an image once it is certified beyond this radius (None: draw them all). decide: and once it is
    unlikely to be; it keeps the radius that it has then. precision: of the network as it runs. seed: of all noise.
    UsageError on values that mean nothing or that can certify nothing.
    """

    sigma: float = 0.25
    n0: int = 100
    samples: int = 1000
    alpha: float = 0.001
    enough: float | None = None
    seed: int = 0
    precision: str = "float32"
    decide: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):  # they also come from records and evidence, which anyone may have written
            value = getattr(self, item.name)
            kinds = {"precision": str, "n0": int, "samples": int, "seed": int, "decide": bool}.get(
                item.name, (int, float)
            )
            optional = item.name == "enough" and value is None
            if not optional and (not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool)):
                raise UsageError(f"--{item.name} {value!r} is not of its kind")
        if not 0 < self.sigma < math.inf:
            raise UsageError(f"--sigma {self.sigma:g} is not a finite number above 0", "--sigma 0.25, or --sigma auto")
        if not 0 < self.alpha < 1:
            raise UsageError(f"--alpha {self.alpha:g} is not between 0 and 1", "--alpha 0.001")
        if min(self.n0, self.samples) < 1 or max(self.n0, self.samples) > MOST:
            raise UsageError(f"--n0 and --samples must be between 1 and {MOST:,}")
        if self.enough is not None and not 0 <= self.enough < math.inf:
            raise UsageError(f"--enough {self.enough:g} is not a finite radius >= 0")
        if self.decide and self.enough is None:
            raise UsageError("--decide needs a radius to decide about", "--enough 0.25")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"--seed {self.seed} is not between 0 and 2^64")
        if self.precision not in PRECISIONS:
            raise UsageError(f"unknown precision '{self.precision}'", f"one of: {', '.join(PRECISIONS)}")
        if self.reach <= 0:
            least = math.floor(math.log(self._levels[self.samples]) / math.log(0.5)) + 1
            raise UsageError(
                f"{self.samples} samples can certify no radius at alpha {self.alpha:g}: all of one class bound p by 1/2",
                f"--samples {least} is the least, 1000 a good number",
            )
        if self.enough is not None and self.enough >= self.reach:
            raise UsageError(
                f"--enough {self.enough:g} is beyond {self.reach:.4g}, the largest radius that can be certified",
                "more --samples, or a larger --sigma",
            )

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many samples the counts are looked at: n0, then doubling, then all. Fixed before anything is drawn."""
        found = [self.n0 << power for power in range(64) if self.n0 << power < self.samples]
        return (*found, self.samples)

    @property
    def _levels(self) -> Mapping[int, float]:
        """Look -> its part of alpha; a look of level 0 can end in abstention only. They sum to alpha, rounded down."""
        *early, last = self.looks
        if self.enough is None or not early:
            return {**dict.fromkeys(early, 0.0), last: self.alpha}
        each = self.alpha * EARLY_SHARE / len(early)
        return {**dict.fromkeys(early, each), last: self.alpha * (1 - EARLY_SHARE) * (1 - 2.0**-50)}

    @property
    def reach(self) -> float:
        """The radius when every sample falls into one class: none larger can be certified."""
        return self.radius(self.samples, self.samples)

    def radius(self, hits: int, drawn: int) -> float:
        """sigma Phi^-1(p) for the lower bound p that this look may state, rounded down; 0 where p <= 1/2."""
        from scipy.special import ndtri

        level = self._levels[drawn]
        p = lower_confidence(hits, drawn, level) if level > 0 else 0.0
        return max(0.0, self.sigma * float(ndtri(p)) * _DOWN) if p > 0.5 else 0.0

    def states(self, radius: float) -> bool:
        """Whether there is a count of hits at which CERTIFY with these settings states this radius."""
        for look in self.looks:
            low, high = 0, look
            while low < high:  # the fewest hits that give this radius
                middle = (low + high) // 2
                low, high = (low, middle) if self.radius(middle, look) >= radius * (1 - _SAME) else (middle + 1, high)
            found = self.radius(low, look)
            ends = look == self.samples or (self.enough is not None and found > self.enough) or self.hopeless(low, look)
            if ends and abs(found - radius) <= radius * _SAME:
                return True
        return False

    def hopeless(self, hits: int, drawn: int) -> bool:
        """No sample that is left could lead to a certificate, or p <= 1/2 at the confidence 1 - HOPELESS.

        With `decide`: to one beyond `enough`, or p <= Phi(enough / sigma) at the confidence 1 - UNLIKELY.
        """
        least = self.enough if self.decide and self.enough is not None else 0.0
        if self.radius(hits + self.samples - drawn, self.samples) <= least:
            return True
        if upper_confidence(hits, drawn, HOPELESS) <= 0.5:
            return True
        return self.decide and upper_confidence(hits, drawn, UNLIKELY) <= _chance(least / self.sigma)


class SmoothingCertifier(Certifier):
    """classify: noisy pixels (r, c, h, w) float32 on `device` -> logits (r, k), the function the statement is about.

    batch_size: noisy images at a time. purpose: of the noise; see `noise`. stated: further parameters (a denoiser's digest).
    """

    method = METHOD
    domain = "all"

    def __init__(
        self,
        classify: nn.Module,
        classes: int,
        settings: Smoothing,
        device: torch.device,
        batch_size: int = 128,
        purpose: int = noise.CERTIFY,
        about: Mapping[str, Any] = {},
        stated: Mapping[str, Any] = {},
    ) -> None:
        self.settings, self._classify, self._classes = settings, classify, classes
        self._device, self._batch_size, self._purpose, self._about = device, batch_size, purpose, about
        self._stated = stated
        self.promise, self.failure = f"probability {confidence(settings.alpha)}", settings.alpha
        self.arithmetic = settings.precision
        self.at_once = max(1, -(-batch_size // settings.n0))
        self.reach = settings.reach
        behind = ", behind a denoiser" if "denoiser" in stated else ""
        self.title = f"smoothed with sigma {settings.sigma:g}, n = {settings.samples}{behind}"
        self.statement = (
            f"certificates: of the network smoothed by Gaussian noise, as it runs in {settings.precision}, each with "
            f"{self.promise}; radii up to {self.reach:.4g} with these samples"
        )

    @property
    def parameters(self) -> Mapping[str, Any]:
        given = asdict(self.settings)
        if not self.settings.decide:  # records that were written before there was such a choice stay the same run
            del given["decide"]
        return {**given, "noise": noise.VERSION, **self._stated}

    @property
    def about(self) -> Mapping[str, Any]:
        return {"sigma": self.settings.sigma, "reach": self.reach, **self._about}

    def batch(self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]) -> list[Certificate]:
        """CERTIFY for each image: the class by n0 draws, its probability by further ones, in looks."""
        started = time.perf_counter()
        pixels = sent(pixels, self._device).float()
        first = self.settings.n0
        everything = range(len(indices))
        top = self._count(indices, pixels, dict.fromkeys(everything, (0, first))).argmax(dim=1).tolist()
        counts = torch.zeros(len(indices), self._classes, dtype=torch.int64)
        radius, drawn = dict.fromkeys(everything, 0.0), dict.fromkeys(everything, first)
        active, seen = list(everything), 0
        for look in self.settings.looks:
            # samples from n0 on: the class was chosen by others, so it is fixed before these are drawn
            counts += self._count(indices, pixels, dict.fromkeys(active, (first + seen, first + look)))
            seen, standing = look, []
            for image in active:
                hits, drawn[image] = int(counts[image, top[image]]), first + look
                radius[image] = self.settings.radius(hits, look)
                done = radius[image] > (self.settings.enough if self.settings.enough is not None else math.inf)
                if not done and not self.settings.hopeless(hits, look):
                    standing.append(image)
            active = standing
            if not active:
                break
        share = (time.perf_counter() - started) / sum(drawn.values())
        return [
            Certificate(
                indices[image],
                labels[image],
                top[image] if radius[image] > 0 else None,
                radius[image],
                METHOD,
                self.settings.alpha,
                seconds=round(share * drawn[image], 6),
            )
            for image in everything
        ]

    @property
    def attacked(self) -> nn.Module:
        return Smoothed(self._classify, self.settings.sigma, self.settings.seed)

    def confirm(self, claims: Sequence[Certificate], pixels: Tensor, doubt: Doubt) -> list[Confirmation]:
        """Fresh noise: a claim says p >= Phi(R / sigma). It is refuted where so few hits have at most the chance `level`."""
        stated = [row for row, claim in enumerate(claims) if self.settings.states(claim.radius)]
        drawn = self._hits([claims[row] for row in stated], pixels[stated], doubt.seed, noise.CONFIRM) if stated else []
        hits, found = dict(zip(stated, drawn, strict=True)), []
        for row, claim in enumerate(claims):
            if row not in hits:  # known before a file that asks for ten million draws has them
                told = f"no count of hits gives the radius {claim.radius!r} with these parameters"
                found.append(Confirmation("refuted", told))
                continue
            told = f"{hits[row]} of {self.settings.samples} fresh draws are of class {claim.prediction}"
            least = _chance(claim.radius / self.settings.sigma)
            if _chance_of_so_few(hits[row], self.settings.samples, least) <= doubt.level:
                found.append(Confirmation("refuted", f"{told}, {least:.4f} of all are stated"))
            else:
                found.append(Confirmation("verified", told))
        return found

    def repeat(self, claims: Sequence[Certificate], pixels: Tensor) -> list[Confirmation]:
        """The run's own draws, made again: radius and class are those of the record, but for draws at a tie (`TIES`)."""
        found = []
        again = self.batch([claim.index for claim in claims], pixels, [claim.label for claim in claims])
        for claim, now in zip(claims, again, strict=True):
            stated, drawn = (_chance(row.radius / self.settings.sigma) for row in (claim, now))
            if claim.prediction == now.prediction and abs(stated - drawn) <= TIES + _SAME:
                found.append(Confirmation("verified", f"radius {now.radius:.6g} is found again"))
            else:
                said = f"class {claim.prediction} and radius {claim.radius:.6g} are stated"
                found.append(Confirmation("refuted", f"{said}, {now.prediction} and {now.radius:.6g} found again"))
        return found

    def stands(self, claims: Sequence[Certificate], nearby: Tensor, doubt: Doubt) -> list[bool]:
        """Inside a true radius the class has more than half of the draws: fails where so few have the chance `level`."""
        samples = self.settings.samples
        hits = self._hits(claims, nearby, doubt.seed, noise.NEARBY)
        return [_chance_of_so_few(count, samples, 0.5) > doubt.level for count in hits]

    def _hits(self, claims: Sequence[Certificate], pixels: Tensor, seed: int, purpose: int) -> list[int]:
        """How many of `samples` draws at each image are of the claimed class."""
        ranges = dict.fromkeys(range(len(claims)), (0, self.settings.samples))
        pixels = pixels.to(self._device, torch.float32)
        counts = self._count([claim.index for claim in claims], pixels, ranges, seed, purpose)
        return [
            int(row[claim.prediction]) if claim.prediction is not None and claim.prediction < self._classes else 0
            for row, claim in zip(counts, claims, strict=True)
        ]

    @torch.inference_mode()
    def _count(
        self,
        indices: Sequence[int],
        pixels: Tensor,
        ranges: Mapping[int, tuple[int, int]],
        seed: int | None = None,
        purpose: int | None = None,
    ) -> Tensor:
        """Image -> samples start to stop: how often f gives each class, (b, k) int64 on the CPU."""
        seed = self.settings.seed if seed is None else seed
        purpose = self._purpose if purpose is None else purpose
        prepare: Callable[[Tensor], Tensor] | None = None
        run: Callable[[Tensor], Tensor] = self._classify
        if isinstance(self._classify, Classifier):
            prepare, run = self._classify.prepare, self._classify.run
        rows = [(image, sample) for image, (start, stop) in ranges.items() for sample in range(start, stop)]
        counts = torch.zeros(len(indices) * self._classes, dtype=torch.int64, device=self._device)
        finite = torch.ones((), dtype=torch.bool, device=self._device)  # looked at in the end: a GPU works ahead
        start = 0
        while start < len(rows):
            part = rows[start : start + self._batch_size]
            which, samples = [image for image, _ in part], [sample for _, sample in part]
            names = [indices[image] for image in which]
            try:
                logits = run(noise.noisy(pixels, self.settings.sigma, seed, names, samples, purpose, which, prepare))
            except (MemoryError, RuntimeError) as failure:
                if self._batch_size == 1 or not out_of_memory(failure):
                    raise
                self._batch_size = max(1, len(part) // 2)  # the same noise in smaller batches: nothing is counted twice
                self.remark = f"memory lasts for {self._batch_size} noisy images at a time: --batch-size was reduced"
                continue
            start += len(part)
            if logits.shape != (len(part), self._classes):
                raise ArchitectureError(f"the network returns {tuple(logits.shape)} for {len(part)} images")
            finite &= torch.isfinite(logits).all()
            cells = torch.tensor(which, device=self._device) * self._classes + logits.argmax(dim=1)
            counts.index_add_(0, cells, torch.ones_like(cells))
        if not finite:
            hint = "a smaller --sigma" if self.settings.precision == "float32" else "try --precision float32"
            raise DataError("the network gives NaN or infinite logits on noisy images", hint)
        return counts.view(len(indices), self._classes).cpu()


def _chance(z: float) -> float:
    """Phi(z)"""
    from scipy.special import ndtr

    return float(ndtr(z))


def _chance_of_so_few(hits: int, draws: int, p: float) -> float:
    """P[Binomial(draws, p) <= hits]."""
    from scipy.special import betaincc

    return 1.0 if hits >= draws else float(betaincc(hits + 1, draws - hits, p))
