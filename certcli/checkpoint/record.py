"""What a checkpoint says about itself, and its canonical JSON: the one metadata key "certvit"."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from certcli.checkpoint.arch_args import arch_arguments
from certcli.checkpoint.schema import decode_record
from certcli.system.errors import CheckpointError, Refused

KEY = "certvit"
SCHEMA = 1
SEEN = "seen"
"""The parameter of a step that says which images it saw (`certcli.evaluation.seen`)."""


@dataclass(frozen=True)
class InputSpec:
    """Pixel images the network takes: (channels, height, width) in [0, 1], then (x - mean) / std as its first layer."""

    size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0


@dataclass(frozen=True)
class Replacement:
    """One module that was swapped after construction: `kind` names a builder in `certcli.nn.surgery`."""

    path: str
    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One command that made these tensors from the parent's."""

    command: str
    parameters: Mapping[str, Any]
    seed: int
    versions: Mapping[str, str]
    parent: str | None

    @property
    def shown(self) -> dict[str, Any]:
        """The parameters as a person reads them: without the digests of the images that it saw."""
        return {name: value for name, value in self.parameters.items() if name != SEEN}


@dataclass(frozen=True)
class Evidence:
    """A result about the function with this digest (tensors, architecture, surgery, input, classes); else it is stale."""

    command: str
    parameters: Mapping[str, Any]
    result: Mapping[str, Any]
    digest: str


@dataclass(frozen=True)
class Record:
    """Everything needed to rebuild the network from its tensors, and how they came to be."""

    arch: str
    arch_args: Mapping[str, Any]
    input: InputSpec
    classes: int
    class_names: tuple[str, ...] | None = None
    dataset: str | None = None
    surgery: tuple[Replacement, ...] = ()
    lineage: tuple[Step, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, nothing that differs between two equal runs."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def function(self) -> dict[str, Any]:
        """What of the record decides the function that the tensors compute, as JSON that is equal for equal functions."""
        spec = self.input
        return {
            "arch": self.arch,
            "arch_args": arch_arguments(self.arch_args),
            "classes": self.classes,
            "surgery": [{"path": item.path, "kind": item.kind, "args": dict(item.args)} for item in self.surgery],
            "size": list(spec.size),
            "mean": [float(value) for value in spec.mean],
            "std": [float(value) for value in spec.std],
            "interpolation": spec.interpolation,
            "crop_pct": float(spec.crop_pct),
        }

    @staticmethod
    def from_json(text: str) -> "Record":
        """Inverse of `to_json`; CheckpointError when the text is not such a record."""
        try:
            fields = decode_record(text, SCHEMA)
        except Refused as refusal:
            raise CheckpointError(
                f"the checkpoint's certvit record cannot be read: {refusal}",
                "it was edited, or written by another program or version; go back to the checkpoint it came from",
            ) from refusal
        stated = fields.input
        return Record(
            arch=fields.arch,
            arch_args=fields.arch_args,
            input=InputSpec(stated.size, tuple(stated.mean), tuple(stated.std), stated.interpolation, stated.crop_pct),
            classes=fields.classes,
            class_names=None if fields.class_names is None else tuple(fields.class_names),
            dataset=fields.dataset,
            surgery=tuple(Replacement(item.path, item.kind, item.args) for item in fields.surgery),
            lineage=tuple(
                Step(item.command, item.parameters, item.seed, item.versions, item.parent) for item in fields.lineage
            ),
            evidence=tuple(
                Evidence(item.command, item.parameters, item.result, item.digest) for item in fields.evidence
            ),
            foreign=fields.foreign,
        )

    def with_evidence(self, entry: Evidence) -> "Record":
        """The record with `entry` in place of older evidence of the same command and parameters."""
        kept = [old for old in self.evidence if (old.command, old.parameters) != (entry.command, entry.parameters)]
        return replace(self, evidence=(*kept, entry))


def versions() -> dict[str, str]:
    """Versions of what computes, its threads and the processor's instructions: a step's sums may end in other digits with
    others of them."""
    import torch

    found = {"threads": str(torch.get_num_threads()), "cpu": torch.backends.cpu.get_cpu_capability()}
    for package in ("certvit", "torch", "timm", "torchattacks"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
