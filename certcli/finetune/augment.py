"""What happens to training images: moved, mirrored, coloured, seen in part, attacked; every draw
from the run's own generator.

Colours and squares are torchvision's transforms; its moves would take as long as a training step,
so whole batches move here. Behind masks the network sees parts of images, as certificates against
patches do. Attacks are FGSM or PGD within [0, 1], against the network in eval mode; ARD and PRM (Mo
et al. 2022) make those of the first epochs weaker and more varied."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations_with_replacement

import certcli.system.compat  # noqa: F401 (before torchvision)

# isort: split
import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate, pad
from torchvision.transforms import v2

from certcli.evaluation.perturbation import Region
from certcli.finetune.option_texts import BANDS, CUTOUT, JITTER, SQUARES
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import transform_each
from certcli.models.pixels import AUTO, PixelModel, band_views, seen_part, square_views
from certcli.system.errors import UsageError

CROP_SHARE = 1 / 8
"""Padding of `crop`, as a share of the side: 4 pixels at 32."""
SHIFT_SHARE = 1 / 14
"""Reach of `shift`: 2 pixels at 28 and 32."""
WARPED = 0.5
"""Share of the images that `warp` changes: the others stay as sharp as those that the network is
judged on."""
WARP_MATRIX = 0.06
"""Reach of each entry of `warp`'s matrix around the identity: 6 % of scale, 3 degrees of rotation
or shear."""
WARP_SHIFT = 1 / 80
"""Reach of `warp`'s shift as a share of the side, from 28 pixels on; smaller images move as far as
28, .35 of a pixel."""
WARP_BEND = 1 / 90
"""Standard deviation of `warp`'s displacements on a grid of WARP_CELLS points a side, as a share of
the side."""
WARP_CELLS = 5


def translate(images: Tensor, reach: int, mode: str, generator: Generator) -> Tensor:
    """Move every image by its own random (dy, dx), |dy|, |dx| <= reach: (b, c, h, w) -> (b, c, h,
    w).

    Args:
        mode: the pixels beyond the edge, "constant" (black) or "replicate".
    """
    b, _, h, w = images.shape
    wide = pad(images, (reach,) * 4, mode=mode)
    corners = torch.randint(0, 2 * reach + 1, (2, b), generator=generator).to(images.device)
    rows = (corners[0].view(b, 1) + torch.arange(h, device=images.device)).view(b, 1, h, 1)
    columns = (corners[1].view(b, 1) + torch.arange(w, device=images.device)).view(b, 1, 1, w)
    each = torch.arange(b, device=images.device).view(b, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return wide[each, channels, rows, columns]


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror every image left to right with probability 1/2."""
    mirrored = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)


def warp(images: Tensor, generator: Generator) -> Tensor:
    """Sample half of the images along a random affine map and smooth displacements, bicubic: (b, c,
    h, w) -> (b, c, h, w).

    Source: Simard et al. 2003 (elastic distortions), here on a coarse grid in place of filtered
    noise.
    """
    b, _, h, w = images.shape
    chosen = (torch.rand(b, generator=generator) < WARPED).nonzero()[:, 0]
    n = len(chosen)
    if n == 0:
        return images
    shift = 2 * WARP_SHIFT * max(1.0, 28 / min(h, w))  # the grid's side is 2
    reach = torch.tensor([[WARP_MATRIX, WARP_MATRIX, shift]])
    maps = torch.eye(2, 3) + reach * (2 * torch.rand(n, 2, 3, generator=generator) - 1)
    bends = 2 * WARP_BEND * torch.randn(n, 2, WARP_CELLS, WARP_CELLS, generator=generator)
    bends = interpolate(bends, size=(h, w), mode="bilinear", align_corners=True).permute(0, 2, 3, 1)
    grid = (affine_grid(maps, [n, 1, h, w], align_corners=False) + bends).to(images)
    chosen = chosen.to(images.device)
    warped = grid_sample(
        images[chosen], grid, mode="bicubic", padding_mode="border", align_corners=False
    )
    return images.index_copy(0, chosen, warped.clamp(0, 1))


def cutout(images: Tensor, squares: int, side: int, grey: Tensor, generator: Generator) -> Tensor:
    """Put grey squares on every image at its own random places, all of them inside: (b, c, h, w) ->
    (b, c, h, w).

    Source: DeVries and Taylor 2017; two squares as in Xiang et al. 2022, PatchCleanser.

    Args:
        grey: (1, c, 1, 1).
    """
    h, w = images.shape[2:]
    if side >= min(h, w):
        raise UsageError(
            f"cutout squares of {side} pixels do not fit into images of {w} x {h}", "smaller ones"
        )
    area = (side * side / (h * w),) * 2
    square = v2.RandomErasing(1.0, area, (1.0, 1.0), grey.flatten().tolist())
    return transform_each(images, v2.Compose([square] * squares), _drawn_seed(generator))


