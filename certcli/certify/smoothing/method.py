"""Randomised smoothing: what the network says under Gaussian noise, and how far that holds.

g(x) = the class that f gives to x + sigma z most often, z ~ N(0, I), pixels unclipped. If the class
c is given with probability p > 1/2, no image within sigma Phi^-1(p) (pixel l2) has another g. p is
bounded from below by drawing. Source: Cohen, Rosenfeld & Kolter 2019, Theorem 1 and CERTIFY. Looks,
early stops and their proofs: docs/smoothing.md.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certifier, RecheckSettings
from certcli.certify.forecast import duration, seconds_a_draw
from certcli.certify.options import SAME, Smoothing, normal_chance
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.denoiser import named_denoiser
from certcli.certify.smoothing.noise import Classifier, Smoothed, smoothed_classifier
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.evidence import Claim, Status
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.intervals import number_of
from certcli.evaluation.threat import attacked_radius, confidence, proven_radius
from certcli.images.labelled import sent
from certcli.system.errors import ArchitectureError, DataError
from certcli.system.memory import out_of_memory

METHOD = "smoothing"

STATED = ("sigma", "n0", "samples", "alpha", "enough", "seed", "precision")
"""Parameters of every run; `decide` and `denoiser` only where they are used, as in older records.
"""
TIES = 1e-3
"""How far the probability behind a repeated radius may lie from the record's: other batches round
otherwise, and an image with noise near two classes may fall to the other. Far more draws have to be
such than are.
"""
SHIFT = 1e-2
"""How far the radius may lie from it then, in deviations of the noise, where more than one draw
differs: rounding shifts the boundary by less. Near probability 1, TIES alone would allow a radius a
quarter larger.
"""
LARGE = 2**15
"""Numbers of an image, a photograph's, from which a CPU takes no more than CACHED at a time."""
CACHED = 32
"""Of ViT-Tiny at 224 pixels a draw takes 24 ms in batches of 32, 31 in 64 and 34 in 128; of
ViT-Small 91, 94 and 108: beyond 32 activations leave the caches (one core, AVX-512)."""


