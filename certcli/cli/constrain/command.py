"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from dataclasses import replace

from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Source, Talk
from certcli.constrain.settings import ConstrainSettings, preset_of
from certcli.system import errors, options


@group("Method")
class Aim:
    """The allowed output error, and which layers."""

    keep: float | None = options.option(
        None,
        "Fraction of top-1 predictions to preserve on held-out images (default 0.98; 0.95 "
        "on synthetic images). Sets --eta.",
    )
    eta: float | None = options.option(
        None, "Allowed relative output error of each layer, in place of --keep."
    )
    preset: str | None = options.option(
        None,
        "certvit-paper: the paper's problem in its own units (l1, absolute eta 0.1, all "
        "tokens, no ridge), 10 iterations; certvit-paper-tables: eta 0.01 and beta 0.1, as its "
        "Tables 9 and 10 have. Either takes --beta and --relaxation.",
    )
    layers: list[str] = options.option(
        list,
        "Only layers whose path matches this pattern (* and ?); may be repeated.",
        panel="Layers",
    )


def preset_settings(aim: Aim, settings: ConstrainSettings) -> ConstrainSettings:
    """Return the preset's, with beta and lambda as typed; UsageError where another option differs."""
    assert aim.preset is not None
    if (aim.keep, aim.eta) != (None, None) or settings != ConstrainSettings(
        beta=settings.beta, relaxation=settings.relaxation
    ):
        raise errors.UsageError(
            "--preset sets the method and the error",
            "of --eta, --keep and Method it takes --beta and --relaxation alone",
        )
    return replace(
        preset_of(aim.preset),
        beta=settings.beta or preset_of(aim.preset).beta,
        relaxation=settings.relaxation,
    )


@command(
    "certvit constrain m.safetensors --beta 0.01",
    "certvit constrain m.safetensors --keep 0.9 --dataset photos/ -o lower.safetensors",
    page="constrain.md",
    run="certcli.cli.constrain.run:write_constrained",
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
