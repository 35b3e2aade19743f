"""What the user states about a foreign file, and what was assumed in reading it, each with its origin.

An adapter of PEFT is merged into the weights of its base: W' = W + s B A with s = alpha / r, or
alpha / sqrt(r) where the ranks are stabilised; of a convolution, B is a 1 x 1 convolution behind A.
DoRA gives each row of W' the length m that it learned: m W' / |W'|. Computed in float64, and rounded
to the type of the base.

Sources: Hu et al. 2021, LoRA; Kalajdzievski 2023, rsLoRA; Liu et al. 2024, DoRA; PEFT's files.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

from certcli.checkpoint.config_fields import LOGITS_ALONE
from certcli.checkpoint.file import read_tensors, tensors_digest
from certcli.checkpoint.record import Record, arch_arguments
from certcli.checkpoint.schema import decode_json, require_statistics
from certcli.system.errors import CheckpointError, Refused, UsageError, one_line, raise_if
from certcli.system.reading import is_absent, read_bounded

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_HARMLESS = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
        "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_bias", "lora_dropout",
        "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
        "target_modules", "task_type",
    )
)  # fmt: skip
"""Fields that say how the adapter was trained, or what its tensors say as well."""
_Rank = Annotated[int, Meta(ge=1, le=2**20)]
_Alpha = Annotated[float, Meta(ge=-1e9, le=1e9)]


class AdapterConfig(Struct):
    """What decides the merged weights. Other initial weights than these change the base itself."""

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    init_lora_weights: bool | Literal["gaussian"] | None = True


@dataclass(frozen=True)
class Adapter:
    """An adapter's config and tensors; digest: the sha256 of both."""

    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    digest: str

    def merged(self, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the base with the adapter in them.

        Raises:
            CheckpointError: a tensor of the adapter does not belong to this base.
        """
        changed: dict[str, Tensor] = {}
        unread = dict(self.tensors)
        for key in self.tensors:
            if key.endswith(".lora_A.weight"):
                self._merge_layer(key.removesuffix(".lora_A.weight"), base, unread, changed)
        for key, tensor in unread.items():
            plain = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", key)
            _set_once(changed, base, plain, tensor)
        return {**base, **changed}

    def _merge_layer(
        self,
        layer: str,
        base: Mapping[str, Tensor],
        unread: dict[str, Tensor],
        changed: dict[str, Tensor],
    ) -> None:
        """Put the weight and the bias of a layer into `changed`, and take its tensors of `unread`."""
        path = layer.removeprefix("base_model.model.")
        a = unread.pop(f"{layer}.lora_A.weight").double()
        raise_if(
            f"{layer}.lora_B.weight" not in unread,
            CheckpointError,
            f"'{one_line(path)[:80]}' has lora_A and no lora_B",
        )
        b = unread.pop(f"{layer}.lora_B.weight").double()
        lengths = [
            unread.pop(key)
            for key in (f"{layer}.lora_magnitude_vector", f"{layer}.lora_magnitude_vector.weight")
            if key in unread
        ]
        rank = _by_pattern(self.config.rank_pattern, path, self.config.r)
        name = _base_name(f"{layer}.weight", base)
        fits = 2 <= a.dim() == b.dim() == base[name].dim()
        raise_if(
            not fits or not len(a) == b.flatten(1).shape[1] == rank,
            CheckpointError,
            f"'{one_line(path)[:80]}' is of another rank than {CONFIG} says",
        )
        alpha = _by_pattern(self.config.alpha_pattern, path, self.config.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self.config.use_rslora else rank)
        product = torch.einsum("or,r...->o...", b.flatten(1), a)
        change = scale * (product.T if self.config.fan_in_fan_out else product)
        weight = self._with_lengths(name, _with_change(name, base, change), lengths)
        _set_once(changed, base, name, weight)
        if f"{layer}.lora_B.bias" in unread:
            bias = _base_name(f"{layer}.bias", base)
            change = scale * unread.pop(f"{layer}.lora_B.bias").double()
            _set_once(changed, base, bias, _with_change(bias, base, change))

    def _with_lengths(self, name: str, weight: Tensor, lengths: list[Tensor]) -> Tensor:
        """Return the weight, with rows (o, i) of the lengths (o,) that DoRA learned."""
        raise_if(
            self.config.use_dora != bool(lengths),
            CheckpointError,
            f"'{name}': DoRA's lengths are not there as {CONFIG} says",
        )
        if not lengths:
            return weight
        rows = weight.flatten(1).norm(dim=1)
        turned = self.config.fan_in_fan_out
        raise_if(
            weight.dim() != 2 or turned or lengths[0].shape != rows.shape or not rows.all(),
            CheckpointError,
            f"'{name}': DoRA is merged into the rows of linear layers alone",
        )
        return (lengths[0].double() / rows)[:, None] * weight


def read_adapter(folder: Path) -> Adapter:
    """Read a folder that PEFT saved.

    Raises:
        CheckpointError: a file is missing, damaged, or says what nothing here reads.
    """
    raise_if(
        is_absent(folder / WEIGHTS) and not is_absent(folder / "adapter_model.bin"),
        CheckpointError,
        f"{folder} has adapter_model.bin, which runs code as it is read",
        "in a place that you trust: model.save_pretrained(FOLDER) writes safetensors",
    )
    try:
        text = read_bounded(folder / CONFIG)
        config = decode_json(text, AdapterConfig)
        about = decode_json(text, dict[str, Any])
        for name in sorted(about.keys() - set(AdapterConfig.__struct_fields__) - _HARMLESS):
            raise_if(about[name], Refused, f"'{one_line(name)[:80]}' has no reader")
        for key in {**(config.rank_pattern or {}), **(config.alpha_pattern or {})}:
            raise_if(
                re.fullmatch(r"[\w.]+", key) is None,
                Refused,
                f"the pattern '{one_line(key)[:80]}' is no name",
            )
    except (OSError, Refused) as failure:
        raise CheckpointError(
            f"{folder / CONFIG}: {one_line(failure)}", "a folder that PEFT saved, with LoRA or DoRA"
        ) from failure
    tensors, _ = read_tensors(folder / WEIGHTS)
    digest = hashlib.sha256(text + tensors_digest(tensors).encode()).hexdigest()
    return Adapter(config, tensors, digest)


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, usual: Any) -> Any:
    """Return the value of the first name that ends the path, as PEFT finds it."""
    values = (
        value for name, value in (patterns or {}).items() if re.match(rf"(.*\.)?({name})$", path)
    )
    return next(values, usual)


def _base_name(key: str, base: Mapping[str, Tensor]) -> str:
    """Return the name that a tensor of the adapter has in the base; CheckpointError without one."""
    path = key.removeprefix("base_model.model.")
    name = path if path in base else path.removeprefix("model.")
    raise_if(
        name not in base,
        CheckpointError,
        f"the adapter changes '{one_line(path)[:80]}', which the base does not have",
        "the base that the adapter was trained on, with its own names",
    )
    return name


def _with_change(name: str, base: Mapping[str, Tensor], change: Tensor) -> Tensor:
    weight = base[name].double()
    sizes = f"{tuple(change.shape)} to {tuple(weight.shape)}"
    message = f"the adapter adds {sizes} at '{name}'"
    raise_if(weight.shape != change.shape, CheckpointError, message, "it is of another base")
    return weight + change


def _set_once(
    changed: dict[str, Tensor], base: Mapping[str, Tensor], key: str, tensor: Tensor
) -> None:
    """Set a tensor of the base once, in its type."""
    name = _base_name(key, base)
    why = "twice" if name in changed else f"to the shape {tuple(tensor.shape)}"
    raise_if(
        name in changed or tensor.shape != base[name].shape,
        CheckpointError,
        f"the adapter sets '{name}' {why}, of {tuple(base[name].shape)} in the base",
        "a base whose layers have the sizes of the adapter's: its classes, for a new head",
    )
    changed[name] = tensor.to(base[name].dtype)


KEY = "assumed"
"""The key of the facts in a record's `foreign`."""


@dataclass(frozen=True)
class Fact:
    """A network's property, its value, and where that is from (an option, config.json, ...)."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Reading:
    """The facts that reading a file rests on, and sentences that cast doubt on it."""

    facts: tuple[Fact, ...]
    doubts: tuple[str, ...] = ()

    @property
    def decides(self) -> bool:
        """Tell whether the network decides by its largest logit, as far as its file says."""
        return not any(doubt.endswith(LOGITS_ALONE) for doubt in self.doubts)

    def line(self) -> str:
        """Return all facts in one line, those of one origin together."""
        groups: list[tuple[str, list[str]]] = []
        for fact in self.facts:
            if not groups or groups[-1][0] != fact.origin:
                groups.append((fact.origin, []))
            groups[-1][1].append(
                fact.value if fact.name == "architecture" else f"{fact.name} {fact.value}"
            )
        return "network: " + "; ".join(
            f"{', '.join(values)} ({origin})" for origin, values in groups
        )

    def to_json(self) -> dict[str, Any]:
        facts = {fact.name: {"value": fact.value, "from": fact.origin} for fact in self.facts}
        return {**facts, "doubts": list(self.doubts)}

    def with_facts(self, facts: Sequence[Fact]) -> "Reading":
        return replace(self, facts=(*self.facts, *facts))

    def noted(self, record: Record) -> Record:
        """Return the record of a foreign file with these facts in `foreign`."""
        return replace(record, foreign={**record.foreign, KEY: self.line()})


NOTHING_ASSUMED = Reading(())


def overruled(options: Iterable[tuple[str, Any, Any]], where: str) -> list[str]:
    """Return a sentence for each option that overrules what a file says.

    Args:
        options: The option, its value, and what the file says; None: nothing.
    """
    return [
        f"{option} says {_value_text(value)}, {where} {_value_text(said)}: the option is taken"
        for option, value, said in options
        if value is not None and said is not None and not _equal_values(value, said)
    ]


def _equal_values(value: Any, said: Any) -> bool:
    """Tell whether two values are equal; one number stands for every channel."""
    if isinstance(value, (list, tuple)) and isinstance(said, (list, tuple)):
        both = [*value, *said]
        return list(value) == list(said) or all(each == both[0] for each in both)
    return bool(value == said)


def _value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@dataclass(frozen=True)
class Hints:
    """The architecture, its arguments and the pixel statistics of a foreign file.

    Attributes:
        as_stated: Believe these and config.json where the tensors fit another network too.
        weights: "raw", "ema" or a key: the weights to read of a file that holds several.
        features: Open a network without a classifier, which ends in features.
        image_size: Side of the images, and of the pixels in which radii are measured, where it is
            not the network's own: its first layer resizes them. It goes with every file.
        adapter: To be merged into the file's weights, by the names that it has.
        logits: Open a network that does not decide by its largest logit: only the logits count.
    """

    arch: str | None = None
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    as_stated: bool = False
    weights: str | None = None
    features: bool = False
    image_size: int | None = None
    adapter: Adapter | None = None
    logits: bool = False

    def __post_init__(self) -> None:
        try:
            arch_arguments(self.arch_args)
            require_statistics(self.mean or (), self.std or ())
        except Refused as refusal:
            raise UsageError(
                str(refusal), "see --arch-arg, --mean and --std; pixels are in [0, 1]"
            ) from refusal

    def adapted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the adapter in them, where there is one."""
        return tensors if self.adapter is None else self.adapter.merged(tensors)

    @property
    def given(self) -> list[str]:
        """Return the options that are given, as spelled on the command line."""
        named = {
            "--arch": self.arch,
            "--mean": self.mean,
            "--std": self.std,
            "--weights": self.weights,
        }
        arguments = [f"--arch-arg {key}" for key in self.arch_args]
        return [option for option, value in named.items() if value] + arguments