class SmoothingCertifier(Certifier):
    """classify: noisy pixels (r, c, h, w) float32 on `device` -> logits (r, k), as is stated.

    Attributes:
        purpose: of the noise; see `noise`.
        about: further facts for the document.
    """

    method = METHOD
    domain = "all"

    def __init__(
        self,
        classify: nn.Module,
        classes: int,
        settings: Smoothing,
        device: torch.device,
        purpose: int = noise.CERTIFY,
        about: Mapping[str, Any] = {},
    ) -> None:
        settings.require_reach()
        self.settings = settings
        self._classify = classify
        self._classes = classes
        self._device = device
        self._batch_size = settings.batch_size
        self._purpose = purpose
        self._about = about
        self.promise = f"probability {confidence(settings.alpha)}"
        self.failure = settings.alpha
        self.arithmetic = settings.precision
        self.at_once = max(1, -(-settings.batch_size // settings.n0))
        self.reach = settings.reach
        self.drawn_to = math.inf if settings.enough is None else settings.enough
        self._drawn = 0
        self.reading = f"denoiser: {about['denoiser_line']}" if "denoiser_line" in about else ""
        behind = "" if settings.denoiser is None else ", behind a denoiser"
        self.title = f"smoothed with sigma {settings.sigma:g}, n = {settings.samples}{behind}"
        self.statement = (
            f"certificates: of the network smoothed by Gaussian noise, as it runs in {settings.precision}, each with "
            f"{self.promise}; radii up to {attacked_radius(self.reach, 4)} with these samples"
        )

    @property
    def parameters(self) -> Mapping[str, Any]:
        optional = ("decide",) * self.settings.decide + ("denoiser",) * (
            self.settings.denoiser is not None
        )
        return {
            **{name: getattr(self.settings, name) for name in (*STATED, *optional)},
            "noise": noise.VERSION,
        }

    @property
    def about(self) -> Mapping[str, Any]:
        return {"sigma": self.settings.sigma, "reach": self.reach, **self._about}

    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        """CERTIFY for each image: the class by n0 draws, its probability by further ones, in looks."""
        started = time.perf_counter()
        self._drawn = 0
        pixels = sent(pixels, self._device).float()
        first = self.settings.n0
        everything = range(len(indices))
        top = (
            self._count(
                indices,
                pixels,
                dict.fromkeys(everything, (0, first)),
                self.settings.seed,
                self._purpose,
            )
            .argmax(dim=1)
            .tolist()
        )
        counts = torch.zeros(len(indices), self._classes, dtype=torch.int64)
        grid_loss = noise.grid_loss(pixels.shape[1:], self.settings.sigma)
        radius = dict.fromkeys(everything, 0.0)
        drawn = dict.fromkeys(everything, first)
        active = list(everything)
        count = 0
        for look in self.settings.looks:
            # samples from n0 on: the class was chosen by others, so it is fixed before these are
            # drawn
            ranges = dict.fromkeys(active, (first + count, first + look))
            counts += self._count(indices, pixels, ranges, self.settings.seed, self._purpose)
            count = look
            standing = []
            for image in active:
                hits = int(counts[image, top[image]])
                drawn[image] = first + look
                radius[image] = max(0.0, self.settings.radius(hits, look) - grid_loss)
                done = radius[image] > (
                    self.settings.enough if self.settings.enough is not None else math.inf
                )
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

    def expected(self, images: int, size: Sequence[int]) -> str:
        """Return what these images (c, h, w) will take at most, by two timed batches."""
        if not isinstance(self._classify, Classifier):
            return ""
        try:
            each = self.seconds_a_draw(size)
        except (MemoryError, RuntimeError) as failure:  # the run itself finds a smaller batch
            if not out_of_memory(failure):
                raise
            return ""
        draws = self.settings.n0 + self.settings.samples
        stops = "" if self.settings.enough is None else ", fewer where it stops early"
        return (
            f"{duration(each)} a draw on {self._device.type}: "
            f"at most {duration(each * draws)} an image ({draws:,} draws{stops}), "
            f"{duration(each * draws * images)} for {number_of(images)}"
        )

    @torch.inference_mode()
    def seconds_a_draw(self, size: Sequence[int]) -> float:
        """Return the seconds of one draw of an image (c, h, w).

        The draws have a purpose of their own and count nowhere; no check of the run is spared.
        """
        classify = self._classify
        assert isinstance(classify, Classifier)
        pixels = torch.full((1, *size), 0.5, device=self._device)

        def run(rows: int) -> float:
            prepared = noise.noisy(
                pixels, self.settings.sigma, 0, [0] * rows, range(rows), noise.TIMED, [0] * rows,
                classify.prepare,
            )  # fmt: skip
            return float(classify.logits(prepared).sum())

        return seconds_a_draw(run, self._rows_at_once(pixels))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (
            self._classify.networks if isinstance(self._classify, Classifier) else [self._classify]
        )

    @property
    def attacked(self) -> nn.Module:
        return Smoothed(self._classify, self.settings.sigma, self.settings.seed)

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """Refute p >= Phi(R / sigma) where fresh noise hits so rarely, at most chance `level`."""
        grid_loss = noise.grid_loss(pixels.shape[1:], self.settings.sigma)
        raw_radii = [claim.radius + grid_loss if claim.radius > 0 else 0.0 for claim in claims]
        finite = [row for row, radius in enumerate(raw_radii) if self.settings.states(radius)]
        drawn = (
            self._hits([claims[row] for row in finite], pixels[finite], doubt.seed, noise.CONFIRM)
            if finite
            else []
        )
        hits = dict(zip(finite, drawn, strict=True))
        confirmations = []
        for row, claim in enumerate(claims):
            if row not in hits:  # known before a file that asks for ten million draws has them
                message = (
                    f"no count of hits gives the radius {claim.radius!r} with these parameters"
                )
                confirmations.append(claim.checked("refuted", message))
                continue
            message = f"{hits[row]} of {self.settings.samples} fresh draws are of class {claim.prediction}"
            probability = normal_chance(raw_radii[row] / self.settings.sigma)
            few = _chance_of_so_few(hits[row], self.settings.samples, probability) <= doubt.level
            refutation = f", {probability:.4f} of all are stated" if few else ""
            status: Status = "refuted" if few else "verified"
            confirmations.append(claim.checked(status, message + refutation))
        return confirmations

    def repeat(self, claims: Sequence[Certificate], pixels: Tensor) -> list[Claim]:
        """Repeat the run's draws: the record's radius and class, but for ties (`TIES`)."""
        confirmations = []
        recomputed = self.certificates(
            [claim.index for claim in claims], pixels, [claim.label for claim in claims]
        )
        for claim, now in zip(claims, recomputed, strict=True):
            claimed, drawn = (
                normal_chance(row.radius / self.settings.sigma) for row in (claim, now)
            )
            shift = abs(claim.radius - now.radius) / self.settings.sigma
            few = abs(claimed - drawn) <= 1 / self.settings.samples or shift <= SHIFT
            radius = proven_radius(now.radius)
            if claim.prediction == now.prediction and few and abs(claimed - drawn) <= TIES + SAME:
                confirmations.append(claim.checked("verified", f"radius {radius} is found again"))
                continue
            said = f"class {claim.prediction} and radius {proven_radius(claim.radius)} are stated"
            message = f"{said}, {now.prediction} and {radius} found again"
            confirmations.append(claim.checked("refuted", message))
        return confirmations

    def stands(
        self, claims: Sequence[Certificate], nearby: Tensor, doubt: RecheckSettings
    ) -> list[bool]:
        """Fails where so few draws of the class, over 1/2 in truth, have chance `level`."""
        samples = self.settings.samples
        hits = self._hits(claims, nearby, doubt.seed, noise.NEARBY)
        return [_chance_of_so_few(count, samples, 0.5) > doubt.level for count in hits]

    def _hits(
        self, claims: Sequence[Certificate], pixels: Tensor, seed: int, purpose: int
    ) -> list[int]:
        """Return the number of `samples` draws at each image that are of the claimed class."""
        ranges = dict.fromkeys(range(len(claims)), (0, self.settings.samples))
        pixels = pixels.to(self._device, torch.float32)
        counts = self._count([claim.index for claim in claims], pixels, ranges, seed, purpose)
        return [
            int(row[claim.prediction])
            if claim.prediction is not None and claim.prediction < self._classes
            else 0
            for row, claim in zip(counts, claims, strict=True)
        ]

    def _rows_at_once(self, pixels: Tensor) -> int:
        """Return how many noisy images of this size (b, c, h, w) run together."""
        large = pixels.device.type == "cpu" and pixels[0].numel() >= LARGE
        return min(self._batch_size, CACHED) if large else self._batch_size

    @torch.inference_mode()
    def _count(
        self,
        indices: Sequence[int],
        pixels: Tensor,
        ranges: Mapping[int, tuple[int, int]],
        seed: int,
        purpose: int,
    ) -> Tensor:
        """Image -> samples start to stop: how often f gives each class, (b, k) int64 on the CPU."""
        prepare: Callable[[Tensor], Tensor] | None = None
        run: Callable[[Tensor], Tensor] = self._classify
        if isinstance(self._classify, Classifier):
            prepare = self._classify.prepare
            run = self._classify.run
        rows = [
            (image, sample)
            for image, (start, stop) in ranges.items()
            for sample in range(start, stop)
        ]
        counts = torch.zeros(len(indices) * self._classes, dtype=torch.int64, device=self._device)
        # looked at in the end: a GPU works ahead
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        start = 0
        while start < len(rows):
            rest = len(rows) - start
            # of the last batches powers of two, since each size is looked at once
            largest = self._rows_at_once(pixels)
            size = largest if rest >= largest else 1 << rest.bit_length() - 1
            part = rows[start : start + size]
            which = [image for image, _ in part]
            samples = [sample for _, sample in part]
            names = [indices[image] for image in which]
            try:
                logits = run(
                    noise.noisy(
                        pixels,
                        self.settings.sigma,
                        seed,
                        names,
                        samples,
                        purpose,
                        which,
                        prepare,
                    )
                )
            except (MemoryError, RuntimeError) as failure:
                if self._batch_size == 1 or not out_of_memory(failure):
                    raise
                # the same noise in smaller batches: nothing is counted twice
                self._batch_size = max(1, len(part) // 2)
                self.remark = f"memory lasts for {self._batch_size} noisy images at a time: --batch-size was reduced"
                continue
            start += len(part)
            self._drawn += len(part)
            if self.within is not None:
                self.within(self._drawn / (self.settings.n0 + self.settings.samples))
            if logits.shape != (len(part), self._classes):
                raise ArchitectureError(
                    f"the network returns {tuple(logits.shape)} for {len(part)} images"
                )
            finite &= torch.isfinite(logits).all()
            cells = torch.tensor(which, device=self._device) * self._classes + logits.argmax(dim=1)
            counts.index_add_(0, cells, torch.ones_like(cells))
        if not finite:
            hint = (
                "a smaller --sigma"
                if self.settings.precision == "float32"
                else "try --precision float32"
            )
            raise DataError("the network gives NaN or infinite logits on noisy images", hint)
        return counts.view(len(indices), self._classes).cpu()


def _chance_of_so_few(hits: int, draws: int, p: float) -> float:
    """P[Binomial(draws, p) <= hits]."""
    from scipy.special import betaincc

    return 1.0 if hits >= draws else float(betaincc(hits + 1, draws - hits, p))


def prepare_smoothing(
    checkpoint: Checkpoint, device: torch.device, options: Smoothing
) -> SmoothingCertifier:
    """Return the certifier under noise, behind the denoiser that is named."""
    source = named_denoiser(checkpoint, options)
    options.require_reach()  # before the network is built
    about: dict[str, Any] = {}
    denoiser = None
    if source is not None:
        denoiser = source.at(options.sigma)
        if options.denoiser not in (None, denoiser.digest):  # as records state it
            raise DataError(
                f"{options.denoiser_file} is another denoiser (digest {denoiser.digest[:16]}) "
                f"than that of the records: {str(options.denoiser)[:16]}"
            )
        options = replace(options, denoiser=denoiser.digest)
        about = {**denoiser.about, "denoiser_line": denoiser.line}
    classify = smoothed_classifier(checkpoint, device, options.precision, denoiser)
    return SmoothingCertifier(classify, checkpoint.record.classes, options, device, about=about)
