"""timm's config.json: every field is used, known to be harmless, or named in a doubt.

timm wrote the statistics of pixels beside `architecture` until 2022, and in `pretrained_cfg` since.
Both forms are read as timm reads them (timm/models/_hub.py).
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from certcli.checkpoint.record import arch_arguments
from certcli.checkpoint.schema import (
    MOST_CLASSES,
    Channels,
    Classes,
    CropMode,
    CropPct,
    Interpolation,
    Json,
    Name,
    PerChannel,
    Side,
    convert_json,
    decode_json,
)
from certcli.system.errors import Refused, one_line, raise_if

LOGITS_ALONE = "; the bound of its logits holds, and nothing else is judged"
"""The end of a doubt about such a network, where only its logits are asked for."""
DEFAULT_CROP = 0.875
"""timm's share of an image where a config states none."""

_NESTED = "pretrained_cfg"
_LABELS = ("label_names", "labels", "id2label")
"""Fields that name the classes, the most telling first."""
_TOP = frozenset(
    ("architecture", "num_classes", "num_features", "global_pool", "model_args", _NESTED, *_LABELS)
)
_PIXELS = frozenset(
    (
        *("input_size", "fixed_input_size", "mean", "std", "interpolation", "crop_pct"),
        *("crop_mode", "num_classes", "label_offset"),
    )
)
_HARMLESS = frozenset(
    (
        "problem_type",  # judged by other_problem
        # where the weights came from
        *("url", "file", "hf_hub", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load"),
        # what was written about them
        *("license", "description", "origin_url", "paper_name", "paper_ids", "notes"),
        *("label_descriptions", "label2id", "_name_or_path"),
        # other sizes that were tried, and names of layers for adapting them
        *("test_input_size", "min_input_size", "test_crop_pct", "pool_size", "test_pool_size"),
        *("first_conv", "classifier"),
        # of transformers, which wraps timm's networks
        *("architectures", "transformers_version", "torch_dtype", "dtype", "initializer_range"),
        *("do_pooling", "return_dict", "output_hidden_states", "output_attentions"),
    )
)
"""Fields that change neither the pixels nor the function of the weights that lie beside them."""


class PretrainedFields(Struct):
    """The fields of `pretrained_cfg` about the input; files and URLs are not read."""

    input_size: tuple[Channels, Side, Side] | None = None
    fixed_input_size: bool | None = None
    mean: PerChannel | None = None
    std: PerChannel | None = None
    interpolation: Interpolation | None = None
    crop_pct: CropPct | None = None
    crop_mode: CropMode | None = None
    num_classes: Classes | None = None
    label_offset: Annotated[int, Meta(ge=-MOST_CLASSES, le=MOST_CLASSES)] | None = None

    @property
    def states_images(self) -> bool:
        """Tell whether it says anything of how images become the input."""
        statistics = (self.input_size, self.mean, self.std, self.interpolation, self.crop_pct)
        return any(value is not None for value in (*statistics, self.crop_mode))


class ConfigFields(Struct):
    """The fields of timm's config.json that are read.

    Attributes:
        doubts: A sentence for each field that certvit neither uses nor knows.
    """

    architecture: Name
    num_classes: Classes | None = None
    num_features: Any = None
    global_pool: Any = None
    model_args: Json = {}
    pretrained_cfg: PretrainedFields = msgspec.field(default_factory=PretrainedFields)
    class_names: tuple[str, ...] | None = None
    doubts: list[str] = []


def decode_config(text: str | bytes, decides: bool = True) -> ConfigFields:
    """Decode timm's config.json, or raise Refused.

    Args:
        decides: refuse a network that does not decide by its largest logit.
    """
    raw = decode_json(text, Json)
    problem = other_problem(raw)
    raise_if(problem is not None and decides, Refused, problem or "")
    flat = not isinstance(raw.get(_NESTED), dict)
    raise_if(flat and raw.get(_NESTED) is not None, Refused, f"{_NESTED} is no dictionary")
    about: Json = raw if flat else raw[_NESTED]
    top = {key: value for key, value in raw.items() if key in _TOP and value is not None}
    top[_NESTED] = {
        key: value
        for key, value in about.items()
        if key in _PIXELS and value is not None and not (flat and key in _TOP)
    }
    labels = _labels(raw) if flat else (_labels(raw) or _labels(about))
    config = convert_json(
        {key: value for key, value in top.items() if key not in _LABELS}, ConfigFields
    )
    arch_arguments(config.model_args)
    raise_if(
        config.pretrained_cfg.label_offset,
        Refused,
        f"label_offset is {config.pretrained_cfg.label_offset}: timm would drop rows of the classifier",
    )
    where = "config.json"
    wrapped = ("model_type",) if raw.get("model_type") == "timm_wrapper" else ()
    config.doubts = [
        *([] if problem is None else [problem + LOGITS_ALONE]),
        *unknown_in(raw, {*_HARMLESS, *_TOP, *wrapped, *(_PIXELS if flat else ())}, where),
        *(
            []
            if flat
            else unknown_in(about, {*_HARMLESS, *_PIXELS, *_LABELS, "architecture"}, where)
        ),
    ]
    # timm takes the outer one
    inner = about.get("architecture")
    if isinstance(inner, str) and inner.split(".")[0] != config.architecture.split(".")[0]:
        config.doubts.append(
            f"config.json names two architectures, {config.architecture} and {one_line(inner)[:80]}: the first is taken"
        )
    names = class_names_in(labels)
    classes = (
        config.pretrained_cfg.num_classes if config.num_classes is None else config.num_classes
    )
    if names is not None and (classes is None or len(names) == classes):
        config.class_names = plain_names(names)
    elif labels is not None:
        config.doubts.append("config.json names its classes in a way that certvit does not read")
    return config


def unknown_in(
    fields: Mapping[str, Any], used: Iterable[str], where: str, off: tuple[Any, ...] = (None,)
) -> list[str]:
    """Return a sentence about the fields that are neither used nor harmless; off: values of none."""
    names = {*used}
    strange = sorted(key for key, value in fields.items() if key not in names and value not in off)
    shown = one_line(", ".join(strange))[:160]
    return [f"{where} says {shown}, which certvit does not know and leaves out"] if strange else []


def other_problem(fields: Mapping[str, Any]) -> str | None:
    """Return why a network is not judged by its largest logit, None where it is."""
    problem = fields.get("problem_type")
    if problem in (None, "", "single_label_classification"):
        return None
    return (
        f"its problem_type is {one_line(str(problem))[:80]}: such a network does not decide by its largest logit, and every "
        "accuracy, attack and certificate here is of this decision"
    )


def _labels(fields: Mapping[str, Any]) -> Any:
    return next((fields[key] for key in _LABELS if fields.get(key) is not None), None)


def class_names_in(labels: Any) -> tuple[str, ...] | None:
    """Return names by number: of a list, {name: number} or {number: name}; else None."""
    if isinstance(labels, list):
        names = labels
    elif isinstance(labels, dict) and all(type(value) is int for value in labels.values()):
        names = sorted(labels, key=labels.__getitem__)
        if [labels[name] for name in names] != list(range(len(names))):
            return None
    elif isinstance(labels, dict):
        names = [labels.get(str(number)) for number in range(len(labels))]
    else:
        return None
    is_text = all(isinstance(name, str) for name in names)
    return tuple(names) if names and is_text and len(names) <= MOST_CLASSES else None


def plain_names(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return distinct names that could name folders; None: placeholders, numbers, other texts."""
    plain = all(name.isprintable() and 0 < len(name) <= 128 and "/" not in name for name in names)
    placeholders = all(name.startswith("LABEL_") or name.isdigit() for name in names)
    return names if plain and not placeholders and len(set(names)) == len(names) else None
