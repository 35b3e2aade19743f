"""Ascents of any loss of the logits by projected gradients, in both norms, with steps that fall:
FGSM, PGD and EOT-PGD of the cross entropy, PGD of the margin, and the self-attention gradient
attack, which leans towards the patches attended to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import (
    Watched,
    count_shared_targets,
    count_targets,
    craft_with,
    seeded,
)
from certcli.evaluation.perturbation import Region, beside_pixels
from certcli.system.errors import UsageError

MARGIN_STEPS = 40
MARGIN_AIMED = 5
"""Classes that the first run of `margin_pgd` takes in turn, at most; each gets `MARGIN_SHORTEST`
steps or more."""
MARGIN_SHORTEST = 5
MOMENTUM = 0.5
"""What is kept of the last direction in linf, where a step takes signs alone; docs/attack.md shows
the choice."""
RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""logits (b, k), labels (b,), logits of the run's first point (b, k) -> (b,): what the ascent
raises."""


@dataclass(frozen=True)
class Stretch:
    """A part of a run: it begins anew, with long steps that fall to 0.

    `rank` r > 0 puts z_t - z_y in place of the loss, t the r-th likeliest wrong class where the run
    began.
    """

    steps: int
    rank: int = 0


def lost_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y of each row, positive once the label flips: (b, k), (b,) -> (b,)."""
    return wrong_logits(logits, labels).amax(dim=1) - true(logits, labels)


def targeted_margin(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """z_t - z_y of each row, positive once class t overtakes y: (b, k), (b,), (b,) -> (b,)."""
    return true(logits, targets) - true(logits, labels)


def true(logits: Tensor, labels: Tensor) -> Tensor:
    """z_y of each row: (b, k), (b,) -> (b,)."""
    return logits.gather(1, labels[:, None]).squeeze(1)


def wrong_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits with -inf for the true class: (b, k), (b,) -> (b, k)."""
    return logits.scatter(1, labels[:, None], float("-inf"))


