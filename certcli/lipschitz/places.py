"""Where the entries, the fibres and the features of a tensor go when it is rearranged."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from certcli.engine.moves import Move
from certcli.lipschitz.size import Size

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Features of a tensor, which a map makes token by token, after a move.

    Attributes:
        axes: (negative) along which the feature changes.
        separate: Whether the token changes along other axes only.
        line: The feature's number along `axes`, size 1 on all others.
        level: Whether that is so at every token, and what is no entry is so for whole tokens.
        mixed: Of how many tokens a fibre along the first of `axes` (the last axis) consists at most.
    """

    axes: list[int]
    separate: bool
    line: Tensor
    level: bool
    mixed: float

    def in_order(self, count: int) -> bool:
        """Tell whether the features lie one behind the other on one axis, all of them."""
        return len(self.axes) == 1 and torch.equal(self.line.flatten(), torch.arange(count))


@dataclass(frozen=True)
class Places:
    """What is known of one result of a move of a tensor of shape `before`."""

    move: Move
    before: Shape
    part: int
    _layouts: dict[tuple[tuple[int, ...], bytes], Layout] = field(default_factory=dict)
    _fibres: dict[int, tuple[int | None, float]] = field(default_factory=dict)

    @property
    def of(self) -> Tensor:
        """Return which entry each entry is, -1 beside them. Not stored: it is as large as the
        tensor."""
        return self.move.places(self.before)[self.part].int()

    @cached_property
    def _counted(self) -> tuple[Shape, bool, int]:
        of = self.of
        taken = (of.flatten() + 1).bincount(minlength=2)  # the first of these are beside the tensor
        return tuple(of.shape), not int(taken[0]), max(1, int(taken[1:].max()))

    @property
    def shape(self) -> Shape:
        return self._counted[0]

    @property
    def filled(self) -> bool:
        """Tell whether every entry is one of the tensor's."""
        return self._counted[1]

    @property
    def times(self) -> int:
        """Return how often an entry is taken at most."""
        return self._counted[2]

    @property
    def permutes(self) -> bool:
        return self.filled and self.times == 1 and math.prod(self.shape) == math.prod(self.before)

    def fibres(self, axis: int) -> tuple[int | None, float]:
        """Return where the fibres along an axis lie, and how many of them one fibre there is made
        of."""
        if axis not in self._fibres:
            self._fibres[axis] = self._fibres_along(axis)
        return self._fibres[axis]

    def _fibres_along(self, axis: int) -> tuple[int | None, float]:
        of = self.of
        none = None if self.filled else of < 0
        inner = math.prod(self.before[len(self.before) + axis + 1 :])
        within = _varying((of // inner) % self.before[axis], none)
        if not within:
            return None, 1.0
        along = max(within)
        outer = inner * self.before[axis]
        fibre = (of // outer) * inner + of % inner
        if none is None and along not in _varying(fibre, none):
            return along, 1.0
        return along, float(_most_distinct(fibre, along))

    def layout(self, index: Tensor) -> Layout:
        """Return where features go. index: the feature of each entry, size 1 on axes of tokens."""
        key = (tuple(index.shape), index.numpy().tobytes())
        if key not in self._layouts:
            self._layouts[key] = self._layout(index)
        return self._layouts[key]

    def _layout(self, index: Tensor) -> Layout:
        of = self.of
        none = None if self.filled else of < 0
        token_sizes = [
            1 if wide > 1 else n for wide, n in zip(index.shape, self.before, strict=True)
        ]
        picked = of.clamp_min(0).flatten()
        features = index.int().expand(self.before).reshape(-1)[picked].view(of.shape)
        tokens = (
            torch.arange(math.prod(token_sizes), dtype=torch.int32)
            .view(token_sizes)
            .expand(self.before)
        )
        tokens = tokens.reshape(-1)[picked].view(of.shape)
        axes = _varying(features, none)
        marked = features if none is None else features.masked_fill(none, -1)
        others = [a for a in range(-of.dim(), 0) if a not in axes]
        line = marked.amax(others, keepdim=True) if others else marked
        level = True
        if none is not None:
            whole = not axes or torch.equal(none.any(axes), none.all(axes))
            level = whole and bool(((features == line) | none).all() & (line >= 0).all())
        separate = not set(axes) & set(_varying(tokens, none))
        mixed = 1.0 if separate else float(_most_distinct(tokens, (axes or [-1])[0]))
        return Layout(axes, separate, line.long(), level, mixed)

    def arranged(self, size: Size) -> Size:
        """Return the bounds of the same entries in these places, none twice."""
        if not self.before:
            return size.arranged(self.shape, None)
        axis, factor = self.fibres(size.axis)
        return size.arranged(self.shape, axis, factor)


def axis_numbers(shape: Sequence[int], axis: int) -> Tensor:
    """Return the number of each entry along an axis, size 1 on all others."""
    return torch.arange(shape[axis]).view([-1 if a == axis else 1 for a in range(-len(shape), 0)])


def _varying(numbers: Tensor, none: Tensor | None) -> list[int]:
    """Return the axes (negative) along which these numbers of the entries change."""
    axes = []
    for axis in range(-numbers.dim(), 0):
        count = numbers.shape[axis] - 1
        first, second = (numbers.narrow(axis, start, count) for start in (0, 1))
        differ = first != second
        if none is not None:
            differ &= ~(none.narrow(axis, 0, count) | none.narrow(axis, 1, count))
        if bool(differ.any()):
            axes.append(axis)
    return axes


def _most_distinct(numbers: Tensor, axis: int) -> int:
    """Return how many different numbers there are along an axis at most."""
    rows = numbers.movedim(axis, -1).sort(-1).values
    return int((rows.diff(dim=-1) != 0).sum(-1).max()) + 1


@functools.lru_cache(maxsize=512)
def places_of(move: Move, shape: Shape) -> list[Places]:
    """Return the places of each result. Networks repeat their moves: they are looked at once."""
    parts = len(move(torch.zeros(shape))) if move.several(shape) else 1
    return [Places(move, shape, part) for part in range(parts)]
