"""Words of which options of several rooms take one. No torch here: `--help` reads them."""

from typing import Literal, get_args

Precision = Literal["float32", "bf16"]
"""Of the passes of a network."""
PRECISIONS = get_args(Precision)
Pixels = Literal["float", "8bit"]
"""Of adversarial images: any floats, or those that a file of 8 bits a value can hold."""
Defence = Literal["none", "patch"]
"""What decides: the network itself, or its classifier behind masks."""
