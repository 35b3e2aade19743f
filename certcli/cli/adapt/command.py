"""certvit adapt: replace parts of a vision transformer by Lipschitz parts."""

from certcli.adapt.settings import AdaptSettings
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Source, Talk
from certcli.system.options import option


@group()
class Mode:
    """Continue an interrupted run."""

    resume: bool = option(
        False, "Continue an interrupted run of the same command.", panel="Fitting"
    )


@command(
    "certvit adapt m.safetensors --dataset photos/ -o lipschitz.safetensors",
    "certvit adapt m.safetensors --goal certify --norm fold --activation maxmin --head 128,128",
    page="adapt.md",
    run="certcli.cli.adapt.run:write_adapted",
    often=(
        "goal",
        "keep",
        "norm",
        "activation",
        "head",
        "epochs",
        "resume",
    ),
)
def adapt(
    source: Source,
    settings: AdaptSettings,
    mode: Mode = Mode(),
    data: Calibration = Calibration(limit=400),
    machine: BatchDevice = BatchDevice(batch_size=64),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Replace layers by Lipschitz layers: keep the predictions, or prepare for certified training."""
