"""`certvit lipschitz`: the proven upper bound, layer by layer, beside a measured lower bound."""

from typing import Annotated

import typer

from certcli.cli.lipschitz.options import (
    BoundedNetwork,
    NearImages,
    SlopeSearch,
    Views,
)
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Talk


@command(
    "certvit lipschitz m.safetensors --layers",
    "certvit lipschitz m.safetensors --max 1000 --json > report.json",
    "certvit lipschitz m.safetensors --around 0.1 --around 0.2 --dataset digits --plot near.png",
    page="bounds.md",
    often=(
        "maximum",
        "layers",
        "estimate",
        "plot",
    ),
)
def lipschitz(
    source: BoundedNetwork,
    maximum: Annotated[
        float | None,
        typer.Option("--max", min=0, help="Exit 7 if the bound exceeds this; 5 if there is none."),
    ] = None,
    near: NearImages = NearImages(),
    show: Views = Views(),
    slope: SlopeSearch = SlopeSearch(),
    data: Calibration = Calibration(limit=4),
    machine: BatchDevice = BatchDevice(batch_size=8),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Prove a global bound: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1]; some pair
    has slope >= lower.
    """
    from certcli.cli.lipschitz import run

    run.report_bound(source, maximum, near, show, slope, data, machine, output, talk)