def margin_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad (z_t - z_y))), 40 steps: (b, c, h, w), (b,) -> (b, c, h,
    w).

    The margin is what a Lipschitz certificate bounds, and unlike the cross entropy it does not
    saturate when the net is confident. The first run shares its steps between the likeliest wrong
    classes t in turn (of at most `SHARED_CLASSES`), each from the image, since the largest logit
    need not belong to the nearest class. Restart r gives all of its steps to the r-th likeliest;
    once the `targets` are used up, restarts start at random and climb max_j z_j - z_y, as does a
    run with steps of one length.
    Source: Carlini & Wagner 2017 (the loss), Madry et al. 2018 (the ascent), Gowal et al. 2019 (the
    targets).
    """
    targets = count_targets(model, images, settings)
    steps = settings.steps or MARGIN_STEPS
    aimed = min(
        MARGIN_AIMED, count_shared_targets(model, images, settings), steps // MARGIN_SHORTEST
    )
    stretches = [Stretch(steps, settings.restart if settings.restart <= targets else 0)]
    if settings.restart == 0 and aimed > 1:
        each, more = divmod(steps, aimed)
        stretches = [Stretch(each + (rank <= more), rank) for rank in range(1, aimed + 1)]
    return ascend_gradient(
        model,
        images,
        labels,
        region,
        settings,
        lambda logits, labels, _: lost_margin(logits, labels),
        stretches,
        random_start=settings.restart > targets,
    )


def ascend_gradient(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    loss: RowLoss,
    stretches: Sequence[Stretch],
    *,
    samples: int = 1,
    random_start: bool = True,
    weights: Tensor | None = None,
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad loss)): (b, c, h, w), (b,) -> (b, c, h, w).

    alpha_t is `settings.step`. In linf, where steps fall, the steepest direction is that of m_t =
    m_{t-1} / 2 + gradient / mean |gradient| (Dong et al. 2018). `samples` gradients are averaged a
    step. `weights` (b, 1, h, w) multiply the gradient before its steepest step is taken. Each row
    returns the point of its largest loss in all stretches, or, with `stop_early` and one sample,
    the first judged success.
    """
    generator = torch.Generator().manual_seed(settings.draw)
    has_momentum = region.norm == "linf" and not settings.classical

    def climb(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        peak = images.clone()
        height = torch.full_like(labels, float("-inf"), dtype=images.dtype)
        first: Tensor | None = None
        for stretch in stretches:
            point = region.random_start(images, generator) if random_start else images
            momentum = torch.zeros_like(images)
            for turn in range(stretch.steps + 1):  # the last turn only values the last point
                point = point.detach().requires_grad_(True)
                value = torch.zeros_like(height)
                gradient = torch.zeros_like(images)
                for _ in range(samples):
                    logits = net(point)
                    if first is None:
                        first = logits.detach()
                    raised = values = loss(logits, labels, first)
                    if stretch.rank:
                        ranked = wrong_logits(first, labels).topk(stretch.rank, dim=1).indices
                        raised = targeted_margin(logits, labels, ranked[:, -1])
                    value = value + values.detach() / samples
                    if turn < stretch.steps:
                        gradient = gradient + torch.autograd.grad(raised.sum(), point)[0]
                if weights is not None:
                    gradient = gradient * weights
                if has_momentum:
                    gradient = momentum = MOMENTUM * momentum + _unit_mean(gradient)
                point = point.detach()
                higher = value > height
                peak = torch.where(beside_pixels(higher, images), point, peak)
                height = torch.where(higher, value, height)
                # a pixel at the edge of the box cannot follow: without it the step keeps its length
                # in l2
                blocked = ((point <= 0) & (gradient < 0)) | ((point >= 1) & (gradient > 0))
                gradient = gradient.masked_fill(blocked, 0.0)
                alpha = settings.step(region, turn, stretch.steps, images)
                point = region.project(point + alpha * region.steepest(gradient), images)
        return peak

    return craft_with(climb, model, images, labels, region, settings, watch=samples == 1)


def _unit_mean(gradient: Tensor) -> Tensor:
    """Return the gradient over the mean of its entries' size: (b, c, h, w) -> same.

    A gradient of 0 stays 0. Of an infinite one the signs are taken. The largest entry is divided
    out first: the sum of all could overflow."""
    largest = gradient.abs().flatten(1).amax(dim=1)
    usable = (largest > 0) & largest.isfinite()
    scaled = gradient / beside_pixels(
        torch.where(usable, largest, torch.ones_like(largest)), gradient
    )
    scaled = torch.where(beside_pixels(largest.isinf(), gradient), gradient.sign(), scaled)
    size = scaled.abs().flatten(1).mean(dim=1)
    return scaled / beside_pixels(torch.where(size > 0, size, torch.ones_like(size)), gradient)


PGD_STEPS = 20
EOT_SAMPLES = 10
WARMTH = 0.3
"""Temperature of PGD's softmax, as a share of the margin where a run begins."""
PGD_AIMED = 6
"""Classes that a run of PGD takes in turn, at most; each gets an eighth of its steps,
`PGD_SHORTEST` or more."""
PGD_SHORTEST = 4
UNTARGETED = 6
"""Steps of the cross entropy before them, at least; a quarter of the run where that is more."""


def fgsm(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x + radius * steepest(grad CE): one step, no random start. (b, c, h, w), (b,) -> same.

    `steps` and `restarts` do not apply. Source: Goodfellow et al. 2015.
    """
    single = replace(settings, steps=1, relative_step=1.0)
    return ascend_gradient(
        model, images, labels, region, single, log_odds, [Stretch(1)], random_start=False
    )


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad CE)), 20 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    The logits are divided by .3 of the margin that the image has, so their scale does not matter.
    Longer runs leave up to three quarters of their steps to z_t - z_y, for the likeliest wrong
    classes t in turn (of at most `SHARED_CLASSES`): the gradient of the cross entropy leads to few
    of them. The first run starts
    at the image, restarts at random. With steps of one length a run is Madry et al.'s: all of the
    cross entropy of the logits as they are, from a random start.
    Source: Madry et al. 2018; Gowal et al. 2019 (the targets).
    """
    steps = settings.steps or PGD_STEPS
    each = max(PGD_SHORTEST, steps // 8)
    targets = count_shared_targets(model, images, settings)
    aimed = min(PGD_AIMED, targets, max(0, steps - max(UNTARGETED, steps // 4)) // each)
    if targets < 2:
        aimed = 0
    return ascend_gradient(
        model,
        images,
        labels,
        region,
        settings,
        log_odds if settings.classical else tempered_odds,
        [Stretch(steps - aimed * each), *(Stretch(each, rank + 1) for rank in range(aimed))],
        random_start=settings.classical or settings.restart > 0,
    )


def eot_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(mean of `samples` gradients)), 20 steps: (b, c, h, w), (b,) ->
    (b, c, h, w).

    10 draws a step unless `samples` says more than 1. One lucky draw is no success of a random net.
    Source: Athalye et al. 2018; Zimmermann 2019.
    """
    stretches = [Stretch(settings.steps or PGD_STEPS)]
    samples = settings.samples if settings.samples > 1 else EOT_SAMPLES
    return ascend_gradient(
        model, images, labels, region, settings, log_odds, stretches, samples=samples
    )


def log_odds(logits: Tensor, labels: Tensor, first: Tensor | None = None) -> Tensor:
    """log sum_{j != y} exp z_j - z_y of each row, which grows with the cross entropy: (b, k), (b,)
    -> (b,).

    CE = log(1 + exp of it), so both point the same way. But in float32 the gradient of CE itself
    loses the part of z_y once p_y rounds to 1, and is 0 where all other p_j do to 0.
    """
    return wrong_logits(logits, labels).logsumexp(dim=1) - true(logits, labels)


def tempered_odds(logits: Tensor, labels: Tensor, first: Tensor) -> Tensor:
    """T (log sum_{j != y} exp(z_j / T) - z_y / T), T = .3 |margin of `first`|: (b, k), (b,), (b, k)
    -> (b,).

    Twice the logits are twice the loss: its direction is the same.
    """
    warmth = WARMTH * lost_margin(first, labels).abs()[:, None]
    warmth = warmth.clamp_min(torch.finfo(logits.dtype).tiny)
    rest = wrong_logits(logits, labels)
    top = rest.detach().amax(dim=1, keepdim=True)  # 0 / T is 0 for any T
    soft = warmth * ((rest - top) / warmth).logsumexp(dim=1, keepdim=True) + top
    return soft.squeeze(1) - true(logits, labels)


# least weight of a pixel: a patch that nobody attends to keeps a twentieth of its gradient
FLOOR = 0.05


def saga(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(R(x) * grad CE)), R the attention rollout of the image: (b, c,
    h, w), (b,) -> same.

    R = prod_l (A_l / 2 + I / 2), A_l the attention of block l averaged over heads, the row of the
    class token (without one the mean of the rows) spread over the pixels of each patch, at most 1
    and at least 0.05. 20 steps. Mahmood et al. multiply by the image as well, which never moves a
    black pixel; we do not. UsageError on a network without self-attention over patches. Source:
    Mahmood, Mahmood, van Dijk 2021, section 5; rollout: Abnar & Zuidema 2020.
    """
    if not len(images):
        return images.clone()
    with torch.no_grad(), seeded(images, settings.draw):
        weights = rollout(model, images)
    stretches = [Stretch(settings.steps or PGD_STEPS)]
    return ascend_gradient(
        model, images, labels, region, settings, log_odds, stretches, weights=weights
    )


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention rollout spread over the pixels: (b, c, h, w) -> (b, 1, h, w) in [0.05, 1]."""
    grid, prefix = _patch_grid(model)
    with _attention_of(model) as maps:
        model(images)
    tokens = grid[0] * grid[1] + prefix
    if not maps or any(attention.shape[-1] != tokens for attention in maps):
        raise UsageError(
            "saga needs self-attention over the patches of the whole image", "use --attack pgd"
        )
    flow = torch.eye(tokens, dtype=maps[0].dtype, device=images.device).expand(len(images), -1, -1)
    for attention in maps:
        flow = 0.5 * (attention @ flow) + 0.5 * flow
    token_weights = flow[:, 0, prefix:] if prefix else flow.mean(dim=1)
    token_weights = token_weights / token_weights.amax(dim=1, keepdim=True)
    spread = functional.interpolate(
        token_weights.view(-1, 1, *grid), size=images.shape[-2:], mode="nearest"
    )
    return spread.clamp_min(FLOOR).to(images.dtype)


def _patch_grid(model: nn.Module) -> tuple[tuple[int, int], int]:
    """Rows and columns of patches, and number of tokens before them, of timm's transformers."""
    for module in model.modules():
        embed: Any = getattr(module, "patch_embed", None)
        if getattr(embed, "grid_size", None) is not None and hasattr(module, "blocks"):
            return tuple(embed.grid_size), int(getattr(module, "num_prefix_tokens", 0))
    raise UsageError("saga needs a vision transformer with a grid of patches", "use --attack pgd")


@contextmanager
def _attention_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect every layer's (b, n, n) attention, averaged over heads; hooks are removed at exit."""
    from timm.layers.attention import Attention

    from certcli.nn.attention_variants import L2Attention

    maps: list[Tensor] = []

    def dot_product(layer: Any) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            b, n = output.shape[:2]
            q, k = output.reshape(b, n, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)[:2]
            q = layer.q_norm(q)
            k = layer.k_norm(k)
            maps.append((q @ k.transpose(-2, -1) * layer.scale).softmax(-1).mean(dim=1))

        return note

    def tied(layer: Any) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            b, n = output.shape[:2]
            q = output.reshape(b, n, layer.num_heads, -1).transpose(1, 2)
            maps.append((-torch.cdist(q, q).square() / layer.head_dim**0.5).softmax(-1).mean(dim=1))

        return note

    with ExitStack() as hooks:
        for layer in model.modules():
            if type(layer) is Attention:
                hooks.enter_context(layer.qkv.register_forward_hook(dot_product(layer)))
            elif type(layer) is L2Attention:
                hooks.enter_context(layer.query.register_forward_hook(tied(layer)))
        yield maps
