"""Checkpoints that certvit did not write: a downloaded file, a folder from the hub, a timm or hf-hub name.

Nothing is guessed. Heads, mean or standard deviation cannot be read off tensors; what is missing is named.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import certcli.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
import timm

from certcli import models
from certcli.checkpoint import Checkpoint, read_tensors, require_finite
from certcli.errors import ArchitectureError, CheckpointError
from certcli.provenance import KEY, InputSpec, Record

_TORCH_SUFFIXES = (".pth", ".pt", ".bin")


@dataclass(frozen=True)
class Hints:
    """What the user says about a foreign file: --arch, --arch-arg, --mean, --std."""

    arch: str | None = None
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def given(self) -> bool:
        return bool(self.arch or self.arch_args or self.mean or self.std)


def open_checkpoint(source: str, hints: Hints | None = None) -> Checkpoint:
    """A checkpoint from a file, a folder with model.safetensors, a timm name or an `hf-hub:` name."""
    hints = hints or Hints()
    path = Path(source)
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise CheckpointError(f"folder {path} holds no model.safetensors", "name the file itself")
        return _from_file(path / "model.safetensors", hints)
    if path.is_file():
        return _from_file(path, hints)
    if source.startswith(("hf-hub:", "hf_hub:")) or timm.is_model(source):
        return _from_timm(source, hints)
    raise CheckpointError(
        f"no file {source}", "give a .safetensors file, a folder with model.safetensors, a timm name, or hf-hub:NAME"
    )


def _from_file(path: Path, hints: Hints) -> Checkpoint:
    metadata: dict[str, str] = {}
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
    models.load_weights(models.build(record), tensors)  # refuse now what would not load later
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
        stated = json.loads(config.read_text())
        arch = str(stated["architecture"])
        about = {**stated.get("pretrained_cfg", {})}
        arguments = {**stated.get("model_args", {})}
        if "num_classes" in stated:
            arguments.setdefault("num_classes", int(stated["num_classes"]))
        size = about.get("input_size")
        mean = hints.mean or tuple(about.get("mean") or ())
        std = hints.std or tuple(about.get("std") or ())
        if not size or not mean or not std:
            missing = [n for n, v in (("input_size", size), ("mean", mean), ("std", std)) if not v]
            raise ArchitectureError(f"{config} does not say {', '.join(missing)}", "add it, or pass --mean and --std")
        spec = InputSpec(
            size=(int(size[0]), int(size[1]), int(size[2])),
            mean=tuple(float(value) for value in mean),
            std=tuple(float(value) for value in std),
            interpolation=str(about.get("interpolation", "bicubic")),
            crop_pct=float(about.get("crop_pct", 1.0)),
        )
        classes = int(arguments.get("num_classes") or about["num_classes"])
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise ArchitectureError(
            f"{config} is not timm's config.json ({type(failure).__name__}: {failure})",
            "it needs architecture, num_classes",
        ) from failure
    arguments |= hints.arch_args
    _require_positive(spec)
    return Record(arch=arch, arch_args=arguments, input=spec, classes=classes, foreign=dict(metadata))


def _from_hints(hints: Hints, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> Record:
    if hints.mean is None or hints.std is None:
        raise ArchitectureError(
            f"{path} does not say how its images were normalised", "pass --mean and --std, one value a channel"
        )
    arguments = dict(hints.arch_args)
    head = tensors.get("head.weight", tensors.get("head.fc.weight"))
    if "num_classes" not in arguments and head is not None:
        arguments["num_classes"] = int(head.shape[0])
    assert hints.arch is not None
    net = models.create(hints.arch, arguments, initialise=False)
    config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    channels = len(hints.mean)
    side = arguments.get("img_size") or tuple(config.get("input_size", (0, 0, 0)))[1:]
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    spec = InputSpec((channels, int(height), int(width)), hints.mean, hints.std)
    _require_positive(spec)
    return Record(
        arch=hints.arch,
        arch_args=arguments,
        input=spec,
        classes=int(getattr(net, "num_classes", 0)),
        foreign=dict(metadata),
    )


def _require_positive(spec: InputSpec) -> None:
    if not len(spec.mean) == len(spec.std) == spec.size[0] or min(spec.std) <= 0 or min(spec.size) < 1:
        raise ArchitectureError(
            f"mean {spec.mean} and std {spec.std} do not fit {spec.size[0]} input channels",
            "one mean and one positive std a channel",
        )


def _read_torch(path: Path) -> dict[str, Tensor]:
    """A state dict from a .pth / .bin file, without unpickling anything but tensors."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as failure:
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({(str(failure).splitlines() or [''])[0][:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path} is not a dictionary of tensors")
    tensors = {str(name): value for name, value in loaded.items()}
    require_finite(tensors, path.name)
    return tensors


def _from_timm(name: str, hints: Hints) -> Checkpoint:
    """Pretrained weights through timm's own loader."""
    if name.startswith("certvit_"):
        raise CheckpointError(f"{name} has no published weights", f"certvit init {name} -o {name}.safetensors")
    try:
        net = timm.create_model(name, pretrained=True, **hints.arch_args).eval()
    except Exception as failure:  # every network and hub library has its own exceptions
        raise CheckpointError(
            f"timm cannot fetch '{name}' ({type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:120]})",
            "check the name and the network, or download it and give the folder",
        ) from failure
    about: Any = net.pretrained_cfg or {}
    arch = str(about.get("architecture", name)).split(".")[0]
    spec = models.spec_of(net)
    record = Record(arch=arch, arch_args=dict(hints.arch_args), input=spec, classes=models.classes_of(net))
    tensors = {key: value.detach().clone() for key, value in net.state_dict().items()}
    require_finite(tensors, name)
    return Checkpoint(tensors, record)
