"""Options that mean the same everywhere. No torch: `certvit COMMAND --help` must be instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from certcli.system.options import Option

MOST_IMAGES = 2**24  # at a time: more than any memory holds


@dataclass(frozen=True)
class Reads:
    """A mark of options that name an input: a file, a checkpoint, or (folder) images."""

    folder: bool = False


@dataclass(frozen=True)
class Writes:
    """A mark of options that name an output: new, or --force, never an input.

    Args:
        resumable: --resume continues a file that exists.
        figure: the ending names the format.
    """

    resumable: bool = False
    figure: bool = False


def typed_share(text: str) -> float:
    """Return a share of the images, in [0, 1], which a gate demands."""
    try:
        value = float(text)
    except ValueError as failure:
        raise ValueError(f"'{text}' is not a number") from failure
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is no share of the images: 0.9 demands 90 %")
    return value


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A .safetensors file, a folder with model.safetensors, certvit/digits, a timm name, or hf-hub:OWNER/NAME.",
    ),
    Reads(),
]
Force = Annotated[bool, Option("Replace an existing output file.")]
Seed = Annotated[int, Option("Seed of every random choice.", min=0, max=2**63 - 1)]
Plot = Annotated[
    Path | None,
    Option(
        "Draw the result: FILE.png, FILE.svg or FILE.pdf.",
        metavar="FILE",
        panel="Output",
        mark=Writes(figure=True),
    ),
]
Html = Annotated[
    Path | None,
    Option("Write the result as an HTML page.", metavar="FILE.html", panel="Output", mark=Writes()),
]
Records = Annotated[
    Path | None,
    Option(
        "Write one JSON line for each image, during the run.",
        metavar="FILE.jsonl",
        panel="Output",
        mark=Writes(resumable=True),
    ),
]
Resume = Annotated[
    bool, Option("Continue an interrupted --records file of the same run.", panel="Output")
]
