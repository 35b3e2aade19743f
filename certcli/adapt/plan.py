"""What adapt changes, decided before any computation: the families of networks that it takes apart,
which module is replaced by which, and what both goals start from.

A block of every family has norm1, attn, norm2 and mlp. Its stream is (b, n, d), or (b, h, w, d) in
Swin; each half adds a branch of the normed stream.
"""

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from timm.layers.mlp import Mlp
from timm.models.convit import Block as ConvitBlock
from timm.models.convit import ConVit
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, window_partition
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from certcli.adapt.settings import ACTIVATIONS, ATTENTIONS, NORMS, RESIDUALS, AdaptSettings
from certcli.checkpoint.file import Checkpoint, tensors_digest
from certcli.checkpoint.record import Replacement
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import floor_fits
from certcli.system.errors import ArchitectureError, raise_if
from certcli.system.processes import ALONE, Team

Half = Literal[1, 2]
"""1: norm1 and attention; 2: norm2 and MLP."""


@dataclass(frozen=True)
class Section:
    """A section, stream -> stream: a block, a patch merging, or the class token joining."""

    path: str
    kind: Literal["block", "merge", "tokens"]
    module: Any
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """The map of pixels to the stream, the sections, and the paths of the norms around them."""

    embed: Callable[[Any, Tensor], Tensor]
    body: Callable[[Any], list[Section]]
    embed_norms: tuple[str, ...]
    end_norms: tuple[str, ...]


def _block_sections(net: Any) -> list[Section]:
    return [
        Section(f"blocks.{index}", "block", block, block) for index, block in enumerate(net.blocks)
    ]


def run_end(net: Any, x: Tensor) -> Tensor:
    """Return the logits of the stream that leaves the last section, in every family."""
    return net.forward_head(net.norm(x))


def _swin_body(net: Any) -> list[Section]:
    steps = []
    for number, stage in enumerate(net.layers):
        path = f"layers.{number}"
        if not isinstance(stage.downsample, nn.Identity):
            steps.append(Section(f"{path}.downsample", "merge", stage.downsample, stage.downsample))
        steps += [
            Section(f"{path}.blocks.{i}", "block", block, block)
            for i, block in enumerate(stage.blocks)
        ]
    return steps


def _convit_embed(net: Any, x: Tensor) -> Tensor:
    embedded: Tensor = net.patch_embed(x)
    return net.pos_drop(embedded + net.pos_embed if net.use_pos_embed else embedded)


def _convit_body(net: Any) -> list[Section]:
    """Return the body: the class token joins the patches after the positional blocks."""

    def join(x: Tensor) -> Tensor:
        return torch.cat((net.cls_token.expand(x.shape[0], -1, -1), x), dim=1)

    steps = _block_sections(net)
    if net.local_up_to_layer < len(net.blocks):
        steps.insert(net.local_up_to_layer, Section("cls_token", "tokens", None, join))
    return steps


_VIT = Family(
    lambda net, x: net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x)))),
    _block_sections,
    ("norm_pre",),
    ("norm", "fc_norm"),
)
FAMILIES: dict[type[nn.Module], Family] = {
    VisionTransformer: _VIT,
    VisionTransformerDistilled: _VIT,
    SwinTransformer: Family(
        lambda net, x: net.patch_embed(x), _swin_body, ("patch_embed.norm",), ("norm",)
    ),
    ConVit: Family(_convit_embed, _convit_body, (), ("norm",)),
}
KEEP = "--goal keep puts floors under the LayerNorms of any network and changes nothing else"

_BLOCKS = (Block, SwinTransformerBlock, ConvitBlock)


def part_at(net: nn.Module, path: str) -> Any:
    """Return the module at a path, None where there is none."""
    try:
        return net.get_submodule(path)
    except AttributeError:
        return None


def adapted_family(net: nn.Module) -> Family:
    """Return the family of a network, adapted or not. ArchitectureError names the unknown part."""
    family = FAMILIES.get(type(net))
    if family is None:
        raise ArchitectureError(
            f"adapt replaces attention and residuals in {', '.join(each.__name__ for each in FAMILIES)}, "
            f"and this is a {type(net).__name__}",
            KEEP,
        )
    pooling = getattr(net, "attn_pool", None)
    raise_if(
        pooling is not None,
        ArchitectureError,
        f"attn_pool is a {type(pooling).__name__}: adapt knows no pooling by attention",
    )
    return family


def require_known_blocks(net: nn.Module, family: Family) -> None:
    """Raise ArchitectureError with the path of the first block or MLP that differs from timm's."""
    blocks = [step for step in family.body(net) if step.kind == "block"]
    why = f"this {type(net).__name__} has no blocks, so there is no attention to replace"
    raise_if(not blocks, ArchitectureError, why)
    for step in blocks:
        mlp: Any = getattr(step.module, "mlp", None)
        why = ""
        if type(step.module) not in _BLOCKS:
            why = f" is a {type(step.module).__name__}"
        elif type(mlp) is not Mlp or not isinstance(mlp.fc1, nn.Linear):
            why = f".mlp is a {type(mlp).__name__}"
        elif not isinstance(mlp.norm, nn.Identity):
            why = ".mlp has a norm inside"
        raise_if(why, ArchitectureError, f"{step.path}{why}, which adapt does not know")


