"""Branch and bound on signs of open ReLU units, over what a walk keeps. docs/local.md, section 9.

A domain is the part of the neighbourhood in which some units have given signs. Its bound is one of
the way back with slopes, parabolas and multipliers of the signs that ascent has chosen; whatever
they are, it is sound, and it is rounded down. A domain whose bound is not positive is split at one
open unit; its two halves cover it.

Source: Wang et al. 2021 (beta-CROWN: multipliers of signs), Xu et al. 2021 (slopes by ascent), De
Palma et al. 2021 (of several units, the one whose halves have the better bounds). Parabolas below
the splits, and the way back: ours.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.ascent import Ascent
from certcli.enclosure.zonotopes.backward import Node
from certcli.enclosure.zonotopes.search import Tree

BATCH = 24
"""Domains that are split together, fewer where tensors are large."""
FIRST_STEPS = 30
STEPS = 6
LAST_STEPS = 400
"""Of ascent, at a whole neighbourhood, at a half, and at a domain in which there is nothing left to split."""
CANDIDATES = 16
"""Units of a domain whose halves are bounded before it is split at one of them."""

_MOST_BYTES = 2**30
"""Of domains that wait to be split: beyond, the margin counts as not proven."""


@dataclass
class Limit:
    """Limits of a search: a time (time.monotonic), and a number of bounded domains."""

    until: float = math.inf
    domains: int = 100_000

    def over(self, domains: int) -> bool:
        return domains >= self.domains or time.monotonic() >= self.until


@dataclass(eq=False)
class BranchDomain:
    """A part of the neighbourhood, for one margin.

    Attributes:
        tree: its place in the margin's tree.
        sign: (units), +1, -1, or 0 where open.
        numbers: what ascent chose.
        score: (units), what each open unit may lose.
    """

    margin: int
    tree: Tree
    sign: Tensor
    numbers: Tensor
    bound: float = -math.inf
    score: Tensor = field(default_factory=lambda: torch.zeros(0))

    def half(self, unit: int, sign: int, tree: Tree) -> "BranchDomain":
        """Return the half in which an open unit has this sign."""
        signs = self.sign.clone()
        signs[unit] = sign
        return BranchDomain(self.margin, tree, signs, self.numbers)


class BranchSearch:
    """The search over the domains of one walk's margins: rows (margins, *shape) of its last node.

    Attributes:
        trees: one a margin; their splits are taken before others.
        note: told of every batch, for a bar.
    """

    def __init__(
        self,
        out: Node,
        rows: Tensor,
        limit: Limit,
        trees: Sequence[Tree] | None = None,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self.note = note
        self.domains = 0
        self.ascent = Ascent(out, rows)
        self.trees = list(trees) if trees else [Tree() for _ in rows]
        if len(self.trees) != len(rows):  # a margin without a tree would have no bound
            raise ValueError(f"{len(self.trees)} trees for {len(rows)} margins")
        self.bounds = torch.full((len(rows),), math.inf, dtype=rows.dtype)

    def prove(self) -> Tensor:
        """Return each margin's bound: the least of its tree's leaves, (margins,)."""
        if not self.ascent.units:
            return torch.full_like(self.bounds, -math.inf)
        sign, numbers = self.ascent.start()
        first = [
            BranchDomain(margin, tree, sign, numbers) for margin, tree in enumerate(self.trees)
        ]
        turn = itertools.count()
        waiting: list[tuple[float, int, BranchDomain]] = []

        def keep(domains: list[BranchDomain]) -> None:
            for domain in domains:
                if domain.bound > 0:
                    self._lower(domain.margin, domain.bound)
                else:
                    heapq.heappush(waiting, (domain.bound, next(turn), domain))

        keep(self.climbed(first, FIRST_STEPS))
        batch_limit = _MOST_BYTES // (8 * (len(numbers) + 2 * len(sign)))
        while waiting and len(waiting) <= batch_limit and not self.limit.over(self.domains):
            count = min(BATCH, self.ascent.at_once // 2, len(waiting))
            taken = [heapq.heappop(waiting)[2] for _ in range(count)]
            units = self._units(taken)
            whole = [domain for domain, unit in zip(taken, units, strict=True) if unit is None]
            keep(self.climbed(whole, LAST_STEPS))
            if any(not domain.bound > 0 for domain in whole):
                keep([domain for domain in taken if domain not in whole])
                break
            keep(self.climbed(self.halves(taken, units), STEPS))
            self.note()
        for bound, _, domain in waiting:
            self._lower(domain.margin, bound)
        return self.bounds

    def _lower(self, margin: int, bound: float) -> None:
        self.bounds[margin] = self.bounds[margin].clamp_max(bound)

    def climbed(self, domains: list[BranchDomain], steps: int) -> list[BranchDomain]:
        """Bound the domains by ascent, all together."""
        if not domains:
            return []
        margins = [domain.margin for domain in domains]
        signs = torch.stack([domain.sign for domain in domains])
        numbers = torch.stack([domain.numbers for domain in domains])
        until = self.limit.until if steps == LAST_STEPS else math.inf
        bounds, chosen, scores = self.ascent.climb(margins, signs, numbers, steps, until)
        for i, domain in enumerate(domains):
            domain.bound = bounds[i].item()
            domain.numbers = chosen[i]
            domain.score = scores[i]
        self.domains += len(domains)
        return domains

    def halves(self, domains: list[BranchDomain], units: list[int | None]) -> list[BranchDomain]:
        """Return the halves of the domains that have a unit at which they are split."""
        halves = []
        for domain, unit in zip(domains, units, strict=True):
            if unit is None:
                continue
            domain.tree.unit = self.ascent.units[unit]
            active, inactive = domain.tree.halves()
            halves += [domain.half(unit, 1, active), domain.half(unit, -1, inactive)]
        return halves

    def _units(self, domains: list[BranchDomain]) -> list[int | None]:
        """Return the unit that splits each domain: its tree's, or the best of a few."""
        units: list[int | None] = [self._planned(domain) for domain in domains]
        free = [i for i, unit in enumerate(units) if unit is None]
        if free:
            for i, unit in zip(free, self._best([domains[i] for i in free]), strict=True):
                units[i] = unit
        return units

    def _planned(self, domain: BranchDomain) -> int | None:
        """Return the open unit that splits the tree; past units whose sign is determined."""
        while domain.tree.unit is not None:
            unit = self.ascent.places.get(domain.tree.unit)
            if unit is not None and domain.sign[unit] == 0:
                return unit
            active, inactive = domain.tree.halves()
            known = self.ascent.sign_of(domain.tree.unit) if unit is None else domain.sign[unit]
            domain.tree = active if known > 0 else inactive
        return None

    @torch.no_grad()
    def _best(self, domains: list[BranchDomain]) -> list[int | None]:
        """Return of each domain's best-scored units the one whose worse half has the larger bound."""
        count = min(CANDIDATES, len(self.ascent.units))
        scores, places = torch.stack([domain.score for domain in domains]).topk(count, dim=1)
        tried = []
        owners = []
        for domain, units in zip(domains, places.tolist(), strict=True):
            for unit in units:
                tried += [domain.half(unit, 1, Tree()), domain.half(unit, -1, Tree())]
                owners += [domain.margin] * 2
        signs = torch.stack([domain.sign for domain in tried])
        numbers = torch.stack([domain.numbers for domain in tried])
        size = self.ascent.at_once
        pieces = [
            self.ascent.estimates(owners[i : i + size], signs[i : i + size], numbers[i : i + size])
            for i in range(0, len(owners), size)
        ]
        bounds = torch.cat([bound for bound, _ in pieces])
        worse = bounds.view(len(domains), count, 2).clamp_max(0).sum(2)
        worse = worse.masked_fill(scores <= 0, -math.inf)
        best = worse.argmax(1)
        chosen = places.gather(1, best[:, None])[:, 0].tolist()
        possible = (scores.amax(1) > 0).tolist()
        return [unit if able else None for unit, able in zip(chosen, possible, strict=True)]
