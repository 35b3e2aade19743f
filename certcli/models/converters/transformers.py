"""Networks of Hugging Face's transformers as timm's: ViT, DeiT, ViT-MSN, BEiT, DINOv2, Swin and
ConvNeXt, classifiers or not.

`config.json` gives the architecture and `preprocessor_config.json` the pixels.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from certcli.checkpoint.config_fields import class_names_in, plain_names
from certcli.checkpoint.record import Record
from certcli.checkpoint.schema import Json
from certcli.models.converters.base import (
    COMPUTED,
    Converted,
    parted,
    renamed,
    with_joined_qkv,
)
from certcli.models.converters.transformers_config import (
    CONFIG,
    PIXELS,
    Named,
    decoded_config,
    input_spec,
    unknown_fields,
)
from certcli.models.converters.transformers_families import FAMILIES
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import is_absent

_POOLER = "pooler.dense.weight"
_UNUSED = r"^mask_token$|^pooler\.dense\."
"""Tensors that neither a classifier nor the features read."""


def is_transformers(tensors: Mapping[str, Tensor]) -> bool:
    """Whether names are of transformers' vision models: all begin with `embeddings`."""
    return any(
        re.match(r"(\w+\.)?embeddings\.(patch_embeddings|cls_token)", name) for name in tensors
    )


def describes(path: Path) -> bool:
    """Tell whether the config beside a file is transformers': it names no architecture of timm."""
    try:
        raw = decoded_config(path.parent / CONFIG, Json)
    except CheckpointError:
        return False
    names = {key for key in ("model_type", "architectures") if raw.get(key)}
    return bool(names) and "architecture" not in raw and raw.get("model_type") != "timm_wrapper"


def convert_transformers(tensors: Mapping[str, Tensor], path: Path, hints: Hints) -> Converted:
    """Return a checkpoint of transformers in timm's terms, from the two configs beside it.

    Raises:
        ArchitectureError: the model is none of `FAMILIES`, or a config leaves its function open.
    """
    config_file = path.parent / CONFIG
    raise_if(
        is_absent(config_file),
        ArchitectureError,
        f"{path} has the names of transformers, and no {CONFIG} beside it says its heads and eps",
        f"put its {CONFIG} and {PIXELS} beside it",
    )
    about = decoded_config(config_file, Named)
    architecture = about.architectures[0] if about.architectures else ""
    family = FAMILIES.get(about.model_type)
    if family is None or architecture not in family.classes:
        raise ArchitectureError(
            f"{config_file} describes transformers' {one_line(architecture or about.model_type)} (model_type "
            f"{one_line(about.model_type)}), which certvit does not convert",
            f"it converts {', '.join(name for each in FAMILIES.values() for name in each.classes)}",
        )
    config = decoded_config(config_file, family.config)
    try:
        network = family.describe(config, architecture)
    except Refused as refusal:
        raise ArchitectureError(f"{config_file}: {refusal}") from refusal
    spec, origins, doubts = input_spec(config, path.parent / PIXELS, hints)
    doubts += unknown_fields(config_file, family.config, not hints.logits)
    network_tensors = renamed(tensors, family.names)
    features = None
    if architecture == family.headless:
        features = family.features + (
            "; pooler_output comes after it" if _POOLER in network_tensors else ""
        )
    network_tensors, computed = parted(parted(network_tensors, _UNUSED)[0], COMPUTED)
    network_tensors = family.finish(with_joined_qkv(network_tensors))
    record = Record(
        arch=network.arch,
        arch_args={**network.arguments, **({} if features is None else {"num_classes": 0})},
        input=spec,
        classes=config.classes if features is None else 0,
        class_names=_config_class_names(config.id2label) if features is None else None,
        surgery=network.surgery,
    )
    origins = {**dict.fromkeys((*network.arguments, "architecture"), CONFIG), **origins}
    if ignored := [option for option in hints.given if option.startswith("--arch")]:
        doubts.append(f"{CONFIG} describes the architecture: {', '.join(ignored)} ignored")
    return Converted(
        network_tensors,
        record,
        f"transformers' {architecture}",
        origins,
        tuple(doubts),
        computed,
        features,
    )


def _config_class_names(labels: Mapping[str, str] | None) -> tuple[str, ...] | None:
    """Return the classes by names that folders could have, in the order of their numbers."""
    names = class_names_in(dict(labels or {}))
    return None if names is None else plain_names(names)
