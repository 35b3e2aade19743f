"""The options of `certvit constrain` beside its settings."""

from dataclasses import replace

from certcli.cli.shared.command import group
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
