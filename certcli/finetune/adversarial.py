"""Attack training images on the fly by FGSM or PGD.

Images stay in [0, 1]. The network is attacked in eval mode. ARD and PRM (Mo et al. 2022) make the
attacks of the first epochs weaker and more varied.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Generator, Tensor

from certcli.evaluation.perturbation import Region
from certcli.finetune.settings import FinetuneSettings
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError

PGD_REACH = 2.5
"""Sum of all steps over the radius when no step size is given (Madry et al. 2018)."""
FGSM_STEP = 1.25
"""Step of FGSM over the radius: from a random start, larger than the radius (Wong et al. 2020)."""
MASK_DECAY = 0.25
"""Share of the steps in which ARD and PRM decrease to 0."""
LEAST_REACH = 1e-2
"""Share of the radius at which --attack-ramp begins: at radius 0 a random start has no direction."""


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
        step_size = settings.attack_step_size
        self.step_size = reach * self.region.radius / self.steps if step_size is None else step_size
        self.attentions = [
            module for path, module in model.net.named_modules() if path.split(".")[-1] == "attn"
        ]
        if settings.ard > 0 and not self.attentions:
            raise UsageError(
                "--ard drops the gradients of attention, and the network has none named 'attn'"
            )
        self.patch = (1, 1)
        if settings.prm > 0:
            size = getattr(getattr(model.net, "patch_embed", None), "patch_size", None)
            if size is None:
                raise UsageError("--prm masks patches, and the network has no patch embedding")
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
        loss: Callable[[Tensor], Tensor],
        share: float,
    ) -> Tensor:
        """Climb loss(forward(x')) by steepest ascent, projected after every step: (b, c, h, w) ->
        (b, c, h, w).

        Args:
            forward: pixels -> logits in float32.
            loss: logits -> (), a sum over images.
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
                    (gradient,) = torch.autograd.grad(loss(forward(adversarial)), adversarial)
                adversarial = region.project(
                    adversarial.detach() + step_size * region.steepest(gradient), images
                )
        finally:
            self.model.train(was_training)
        return adversarial

    def _masked(self, adversarial: Tensor, images: Tensor, remaining: float) -> Tensor:
        """Take the perturbation from each patch of each image with probability prm * left (PRM)."""
        probability = self.settings.prm * remaining
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
        """Drop each attention's gradient with probability ard * left, not its value (ARD)."""
        probability = self.settings.ard * remaining
        hooks = ExitStack()
        if probability > 0:
            drawn = torch.rand(len(self.attentions), generator=self.generator) < probability
            for attention, dropped in zip(self.attentions, drawn.tolist(), strict=True):
                if dropped:
                    hooks.enter_context(
                        attention.register_forward_hook(lambda module, args, out: out.detach())
                    )
        return hooks
