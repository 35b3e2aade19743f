"""The mean of several networks of one kind, and of each at the mirror image."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.nn.heads import FlatHead
from certcli.system.errors import ArchitectureError

MOST_MEMBERS = 32


class MeanNetwork(nn.Module):
    """x -> the mean over members f and views v of f(v(x)), v the image and with `mirror` its mirror
    image: -> (b, k).

    The members' features stand side by side, and one head maps them all. A mirror image is a
    permutation of pixels: where the features have one constant, each margin's is the root mean
    square of the members' (docs/bounds.md, section 11.5).
    """

    def __init__(self, members: Sequence[nn.Module], mirror: bool) -> None:
        super().__init__()
        widths = []
        for member in members:
            head = member.head
            assert isinstance(head, FlatHead)
            widths.append(head.out.in_features)
            self.num_classes = head.out.out_features
            head.out = nn.Identity()  # type: ignore[assignment]
        self.mirror = mirror
        self.members = nn.ModuleList(members)
        self.head = nn.Linear(sum(widths) * (1 + mirror), self.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        views = [x, x.flip(3)] if self.mirror else [x]
        return self.head(
            torch.cat([member(view) for view in views for member in self.members], dim=1)
        )


def build_members(make: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """Build make(**arguments), or the mean of `members`; `head_2`: the second one's `head`."""
    count = arguments.pop("members", None)
    mirror = arguments.pop("mirror", False)
    if not isinstance(mirror, bool):
        raise ArchitectureError(f"mirror cannot be {mirror!r}", "true or false")
    if count is None and not mirror:
        return make(**arguments)
    count = 1 if count is None else count
    if type(count) is not int or not 1 <= count <= MOST_MEMBERS:
        raise ArchitectureError(
            f"members cannot be {count!r}", f"a number from 1 to {MOST_MEMBERS}"
        )
    own_arguments = [
        {key: value for key, value in arguments.items() if key.endswith(f"_{i}")}
        for i in range(1, count + 1)
    ]
    shared = {
        key: value
        for key, value in arguments.items()
        if not any(key in part for part in own_arguments)
    }
    each = [
        shared | {key.rpartition("_")[0]: value for key, value in part.items()}
        for part in own_arguments
    ]
    return MeanNetwork([make(**part) for part in each], mirror)


def mean_tensors(members: Sequence[Mapping[str, Tensor]], mirror: bool) -> dict[str, Tensor]:
    """Return the tensors of the `MeanNetwork` of networks with these tensors."""
    mean: dict[str, Tensor] = {}
    for number, tensors in enumerate(members):
        mean |= {
            f"members.{number}.{name}": t
            for name, t in tensors.items()
            if not name.startswith("head.out.")
        }
    views = 1 + mirror
    weights = torch.cat([tensors["head.out.weight"] for tensors in members], dim=1) / (
        len(members) * views
    )
    # one by one, since an order of sums that depends on the processor would be another file there
    bias = sum((tensors["head.out.bias"] for tensors in members), torch.zeros(())) / len(members)
    return mean | {"head.weight": weights.repeat(1, views), "head.bias": bias}
