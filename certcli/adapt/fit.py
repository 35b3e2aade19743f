"""Surgery, then re-fitting block by block from first to last: each new block learns the old one's output, fed by the blocks
already adapted, all else frozen. Closed form where a part is linear in its parameters, AdamW for the rest.

The convex residual (1 - t) y + t f(y) keeps the old function exactly on a stream that is scaled: with y_k = x_k / s_k and
s_{k+1} = s_k / (1 - t), the old x + g(x) is (1 - t) y + t f(y) for f(y) = g(s_k y) (1 - t) / (t s_k).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli import models
from certcli.adapt.plan import AdaptSettings, folded, plan
from certcli.adapt.start import LeastSquares, center_norm_start, fold_center_norm, relative_error, tie_queries
from certcli.checkpoint import Checkpoint
from certcli.errors import DataError
from certcli.lipschitz.rules.attention import l2_mixing_constant
from certcli.nn.heads import FlatHead
from certcli.nn.l2_attention import L2Attention
from certcli.nn.norms import CenterNorm
from certcli.nn.residual import ConvexResidual, ResidualBlock


@dataclass(frozen=True)
class Replaced:
    """One adapted part: its path, what it was and became, its relative output error on the calibration images."""

    path: str
    before: str
    after: str
    error: float


def adapt(
    checkpoint: Checkpoint, settings: AdaptSettings, images: Tensor, device: torch.device
) -> Iterator[Replaced | Checkpoint]:
    """Yield a record for each adapted part, then the adapted checkpoint. images: calibration pixels (n, c, h, w)."""
    if not len(images):
        raise DataError("adapt needs at least one calibration image")
    surgery = plan(checkpoint.record, settings)
    teacher = models.load(checkpoint, device)
    record = replace(checkpoint.record, surgery=surgery)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        student_net = models.build(record, initialise=True).to(device)
        student_net.requires_grad_(False)
        _carry_over(student_net, checkpoint)
        student = models.PixelModel(record.input, student_net).eval().to(device)
        if settings.epochs >= 0:
            yield from _fit(teacher, student, settings, images.to(device))
        if settings.epochs >= 0 and settings.distill > 0:
            yield _distil_network(teacher, student, settings, images.to(device))
    if settings.norm == "fold":
        paths = _fold_norms(student_net)
        record = replace(record, surgery=folded(surgery, paths))
    yield checkpoint.derive(
        models.tensors_of(student), "adapt", _parameters(settings, len(images)), settings.seed, surgery=record.surgery
    )


def _parameters(settings: AdaptSettings, images: int) -> dict[str, object]:
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__ if name != "seed"}
    values["head"] = None if settings.head is None else list(settings.head)
    return {**values, "calibration_images": images}


def _carry_over(net: nn.Module, checkpoint: Checkpoint) -> None:
    """Every tensor that exists under the same name and shape keeps its value."""
    state = net.state_dict()
    for name, tensor in checkpoint.tensors.items():
        if name in state and state[name].shape == tensor.shape:
            state[name].copy_(tensor)


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part) for part in x.split(size)])


def _embed(model: models.PixelModel, images: Tensor, size: int) -> Tensor:
    """The token stream before the first block."""
    net: Any = model.net

    def tokens(pixels: Tensor) -> Tensor:
        x = net.patch_embed(model.normalize(pixels))
        return net.norm_pre(net.patch_drop(net._pos_embed(x)))

    return _in_chunks(tokens, images, size)


def _fit(
    teacher: models.PixelModel, student: models.PixelModel, settings: AdaptSettings, images: Tensor
) -> Iterator[Replaced]:
    size = settings.batch_size
    x = _embed(teacher, images, size)
    y, scale = _embed(student, images, size), 1.0
    old_net: Any = teacher.net
    new_net: Any = student.net
    for index, (old, new) in enumerate(zip(old_net.blocks, new_net.blocks, strict=True)):
        path = f"blocks.{index}"
        middle = _in_chunks(partial(_first_half, old), x, size)
        scale = _fit_branch(new, 1, old.norm1, old.attn, x, y, middle, scale, size)
        half = _in_chunks(partial(_first_half, new), y, size)
        out = _in_chunks(old, x, size)
        scale = _fit_branch(new, 2, old.norm2, old.mlp, middle, half, out, scale, size)
        _descend(new, y, out / scale, settings, settings.epochs)
        y = _in_chunks(new, y, size)
        x = out
        yield Replaced(path, type(old).__name__, _describe(new), relative_error(y, x / scale))
    yield from _fit_end(old_net, new_net, x, y, settings)


def _describe(block: Any) -> str:
    parts = [type(block.attn).__name__, type(block.norm1).__name__, type(block.mlp.act).__name__]
    if isinstance(block, ResidualBlock):
        parts.append(type(block.residual1).__name__)
    return ", ".join(parts)


def _first_half(block: Any, y: Tensor) -> Tensor:
    branch = block.ls1(block.attn(block.norm1(y)))
    return block.residual1(y, branch) if isinstance(block, ResidualBlock) else y + branch


def _fit_branch(
    block: Any,
    number: int,
    old_norm: Any,
    old_branch: Any,
    x: Tensor,
    y: Tensor,
    wanted: Tensor,
    scale: float,
    size: int,
) -> float:
    """Start one residual branch of `block` so that it maps the stream y (of scale 1/scale) to `wanted`; the new scale."""
    norm = getattr(block, f"norm{number}")
    if isinstance(norm, CenterNorm):
        targets = _in_chunks(old_norm, x, size)
        center_norm_start(norm, y.flatten(0, 1), targets.flatten(0, 1))
    branch = block.attn if number == 1 else block.mlp
    features: Callable[[Tensor], Tensor] | None = None
    output: nn.Linear | None = None
    if isinstance(branch, L2Attention):
        tie_queries(branch, old_branch)
        features, output = branch.mix, branch.proj
    elif number == 2:
        features, output = partial(_hidden, branch), branch.fc2
    residual = getattr(block, f"residual{number}", None)
    keep, share, next_scale = 1.0, 1.0, scale
    if isinstance(residual, ConvexResidual):
        if isinstance(branch, L2Attention):
            # any share keeps the function; this one gives trunk and attention equal parts of the bound at unit norms
            share = 1 / (1 + l2_mixing_constant(y.shape[1]))
            residual.theta.data.fill_(math.log(share / (1 - share)))
        share = float(torch.sigmoid(residual.theta.double()))
        keep = 1 - share
        next_scale = scale / keep
    if output is None or features is None:  # attention kept as it is: only its scale changes
        if share != 1.0 or scale != 1.0:
            factor = keep / (share * scale)
            kept = branch.proj
            kept.weight.data.mul_(factor)
            if kept.bias is not None:
                kept.bias.data.mul_(factor)
        return next_scale
    solver = LeastSquares(output.in_features, output.out_features, y.device)
    with torch.no_grad():
        for part, goal in zip(y.split(size), wanted.split(size), strict=True):
            target = (goal / next_scale - keep * part) / share
            solver.add(features(norm(part)).flatten(0, 1), target.flatten(0, 1))
    solver.solve_into(output)
    return next_scale


def _hidden(mlp: Any, u: Tensor) -> Tensor:
    """The input of an MLP's last linear map."""
    return mlp.norm(mlp.act(mlp.fc1(u)))