def run_half(block: Any, half: Half, x: Tensor) -> Tensor:
    """Return the stream after norm, attention or MLP, LayerScale and residual of this half."""
    rows = getattr(block, f"norm{half}")(x)
    if half == 2:
        added = block.mlp(rows)
    else:
        added = block._attn(rows) if isinstance(block, SwinTransformerBlock) else block.attn(rows)
    added = getattr(block, f"ls{half}", nn.Identity())(added)
    residual: Callable[[Tensor, Tensor], Tensor] = getattr(block, f"residual{half}", torch.add)
    return residual(x, added)


def attention_input(block: Any, x: Tensor) -> Tensor:
    """Return the attention's input: (b, n, d), or Swin's padded shifted windows (b * w, n, d)."""
    if not isinstance(block, SwinTransformerBlock):
        return x
    shift = block.shift_size
    window = block.window_size
    x = x.roll((-shift[0], -shift[1]), (1, 2)) if any(shift) else x
    x = functional.pad(x, (0, 0, 0, -x.shape[2] % window[1], 0, -x.shape[1] % window[0]))
    return window_partition(x, window).flatten(1, 2)


def token_counts(model: Any, size: tuple[int, ...]) -> dict[str, int]:
    """Return, by path, the number of tokens that each attention mixes on an image (c, h, w)."""
    parameter = next(model.parameters())
    pixels = torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype)
    counts: dict[str, int] = {}

    def note(path: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        counts[path] = int(inputs[0].shape[-2])

    with ExitStack() as hooks, torch.no_grad():
        for step in adapted_family(model.net).body(model.net):
            if step.kind == "block":
                hooks.enter_context(
                    step.module.attn.register_forward_pre_hook(partial(note, step.path))
                )
        model(pixels)
    return counts


def plan(checkpoint: Checkpoint, settings: AdaptSettings) -> tuple[Replacement, ...]:
    """Return this architecture's replacements, in order. ArchitectureError: an unknown part."""
    record = checkpoint.record
    raise_if(
        record.surgery,
        ArchitectureError,
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
            sizes = {"tokens": tokens[step.path]} if sized else {}
            replacements += _block_plan(step, settings, sizes)
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
    raise_if(
        not replacements,
        ArchitectureError,
        f"this {type(net).__name__} has no LayerNorm over the last dimension, so there is nothing to put a floor under",
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
    # LayerScale is multiplied into the fitted output maps
    scales = [getattr(block, name, nn.Identity()) for name in ("ls1", "ls2")]
    identities = [None if isinstance(scale, nn.Identity) else "identity" for scale in scales]
    parts: list[tuple[str, str | None, Mapping[str, Any]]] = [
        (f"{path}.attn", ATTENTIONS[settings.attention], attention_args),
        (f"{path}.mlp.act", ACTIVATIONS[settings.activation], {}),
        (f"{path}.ls1", identities[0], {}),
        (f"{path}.ls2", identities[1], {}),
        (path, RESIDUALS[settings.residual], {}),
    ]
    replacements += [Replacement(at, kind, args) for at, kind, args in parts if kind is not None]
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


@dataclass(frozen=True)
class AdaptedPart:
    """An adapted part: its path, its description before and after, its relative output error."""

    path: str
    before: str
    after: str
    error: float


class Adaptation:
    """The original network (teacher) and, of a subclass, the new one (student).

    Args:
        images: calibration pixels (n, c, h, w), float32 in [0, 1].
    """

    student: PixelModel

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: AdaptSettings,
        images: Tensor,
        device: torch.device,
        team: Team = ALONE,
    ) -> None:
        self.checkpoint = checkpoint
        self.settings = settings
        self.team = team
        # datasets are sorted by class, and closed forms and comparisons use the first images only
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        self.images = images[order].to(device)
        self.record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
        # the student has no digits beyond float32
        self.teacher = build.load(checkpoint, device, torch.float32)
        content = tensors_digest({"images": images})
        about = [checkpoint.digest, settings.parameters(), settings.seed, content]
        # of the starting checkpoint, settings and images, which resumed runs share
        self.identity = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.records: list[AdaptedPart] = []
        self._begin()

    def _begin(self) -> None:
        """Make the student."""
        raise NotImplementedError

    def derive(self, surgery: tuple[Replacement, ...], **parameters: Any) -> Checkpoint:
        """Return the checkpoint of the student, with these parameters of lineage beside the settings."""
        parameters = {
            **self.settings.parameters(),
            "calibration_images": len(self.images),
            **parameters,
        }
        tensors = build.tensors_of(self.student)
        return self.checkpoint.derive(
            tensors, "adapt", parameters, self.settings.seed, surgery=surgery
        )
