"""`certvit lipschitz`: the proven upper bound, layer by layer, beside a measured lower bound."""

from typing import Annotated

import typer

from certcli.cli.lipschitz import around, run, view
from certcli.cli.lipschitz.options import (
    BoundedNetwork,
    LipschitzOptions,
    NearImages,
    SlopeSearch,
    Views,
)
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Talk
from certcli.system.processes import require_one, team

EVIDENCE = ("upper", "log10_upper", "lower", "why", "attention_weight", "bound_of")
"""Keys of the report that a checkpoint keeps."""


@command(
    "certvit lipschitz m.safetensors --layers --worst",
    "certvit lipschitz m.safetensors --max 1000 --json > report.json",
    "certvit lipschitz m.safetensors --around 0.1 --around 0.2 --dataset digits --plot near.png",
    page="bounds.md",
    often=(
        "maximum",
        "layers",
        "worst",
        "other",
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
    sink = talk.sink()
    from certcli.cli.shared.inputs import return_large_blocks

    show.require_agreement(near)
    output.claim(source, show, data)
    chosen = LipschitzOptions(source, near, show, slope, data, machine)
    if show.other is not None or show.jacobian or near.around:
        require_one(
            "networks are compared, blocks measured and slopes near images proven",
            "leave out --compare, --jacobian and --around, or torchrun",
        )
    if not team().leads:
        run.help_leader(chosen, sink)
        return
    return_large_blocks()
    asked = {"--around": near.around, "-o": output.output}
    decision = next((option for option, value in asked.items() if value), None)
    audited = run.prove(source, machine, sink, decision)
    nearby = around.prepared(audited, chosen) if near.around else None
    lower = run.measure_slope(audited, chosen, sink) if slope.estimate else None
    report = view.report_of(audited, lower)
    view.show_bound(audited, show.layers, show.worst, sink)
    report |= run.show_views(audited, nearby, chosen, sink)
    view.explain(audited, lower, report["attention_weight"], sink)
    gate = run.gate_of(audited, maximum)
    sink.document({**report, "proof": audited.proven.bound.to_json()}, gate)
    if output.output is not None:
        result = {name: report[name] for name in EVIDENCE}
        about = {"images": data.limit if slope.estimate else 0}
        output.write(audited.checkpoint.with_evidence("lipschitz", about, result), output.output)
        sink.note(f"wrote {output.output}")
    gate.enforce()
