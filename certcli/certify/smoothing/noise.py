"""Gaussian noise by counter, the same on any device and in any batch; and what smoothing speaks of:
the network run on noisy pixels, alone or behind a denoiser.

The bits are those of Philox4x64-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2,
3) with the key (seed, 0) and the counter (block, image, sample, purpose), blocks from 1: numpy's
generator for long rows on a CPU, the same function in torch's integer arithmetic elsewhere. They
are equal everywhere, bit for bit. The normal numbers are made of them by Box and Muller's transform
in float32, whose logarithm, sine and cosine differ between devices in the last digit.

Pixels and noise are rounded to multiples of h = 2^-m, so that float32 adds them exactly: then the
noisy image is that of another image, moved. Added in floats as they are, its last bits tell the
image that was rounded, and a network that reads them has no radius at all (Voracek & Hein 2023,
Sound randomized smoothing in floating-point arithmetic). Proof: docs/smoothing.md.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from certcli.certify.options import FARTHEST
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.engine.replay import difference_in_company, noise_like, rows_are_apart
from certcli.models import build
from certcli.models.onnx.open import RunByRuntime, has_steps
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError
from certcli.system.memory import out_of_memory

VERSION = "philox4x64-10/2"
CERTIFY, CONFIRM, ATTACK, NEARBY, TIMED = 0, 2, 3, 4, 5
"""Purposes: noise that an attack climbs on must not be what certifies or judges. 1 once served a
choice of sigma.
"""

_LARGEST = 6.67
"""|z| at most: sqrt(-2 log(2^-32)) = 6.661, and what float32 rounds."""

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_CACHED = 1 << 17
"""Numbers at a time on a CPU: half a megabyte."""
_FEW = 256
"""Words a row up to which torch is faster than numpy, which makes a generator for each row: 5
against 14 us for 64 words, 18 against 31 us for 256, 60 against 29 us for 784.
"""


def philox_words(
    seed: int,
    images: Sequence[int],
    samples: Sequence[int],
    count: int,
    device: torch.device,
    purpose: int = CERTIFY,
) -> Tensor:
    """Row r: `count` 32-bit words of (images[r], samples[r]), low halves first: (r, count)."""
    if device.type == "cpu" and count > _FEW:
        blocks = -(-count // 8)
        rows = [
            np.random.Philox(
                key=seed, counter=(image << 64) + (sample << 128) + (purpose << 192)
            ).random_raw(4 * blocks)
            for image, sample in zip(images, samples, strict=True)
        ]
        blocks_of_words = np.stack(rows) if rows else np.empty((0, 4 * blocks), np.uint64)
        return torch.from_numpy(blocks_of_words.view(np.int32))[:, :count]
    return philox(seed, images, samples, count, device, purpose)


def philox(
    seed: int,
    images: Sequence[int],
    samples: Sequence[int],
    count: int,
    device: torch.device,
    purpose: int = CERTIFY,
) -> Tensor:
    """`philox_words` in torch's integer arithmetic, which wraps modulo 2^64 as Philox does, on any
    device.
    """
    blocks = -(-count // 8)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)[:, None].expand(
            -1, blocks
        )

    c0 = torch.arange(1, blocks + 1, device=device).expand(len(images), -1)
    c1 = column(images)
    c2 = column(samples)
    c3 = column([purpose] * len(images))
    k0 = seed
    k1 = 0
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_words(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply_words(c2, _MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ _signed(k0)
        c1 = low1
        c2 = high0 ^ c3 ^ _signed(k1)
        c3 = low0
        k0 = k0 + _WEYL[0]
        k1 = k1 + _WEYL[1]
    return (
        torch.stack((c0, c1, c2, c3), dim=2).reshape(len(images), -1).view(torch.int32)[:, :count]
    )


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def _multiply_words(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of an unsigned product, from products of 32-bit halves."""
    f0 = factor & _LOW
    f1 = factor >> 32
    x0 = x & _LOW
    x1 = (x >> 32) & _LOW
    middle = x1 * f0
    other = x0 * f1
    carry = (((x0 * f0) >> 32) & _LOW) + (middle & _LOW) + (other & _LOW)
    high = x1 * f1 + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW) + (carry >> 32)
    return high, x * _signed(factor)


