"""The options of `certvit certify`: what is certified, and all groups of one call."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from certcli.certify.local_options import Local
from certcli.certify.patch.options import Patches
from certcli.certify.proof_options import Proof
from certcli.certify.smoothing.options import Smoothing
from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import BatchDevice, Evaluation, Output, Source

RADII = {"l2": [0.25, 0.5, 1.0], "linf": [1 / 255, 2 / 255, 4 / 255, 8 / 255]}
"""Radii at which certified accuracy is shown by default."""


@group()
class CertifyTarget:
    """What is certified, at which radii, and what the result must meet."""

    epsilon: Annotated[
        list[float],
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius in pixel units: 0.5 or 36/255; may be repeated. Default: 0.25, 0.5, "
            "1; in linf 1, 2, 4, 8 / 255.",
        ),
    ] = field(default_factory=list)
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="lipschitz (proof, global bound), box (proof, larger radii where pixels are 0 or 1), "
            "local (proof image by image, small networks), local-lip or bcp (proof, chains of "
            "layers), smoothing (any network, with a probability), patch (proof against patches, "
            "any network behind masks), auto (chooses, and says why); several are shown side by side.",
        ),
    ] = field(default_factory=lambda: ["lipschitz"])
    minimum: Annotated[
        str | None,
        typer.Option(
            "--min-certified",
            metavar="SHARE[@R]",
            help="Required certified share at radius (or patch) R, by default the smallest: "
            "exit 7 if it is missed, 9 if the images do not decide.",
        ),
    ] = None
    records: options.Records = None
    resume: options.Resume = False
    attack_records: Annotated[
        Path | None,
        typer.Option(
            "--attack-records",
            help="Records of `attack`, shown beside the certificates and in --plot.",
        ),
        options.Reads(),
    ] = None
    plot: options.Plot = None
    html: options.Html = None


@dataclass(frozen=True)
class CertifyOptions:
    """All options of one call that certifies."""

    source: Source
    target: CertifyTarget
    proof: Proof
    smoothing: Smoothing
    local: Local
    patches: Patches
    data: Evaluation
    machine: BatchDevice
    output: Output
