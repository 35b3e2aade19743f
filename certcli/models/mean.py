"""The mean of trained networks, as one checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import MEAN
from certcli.models.build import OpenCheckpoint, build, with_network
from certcli.nn.layers import FlatHead
from certcli.nn.lipschitz_networks import MOST_MEMBERS, mean_tensors
from certcli.system.errors import ArchitectureError, UsageError, one_line, raise_if


def mean_of(arch: str, members: Sequence[OpenCheckpoint], mirror: bool) -> OpenCheckpoint:
    """Return the mean of these networks' logits, with `mirror` at the mirror image too; its lineage
    tells all their steps.

    Raises:
        UsageError: one is of another architecture, or takes or gives something else than the first.
        ArchitectureError: the architecture has no mean.
    """
    if not isinstance(mirror, bool) or len(members) > MOST_MEMBERS:
        raise UsageError(
            "a mean cannot be built of these",
            f"mirror=true or false, and at most {MOST_MEMBERS} members",
        )
    first = members[0].record
    same = ("input", "classes", "class_names")
    for number, member in enumerate(members, 1):
        member_record = member.record
        raise_if(
            member_record.arch != arch,
            UsageError,
            f"member {number} is of {one_line(member_record.arch)}, not {arch}",
        )
        differs = [name for name in same if getattr(member_record, name) != getattr(first, name)]
        if differs:
            raise UsageError(
                f"member {number} has another {differs[0].replace('_', ' ')} than the first"
            )
        if member_record.surgery or not isinstance(getattr(member.net, "head", None), FlatHead):
            raise ArchitectureError(
                f"member {number}: certvit does not average such networks",
                "certvit_lip_*, sort or mix",
            )
    arguments: dict[str, Any] = {"members": len(members), "mirror": mirror}
    for key in sorted({key for member in members for key in member.record.arch_args}):
        values = [member.record.arch_args.get(key) for member in members]
        if all(value == values[0] for value in values):
            arguments[key] = values[0]
        else:  # an absent one keeps the architecture's default: timm drops None
            arguments |= {
                f"{key}_{i}": value for i, value in enumerate(values, 1) if value is not None
            }
    steps = tuple(step for member in members for step in member.record.lineage)
    dataset = (
        first.dataset if all(member.record.dataset == first.dataset for member in members) else None
    )
    record = replace(first, arch_args=arguments, dataset=dataset, lineage=steps, evidence=())
    tensors = mean_tensors([member.tensors for member in members], mirror)
    digests = {"members": [member.digest for member in members], "mirror": mirror}
    last = Checkpoint(members[-1].tensors, replace(record, arch_args=members[-1].record.arch_args))
    joined = last.derive(tensors, MEAN, digests, arch_args=arguments)
    return with_network(joined, build(joined.record, like=tensors))
