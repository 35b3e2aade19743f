"""certvit certify: certified accuracy at radii or against patches, one record an image."""

from pathlib import Path
from typing import Literal

import typer

from certcli.certify.options import Local, Patches, Proof, Smoothing
from certcli.cli.shared import groups
from certcli.cli.shared.command import Plot, Reads, Records, Resume, Writes, command, group
from certcli.evaluation.threat import parse_radius
from certcli.system.options import option

RADII = {"l2": [0.25, 0.5, 1.0], "linf": [1 / 255, 2 / 255, 4 / 255, 8 / 255]}
"""Radii at which certified accuracy is shown by default."""


@group()
class CertifyTarget:
    """What is certified, at which radii, and what the result must meet."""

    epsilon: list[float] = option(
        list,
        "Radius in pixel units: 0.5 or 36/255; may be repeated. Default: 0.25, 0.5, 1; in "
        "linf 1, 2, 4, 8 / 255.",
        "--epsilon",
        "-e",
        metavar="R",
        read=parse_radius,
    )
    methods: list[str] = option(
        lambda: ["lipschitz"],
        "lipschitz (proof, global bound), box (proof, larger radii where pixels are 0 or "
        "1), local (proof image by image, small networks), local-lip or bcp (proof, "
        "chains of layers), smoothing (any network, with a probability), patch (proof "
        "against patches, any network behind masks), auto (chooses, and says why); "
        "several are shown side by side. --method NAME --help shows its options.",
        "--method",
    )
    minimum: str | None = option(
        None,
        "Required certified share at radius (or patch) R, by default the smallest: exit "
        "7 if it is missed, 9 if the images do not decide.",
        "--min-certified",
        metavar="SHARE[@R]",
    )
    radius: Literal["asked", "largest"] = option(
        "asked",
        "With --method local: asked decides the radii of -e alone, largest searches each image's "
        "largest one, as without -e.",
        metavar="WHICH",
    )
    vnnlib: Path | None = option(
        None,
        "A query of VNN-LIB 1.0 or 2.0 about NET.onnx, in place of images: holds, violated (exit 7) "
        "or unknown (exit 9), within --seconds, 100 by default.",
        mark=Reads(),
    )
    result: Path | None = option(
        None, "With --vnnlib: VNN-COMP's file of the result.", mark=Writes()
    )
    records: Records = None
    resume: Resume = False
    attack_records: Path | None = option(
        None,
        "Records of `attack`, shown beside the certificates and in --plot.",
        mark=Reads(),
    )
    plot: Plot = None


@group()
class CertifyOptions:
    """All options of one call that certifies."""

    source: groups.Source
    target: CertifyTarget = CertifyTarget()
    proof: Proof = Proof()
    smoothing: Smoothing = Smoothing()
    local: Local = Local()
    patches: Patches = Patches()
    data: groups.Evaluation = groups.Evaluation()
    machine: groups.BatchDevice = groups.BatchDevice()
    output: groups.Output = groups.Output()

    @property
    def decides(self) -> bool:
        """Tell whether `local` decides the radii of -e in place of a search."""
        return bool(self.target.epsilon) and self.target.radius == "asked"


PANELS = {
    "smoothing": "Smoothing",
    "local": "Local",
    "patch": "Patches",
    **dict.fromkeys(("lipschitz", "box", "local-lip", "bcp"), "Proofs"),
}
"""A method -> the panel of its options."""


@command(
    "certvit certify m.safetensors -e 36/255 -e 0.5 --records certified.jsonl",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method smoothing --sigma "
    "0.12 -e 0.12 --limit 50",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method patch --patch 32 --limit 200",
    page="certify.md",
    run="certcli.cli.certify.run:report_certificates",
    often=(
        "epsilon",
        "methods",
        "minimum",
        "records",
        "resume",
        "plot",
        "attack_records",
    ),
    panels=PANELS,
)
def certify(
    context: typer.Context,
    options: CertifyOptions,
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Certify images: the certified accuracy at each l2 radius, or against each patch."""
