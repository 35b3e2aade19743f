"""Decide which module is replaced by which, before any computation: the record's surgery."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from certcli.adapt.families import (
    Section,
    adapted_family,
    part_at,
    require_known_blocks,
    token_counts,
)
from certcli.adapt.settings import ACTIVATIONS, ATTENTIONS, NORMS, RESIDUALS, AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Replacement
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.norms import floor_fits
from certcli.system.errors import ArchitectureError


def plan(checkpoint: Checkpoint, settings: AdaptSettings) -> tuple[Replacement, ...]:
    """Return this architecture's replacements, in order. ArchitectureError: an unknown part."""
    record = checkpoint.record
    if record.surgery:
        raise ArchitectureError(
            "this network is already an adapted network: adapt starts from a network as timm builds it",
            "start from the checkpoint before adapt",
        )
    net = build.own_network(checkpoint)
    if not settings.refit:
        return _floor_plan(net)
    family = adapted_family(net)
    require_known_blocks(net, family)
    # a mixing matrix has the size of the sequence
    sized = settings.attention == "orthogonal"
    tokens = token_counts(PixelModel(record.input, net), record.input.size) if sized else {}
    replacements: list[Replacement] = []
    for step in family.body(net):
        if step.kind == "block":
            replacements += _block_plan(
                step, settings, {"tokens": tokens[step.path]} if sized else {}
            )
        elif step.kind == "merge":
            replacements += _norm_plan(step.module, f"{step.path}.norm", "norm", settings)
    for path in (*family.embed_norms, *family.end_norms):
        replacements += _norm_plan(net, path, path, settings)
    if settings.widths is not None:
        replacements.append(Replacement("", "flat-head", {"widths": list(settings.widths)}))
    _try_out(net, replacements)
    return tuple(replacements)


def _floor_plan(net: nn.Module) -> tuple[Replacement, ...]:
    """Return a floor norm for each LayerNorm over the last dimension, in any network."""
    replacements = [
        Replacement(path, "floor-norm")
        for path, part in net.named_modules()
        if path and floor_fits(part)
    ]
    if not replacements:
        norms = {
            type(part).__name__ for part in net.modules() if "norm" in type(part).__name__.lower()
        }
        raise ArchitectureError(
            f"this {type(net).__name__} has no LayerNorm over the last dimension, so there is nothing to put a floor under"
            + (f"; its norms: {', '.join(sorted(norms))}" if norms else "")
        )
    _try_out(net, replacements)
    return tuple(replacements)


def _norm_plan(
    parent: nn.Module, path: str, name: str, settings: AdaptSettings
) -> list[Replacement]:
    """Return a norm's replacement; an Identity stays. The builder takes LayerNorms only."""
    kind = NORMS[settings.norm]
    norm = part_at(parent, name)
    return (
        []
        if kind is None or norm is None or isinstance(norm, nn.Identity)
        else [Replacement(path, kind)]
    )


def _block_plan(
    step: Section, settings: AdaptSettings, attention_args: Mapping[str, Any]
) -> list[Replacement]:
    path = step.path
    block = step.module
    replacements = [*_norm_plan(block, f"{path}.norm1", "norm1", settings)]
    replacements += _norm_plan(block, f"{path}.norm2", "norm2", settings)
    attention = ATTENTIONS[settings.attention]
    activation = ACTIVATIONS[settings.activation]
    residual = RESIDUALS[settings.residual]
    if attention is not None:
        replacements.append(Replacement(f"{path}.attn", attention, attention_args))
    if activation is not None:
        replacements.append(Replacement(f"{path}.mlp.act", activation))
    # LayerScale is multiplied into the fitted output maps
    replacements += [
        Replacement(f"{path}.{name}", "identity")
        for name in ("ls1", "ls2")
        if not isinstance(getattr(block, name, nn.Identity()), nn.Identity)
    ]
    if residual is not None:
        replacements.append(Replacement(path, residual))
    return replacements


def _try_out(net: nn.Module, replacements: Sequence[Replacement]) -> None:
    """Call every builder on its module, so that an unknown part is refused now, by its path."""
    for item in replacements:
        try:
            build.replace_module(net, item)
        except ArchitectureError as refusal:
            raise ArchitectureError(
                f"{item.path or 'the network'}: {refusal.message}", refusal.hint
            ) from refusal
