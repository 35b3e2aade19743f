"""Candidate changes of one part, each placed by a call: a higher floor, or a smoother attention."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.settings import ATTENTIONS
from certcli.adapt.start import LeastSquares, deviations
from certcli.adapt.streams import capture_input
from certcli.nn.attention_weights import AttentionWeights
from certcli.nn.norms import FloorNorm
from certcli.nn.surgery import REPLACEMENTS

QUANTILES = (0.1, 0.3)
"""Floors are tried at these quantiles of the deviations."""

TRIAL_ATTENTIONS = ("scsa", "l2")
"""The values of `--attention` that are tried."""

FLOOR = "floor"
"""The kind of a candidate that raises a floor."""

_RIDGE = 1e-4


@dataclass(frozen=True)
class Candidate:
    """One possible change of the part at `path`.

    Args:
        kind: FLOOR, or the name of a replacement; `family` names it in words.
        digits: log10 of the factor by which the network's bound falls.
        place: makes the change.
        error: |z - z0|_F / |z0|_F of the logits z with this change alone.
        floor: the new floor of a norm.
    """

    path: str
    kind: str
    change: str
    digits: float
    place: Callable[[], Any]
    error: float = 0.0
    family: str = ""
    floor: float = 0.0

    def to_json(self, placed: Mapping[str, "Candidate"]) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "digits": self.digits,
            "logits_error": self.error,
            "taken": placed.get(self.path) is self,
        }


@dataclass
class PartInputs:
    """The deviations of the rows at a norm, or (args, kwargs, output) of an attention's calls."""

    deviations: list[Tensor] = field(default_factory=list)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)


def record_inputs(
    run: Callable[[Tensor], Tensor], rows: Tensor, parts: Mapping[str, nn.Module], batch_size: int
) -> tuple[Tensor, dict[str, PartInputs]]:
    """Return run(rows), and the inputs of each part that it called."""
    inputs_of: dict[str, PartInputs] = {}

    def record(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        inputs = inputs_of.setdefault(path, PartInputs())
        if isinstance(module, FloorNorm):
            inputs.deviations.append(deviations(args[0]))
        else:
            inputs.calls.append((args, kwargs, output))

    with ExitStack() as hooks:
        for path, part in parts.items():
            hooks.enter_context(part.register_forward_hook(partial(record, path), with_kwargs=True))
        return torch.cat([run(part) for part in rows.split(batch_size)]), inputs_of


def floor_candidates(path: str, norm: FloorNorm, inputs: PartInputs) -> Iterator[Candidate]:
    """Yield floors at quantiles of the deviations that lie above the present floor."""
    order = torch.cat(inputs.deviations).sort().values
    present = float(norm.floor)
    for share in QUANTILES:
        floor = float(order[int(share * (len(order) - 1))])
        if floor > present:
            family = f"floor above {100 * share:.0f} % of rows"
            digits = math.log10(floor / present)
            place = partial(norm.floor.fill_, floor)
            yield Candidate(
                path, FLOOR, f"floor {floor:.3g}", digits, place, family=family, floor=floor
            )


def new_attention(attention: str, old: nn.Module) -> Any:
    """Return the attention of that name in the shape of `old`, its weights not yet set."""
    return (
        REPLACEMENTS.load(replacement(attention))(old)
        .requires_grad_(False)
        .eval()
        .to(AttentionWeights.of(old).query)
    )


def replacement(attention: str) -> str:
    kind = ATTENTIONS[attention]
    assert kind is not None
    return kind


def fit_attention(attention: str, old: nn.Module, inputs: PartInputs) -> Any:
    """Return a new attention whose output map is fitted to the old outputs on the same inputs."""
    weights = AttentionWeights.of(old)
    new = new_attention(attention, old)
    new.start(weights)
    solver = LeastSquares(
        new.proj.in_features, new.proj.out_features, weights.query.device, new.proj.bias is not None
    )
    for args, kwargs, output in inputs.calls:
        mixed = capture_input(new.proj, partial(new, *args, **kwargs))
        solver.add(mixed.flatten(0, -2), output.flatten(0, -2))
    # keep=True: directions that the images hardly excite keep the weights of the closed form
    solver.solve_into(new.proj, _RIDGE, keep=True)
    return new
