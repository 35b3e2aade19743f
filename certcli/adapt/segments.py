"""A network cut into consecutive segments: a change in one costs only the segments after it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from certcli.adapt.families import FAMILIES, end
from certcli.adapt.pixels import as_pixels
from certcli.nn.attention_weights import AttentionShape
from certcli.system.errors import ArchitectureError


@dataclass(frozen=True)
class Segment:
    """A map stream -> stream and its modules' paths. The first reads pixels, the last is logits."""

    run: Callable[[Tensor], Tensor]
    inside: tuple[str, ...]

    def holds(self, path: str) -> bool:
        return any(prefix in ("", path) or path.startswith(f"{prefix}.") for prefix in self.inside)


def segments_of(model: Any) -> list[Segment]:
    """Return the segments of pixels -> logits; a single one for an unknown family."""
    net, family = model.net, FAMILIES.get(type(model.net))
    if family is None:
        return [Segment(lambda images: model(as_pixels(images)), ("",))]
    embed = Segment(
        lambda images: family.embed(net, model.normalize(as_pixels(images))),
        ("patch_embed", *family.embed_norms),
    )
    body = [Segment(section.run, (section.path,)) for section in family.body(net)]
    return [embed, *body, Segment(partial(end, net), family.end_norms)]


def replaceable_attentions(net: nn.Module) -> dict[str, nn.Module]:
    """Return the attentions that can be replaced, by path: those in blocks of known families."""
    family = FAMILIES.get(type(net))
    attentions = {}
    for section in () if family is None else family.body(net):
        attention = getattr(section.module, "attn", None) if section.kind == "block" else None
        try:
            if attention is not None and AttentionShape.of(attention):
                attentions[f"{section.path}.attn"] = attention
        except ArchitectureError:
            continue
    return attentions
