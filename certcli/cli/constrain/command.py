"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from certcli.cli.constrain.options import Aim
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Source, Talk
from certcli.constrain.settings import ConstrainSettings


@command(
    "certvit constrain m.safetensors --beta 0.01",
    "certvit constrain m.safetensors --keep 0.9 --dataset photos/ -o lower.safetensors",
    page="constrain.md",
    often=(
        "prox",
        "beta",
        "keep",
        "eta",
        "preset",
        "layers",
    ),
)
def constrain(
    source: Source,
    settings: ConstrainSettings = ConstrainSettings(),
    aim: Aim = Aim(),
    data: Calibration = Calibration(limit=300),
    machine: BatchDevice = BatchDevice(batch_size=50),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Lower each layer's spectral norm as far as its outputs on calibration images allow
    (Douglas-Rachford).
    """
    from certcli.cli.constrain import run

    run.write_constrained(source, settings, aim, data, machine, output, talk)
