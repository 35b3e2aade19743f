"""Options of --method patch, and of commands that run a defended classifier. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from certcli.certify.options import CertifierOptions
from certcli.evaluation.threat import Patch
from certcli.system.errors import UsageError
from certcli.system.options import option
from certcli.system.registry import one_of

DOUBLE_MASKING = "double-masking"
VOTING = "voting"
PROCEDURES = (DOUBLE_MASKING, VOTING)
KINDS: dict[str, type] = {
    **dict.fromkeys(("procedure", "bands", "hide"), str),
    **dict.fromkeys(("masks", "band_width", "rows"), int),
}
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
        UsageError: a value has another type, or no meaning.
    """

    panel: ClassVar[str] = "Patches"
    patches: list[str] = option(
        list,
        "32 (pixels a side), 16x64 (width x height), 2% (of the pixels), 2:32 (two of "
        "them); may be repeated.",
        "--patch",
        metavar="SIZE",
    )
    procedure: str = option(
        DOUBLE_MASKING, "How the defended classifier decides: double-masking, or voting over bands."
    )
    masks: int = option(3, "K x K masks. A larger K hides less and takes more passes.", metavar="K")
    bands: str = "columns"
    band_width: int = option(3, "Width of a band in cells (in tokens, if tokens are dropped).")
    hide: str = option(
        "auto",
        "tokens (dropped: ViT, DeiT), pixels (grey: any network), auto (tokens where possible).",
    )
    cell: Sequence[int] | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():  # records are files
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise UsageError(f"{name} {value!r} has the wrong type")
        for name in ("patches", "cell"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (list, tuple)):
                raise UsageError(f"{name} {value!r} has the wrong type")
        if self.cell is not None and (
            len(self.cell) != 2 or not all(type(side) is int for side in self.cell)
        ):
            raise UsageError(f"cell {list(self.cell)} is not (height, width) in pixels")
        if (
            not 1 <= (1 if self.rows is None else self.rows) <= MOST_ROWS
            or len(self.patches) > MOST_PATCHES
        ):
            raise UsageError(
                f"rows is between 1 and {MOST_ROWS}, and patches are at most {MOST_PATCHES}"
            )
        if self.procedure not in PROCEDURES:
            raise UsageError(
                f"unknown procedure '{self.procedure}'", one_of(self.procedure, PROCEDURES)
            )

    def sizes(self, image: tuple[int, int]) -> list[Patch]:
        """Return the patches for (height, width), as named; UsageError when there is none."""
        if not self.patches:
            raise UsageError(
                "--method patch needs a patch",
                "--patch 32 (pixels), --patch 2%, --patch 16x64",
            )
        return [Patch.read(str(text), image) for text in self.patches]
