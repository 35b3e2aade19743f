"""A query about a network's outputs as a network of its own, whose class 0 stays first.

u of [0, 1]^n is mapped to x = low + width u, which covers the box, and the outputs y to 0 and, of each
case, one row C y + d. Where 0 is the largest everywhere no case holds: each has a row below 0. So a
query is the certificate of the grey image at radius 1/2 in linf, and its attack is that image's.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor, nn

from certcli.certify.vnnlib import Query, Row, float64_above
from certcli.system.errors import DataError, Refused

EXACT = 2**53


class QueryNetwork(nn.Module):
    """Grey image (b, 1, 1, n), or of the inputs' own size -> (0, C y + d), in float64."""

    low: Tensor
    width: Tensor

    def __init__(
        self, net: nn.Module, size: tuple[int, ...], query: Query, rows: list[Row]
    ) -> None:
        super().__init__()
        low = [-float64_above(-edge) for edge in query.low]
        width = [
            float64_above(high - Fraction(start))
            for high, start in zip(query.high, low, strict=True)
        ]
        self.size = size
        shape = size if len(size) == 3 else (1, 1, math.prod(size))
        self.register_buffer("low", torch.tensor(low, dtype=torch.float64).reshape(shape))
        self.register_buffer("width", torch.tensor(width, dtype=torch.float64).reshape(shape))
        self.net = net.double()
        self.last = nn.Linear(query.outputs, len(rows) + 1, dtype=torch.float64)
        weight = torch.zeros(len(rows) + 1, query.outputs, dtype=torch.float64)
        bias = torch.zeros(len(rows) + 1, dtype=torch.float64)
        for number, row in enumerate(rows, 1):
            factors, constant = _whole_factors(row)
            for place, factor in factors.items():
                weight[number, place] = factor
            bias[number] = constant
        self.last.weight = nn.Parameter(weight)
        self.last.bias = nn.Parameter(bias)

    def inputs(self, u: Tensor) -> Tensor:
        """Return the network's inputs: (b, c, h, w) -> (b, ...)."""
        return (self.low + self.width * u).reshape(-1, *self.size)

    def forward(self, u: Tensor) -> Tensor:
        outputs = self.net(self.inputs(u))
        return self.last(outputs.reshape(outputs.shape[0], -1))


def _whole_factors(row: Row) -> tuple[dict[int, int], float]:
    """Return a row times a number above 0 that makes its factors whole, and its constant rounded up."""
    scale = math.lcm(*(factor.denominator for factor in row.coefficients.values()))
    factors = {place: int(factor * scale) for place, factor in row.coefficients.items()}
    if max(map(abs, factors.values()), default=0) > EXACT:
        raise Refused("a factor has more digits than float64")
    return factors, float64_above(row.constant * scale)


@torch.no_grad()
def query_network(net: nn.Module, size: tuple[int, ...], query: Query) -> QueryNetwork:
    """Return the query's network, with the row of each case that is smallest in the box's middle."""
    shape = query.shape
    if math.prod(size) != len(query.low) or shape not in ((), size, (1, *size)):
        about = shape or len(query.low)
        raise DataError(f"the query is about inputs {about}, and the network's are {size}")
    middle = [(low + high) / 2 for low, high in zip(query.low, query.high, strict=True)]
    inputs = torch.tensor([float(one) for one in middle], dtype=torch.float64)
    outputs = net.double()(inputs.reshape(1, *size)).flatten().tolist()
    if len(outputs) != query.outputs or not all(map(math.isfinite, outputs)):
        raise DataError(f"the query is about {query.outputs} outputs, not {len(outputs)}")
    rows = [min(case, key=lambda row: row.at(outputs)) for case in query.cases]
    try:
        return QueryNetwork(net, size, query, rows).eval()
    except Refused as failure:
        raise DataError(str(failure)) from failure
