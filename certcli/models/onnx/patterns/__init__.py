"""What exporters take apart, put together again: one file an identity, in the order of their use."""

from collections.abc import Callable

from certcli.models.onnx.patterns.attention import join_attention
from certcli.models.onnx.patterns.gelu import join_gelu
from certcli.models.onnx.patterns.layer_norm import join_layer_norm
from certcli.models.onnx.patterns.linear import join_linear
from certcli.models.onnx.patterns.roll import join_roll
from certcli.models.onnx.program import Program

PATTERNS: tuple[Callable[[Program], None], ...] = (
    join_linear,
    join_gelu,
    join_layer_norm,
    join_roll,
    join_attention,
)


def join(program: Program) -> None:
    """Put together what is recognised; what is not stays as it is written."""
    for pattern in PATTERNS:
        pattern(program)
        for node in reversed(list(program.graph.nodes)):
            if not node.users and node.op not in ("output", "placeholder"):
                program.graph.erase_node(node)
