"""Which option reads a file, by what its tensors show: hints where it does not fit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
_PATCHES = "patch_embed.proj.weight"
_DISTILLED = {192: "deit_tiny", 384: "deit_small", 768: "deit_base"}
"""Widths of timm's distilled networks."""


@dataclass(frozen=True)
class Advice:
    """A tensor that the network lacks or has in another shape, and options that give it."""

    tensor: str
    options: str


def advice(net: nn.Module, tensors: Tensors) -> list[Advice]:
    """Return what the file's tensors advise, the most telling first."""
    expected = net.state_dict()
    return [each for rule in _RULES for each in rule(tensors, expected)]


def _distilled(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    if "dist_token" not in tensors or "dist_token" in expected:
        return
    width = int(tensors["dist_token"].shape[-1])
    named = _DISTILLED.get(width, "deit_tiny")
    size = "" if width in _DISTILLED else f" --arch-arg embed_dim={width}"
    yield Advice("dist_token", f"--arch {named}_distilled_patch16_224{size}")


def _registers(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    if "reg_token" in tensors and "reg_token" not in expected:
        yield Advice("reg_token", f"--arch-arg reg_tokens={tensors['reg_token'].shape[1]}")


def _channels(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    first = tensors.get(_PATCHES)
    usual = expected.get(_PATCHES)
    if first is None or usual is None or first.dim() != usual.dim():
        return
    if first.shape[1] != usual.shape[1] and first.shape[0] == usual.shape[0]:
        yield Advice(_PATCHES, f"--arch-arg in_chans={first.shape[1]}")
    if first.shape[2:] != usual.shape[2:]:
        yield Advice(_PATCHES, f"--arch-arg patch_size={first.shape[2]}")


def _width_advice(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    first = tensors.get(_PATCHES)
    usual = expected.get(_PATCHES)
    if first is not None and usual is not None and first.shape[0] != usual.shape[0]:
        yield Advice(
            _PATCHES, f"--arch-arg embed_dim={first.shape[0]} and --arch-arg num_heads=..."
        )


def _surplus(ending: str, options: str) -> Callable[[Tensors, Tensors], Iterator[Advice]]:
    """Return the rule for a tensor of this ending, which the network has with these options only."""

    def rule(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
        name = next((name for name in sorted(tensors) if name.endswith(ending)), None)
        if name is not None and not any(other.endswith(ending) for other in expected):
            yield Advice(name, options)

    return rule


_RULES: tuple[Callable[[Tensors, Tensors], Iterator[Advice]], ...] = (
    _distilled,
    _registers,
    _width_advice,
    _channels,
    _surplus("fc_norm.weight", "--arch-arg global_pool=avg"),
    _surplus(".ls1.gamma", "--arch-arg init_values=1e-5"),
    _surplus(".q_norm.weight", "--arch-arg qk_norm=true"),
    _surplus("norm_pre.weight", "--arch-arg pre_norm=true"),
)
