"""The model as torchattacks is allowed to see it: undisturbed, seeded, and watched for points that already succeed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from certcli.attack.judge import judge
from certcli.attack.settings import AttackSettings
from certcli.evaluation.threat import Threat
from certcli.system.errors import UsageError


class AllSolved(Exception):
    """Every row of the batch is solved: there is nothing left to attack. Never leaves `craft_with`."""


def library() -> ModuleType:
    """Return torchattacks, behind the shim that lets its torchvision import; UsageError where it is not installed."""
    import_module("certcli.system.compat")
    try:
        return import_module("torchattacks")
    except ModuleNotFoundError as failure:
        if failure.name != "torchattacks":
            raise
        hint = "pip install --no-deps torchattacks; only deepfool and torchattacks:NAME need it"
        raise UsageError("this attack runs code of torchattacks, which is not installed", hint) from failure


class Successes:
    """Which images of a batch were seen to fall, and where: what flips is judged at once, by the model itself."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, threat: Threat) -> None:
        self._model, self._threat = model, threat
        self._images, self._labels = images.detach(), labels.to(images.device)
        self.solved = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self.count = 0
        """How many fell, known without asking the device."""
        self._kept = self._images.clone()

    def note(self, owner: Tensor, points: Tensor, logits: Tensor) -> None:
        """points (r, c, h, w), logits (r, k) of images `owner` (r,), of which several may be the same."""
        flipped = (logits.argmax(dim=1) != self._labels[owner]) & logits.isfinite().all(dim=1) & ~self.solved[owner]
        rows = flipped.nonzero().flatten()
        if not len(rows):
            return
        at = owner[rows]
        labels, images = self._labels[at], self._images[at]
        verdict = judge(self._model, images, labels, points[rows], self._threat.of(at), prediction=labels)
        won = verdict.success.nonzero().flatten()
        if not len(won):
            return
        first: dict[int, int] = {}  # of several rows of one image
        for image, row in zip(at[won].tolist(), won.tolist(), strict=True):
            first.setdefault(image, row)
        fallen, shown = (torch.tensor(list(some), device=at.device) for some in (first.keys(), first.values()))
        self.solved[fallen], self._kept[fallen] = True, verdict.adversarial[shown]
        self.count += len(first)

    def harvest(self, adversarial: Tensor) -> Tensor:
        """The kept point of each solved image, the attack's own answer for the rest: (b, c, h, w) -> (b, c, h, w)."""
        solved = self.solved.view(-1, *[1] * (adversarial.dim() - 1))
        return torch.where(solved, self._kept, adversarial.to(self._kept.dtype))


class Watched(nn.Module):
    """f, with a memory: a row that was seen to succeed is judged, kept, and costs nothing more.

    torchattacks returns the last iterate of a run and computes all rows to the end. A forward pass of the whole batch
    here evaluates the unsolved rows only; solved ones get the constant logits they had, hence no gradient. A forward
    pass of another batch size comes from an attack that keeps its own books, and is passed through.

    With precision "bf16" the passes of the attack run in bfloat16, two to three times as fast where the hardware has it.
    That can only weaken the attack: what it finds is judged by the model itself, in the model's own precision.

    The model is held outside `nn.Module`'s registration, so that train(), eval() and zero_grad() calls of the library
    end here, and the anchor tells the library the device even when the model has no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        watching: bool,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(0, device=images.device), requires_grad=False)
        self._hidden = (model,)
        self._images, self._watching = images, watching
        self._half = precision == "bf16"
        self._successes = Successes(model, images, labels, threat)
        self._all = torch.arange(len(images), device=images.device)
        self._rows, self._known = self._all, 0  # those that stand, as of so many that fell
        self._last: Tensor | None = None
        self.eval()

    def _logits(self, images: Tensor) -> Tensor:
        # the model keeps the dtype of the caller's images, the library keeps its own (FAB insists on float32)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._half):
            return self._hidden[0](images.to(self._images.dtype)).to(images.dtype)

    def forward(self, images: Tensor) -> Tensor:
        if not self._watching or images.shape != self._images.shape:
            return self._logits(images)
        if self._last is None:
            logits = self._logits(images)
        else:
            if self._known != self._successes.count:
                self._rows, self._known = (~self._successes.solved).nonzero().flatten(), self._successes.count
            rows = self._rows
            if not len(rows):
                raise AllSolved
            logits = self._last.to(images.dtype).index_copy(0, rows, self._logits(images[rows]))
        self._last = logits.detach().clone()  # a clone: the caller may write into the logits it gets
        self._successes.note(self._all, images.detach(), self._last)
        return logits

    def harvest(self, adversarial: Tensor) -> Tensor:
        """The kept point of each solved row, the attack's own answer for the rest: (b, c, h, w) -> (b, c, h, w)."""
        return self._successes.harvest(adversarial)