def _drawn_seed(generator: Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


def augment_batch(
    images: Tensor, names: tuple[str, ...], grey: Tensor, generator: Generator
) -> Tensor:
    """Apply the named augmentations in a fixed order: crop, shift, warp, flip, color-jitter,
    cutout.

    Jitter changes brightness, contrast and saturation of every image by its own random factors
    within [1 - reach, 1 + reach], in its own random order. Images of one channel have no
    saturation."""
    side = min(images.shape[2:])
    if "crop" in names:
        images = translate(images, max(1, round(CROP_SHARE * side)), "constant", generator)
    if "shift" in names:
        images = translate(images, max(1, round(SHIFT_SHARE * side)), "replicate", generator)
    if "warp" in names:
        images = warp(images, generator)
    if "flip" in names:
        images = flip(images, generator)
    for match in filter(None, map(JITTER.fullmatch, names)):
        jitter = v2.ColorJitter(*[float(match[1])] * 3)
        images = transform_each(images, jitter, _drawn_seed(generator))
    for match in filter(None, map(CUTOUT.fullmatch, names)):
        images = cutout(images, int(match[1]), int(match[2]), grey, generator)
    return images


class Hiding:
    """Draw a view for each image, and run the network on the visible part; tokens are dropped where
    that is possible. Each batch takes one of the names.

    Args:
        names: "bands:W" (a random band of W columns of cells stays), "cutout-random:NxS" (N squares
            of S pixels are hidden) and "cutout-greedy:NxS" (each where the loss is then largest).

    Raises:
        UsageError: the image is too small.
    """

    def __init__(self, model: PixelModel, names: tuple[str, ...], generator: Generator) -> None:
        self.part = seen_part(model, AUTO, fine=False)
        self.generator = generator
        grid = self.part.grid
        self.bands = [
            band_views(grid, "columns", int(match[1]))
            for match in map(BANDS.fullmatch, names)
            if match
        ]
        self.squares = [
            (match[1] == "greedy", int(match[2]), square_views(grid, int(match[3])))
            for match in map(SQUARES.fullmatch, names)
            if match
        ]

    @torch.no_grad()
    def draw(self, images: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a view of each image (b, c, h, w): (b, rows, columns).

        Greedy squares come one after the other, each at the worst place beside those before it: 9
        passes a square. Source: Saha et al. 2023, Revisiting image classifier training for improved
        certified robust defense against adversarial patches (greedy cutout).

        Args:
            losses: views -> the loss of each image (b,).
        """
        kind = int(torch.randint(len(self.bands) + len(self.squares), (), generator=self.generator))
        if kind < len(self.bands):
            return self._random(self.bands[kind], images)
        greedy, count, views = self.squares[kind - len(self.bands)]
        mask = torch.ones_like(views[:1]).expand(len(images), -1, -1).to(images.device)
        for _ in range(count):
            if not greedy:
                mask = mask & self._random(views, images)
                continue
            candidates = [mask & view for view in views.to(images.device)]
            worst = torch.stack([losses(some) for some in candidates]).argmax(dim=0)
            mask = torch.stack(candidates)[worst, torch.arange(len(images), device=images.device)]
        return mask

    def _random(self, views: Tensor, images: Tensor) -> Tensor:
        return views[torch.randint(len(views), (len(images),), generator=self.generator)].to(
            images.device
        )

    def logits(self, images: Tensor, views: Tensor) -> Tensor:
        """Return the logits of each image behind its view (b, k), with gradients."""
        kinds = self.part.alike(views)
        rows = [(kinds == kind).nonzero().flatten() for kind in kinds.unique().tolist()]
        logits = torch.cat([self.part(images[some], views[some]) for some in rows])
        return logits[torch.cat(rows).argsort()]

    def validated(self, images: Tensor) -> Tensor:
        """Return logits of validation images, behind the views in turn, alike each epoch."""
        sets = [*self.bands]
        for _, count, views in self.squares:
            places = combinations_with_replacement(range(len(views)), count)
            sets.append(torch.stack([views[list(some)].all(dim=0) for some in places]))
        turns = [sets[i % len(sets)] for i in range(len(images))]
        chosen = [views[i // len(sets) % len(views)] for i, views in enumerate(turns)]
        return self.logits(images, torch.stack(chosen).to(images.device))


PGD_REACH = 2.5
"""Sum of all steps over the radius (Madry et al. 2018)."""
FGSM_STEP = 1.25
"""Step of FGSM over the radius: from a random start, larger than the radius (Wong et al. 2020)."""
MASK_DECAY = 0.25
"""Share of the steps in which ARD and PRM decrease to 0."""
LEAST_REACH = 1e-2
"""Share of the radius at which --attack-ramp begins: at radius 0 a random start has no
direction."""


class Adversary:
    """Find x' in the ball of `settings` around x that makes a loss large.

    Raises:
        UsageError: the network has no attention for ARD, or no patch embedding for PRM.
    """

    def __init__(self, model: PixelModel, settings: FinetuneSettings, generator: Generator) -> None:
        self.model = model
        self.settings = settings
        self.generator = generator
        self.region = Region(settings.attack_norm, settings.attack_epsilon)
        self.steps = 1 if settings.adversarial == "fgsm" else settings.attack_steps
        reach = FGSM_STEP if settings.adversarial == "fgsm" else PGD_REACH
        self.step_size = reach * self.region.radius / self.steps
        self.attentions = [
            module for path, module in model.net.named_modules() if path.split(".")[-1] == "attn"
        ]
        self.patch = (1, 1)
        if settings.ard_prm > 0:
            size = getattr(getattr(model.net, "patch_embed", None), "patch_size", None)
            if size is None or not self.attentions:
                raise UsageError(
                    "--ard-prm drops gradients of attention and patches, and the network has no "
                    "attention named 'attn' or no patch embedding"
                )
            self.patch = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

    def share_left(self, share: float) -> float:
        """Return the factor of ARD's and PRM's probabilities: 1 to 0 over MASK_DECAY."""
        return max(0.0, 1 - share / MASK_DECAY)

    def _reach(self, share: float) -> tuple[Region, float]:
        """Return region and step at this share of training: radius 0 grows to its value."""
        ramp = self.settings.attack_ramp
        if ramp == 0 or share >= ramp:
            return self.region, self.step_size
        grown = max(share / ramp, LEAST_REACH)
        return replace(self.region, radius=grown * self.region.radius), grown * self.step_size

    def attack(
        self,
        forward: Callable[[Tensor], Tensor],
        images: Tensor,
        labels: Tensor,
        share: float,
    ) -> Tensor:
        """Climb the cross entropy of forward(x') by steepest ascent, projected after every step:
        (b, c, h, w), (b,) -> (b, c, h, w).

        Args:
            forward: pixels -> logits in float32.
            share: the share of the training done so far.
        """
        remaining = self.share_left(share)
        was_training = self.model.training
        region, step_size = self._reach(share)
        adversarial = region.random_start(images, self.generator)
        self.model.eval()
        try:
            for _ in range(self.steps):
                adversarial = (
                    self._masked(adversarial, images, remaining).detach().requires_grad_(True)
                )
                with self._attention_dropped(remaining), torch.enable_grad():
                    loss = cross_entropy(forward(adversarial), labels, reduction="sum")
                    (gradient,) = torch.autograd.grad(loss, adversarial)
                adversarial = region.project(
                    adversarial.detach() + step_size * region.steepest(gradient), images
                )
        finally:
            self.model.train(was_training)
        return adversarial

    def _masked(self, adversarial: Tensor, images: Tensor, remaining: float) -> Tensor:
        """Take the perturbation from each patch of each image with probability ard_prm * left
        (PRM)."""
        probability = self.settings.ard_prm * remaining
        if probability == 0:
            return adversarial
        b, _, h, w = images.shape
        rows = -(-h // self.patch[0])
        columns = -(-w // self.patch[1])
        perturbed = (
            torch.rand(b, 1, rows, columns, generator=self.generator).to(images.device)
            >= probability
        )
        perturbed = perturbed.repeat_interleave(self.patch[0], 2).repeat_interleave(
            self.patch[1], 3
        )[:, :, :h, :w]
        return torch.where(perturbed, adversarial, images)

    def _attention_dropped(self, remaining: float) -> ExitStack:
        """Drop each attention's gradient with probability ard_prm * left, not its value (ARD)."""
        probability = self.settings.ard_prm * remaining
        hooks = ExitStack()
        if probability > 0:
            drawn = torch.rand(len(self.attentions), generator=self.generator) < probability
            for attention, dropped in zip(self.attentions, drawn.tolist(), strict=True):
                if dropped:
                    hooks.enter_context(
                        attention.register_forward_hook(lambda module, args, out: out.detach())
                    )
        return hooks
