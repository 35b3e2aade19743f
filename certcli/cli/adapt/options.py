"""The options of `certvit adapt` beside its settings."""

from certcli.cli.shared.command import group
from certcli.system.options import option


@group()
class Mode:
    """Continue an interrupted run."""

    resume: bool = option(
        False, "Continue an interrupted run of the same command.", panel="Fitting"
    )
