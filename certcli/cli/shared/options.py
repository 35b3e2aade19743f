"""Options that mean the same everywhere. No torch: `certvit COMMAND --help` must be instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from certcli.evaluation.radii import parse_radius

MOST_IMAGES = 2**24  # at a time: more than any memory holds


@dataclass(frozen=True)
class Reads:
    """A mark of options that name an input: a file, a checkpoint, or (folder) images."""

    folder: bool = False


@dataclass(frozen=True)
class Writes:
    """A mark of options whose value names an output: new, or --force, and never an input
    (`certcli.checkpoint.outputs`).

    Args:
        resumable: --resume continues a file that exists.
        figure: the ending names the format.
    """

    resumable: bool = False
    figure: bool = False


def fraction(text: str) -> float:
    """Return a radius, finite and >= 0, of a number or a quotient as in 8/255."""
    try:
        return parse_radius(str(text))
    except ValueError as failure:
        raise typer.BadParameter(str(failure)) from failure


def share(text: str) -> float:
    """Return a share of the images, in [0, 1], which a gate demands."""
    try:
        value = float(text)
    except ValueError as failure:
        raise typer.BadParameter(f"'{text}' is not a number") from failure
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text} is no share of the images: 0.9 demands 90 %")
    return value


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A .safetensors file, a folder with model.safetensors, certvit/digits, a timm name, or hf-hub:OWNER/NAME.",
    ),
    Reads(),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Checkpoint to write."), Writes()
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Size of a file where -o ends in .safetensors.index.json: 5GB, 200MB.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output file.")]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="digits, torch/mnist, torch/cifar10, ..., or a folder: of class folders (classes in the order of their names), "
        "or of images with a labels.csv (columns file and class).",
    ),
    Reads(folder=True),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the torch/... datasets."),
    Reads(folder=True),
]
Split = Annotated[
    str | None, typer.Option("--split", help="train, val or test. Default: the evaluation split.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Use a seeded, class-balanced sample of N images.")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of every random choice.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.")]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, max=MOST_IMAGES, help="Most images in a batch.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        max=64,
        help="Threads that read image files ahead. Default: one a core, at most 8.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the result: FILE.png, FILE.svg or FILE.pdf.",
        rich_help_panel="Output",
    ),
    Writes(figure=True),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help="Write a page that opens from disk.",
        rich_help_panel="Output",
    ),
    Writes(),
]
Records = Annotated[
    Path | None,
    typer.Option(
        "--records",
        metavar="FILE.jsonl",
        help="Write one JSON line an image, during the run.",
        rich_help_panel="Output",
    ),
    Writes(resumable=True),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the --records of the same run.", rich_help_panel="Output"
    ),
]
Epsilons = Annotated[
    list[float],
    typer.Option(
        "--epsilon",
        "-e",
        parser=fraction,
        metavar="R",
        help="Radius in pixel units: 0.5 or 36/255; may be repeated.",
    ),
]
Arch = Annotated[str | None, typer.Option("--arch", help="timm architecture of a foreign file.")]
ArchArg = Annotated[
    list[str], typer.Option("--arch-arg", metavar="KEY=VALUE", help="Argument of --arch.")
]
Mean = Annotated[
    str | None,
    typer.Option("--mean", help="Pixel mean of a foreign file, e.g. 0.5 or 0.48,0.45,0.41."),
]
Std = Annotated[
    str | None, typer.Option("--std", help="Pixel standard deviation of a foreign file.")
]
NormEps = Annotated[
    float | None,
    typer.Option("--norm-eps", help="eps of every norm of a foreign file, if not timm's own."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="raw|ema|KEY",
        help="Which weights of a file that holds several: raw or averaged ones, or those under a key.",
    ),
]
AsStated = Annotated[
    bool,
    typer.Option(
        "--as-stated",
        help="Believe --arch-arg and config.json where the tensors fit another network too.",
    ),
]
