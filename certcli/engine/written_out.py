"""Operations that are others put together: written out in the graph once, so every domain has them.

The graph as it ran stays beside the written one (`Trace.ran`): runs are compared with that.
"""

import math
import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

Constants = MutableMapping[str, Any]


class _Writer:
    """Adds operations in place of one. What depends on no image is computed, as the tracer does."""

    def __init__(self, graph: fx.Graph, constants: Constants, replaced: fx.Node) -> None:
        self.graph = graph
        self.constants = constants
        name = getattr(replaced.target, "__name__", str(replaced.target))
        self.meta = {**replaced.meta, "written": name}

    def constant(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and x.op == "get_attr"

    def shape(self, x: fx.Node) -> tuple[int, ...]:
        constant = self.constants.get(str(x.target)) if x.op == "get_attr" else None
        return tuple(x.meta["shape"] if constant is None else constant.shape)

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        """Return the node of target(*args), a function or the name of a method."""
        function = (
            (lambda x, *rest: getattr(x, target)(*rest)) if isinstance(target, str) else target
        )
        nodes = [x for x in args if isinstance(x, fx.Node)]
        if all(map(self.constant, nodes)):
            name = f".{len(self.constants)}"
            self.constants[name] = function(*fx.node.map_arg(args, self._number))
            return self.graph.get_attr(name)
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args)
        value = function(*fx.node.map_arg(args, self._like))
        node.meta = {**self.meta, "shape": tuple(value.shape), "dtype": value.dtype}
        return node

    def _number(self, x: fx.Node) -> Any:
        return self.constants[str(x.target)]

    def _like(self, x: fx.Node) -> Tensor:
        dtype = self._number(x).dtype if self.constant(x) else x.meta["dtype"]
        return torch.empty(self.shape(x), dtype=dtype, device="meta")

    def arranged(self, x: fx.Node, labels: str, order: str, shape: Sequence[int]) -> fx.Node:
        """Return x, whose axes have labels, in another order of axes, and then in this shape."""
        if order != labels:
            x = self("permute", x, tuple(labels.index(label) for label in order))
        return x if self.shape(x) == tuple(shape) else self("reshape", x, tuple(shape))


