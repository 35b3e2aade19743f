"""What one part of a network could become, placed and taken back by a call: floors and attentions."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.settings import ATTENTIONS
from certcli.adapt.start import LeastSquares
from certcli.adapt.streams import captured
from certcli.nn.attention_weights import AttentionWeights
from certcli.nn.norms import FloorNorm
from certcli.nn.surgery import REPLACEMENTS

QUANTILES = (0.1, 0.3)
"""Floors that are tried: this share of the rows that were seen lies below."""

TRIED = ("scsa", "l2")
"""Attentions that are tried, as `--attention` calls them."""

FLOOR = "floor"
"""The kind of an option that raises a floor."""

_RIDGE = 1e-4


@dataclass(frozen=True)
class Option:
    """kind: FLOOR, or the name of a replacement; family: in words. digits: log10 that the bound gains. error: |z - z0|_F /
    |z0|_F of the logits z with this option alone.
    """

    path: str
    kind: str
    change: str
    digits: float
    place: Callable[[], Any]
    error: float = 0.0
    family: str = ""

    def to_json(self, placed: Mapping[str, "Option"]) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "digits": self.digits,
            "logits_error": self.error,
            "taken": placed.get(self.path) is self,
        }


@dataclass
class Seen:
    """What reached a part: the deviations of a norm's rows, or the calls of an attention and what came out."""

    deviations: list[Tensor] = field(default_factory=list)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)


def watched(
    run: Callable[[Tensor], Tensor], rows: Tensor, parts: Mapping[str, nn.Module], batch_size: int
) -> tuple[Tensor, dict[str, Seen]]:
    """(run(rows), what reached each part that was called meanwhile)."""
    found: dict[str, Seen] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = found.setdefault(path, Seen())
        if isinstance(module, FloorNorm):
            seen.deviations.append(args[0].double().var(dim=-1, correction=0).sqrt().flatten())
        else:
            seen.calls.append((args, kwargs, output))

    handles = [part.register_forward_hook(partial(note, path), with_kwargs=True) for path, part in parts.items()]
    try:
        return torch.cat([run(part) for part in rows.split(batch_size)]), found
    finally:
        for handle in handles:
            handle.remove()


def floor_options(path: str, norm: FloorNorm, seen: Seen) -> Iterator[Option]:
    """Floors at quantiles of the deviations, where these lie above the floor that is there."""
    order, now = torch.cat(seen.deviations).sort().values, float(norm.floor)
    for share in QUANTILES:
        floor = float(order[int(share * (len(order) - 1))])
        if floor > now:
            name = f"floor above {100 * share:.0f} % of rows"
            yield Option(
                path, FLOOR, f"floor {floor:.3g}", math.log10(floor / now), partial(norm.floor.fill_, floor), 0.0, name
            )


def made(attention: str, old: nn.Module) -> Any:
    """The attention of that name for the place of `old`, its weights yet to come."""
    kind = ATTENTIONS[attention]
    assert kind is not None
    return REPLACEMENTS.load(kind)(old).requires_grad_(False).eval().to(AttentionWeights.of(old).query)


def fitted(attention: str, old: nn.Module, seen: Seen) -> Any:
    """An attention of smaller constant, its output map fitted to what the old one gave on the same inputs."""
    weights, new = AttentionWeights.of(old), made(attention, old)
    new.start(weights)
    solver = LeastSquares(new.proj.in_features, new.proj.out_features, weights.query.device, new.proj.bias is not None)
    for args, kwargs, wanted in seen.calls:
        mixed = captured(new.proj, partial(new, *args, **kwargs))
        solver.add(mixed.flatten(0, -2), wanted.flatten(0, -2))
    # as with kept attentions: directions that the images hardly excite stay as the closed form has them
    solver.solve_into(new.proj, _RIDGE, keep=True)
    return new


def attention_option(path: str, attention: str, place: Callable[[Any], Any], new: nn.Module) -> Option:
    """place: puts an attention where this one shall be."""
    kind = ATTENTIONS[attention]
    assert kind is not None
    return Option(path, kind, type(new).__name__, 1.0, partial(place, new), 0.0, f"{attention} attention")
