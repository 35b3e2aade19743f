"""The model as torchattacks sees it: undisturbed, seeded, and watched for early successes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from certcli.attack.judge import judge_points
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Region, beside_pixels
from certcli.system import errors, torch_modes

ENTRIES = 2**17
"""Pixels of one batch up to which several targets are attacked at once: small networks spend their
time in calls."""


class AllSolved(Exception):
    """Every row of the batch is solved: there is nothing left to attack. Never leaves
    `craft_with`."""


class Successes:
    """Images of a batch that were seen to fall, and where; the model judges each flip at once."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, region: Region) -> None:
        self._model = model
        self._threat = region
        self._images, self._labels = images.detach(), labels.to(images.device)
        self.solved = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self.count = 0
        """How many fell, known without asking the device."""
        self._kept = self._images.clone()

    def note(self, owner: Tensor, points: Tensor, logits: Tensor) -> None:
        """Judge points (r, c, h, w), logits (r, k) of images `owner` (r,), which may repeat."""
        flipped = (
            (logits.argmax(dim=1) != self._labels[owner])
            & logits.isfinite().all(dim=1)
            & ~self.solved[owner]
        )
        rows = flipped.nonzero().flatten()
        if not len(rows):
            return
        at = owner[rows]
        labels = self._labels[at]
        images = self._images[at]
        verdict = judge_points(
            self._model, images, labels, points[rows], self._threat.of(at), prediction=labels
        )
        won = verdict.success.nonzero().flatten()
        if not len(won):
            return
        first: dict[int, int] = {}  # of several rows of one image
        for image, row in zip(at[won].tolist(), won.tolist(), strict=True):
            first.setdefault(image, row)
        fallen, shown = (
            torch.tensor(list(some), device=at.device) for some in (first.keys(), first.values())
        )
        self.solved[fallen], self._kept[fallen] = True, verdict.adversarial[shown]
        self.count += len(first)

    def harvest(self, adversarial: Tensor) -> Tensor:
        """Solved images' points, the attack's answer for the rest: (b, c, h, w) -> (b, c, h, w)."""
        solved = beside_pixels(self.solved, adversarial)
        return torch.where(solved, self._kept, adversarial.to(self._kept.dtype))


class Watched(nn.Module):
    """f, with a memory: a row that was seen to succeed is judged, kept, and costs nothing more.

    torchattacks returns the last iterate of a run and computes all rows to the end. A forward pass
    of the whole batch here evaluates the unsolved rows only; solved ones get the constant logits
    they had, hence no gradient. A forward pass of another batch size comes from an attack that
    keeps its own books, and is passed through.

    With precision "bf16" the passes of the attack run in bfloat16, two to three times as fast where
    the hardware has it. That can only weaken the attack: what it finds is judged by the model
    itself, in the model's own precision.

    The model is held outside `nn.Module`'s registration, so that train(), eval() and zero_grad()
    calls of the library end here, and the anchor tells the library the device even when the model
    has no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        region: Region,
        watching: bool,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(0, device=images.device), requires_grad=False)
        self._hidden = (model,)
        self._images = images
        self._watching = watching
        self._half = precision == "bf16"
        self._successes = Successes(model, images, labels, region)
        self.harvest = self._successes.harvest
        self._all = torch.arange(len(images), device=images.device)
        # images that stand, and how many had fallen when they were counted
        self._rows = self._all
        self._known = 0
        self._last: Tensor | None = None
        self.eval()

    def _logits(self, images: Tensor) -> Tensor:
        # the model keeps the dtype of the caller's images, the library keeps its own (FAB insists
        # on float32)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._half):
            return self._hidden[0](images.to(self._images.dtype)).to(images.dtype)

    def forward(self, images: Tensor) -> Tensor:
        if not self._watching or images.shape != self._images.shape:
            return self._logits(images)
        if self._last is None:
            logits = self._logits(images)
        else:
            if self._known != self._successes.count:
                self._rows = (~self._successes.solved).nonzero().flatten()
                self._known = self._successes.count
            rows = self._rows
            if not len(rows):
                raise AllSolved
            logits = self._last.to(images.dtype).index_copy(0, rows, self._logits(images[rows]))
        # a clone: the caller may write into the logits it gets
        self._last = logits.detach().clone()
        self._successes.note(self._all, images.detach(), self._last)
        return logits


@contextmanager
def seeded(images: Tensor, seed: int) -> Iterator[None]:
    """Global random numbers from `seed`, on device and CPU; the caller's are restored."""
    devices = [images.device] if images.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch_modes.seed_all(seed)
        yield


