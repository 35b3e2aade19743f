"""Options of every method that proves. No torch here: `certvit certify --help` reads them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from certcli.certify.options import CertifierOptions
from certcli.system.options import option

Arithmetic = Literal["real", "float64", "float32", "tf32", "bf16", "fp16"]
ARITHMETICS = get_args(Arithmetic)
REAL: Literal["real"] = "real"


@dataclass(frozen=True)
class Proof(CertifierOptions):
    """What proven certificates speak of.

    Args:
        arithmetic: That executes the network at the neighbours of an image; None stands for
            float64, and for real numbers where an operation of the network has no proven rounding.
    """

    panel: ClassVar[str] = "Proofs"
    arithmetic: Arithmetic | None = option(
        None,
        "Arithmetic of the certified network: real, float64, float32, tf32, bf16, fp16. "
        "Default: float64 if the rounding of every operation is proven, else real.",
        metavar="NAME",
    )
