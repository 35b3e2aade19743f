"""What is known of the curves of activations. Every domain reads it here.

Proofs: docs/bounds.md, section 3. `tests/lipschitz/test_rules.py` sweeps each derivative.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Bounds on the derivatives of a curve f, rounded up.

    Args:
        slope: at least sup |f'|.
        second: at least sup |f''|; inf where no domain needs it.
        third, fourth: at least sup |f'''| and sup |f''''|; inf where no domain needs it.
    """

    slope: float
    second: float = math.inf
    third: float = math.inf
    fourth: float = math.inf


# GELU' = Phi + x phi is Phi(sqrt 2) + sqrt(2) phi(sqrt 2) = 1.12890414518... at most; 1.12, as
# published, is below it. GELU'' is 2 phi(0) = 0.79788456... at most, GELU''' 0.7796,
# GELU'''' = phi(x) (x^2 (7 - x^2) - 4) twice as much as GELU'' at 0.
GELU = Shape(1.12890415, second=0.7978846, third=0.78, fourth=1.5957692)
GELU_TANH = Shape(1.12901, third=0.9, fourth=1.604)
# SiLU'' is 1/2 at 0, the largest; the third derivative 0.3082 at most
SILU = Shape(1.0998394, second=0.5, third=0.309, fourth=0.5001)
MISH = Shape(1.0886)
SELU = Shape(1.7580994)
HARD_SWISH = Shape(1.5)
# s'' = s' (1 - 2 s) is 1 / (6 sqrt 3) at most, s' (1 - 6 s + 6 s^2) is -1/8 at 0; tanh x = 2 s(2 x) - 1
SIGMOID = Shape(0.25, second=0.0962251, third=0.125, fourth=0.128)
TANH = Shape(1.0, second=0.7698004, third=2.0, fourth=4.086)
HARD_SIGMOID = Shape(math.nextafter(1 / 6, math.inf))
ERF = Shape(math.nextafter(math.nextafter(2 / math.sqrt(math.pi), math.inf), math.inf))
