"""Which module becomes what: decided before anything is computed, printable, and stored as the record's surgery."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from certcli import models
from certcli.errors import ArchitectureError, UsageError
from certcli.provenance import Record, Replacement

ATTENTIONS = ("l2", "keep")
NORMS = ("center", "fold", "keep")
RESIDUALS = ("convex", "weighted", "keep")
ACTIVATIONS = ("keep", "maxmin")


@dataclass(frozen=True)
class AdaptSettings:
    """What is replaced, and how the new parts are fitted to the old ones.

    head: None keeps it; a tuple of widths puts the tokens side by side into a MaxMin MLP of these widths (() is one
    linear layer). epochs: AdamW epochs a block after the closed-form start; 0 is the closed form alone, -1 surgery alone.
    lr: relative to the size of each tensor. distill: epochs of end-to-end training on the old logits, after the blocks.
    """

    attention: str = "l2"
    norm: str = "center"
    residual: str = "convex"
    activation: str = "keep"
    head: tuple[int, ...] | None = None
    epochs: int = 3
    distill: int = 5
    lr: float = 5e-3
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--attention", self.attention, ATTENTIONS),
            ("--norm", self.norm, NORMS),
            ("--residual", self.residual, RESIDUALS),
            ("--activation", self.activation, ACTIVATIONS),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} '{value}'", f"one of: {', '.join(known)}")
        if self.epochs < -1 or self.distill < 0 or self.lr <= 0 or self.batch_size < 1:
            raise UsageError("--epochs must be at least 0, --lr and --batch-size positive")


def plan(record: Record, settings: AdaptSettings) -> tuple[Replacement, ...]:
    """The replacements for this architecture, in their order; ArchitectureError names what is not known."""
    net = models.build(record)
    if type(net) is not VisionTransformer or record.surgery:
        what = "an adapted network" if record.surgery else type(net).__name__
        raise ArchitectureError(
            f"adapt knows timm's plain VisionTransformer, not {what}",
            "start from the checkpoint before adapt" if record.surgery else "",
        )
    found: list[Replacement] = []
    for index, block in enumerate(net.blocks):
        path = f"blocks.{index}"
        if type(block) is not Block:
            raise ArchitectureError(f"{path} is a {type(block).__name__}, adapt knows timm's plain Block")
        found += _block_plan(path, block, settings)
    if settings.norm != "keep":
        for name in ("norm_pre", "norm", "fc_norm"):
            if isinstance(getattr(net, name), nn.LayerNorm):
                found.append(Replacement(name, "center-norm"))
    if settings.head is not None:
        found.append(Replacement("", "flat-head", {"widths": list(settings.head)}))
    return tuple(found)


def _block_plan(path: str, block: Block, settings: AdaptSettings) -> list[Replacement]:
    found = []
    for name in ("norm1", "norm2"):
        if settings.norm != "keep" and isinstance(getattr(block, name), nn.LayerNorm):
            found.append(Replacement(f"{path}.{name}", "center-norm"))
    if settings.attention == "l2":
        if type(block.attn) is not Attention:
            raise ArchitectureError(f"{path}.attn is a {type(block.attn).__name__}, not timm's plain Attention")
        found.append(Replacement(f"{path}.attn", "l2-attention"))
    if settings.activation == "maxmin":
        found.append(Replacement(f"{path}.mlp.act", "maxmin"))
    # the fitted output maps take LayerScale in
    found += [
        Replacement(f"{path}.{name}", "identity")
        for name in ("ls1", "ls2")
        if not isinstance(getattr(block, name), nn.Identity)
    ]
    if settings.residual != "keep":
        found.append(Replacement(path, f"{settings.residual}-block"))
    return found


def folded(surgery: Sequence[Replacement], paths: Sequence[str]) -> tuple[Replacement, ...]:
    """The surgery once the centre norms at `paths` were multiplied into the maps that follow them."""
    return tuple(
        replace(item, kind="identity") if item.path in paths and item.kind == "center-norm" else item
        for item in surgery
    )
