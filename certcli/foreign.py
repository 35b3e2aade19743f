"""Checkpoints that certvit did not write: a downloaded file, a folder from the hub, a timm or hf-hub name.

Nothing is guessed. Heads, mean or standard deviation cannot be read off tensors; what is missing is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import certcli.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
import timm

from certcli import models
from certcli.arch_args import arch_arguments
from certcli.checkpoint import Checkpoint, read_tensors, require_numbers
from certcli.errors import ArchitectureError, CheckpointError, Refused, UsageError, one_line
from certcli.provenance import KEY, InputSpec, Record
from certcli.schema import LONGEST_RECORD, LONGEST_TEXT, decode_config, is_name, require_pixels, require_statistics

_TORCH_SUFFIXES = (".pth", ".pt", ".bin")


@dataclass(frozen=True)
class Hints:
    """What the user says about a foreign file: --arch, --arch-arg, --mean, --std."""

    arch: str | None = None
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        try:
            arch_arguments(self.arch_args)
            require_statistics(self.mean or (), self.std or ())
        except Refused as refusal:
            raise UsageError(str(refusal), "see --arch-arg, --mean and --std; pixels are in [0, 1]") from refusal

    @property
    def given(self) -> bool:
        return bool(self.arch or self.arch_args or self.mean or self.std)


def open_checkpoint(source: str, hints: Hints | None = None) -> Checkpoint:
    """A checkpoint from a file, a folder with model.safetensors, a timm name or an `hf-hub:` name."""
    hints = hints or Hints()
    path = Path(source)
    try:
        found = path.exists()
    except OSError as failure:
        raise CheckpointError(
            f"cannot open {one_line(source)}: {failure.strerror}", "check its name and permissions"
        ) from failure
    if found and path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise CheckpointError(f"folder {path} holds no model.safetensors", "name the file itself")
        return _from_file(path / "model.safetensors", hints)
    if found:
        return _from_file(path, hints)
    if source.startswith(("hf-hub:", "hf_hub:")):
        return _from_hub(source.partition(":")[2], hints)
    if is_name(source) and timm.is_model(source):
        return _from_timm(source, hints)
    raise CheckpointError(
        f"no file {source}", "give a .safetensors file, a folder with model.safetensors, a timm name, or hf-hub:NAME"
    )


def _from_file(path: Path, hints: Hints) -> Checkpoint:
    metadata: dict[str, str] = {}
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    if path.suffix in _TORCH_SUFFIXES:
        tensors = _read_torch(path)
    else:
        tensors, metadata = read_tensors(path)
    if KEY in metadata:
        return Checkpoint(tensors, Record.from_json(metadata[KEY]))
    config = path.parent / "config.json"
    if hints.arch is None and config.is_file():
        record = _from_config(config, hints, metadata)
    elif hints.arch is not None:
        record = _from_hints(hints, tensors, metadata, path)
    else:
        raise ArchitectureError(f"{path} {_appearance(tensors)}", _MISSING_HINT)
    checkpoint = Checkpoint(tensors, record)
    models.load_weights(models.build(record, like=tensors), tensors)  # refuse now what would not load later
    return checkpoint


_MISSING_HINT = "put timm's config.json beside it, or pass --arch NAME --arch-arg num_heads=... --mean ... --std ..."


def _appearance(tensors: Mapping[str, Tensor]) -> str:
    """What the tensors' names and shapes tell, and what they cannot."""
    embedding, qkv = tensors.get("patch_embed.proj.weight"), tensors.get("blocks.0.attn.qkv.weight")
    if embedding is None or qkv is None or embedding.dim() != 4:
        known = ", ".join(sorted(tensors)[:2])
        return f"has no certvit record, and its tensors ({known}, ...) are not those of a timm vision transformer"
    width, channels, patch = embedding.shape[0], embedding.shape[1], embedding.shape[2]
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    return (
        f"looks like a timm vision transformer (width {width}, depth {depth}, patch {patch}, {channels} channels), but "
        "its number of heads, mean and std cannot be known from its tensors"
    )


def _from_config(config: Path, hints: Hints, metadata: Mapping[str, str]) -> Record:
    """timm's config.json: architecture, model_args, num_classes and pretrained_cfg."""
    try:
        if config.stat().st_size > LONGEST_RECORD:
            raise Refused(f"more than {LONGEST_RECORD:,} bytes")
        stated = decode_config(config.read_bytes())
    except (Refused, OSError) as failure:
        raise CheckpointError(
            f"{config} cannot be used: {one_line(failure)}", "it needs what timm writes: architecture, num_classes, ..."
        ) from failure
    about = stated.pretrained_cfg
    arguments = dict(stated.model_args)
    if stated.num_classes is not None:
        arguments.setdefault("num_classes", stated.num_classes)
    missing = [
        name
        for name, value in (
            ("input_size", about.input_size),
            ("mean", hints.mean or about.mean),
            ("std", hints.std or about.std),
        )
        if value is None
    ]
    classes = arguments.get("num_classes", about.num_classes)
    if classes is None:
        missing.append("num_classes")
    if missing:
        raise ArchitectureError(f"{config} does not say {', '.join(missing)}", "add it, or pass --mean and --std")
    assert about.input_size is not None
    if not isinstance(classes, int):
        raise CheckpointError(f"{config} cannot be used: num_classes is no number")
    spec = _input(
        about.input_size,
        hints.mean or about.mean or (),
        hints.std or about.std or (),
        about.interpolation,
        about.crop_pct,
    )
    arguments |= hints.arch_args
    return Record(stated.architecture, arguments, spec, classes, foreign=_short(metadata))


