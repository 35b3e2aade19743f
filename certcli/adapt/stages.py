"""A network in pieces that follow each other, so that a change in one of them costs only what comes after it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from certcli.adapt.families import FAMILIES
from certcli.adapt.pixels import as_pixels
from certcli.nn.attention_weights import AttentionShape
from certcli.system.errors import ArchitectureError


@dataclass(frozen=True)
class Stage:
    """run: stream -> stream; the first reads pixels, the last gives logits. inside: paths of the modules that it runs."""

    run: Callable[[Tensor], Tensor]
    inside: tuple[str, ...]

    def holds(self, path: str) -> bool:
        return any(prefix in ("", path) or path.startswith(f"{prefix}.") for prefix in self.inside)


def stages_of(model: Any) -> list[Stage]:
    """The pieces of pixels -> logits; a single one where the family is not known."""
    net, family = model.net, FAMILIES.get(type(model.net))
    if family is None:
        return [Stage(lambda images: model(as_pixels(images)), ("",))]
    embed = Stage(
        lambda images: family.embed(net, model.normalize(as_pixels(images))), ("patch_embed", *family.embed_norms)
    )
    body = [Stage(step.run, (step.path,)) for step in family.body(net)]
    return [embed, *body, Stage(lambda stream: family.end(net, stream), family.end_norms)]


def replaceable_attentions(net: nn.Module) -> dict[str, nn.Module]:
    """The attentions that can be replaced: in blocks of families that are known."""
    family, found = FAMILIES.get(type(net)), {}
    for step in () if family is None else family.body(net):
        attention = getattr(step.module, "attn", None) if step.kind == "block" else None
        try:
            if attention is not None and AttentionShape.of(attention):
                found[f"{step.path}.attn"] = attention
        except ArchitectureError:
            continue
    return found
