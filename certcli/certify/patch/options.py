"""Options of --method patch, and of commands that run a defended classifier. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from certcli.certify.options import CertifierOptions
from certcli.evaluation.threat import Patch
from certcli.system.errors import UsageError
from certcli.system.options import option

DOUBLE_MASKING: Literal["double-masking"] = "double-masking"
VOTING: Literal["voting"] = "voting"
Masking = Literal["double-masking", "voting"]
PROCEDURES = get_args(Masking)
Bands = Literal["columns", "rows", "blocks"]
Hiding = Literal["auto", "tokens", "pixels"]
MOST_ROWS = 4096
MOST_PATCHES = 32


@dataclass(frozen=True)
class Patches(CertifierOptions):
    """The patches, and the procedure that defends a network against them.

    Args:
        bands: what each vote sees, columns, rows or blocks.
        cell: (height, width) in pixels of what is hidden together; None asks the network.
        rows: passes in a batch; None takes the device's usual number.

    Raises:
        UsageError: a value has no meaning.
    """

    panel: ClassVar[str] = "Patches"
    patches: list[str] = option(
        list,
        "32 (pixels a side), 16x64 (width x height), 2% (of the pixels), 2:32 (two of "
        "them); may be repeated.",
        "--patch",
        metavar="SIZE",
    )
    procedure: Masking = option(
        DOUBLE_MASKING, "How the defended classifier decides: double-masking, or voting over bands."
    )
    masks: int = option(3, "K x K masks. A larger K hides less and takes more passes.", metavar="K")
    bands: Bands = "columns"
    band_width: int = option(3, "Width of a band in cells (in tokens, if tokens are dropped).")
    hide: Hiding = option(
        "auto",
        "tokens (dropped: ViT, DeiT), pixels (grey: any network), auto (tokens where possible).",
    )
    cell: Sequence[int] | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cell is not None and [*map(type, self.cell)] != [int, int]:
            raise UsageError(f"cell {list(self.cell)} is not (height, width) in pixels")
        if (
            not 1 <= (1 if self.rows is None else self.rows) <= MOST_ROWS
            or len(self.patches) > MOST_PATCHES
        ):
            raise UsageError(
                f"rows is between 1 and {MOST_ROWS}, and patches are at most {MOST_PATCHES}"
            )

    def sizes(self, image: tuple[int, int]) -> list[Patch]:
        """Return the patches for (height, width), as named; UsageError when there is none."""
        if not self.patches:
            raise UsageError(
                "--method patch needs a patch",
                "--patch 32 (pixels), --patch 2%, --patch 16x64",
            )
        return [Patch.read(str(text), image) for text in self.patches]
