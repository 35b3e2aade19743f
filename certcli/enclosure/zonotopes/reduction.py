"""Order reduction: fewer symbols for one form. Proof: docs/local.md, section 1."""

from dataclasses import replace

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.ellipsoids import (
    Part,
    factor,
    fibres,
    grouped,
    rest_gram,
    root,
)
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.symbols import Block, alike, lengths


def reduced(x: Form) -> Form:
    """Reduce the symbols to the limit: those whose loss is least become one ellipsoid a fibre.

    Slack becomes symbols where it is worth it, so that no rounding error is counted once a layer
    again and again.
    """
    limit = x.space.limit
    count = x.centre.numel()
    if not limit:
        return x
    if x.space.by_fibres:
        return by_fibres(x)
    if len(x.box) + count <= limit or not x.blocks:
        return x.worked()
    blocks, columns, dropped = _sorted_out(x, max(0, limit - count))
    gens = torch.cat([x.gens[: x.fixed], *columns])
    reduced = Form(x.space, x.centre, gens, torch.zeros_like(x.slack), blocks)
    return replace(grouped(reduced, root(dropped, fibres(x.slack[None])[0])), node=x.node)


def by_fibres(x: Form) -> Form:
    """Return x with all but its ball part in one ellipsoid a fibre, of the fibre's own symbols."""
    if not x.blocks and not bool(x.slack.any()):
        return x
    ellipsoids = factor(rest_gram(x))
    bare = Form(x.space, x.centre, x.gens[: x.fixed], torch.zeros_like(x.slack))
    return replace(grouped(bare, ellipsoids), node=x.node)


def _sorted_out(x: Form, capacity: int) -> tuple[tuple[Block, ...], list[Tensor], list[Part]]:
    """Return blocks and columns of at most `capacity` symbols of x, and the rest of it.

    What is kept has new names: a column that another form still holds is treated as independent of
    it, which only widens.
    """
    places = [(part.unflatten(0, (-1, width)), width) for width, part in alike(x.box, x.blocks)]
    losses = [_loss(groups.flatten(0, 1), width) / width for groups, width in places]
    widths = torch.cat([torch.full((len(groups),), width) for groups, width in places])
    order = torch.argsort(torch.cat(losses), descending=True, stable=True).cpu()
    keep = torch.zeros(len(widths), dtype=torch.bool)
    keep[order[widths[order].cumsum(0) <= capacity]] = True
    blocks = []
    columns = []
    dropped: list[Part] = []
    for (groups, width), chosen in zip(
        places, keep.split([len(groups) for groups, _ in places]), strict=True
    ):
        if bool(chosen.any()):
            columns.append(groups[chosen].flatten(0, 1))
            blocks.append(Block.fresh(len(columns[-1]), width))
        if not bool(chosen.all()):
            dropped.append((fibres(groups[~chosen].flatten(0, 1)), width))
    return tuple(blocks), columns, dropped


def _loss(columns: Tensor, width: int) -> Tensor:
    """Return of each group how much more it says of all entries than of one."""
    flat = lengths(columns.flatten(1), width)
    return flat.sum(1) - flat.amax(1)
