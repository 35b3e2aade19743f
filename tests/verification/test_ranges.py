"""Numbers of a report have the range that the arithmetic behind them bears."""

import msgspec
import pytest

from certcli.checkpoint.schema import LARGEST_EXPONENT, ProofFields
from certcli.lipschitz.numerics.real import Real

NODE = {"path": "a", "kind": "Linear", "law": "theorem", "parts": []}


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_exponent_at_the_limit_is_read_and_printed_and_one_beyond_is_no_proof(sign: int) -> None:
    """Its digits are those of a power of two: without a limit, 10^7 takes minutes."""
    limit = sign * LARGEST_EXPONENT
    node = msgspec.convert({**NODE, "value": [0.7, limit]}, ProofFields)
    assert f"e{sign * 12041:+d}"[:4] in str(Real.from_json(list(node.value)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**NODE, "value": [0.7, limit + sign]}, ProofFields)