@contextmanager
def undisturbed(model: nn.Module, images: Tensor, seed: int) -> Iterator[None]:
    """Gradients on, parameters without, random numbers from `seed`; all restored afterwards.

    torchattacks draws from the global generators, some attacks reseed them, and those that call
    `backward` would leave gradients in the model's parameters (and pay for them).
    """
    if model.training:
        raise errors.UsageError(
            "the model is in training mode", "call model.eval() before an attack"
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with seeded(images, seed), torch.enable_grad():
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _unfused(model: nn.Module) -> Iterator[None]:
    """timm's attention written out as two products: in bfloat16 on a CPU its fused gradient is
    three times slower.
    """
    layers: list[Any] = [
        layer for layer in model.modules() if getattr(layer, "fused_attn", False) is True
    ]
    try:
        for layer in layers:
            layer.fused_attn = False
        yield
    finally:
        for layer in layers:
            layer.fused_attn = True


def craft_with(
    search: Callable[[Watched, Tensor, Tensor], Tensor],
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    *,
    watch: bool = True,
) -> Tensor:
    """Run `search` on the watched model: (b, c, h, w), labels (b,) -> points, to be judged.

    Args:
        watch: False for attacks that look for the smallest perturbation, which must not stop at the
            first success.
    """
    images, labels = images.detach(), labels.to(images.device)
    if not len(images) or region.radius == 0:
        return images.clone()
    watched = Watched(model, images, labels, region, watch and settings.stops, settings.precision)
    slow = settings.precision == "bf16" and images.device.type == "cpu"
    unfused = _unfused(model) if slow else nullcontext()
    with undisturbed(model, images, settings.draw), unfused, torch_modes.fast_products(model):
        try:
            adversarial = search(watched, images, labels)
        except AllSolved:
            adversarial = images
    return watched.harvest(adversarial.detach())


class AttackSearch(NamedTuple):
    """What an attack with its own books has: images (b, c, h, w), labels (b,), network, draws.

    Attributes:
        successes: None where nothing may stop early, because only the end of the run is judged.
    """

    net: Watched
    successes: Successes | None
    images: Tensor
    labels: Tensor
    region: Region
    settings: AttackSettings
    generator: torch.Generator

    def standing(self) -> Tensor:
        """Return the positions of the images that have not fallen."""
        everyone = torch.arange(len(self.images), device=self.images.device)
        return everyone if self.successes is None else everyone[~self.successes.solved]

    def aimed(self, targets: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield runs against the `targets` likeliest wrong classes, m small classes at once.

        (r,) images that have not fallen, (m r,) the image and (m r,) the class of each run, of
        which each class has r.
        """
        with torch.no_grad():
            others = self.net(self.images).scatter(1, self.labels[:, None], float("-inf"))
        ranked = others.topk(targets, dim=1).indices
        many = max(1, min(targets, ENTRIES // max(1, self.images.numel())))
        for part in ranked.split(many, dim=1) if targets else ():
            rows = self.standing()
            if len(rows):
                yield rows, rows.repeat(part.shape[1]), part[rows].T.reshape(-1)


def climb_with(
    climb: Callable[[AttackSearch], Tensor],
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    *,
    watch: bool = True,
) -> Tensor:
    """Run an attack that keeps its own books: (b, c, h, w), (b,) -> (b, c, h, w), to be judged."""
    successes = Successes(model, images, labels, region) if watch and settings.stops else None
    generator = torch.Generator().manual_seed(settings.draw)

    def run(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        return climb(AttackSearch(net, successes, images, labels, region, settings, generator))

    end = craft_with(run, model, images, labels, region, settings, watch=False)
    return end if successes is None else successes.harvest(end)


def count_classes(model: nn.Module, images: Tensor, settings: AttackSettings) -> int:
    """k, the number of classes: as the settings say, else one forward pass of one image."""
    if settings.classes is not None:
        return settings.classes
    with seeded(images, settings.draw), torch.no_grad():
        return int(model(images[:1]).shape[1])


SHARED_CLASSES = 20
"""Classes up to which an ascent shares its steps between targets: with 10 it breaks more images, on
a ViT-Tiny of 1,000 classes fewer (docs/attack.md); between, nothing was measured."""


def count_shared_targets(model: nn.Module, images: Tensor, settings: AttackSettings) -> int:
    """Return the number of wrong classes that share the steps of a run; 0: it has one loss."""
    if settings.classical or not len(images):
        return 0
    classes = count_classes(model, images, settings)
    return min(settings.targets, classes - 1) if classes <= SHARED_CLASSES else 0


def count_targets(model: nn.Module, images: Tensor, settings: AttackSettings) -> int:
    """Return how many wrong classes a targeted attack tries, at most all; 0 without images."""
    return min(settings.targets, count_classes(model, images, settings) - 1) if len(images) else 0
