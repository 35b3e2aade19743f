"""The second part of a tensor, then its first part: the tensor rolled, whose norm is its own."""

import torch
from torch import fx

from certcli.models.onnx.program import Program, shape_of


def join_roll(program: Program) -> None:
    for node in list(program.graph.nodes):
        if node.target is not torch.cat or len(node.args[0]) != 2:
            continue
        parts, axis = node.args
        if not all(isinstance(each, fx.Node) and each.target == "narrow" for each in parts):
            continue
        (x, a, start, size), (y, b, first, before) = (each.args for each in parts)
        size_of_all = shape_of(x)[axis]
        whole = (first, before, start + size) == (0, start, size_of_all)
        if x is y and a == b == axis and whole:
            program.replace(node, torch.roll, x, size, axis)
