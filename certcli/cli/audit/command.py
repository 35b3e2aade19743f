"""certvit audit: bound, slope, certificates and attacks within a time budget, in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from certcli.cli.shared import groups
from certcli.cli.shared.command import Html, Reads, Writes, command, group
from certcli.evaluation.threat import Pixels, Precision, parse_radius
from certcli.system import errors, registry
from certcli.system.options import option

if TYPE_CHECKING:
    from certcli.audit.plan import AuditPlan

TEXT = "text"
STDOUT = (TEXT, "github")
"""Formats of the answer on stdout."""
METHODS = ("lipschitz", "local", "patch", "smoothing")


@group("Audit")
class AuditOptions:
    """The figures to find, the time for them, and the requirements."""

    time_budget: str = option(
        "2m", "Wall time: 90s, 2m, 1h. The report names what did not fit.", metavar="T"
    )
    epsilon: list[float] = option(
        lambda: [0.12, 0.5],
        "Radius in pixel units: 0.5 or 36/255; may be repeated.",
        "--epsilon",
        "-e",
        metavar="R",
        read=parse_radius,
    )
    attacks: list[str] = option(
        lambda: ["pgd-10", "margin-pgd-10"],
        "pgd, margin-pgd, autoattack, and all that certvit attack --list shows; repeated: in turn.",
        "--attack",
        "-a",
    )
    methods: list[str] = option(
        list,
        "lipschitz, local, patch or smoothing; may be repeated. Default: those that suit "
        "the network.",
        "--method",
    )
    patches: list[str] = option(
        list,
        "Prove against patches of this size, behind masks: 32, 16x64, 2%; may be repeated.",
        "--patch",
        metavar="SIZE",
    )
    sigma: float | None = option(
        None,
        "Noise of smoothing, pixel units. Default: the smallest --epsilon, at least R / "
        "1.5 for certified@R.",
        metavar="S",
        read=parse_radius,
    )
    denoiser: Path | None = option(
        None,
        "Denoiser that runs before the smoothed network: a DnCNN, a folder of diffusers, "
        "or a guided-diffusion file.",
        metavar="PATH",
        mark=Reads(),
    )
    precision: Precision | Literal["auto"] = option(
        "auto",
        "Precision of smoothing and of the attacks' own passes: float32, bf16, or auto "
        "(bf16 for a million parameters and more, on hardware for it).",
    )
    pixels: Pixels = option(
        "float",
        "Images that attacks search among: float, or 8bit (the images are rounded first).",
    )
    fail_on: list[str] = option(
        list,
        "Gate, may be repeated: exit 7 if it is true, 9 if the images do not decide. "
        "certified@0.25<0.4, proven@0.5<0.1, robust@0.5<0.2, patched@32<0.1, clean<0.9, "
        "upper>100.",
        metavar="GATE",
    )

    def plan(self, seed: int, batch_size: int, limit: int | None) -> AuditPlan:
        """Return the audit's plan; UsageError on meaningless names and values."""
        from certcli.attack import settings, stages
        from certcli.audit import gates, plan
        from certcli.evaluation.threat import Threat, require_radii
        from certcli.finetune.option_texts import parse_duration

        for method in self.methods:
            if method not in METHODS:
                raise errors.UsageError(
                    f"an audit knows no method '{method}'", registry.one_of(method, METHODS)
                )
        for patch in self.patches:
            Threat.read(patch, "patch")
        radii = require_radii(self.epsilon)
        stages.stages_of(
            self.attacks, None, "l2", radii, settings.AttackSettings(seed=seed, pixels=self.pixels)
        )
        return plan.AuditPlan(
            radii=radii,
            sigma=self.sigma,
            denoiser=self.denoiser,
            attacks=tuple(self.attacks),
            methods=tuple(self.methods),
            patches=tuple(self.patches),
            seed=seed,
            batch_size=batch_size,
            precision=self.precision,
            pixels=self.pixels,
            gates=tuple(gates.parse_gate(text) for text in self.fail_on),
            budget=parse_duration(self.time_budget),
            limit=limit,
        )


@group("Output")
class Reports:
    """Files beside the answer; their suffix decides the format."""

    report: list[Path] = option(
        list,
        ".html .json .sarif .xml (JUnit).",
        metavar="FILE",
        mark=Writes(),
    )
    html: Html = None
    written: str = option(
        TEXT,
        "text, or github: also annotations (::error, ::warning, ::notice) on stdout.",
        "--format",
        metavar="NAME",
    )
    anonymous: bool = option(
        False,
        "Reports without folders, names of image files and the processor, as for a page that others "
        "read.",
    )
    compare: Path | None = option(
        None,
        "Earlier --report FILE.json to compare with.",
        metavar="FILE",
        mark=Reads(),
    )


@command(
    "certvit audit m.safetensors --dataset digits --html audit.html",
    'certvit audit m.safetensors --limit 100 --fail-on "certified@0.25<0.4" --fail-on "robust@0.5<0.2"',
    page="audit.md",
    run="certcli.cli.audit.run:report_audit",
    often=(
        "time_budget",
        "epsilon",
        "methods",
        "fail_on",
        "report",
        "html",
    ),
)
def audit(
    source: groups.Source,
    options: AuditOptions = AuditOptions(),
    data: groups.Evaluation = groups.Evaluation(limit=200),
    machine: groups.BatchDevice = groups.BatchDevice(),
    reports: Reports = Reports(),
    output: groups.Output = groups.Output(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Say in words how robust a network is: bound, slope, certificates and attacks within a time
    budget."""