def _distil_network(teacher: Any, student: Any, settings: AdaptSettings, images: Tensor) -> Replaced:
    """All parts together, on the old network's logits: errors that the blocks have handed on are mended at the end."""
    logits = _in_chunks(teacher, images, settings.batch_size)
    _descend(student, images, logits, settings, settings.distill)
    found = _in_chunks(student, images, settings.batch_size)
    return Replaced("(network)", "logits", "logits after distillation", relative_error(found, logits))


def _descend(block: Any, inputs: Tensor, targets: Tensor, settings: AdaptSettings, epochs: int) -> None:
    """AdamW on the mean squared error; the best epoch's weights are kept, so it never ends worse than it began."""
    if epochs <= 0:
        return
    parameters = [p.requires_grad_(True) for p in block.parameters()]
    # steps relative to each tensor's own size: least squares leaves output maps a thousand times larger than query maps
    groups = [
        {"params": [p], "lr": settings.lr * max(float(p.detach().square().mean().sqrt()), 1e-2)} for p in parameters
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    steps = epochs * -(-len(inputs) // settings.batch_size)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    size = targets.square().mean()
    best, best_state = _block_error(block, inputs, targets, settings.batch_size), _state(block)
    for _ in range(epochs):
        for positions in torch.randperm(len(inputs)).split(settings.batch_size):
            loss = functional.mse_loss(block(inputs[positions]), targets[positions]) / size
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        error = _block_error(block, inputs, targets, settings.batch_size)
        if error < best:
            best, best_state = error, _state(block)
    block.load_state_dict(best_state)
    for parameter in parameters:
        parameter.requires_grad_(False)


def _state(block: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in block.state_dict().items()}


def _block_error(block: Any, inputs: Tensor, targets: Tensor, size: int) -> float:
    return relative_error(_in_chunks(block, inputs, size), targets)


def _fit_end(old: Any, new: Any, x: Tensor, y: Tensor, settings: AdaptSettings) -> Iterator[Replaced]:
    """Final norm, pooling and head. With a flat linear head pooling is copied exactly; hidden widths are distilled."""
    size = settings.batch_size
    if isinstance(new.norm, CenterNorm):
        targets = _in_chunks(old.norm, x, size)
        center_norm_start(new.norm, y.flatten(0, 1), targets.flatten(0, 1))
        found = _in_chunks(new.norm, y, size)
        yield Replaced("norm", "LayerNorm", "CenterNorm", relative_error(found, targets))
    logits = _in_chunks(lambda part: old.forward_head(old.norm(part)), x, size)
    if isinstance(new.fc_norm, CenterNorm):
        found = _in_chunks(lambda part: new.pool(new.norm(part)), y, size)
        targets = _in_chunks(lambda part: old.fc_norm(old.pool(old.norm(part))), x, size)
        if found.dim() == 2:
            center_norm_start(new.fc_norm, found, targets)
    head = new.head
    if isinstance(head, FlatHead):
        if head.hidden:
            features = _in_chunks(lambda part: new.fc_norm(new.norm(part)), y, size)
            _distil_head(head, features, logits, settings)
        else:
            _copy_pooling(old, head)
        found = _in_chunks(lambda part: new.forward_head(new.norm(part)), y, size)
        yield Replaced(
            "head",
            type(old.head).__name__,
            f"FlatHead{[h.out_features for h in head.hidden]}",
            relative_error(found, logits),
        )


def _copy_pooling(old: Any, head: FlatHead) -> None:
    """A linear map of all tokens that equals the old pooling followed by the old head."""
    weight = old.head.weight.detach()
    classes, width = weight.shape
    tokens = head.out.in_features // width
    whole = torch.zeros(classes, tokens, width).to(weight)
    prefix = 0 if old.pool_include_prefix else int(old.num_prefix_tokens)
    if old.global_pool == "token":
        whole[:, 0] = weight
    elif old.global_pool == "avg":
        whole[:, prefix:] = weight.unsqueeze(1) / (tokens - prefix)
    else:
        raise DataError(f"pooling '{old.global_pool}' is not linear; give --head widths to distil it")
    head.out.weight.data.copy_(whole.flatten(1))
    if old.head.bias is not None:
        head.out.bias.data.copy_(old.head.bias.detach())


def _distil_head(head: Any, features: Tensor, logits: Tensor, settings: AdaptSettings) -> None:
    """Orthogonal hidden layers, the last one by least squares on the old logits, then AdamW on all of them."""
    for layer in head.hidden:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    solver = LeastSquares(head.out.in_features, head.out.out_features, features.device)
    with torch.no_grad():
        for part, goal in zip(features.split(512), logits.split(512), strict=True):
            hidden = part.flatten(1)
            for layer in head.hidden:
                hidden = head.act(layer(hidden))
            solver.add(hidden, goal)
    solver.solve_into(head.out, ridge=1e-3)
    _descend(head, features, logits, settings, settings.epochs)


def _fold_norms(net: Any) -> list[str]:
    """Multiply every centre norm into the linear map that follows it; the paths of the norms that are now identities."""
    paths = []
    for index, block in enumerate(net.blocks):
        for name, layer in (("norm1", getattr(block.attn, "query", None) or block.attn.qkv), ("norm2", block.mlp.fc1)):
            norm = getattr(block, name)
            if isinstance(norm, CenterNorm) and layer.bias is not None:  # without a bias its offset has no place
                fold_center_norm(norm, layer)
                setattr(block, name, nn.Identity())
                paths.append(f"blocks.{index}.{name}")
    return paths
