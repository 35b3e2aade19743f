"""Options of every method that proves. No torch here: `certvit certify --help` reads them."""

from dataclasses import dataclass
from typing import ClassVar

from certcli.certify.options import CertifierOptions
from certcli.system.errors import UsageError
from certcli.system.options import option
from certcli.system.registry import one_of

REAL = "real"
ARITHMETICS = (REAL, "float64", "float32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Proof(CertifierOptions):
    """What proven certificates speak of.

    Args:
        arithmetic: That executes the network at the neighbours of an image; None stands for
            float64, and for real numbers where an operation of the network has no proven rounding.

    Raises:
        UsageError: the arithmetic is unknown.
    """

    panel: ClassVar[str] = "Proofs"
    arithmetic: str | None = option(
        None,
        "Arithmetic of the certified network: real, float64, float32, tf32, bf16, fp16. "
        "Default: float64 if the rounding of every operation is proven, else real.",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        require_arithmetic(self.arithmetic)


def require_arithmetic(name: str | None) -> None:
    """Raise UsageError for the name of no arithmetic; None is none that anyone named."""
    if name is not None and name not in ARITHMETICS:
        raise UsageError(f"--arithmetic {name}", one_of(name, ARITHMETICS))