def grid_bits(sigma: float) -> int:
    """Return m: multiples of 2^-m up to 1 + (5.4 + 6.67) sigma, image and noise, are floats."""
    largest = 1 + (FARTHEST + _LARGEST) * sigma
    return 24 - math.ceil(math.log2(largest))


def grid_loss(shape: Sequence[int], sigma: float) -> float:
    """Return sqrt(d) 2^-m, rounded up: by how much rounding to the grid lengthens a distance."""
    return math.sqrt(math.prod(shape)) * 2.0 ** -grid_bits(sigma) * (1 + 2.0**-50)


def normals(
    seed: int,
    images: Sequence[int],
    samples: Sequence[int],
    shape: Sequence[int],
    device: torch.device,
    purpose: int = CERTIFY,
) -> Tensor:
    """Standard normal noise of image images[r], sample samples[r] in row r: (r, *shape) float32, on
    the grid of sigma 1.
    """
    nothing = torch.zeros(len(images), *shape, device=device)
    return noisy(nothing, 1.0, seed, images, samples, purpose)


def noisy(
    pixels: Tensor,
    sigma: float,
    seed: int,
    images: Sequence[int],
    samples: Sequence[int],
    purpose: int = CERTIFY,
    which: Sequence[int] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Row r: round(pixels[which[r]]) + round(sigma z), to multiples of h = 2^-m, exactly; z of
    (images[r], samples[r]): (r, c, h, w) float32.

    Args:
        which: row of `pixels` for each row, r itself unless given.
        finish: what is done to each pixel then (normalisation, a cast), while the rows are still in
            the caches of a CPU.
    """
    shape = pixels.shape[1:]
    device = pixels.device
    count = math.prod(shape)
    steps = 2.0 ** grid_bits(sigma)
    # in units of h: whole numbers up to 2^24, which float32 adds exactly
    flat = (pixels.flatten(1) * steps).round_()
    half = -(-count // 2)
    # a few rows at a time on a CPU: what fits in its caches is several times as fast
    step = max(1, _CACHED // max(count, 1)) if device.type == "cpu" else max(1, len(images))
    part = torch.empty(min(step, len(images)), count, device=device)
    result = None
    for start in range(0, len(images), step):
        rows = slice(start, min(start + step, len(images)))
        drawn = philox_words(seed, images[rows], samples[rows], 2 * half, device, purpose)
        # 31 bits, so that small u keep all their digits: |z| reaches 6.66; the sign bit would cost
        # the tail its resolution
        radius = (
            (drawn[:, :half] & 0x7FFFFFFF)
            .float()
            .add_(0.5)
            .mul_(2.0**-31)
            .log_()
            .mul_(-2)
            .sqrt_()
            .mul_(sigma * steps)
        )
        angle = drawn[:, half:].float().mul_(math.pi * 2.0**-31)
        # into tensors of their own: torch computes strided ones by another routine, which may
        # differ in the last digit
        first = torch.cos(angle).mul_(radius).round_()
        second = angle.sin_().mul_(radius).round_()
        base = flat[rows] if which is None else flat[list(which[rows])]
        noise = part[: len(base)]
        torch.add(base[:, :half], first, out=noise[:, :half])
        torch.add(base[:, half:], second[:, : count - half], out=noise[:, half:])
        noise.mul_(1 / steps)
        done = noise.view(-1, *shape) if finish is None else finish(noise.view(-1, *shape))
        if len(done) == len(images):
            return done
        if result is None:
            result = done.new_empty(len(images), *done.shape[1:])
        result[rows] = done
    return part.view(0, *shape) if result is None else result


DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BESIDE = (
    "no certificate by smoothing: the network's logits of an image depend on the images beside it"
)
READ = "another --method, such as lipschitz or local, which reads the layers"
CLIMBED = 16
"""Draws whose mean an attack on the smoothed classifier climbs on."""


class Classifier(nn.Module):
    """Noisy float32 pixels -> logits, normalised in float32; the networks run in `precision`."""

    def __init__(
        self, model: PixelModel, precision: str, denoiser: PixelDenoiser | None = None
    ) -> None:
        super().__init__()
        self.kind = DTYPES[precision]
        self.precision = precision
        self.normalize, self.net = model.normalize, build.converted(model, self.kind).net
        self.denoiser = None if denoiser is None else denoiser.to(self.kind)
        if self.denoiser is not None and self.denoiser.channels_last:
            # two thirds of the time on a CPU
            self.denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._apart: dict[int, bool] = {}
        self.eval()

    def forward(self, noisy: Tensor) -> Tensor:
        return self.run(self.prepare(noisy))

    def prepare(self, noisy: Tensor) -> Tensor:
        """What is done to each pixel on its own: up to the denoiser, or the network."""
        if self.denoiser is not None and self.denoiser.takes_float32:
            return noisy
        return (noisy if self.denoiser is not None else self._normalised(noisy)).to(self.kind)

    def _normalised(self, pixels: Tensor) -> Tensor:
        normalised: Tensor = self.normalize(pixels)
        return normalised

    def run(self, prepared: Tensor) -> Tensor:
        """Prepared pixels -> logits, one at a time unless rows are proven apart at this size."""
        size = len(prepared)
        if size < 2 or torch.is_grad_enabled():  # an attack's gradients are no votes
            return self.logits(prepared)
        if size not in self._apart:
            self._apart[size] = rows_are_apart(self.logits, prepared)
            if difference_in_company(self.logits, prepared, sorted({0, size // 2, size - 1})):
                raise UsageError(BESIDE, READ)  # draws would not be independent
        if self._apart[size]:
            return self.logits(prepared)
        return torch.cat([self.logits(row[None]) for row in prepared])

    @property
    def networks(self) -> list[nn.Module]:
        return [self.net] if self.denoiser is None else [self.net, self.denoiser]

    def logits(self, prepared: Tensor) -> Tensor:
        """Return the logits, without a look at what a batch has to do with them."""
        try:
            if self.denoiser is not None:
                prepared = self._normalised(self.denoiser(prepared).float()).to(self.kind)
            logits: Tensor = self.net(prepared)
        except RuntimeError as failure:
            if self.kind == torch.float32 or out_of_memory(failure):
                raise
            raise UsageError(
                f"this network does not run in {self.precision} ({failure})", "--precision float32"
            ) from failure
        return logits.float()


def smoothed_classifier(
    checkpoint: Checkpoint,
    device: torch.device,
    precision: str,
    denoiser: PixelDenoiser | None = None,
) -> Classifier:
    """Return the checkpoint's network as smoothing runs it: a quantised file's by ONNX Runtime."""
    model = build.load(checkpoint, device)
    if denoiser is not None:
        denoiser.require_size(model.input_size)
    require_rows_alone(model)
    classifier = Classifier(model, precision, None if denoiser is None else denoiser.to(device))
    runtime = getattr(checkpoint, "runtime", None)
    if runtime is not None and has_steps(model):
        if precision != "float32":
            raise UsageError(
                f"ONNX Runtime runs a quantised file as it is stored, not in {precision}",
                "--precision float32",
            )
        classifier.net = RunByRuntime(classifier.net, runtime)
    return classifier


@torch.no_grad()
def require_rows_alone(model: PixelModel) -> None:
    """UsageError where logits depend on the batch: its draws would not be independent."""
    weight = next(model.parameters(), torch.zeros(()))
    images = noise_like(torch.empty(3, *model.input_size, dtype=weight.dtype, device=weight.device))
    if difference_in_company(model, images):
        raise UsageError(BESIDE, READ)


class Smoothed(nn.Module):
    """log mean softmax f(x + sigma z) over a few fixed z: what an attack on g climbs."""

    def __init__(self, classify: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        self.classify = classify
        self.sigma = sigma
        self.seed = seed
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        names = [0] * CLIMBED
        shape = pixels.shape[1:]
        drawn = normals(self.seed, names, range(CLIMBED), shape, pixels.device, ATTACK)
        noisy = pixels[:, None] + self.sigma * drawn.to(pixels.dtype)
        shares = self.classify(noisy.flatten(0, 1)).softmax(dim=1)
        return shares.unflatten(0, (len(pixels), CLIMBED)).mean(dim=1).clamp_min(1e-30).log()