def _from_hints(hints: Hints, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> Record:
    """--arch and what goes with it; mean, std, crop and interpolation are timm's own for that name unless given."""
    arguments = dict(hints.arch_args)
    head = tensors.get("head.weight", tensors.get("head.fc.weight"))
    if "num_classes" not in arguments and head is not None and head.dim():
        arguments["num_classes"] = int(head.shape[0])
    assert hints.arch is not None
    net = models.create(hints.arch, arguments, initialise=False, like=tensors)
    config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    mean, std = hints.mean or config.get("mean"), hints.std or config.get("std")
    if not mean or not std:
        raise ArchitectureError(
            f"{path} does not say how its images were normalised, and timm has no configuration of '{hints.arch}'",
            "pass --mean and --std, one value a channel",
        )
    size = models.input_size_of(net) or tuple(config.get("input_size") or (0, 0, 0))
    channels = arguments.get("in_chans", max(size[0], len(hints.mean or ()), len(hints.std or ())))
    side = arguments.get("img_size") or size[1:]
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    view = (str(config.get("interpolation") or "bicubic"), float(config.get("crop_pct") or 1.0))
    spec = _input((channels, int(height), int(width)), mean, std, *view)
    return Record(hints.arch, arguments, spec, models.classes_of(net), foreign=_short(metadata))


def _input(size: tuple[int, int, int], mean: Sequence[float], std: Sequence[float], *rest: Any) -> InputSpec:
    """One value of mean or std stands for every channel; ArchitectureError when they fit no image in [0, 1]."""
    means, stds = (list(values) * size[0] if len(values) == 1 else list(values) for values in (mean, std))
    try:
        require_pixels(size, means, stds)
    except Refused as refusal:
        raise ArchitectureError(
            str(refusal), "one mean and one positive std a channel, of pixels in [0, 1]"
        ) from refusal
    return InputSpec(size, tuple(means), tuple(stds), *rest)


def _short(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a foreign file says of itself, without texts of a length that no record may hold."""
    return {key: value for key, value in metadata.items() if len(key) + len(value) <= LONGEST_TEXT}


def _read_torch(path: Path) -> dict[str, Tensor]:
    """A state dict from a .pth / .bin file, without unpickling anything but tensors."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # of hostile bytes, the restricted unpickler raises anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({one_line(failure)[:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path} is not a dictionary of tensors")
    tensors = {str(name): value.detach() for name, value in loaded.items()}
    for name, value in tensors.items():
        plain = value.layout == torch.strided and not value.is_quantized and not value.is_meta and not value.is_nested
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"tensor '{one_line(name)}' of {path} is not a plain tensor with values of its own")
    require_numbers(tensors, path.name)
    return tensors


def _from_hub(name: str, hints: Hints) -> Checkpoint:
    """The files of a hub's repository through the same door as a downloaded folder: timm would also unpickle what it holds.

    name: OWNER/REPOSITORY, or OWNER/REPOSITORY@REVISION.
    """
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    try:
        for file in ("config.json", "model.safetensors"):
            path = Path(hf_hub_download(repository, file, revision=revision or None))
    except Exception as failure:  # every network and hub library has its own exceptions
        raise CheckpointError(
            f"cannot fetch '{one_line(name)}' from the hub ({type(failure).__name__}: {one_line(failure)[:120]})",
            "check the name and the network; the repository needs config.json and model.safetensors",
        ) from failure
    return _from_file(path, hints)


def _from_timm(name: str, hints: Hints) -> Checkpoint:
    """Pretrained weights through timm's own loader."""
    if name.startswith("certvit_"):
        raise CheckpointError(f"{name} has no published weights", f"certvit init {name} -o {name}.safetensors")
    try:
        net = timm.create_model(name, pretrained=True, **arch_arguments(hints.arch_args)).eval()
    except Exception as failure:  # every network and hub library has its own exceptions
        raise CheckpointError(
            f"timm cannot fetch '{name}' ({type(failure).__name__}: {one_line(failure)[:120]})",
            "check the name and the network, or download it and give the folder",
        ) from failure
    about: Any = net.pretrained_cfg or {}
    arch = str(about.get("architecture", name)).split(".")[0]
    spec = models.spec_of(net, size=models.input_size_of(net))
    record = Record(arch=arch, arch_args=dict(hints.arch_args), input=spec, classes=models.classes_of(net))
    tensors = {key: value.detach().clone() for key, value in net.state_dict().items()}
    require_numbers(tensors, name)
    return Checkpoint(tensors, record)