def write_out_graph(
    graph: fx.Graph, constants: Constants
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return the graph with such operations written out, and the node of each of its nodes."""
    if not any(node.target in _WRITTEN for node in graph.nodes):
        return graph, {node: node for node in graph.nodes}
    written = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        write = _Writer(written, constants, node)
        writing = _WRITTEN.get(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
        out = None if writing is None else writing(write, *args, **kwargs)
        places[node] = written.node_copy(node, places.__getitem__) if out is None else out
    return written, places


def _written_matrix_product(write: _Writer, input: Any, other: Any) -> fx.Node | None:
    """x W for a matrix W that depends on no image, as a linear map of rows."""
    if write.constant(input) or not write.constant(other):
        return None
    shape = write.shape(other)
    if not 2 <= len(shape) <= len(write.shape(input)) or math.prod(shape[:-2]) != 1:
        return None
    return write(F.linear, input, write(torch.transpose, write("reshape", other, shape[-2:]), 0, 1))


def _product(write: _Writer, one: fx.Node, other: fx.Node) -> fx.Node:
    return _written_matrix_product(write, one, other) or write(torch.matmul, one, other)


def _sum_of_products(
    write: _Writer, input: Any, *matrices: Any, beta: Any = 1, alpha: Any = 1, **named: Any
) -> fx.Node | None:
    """beta x + alpha a b."""
    one, other = (*matrices, *named.values())
    numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in (beta, alpha))
    if not numbers or (write.constant(one) and write.constant(other)):
        return None
    product = _product(write, one, other)
    product = product if alpha == 1 else write(operator.mul, product, alpha)
    if beta == 0:  # torch does not read x then
        return product
    return write(operator.add, input if beta == 1 else write(operator.mul, input, beta), product)


def _sum_with_product(write: _Writer, input: Any, a: Any, b: Any, value: Any = 1) -> fx.Node:
    """x + (value a) b, entry by entry."""
    product = write(operator.mul, a if value == 1 else write(operator.mul, a, value), b)
    return write(operator.add, input, product)


def _einsum(write: _Writer, equation: Any, *operands: Any) -> fx.Node | None:
    """Of one tensor, or of two: a product of matrices for each label that both and the result
    have."""
    parts = operands[0] if isinstance(operands[0], (list, tuple)) else operands
    terms = _labelled(equation, [len(write.shape(x)) for x in parts])
    if terms is None or len(parts) > 2:
        return None
    *inputs, out = terms
    summed = [
        _summed_labels(write, x, labels, {*out, *"".join(inputs[:place] + inputs[place + 1 :])})
        for place, (x, labels) in enumerate(zip(parts, inputs, strict=True))
    ]
    if len(summed) == 1:
        ((x, labels),) = summed
        return write.arranged(
            x, labels, out, [write.shape(x)[labels.index(label)] for label in out]
        )
    return _product_of_two(write, summed, out)


def _product_of_two(write: _Writer, factors: list[tuple[fx.Node, str]], out: str) -> fx.Node:
    """Return the product of two tensors, summed over the labels that only they have."""
    if write.constant(factors[0][0]):
        factors = factors[::-1]
    sides: dict[str, int] = {}
    for x, labels in factors:
        for label, side in zip(labels, write.shape(x), strict=True):
            sides[label] = max(side, sides.get(label, 0))  # an axis of size 1 is repeated

    def shape(labels: str) -> tuple[int, ...]:
        return tuple(sides[label] for label in labels)

    (a, of_a), (b, of_b) = (
        (x if write.shape(x) == shape(labels) else write("expand", x, shape(labels)), labels)
        for x, labels in factors
    )
    inner = "".join(label for label in of_a if label not in out)
    if not inner:  # entry by entry
        one, other = (
            write.arranged(
                x,
                labels,
                "".join(label for label in out if label in labels),
                [sides[label] if label in labels else 1 for label in out],
            )
            for x, labels in ((a, of_a), (b, of_b))
        )
        return write(operator.mul, one, other)
    shared, of_rows, of_columns = (
        "".join(label for label in out if (label in of_a, label in of_b) == where)
        for where in ((True, True), (True, False), (False, True))
    )
    terms, columns = math.prod(shape(inner)), math.prod(shape(of_columns))
    b = write.arranged(b, of_b, shared + inner + of_columns, (*shape(shared), terms, columns))
    if write.constant(b):  # each row of a by its matrix: the axes of a stay apart
        order = of_rows + shared
        rows = (*shape(order), 1, terms) if shared else (*shape(order), terms)
    else:
        order = shared + of_rows
        rows = (*shape(shared), math.prod(shape(of_rows)), terms)
    product = _product(write, write.arranged(a, of_a, order + inner, rows), b)
    unfolded = write.arranged(product, "", "", shape(order + of_columns))
    return write.arranged(unfolded, order + of_columns, out, shape(out))


def _summed_labels(
    write: _Writer, x: fx.Node, labels: str, others: set[str]
) -> tuple[fx.Node, str]:
    """Return x summed over the labels that nothing else has, and those that are left."""
    axes = [axis for axis, label in enumerate(labels) if label not in others]
    labels_of_rest = "".join(label for label in labels if label in others)
    return (write("sum", x, axes) if axes else x), labels_of_rest


def _labelled(equation: Any, axes: list[int]) -> list[str] | None:
    """Return the labels of operands and result, one an axis; None for diagonals."""
    if not isinstance(equation, str):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    several = [
        count - len(term.replace("...", "")) for count, term in zip(axes, terms, strict=True)
    ]
    dots = [count if "..." in term else 0 for count, term in zip(several, terms, strict=True)]
    # axes behind "..." are aligned at their ends
    free = "".join(chr(ord("0") + place) for place in range(max(dots)))
    if not arrow:
        letters = "".join(terms).replace(".", "")
        out = "..." + "".join(sorted(label for label in {*letters} if letters.count(label) == 1))
    terms = [
        term.replace("...", free[len(free) - count :])
        for term, count in zip(terms, dots, strict=True)
    ]
    terms.append(out.replace("...", free))
    repeats = any(len({*labels}) < len(labels) for labels in terms)
    return None if repeats else terms


_WRITTEN: dict[Any, Callable[..., fx.Node | None]] = {
    torch.einsum: _einsum,
    torch.addcmul: _sum_with_product,
    **dict.fromkeys(
        (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"), _written_matrix_product
    ),
    **dict.fromkeys(
        (torch.addmm, torch.baddbmm, "addmm", "addmm_", "baddbmm", "baddbmm_"), _sum_of_products
    ),
}
"""Functions, and names of methods; None: what is called is left as it is."""
