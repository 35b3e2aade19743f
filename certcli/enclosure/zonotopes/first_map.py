"""Where a walk may change to fewer numbers than pixels. Proof: docs/local.md, section 1."""

import math
from dataclasses import replace

import torch
from torch import fx

from certcli.enclosure.zonotopes.columns import norm2, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.space import Coordinates
from certcli.engine.trace import Trace


def narrow_place(traced: Trace) -> fx.Node | None:
    """Return the first node narrower than the image, through which alone the image passes."""
    nodes = list(traced.graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    order = {node: place for place, node in enumerate(nodes)}
    image = next(node for node in nodes if node.op == "placeholder")
    pixels = math.prod(image.meta["shape"])
    reached = {image}
    alive = {image}
    for node in nodes:
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
            alive.add(node)
        alive = {one for one in alive if order[last_use.get(one, one)] > order[node]}
        shape = node.meta.get("shape")
        if alive == {node} and isinstance(shape, tuple) and math.prod(shape) < pixels:
            return node
    return None


def changed(x: Form, coordinates: Coordinates) -> Form:
    """Return the form of x in these coordinates; what they do not hold of it becomes slack."""
    space = x.space
    ball = x.ball
    columns = coordinates.down(ball) * coordinates.stretch
    residue = norm2(ball - coordinates.lifted(columns))
    rounding = coordinates.lost(norm2(columns)) + 2.0**-50 * norm2(ball)
    squares = coordinates.count <= space.squares_up_to
    new = replace(space, ball=coordinates.count, squares=squares, coordinates=coordinates)
    gens = torch.cat([columns, columns.new_zeros(new.square, *x.shape), x.box])
    return Form(new, x.centre, gens, up(x.slack + residue + rounding, 4), x.blocks, x.node)


def may_change(x: Form) -> bool:
    """Tell whether the theorem is about this form: an l2 ball, and nothing in e e^T yet."""
    return not x.space.boxed and not bool(x.square.any())
