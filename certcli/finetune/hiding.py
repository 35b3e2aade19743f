"""Training behind masks: the network sees parts of images, as certificates against patches do."""

from collections.abc import Callable
from itertools import combinations_with_replacement

import torch
from torch import Generator, Tensor

from certcli.finetune.augmentations import BANDS, SQUARES
from certcli.models.pixels import PixelModel
from certcli.models.visible_part import AUTO, band_views, seen_part, square_views


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
