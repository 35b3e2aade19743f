"""x W^T, then + b: one linear map."""

import operator

from torch import nn

from certcli.models.onnx.layers import linear_module
from certcli.models.onnx.program import Program, module_of, with_row


def join_linear(program: Program) -> None:
    for node in list(program.graph.nodes):
        module = module_of(program, node, nn.Linear)
        if module is None or module.bias is not None:
            continue
        added = with_row(program, node, operator.add, module.out_features)
        if added is not None:
            user, bias = added
            program.replace(user, linear_module(module.weight.detach(), bias), node.args[0])