@contextmanager
def seeded(images: Tensor, seed: int) -> Iterator[None]:
    """Global random numbers from `seed`, on the images' device and the CPU; the caller's are put back afterwards."""
    devices = [images.device] if images.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def undisturbed(model: nn.Module, images: Tensor, seed: int) -> Iterator[None]:
    """Gradients on, parameters without gradients, random numbers from `seed`; all put back afterwards.

    torchattacks draws from the global generators, some attacks reseed them, and those that call `backward` would leave
    gradients in the model's parameters (and pay for them).
    """
    if model.training:
        raise UsageError("the model is in training mode", "call model.eval() before an attack")
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        with seeded(images, seed), torch.enable_grad():
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _unfused(model: nn.Module) -> Iterator[None]:
    """timm's attention written out as two products: in bfloat16 on a CPU its fused gradient is three times slower."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "fused_attn", False) is True]
    try:
        for layer in layers:
            layer.fused_attn = False
        yield
    finally:
        for layer in layers:
            layer.fused_attn = True


def craft_with(
    build: Callable[[Callable[[], ModuleType], Watched], Any],
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Threat,
    settings: AttackSettings,
    *,
    watch: bool = True,
) -> Tensor:
    """Run the attack that `build(library, watched model)` returns: (b, c, h, w) -> (b, c, h, w), to be judged.

    `watch=False` is for attacks that look for the smallest perturbation, which must not stop at the first.
    """
    images, labels = images.detach(), labels.to(images.device)
    if not len(images) or threat.radius == 0:
        return images.clone()
    watched = Watched(model, images, labels, threat, watch and settings.stops, settings.precision)
    slow = settings.precision == "bf16" and images.device.type == "cpu"
    with undisturbed(model, images, settings.draw), _unfused(model) if slow else nullcontext():
        try:
            adversarial = build(library, watched)(images, labels)
        except AllSolved:
            adversarial = images
    return watched.harvest(adversarial.detach())


Climb = Callable[[Watched, Successes | None, Tensor, Tensor], Tensor]
"""net, successes, images, labels -> points. Without successes nothing may stop early: the end of the run is judged."""


def climb_with(
    climb: Climb,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Threat,
    settings: AttackSettings,
    *,
    watch: bool = True,
) -> Tensor:
    """Run an attack that keeps its own books: (b, c, h, w), (b,) -> (b, c, h, w), to be judged."""
    successes = Successes(model, images, labels, threat) if watch and settings.stops else None

    def build(_: Any, net: Watched) -> Any:
        return lambda images, labels: climb(net, successes, images, labels)

    end = craft_with(build, model, images, labels, threat, settings, watch=False)
    return end if successes is None else successes.harvest(end)


def count_classes(model: nn.Module, images: Tensor, settings: AttackSettings) -> int:
    """k, the number of classes: as the settings say, else one forward pass of one image."""
    if settings.classes is not None:
        return settings.classes
    with seeded(images, settings.draw), torch.no_grad():
        return int(model(images[:1]).shape[1])
