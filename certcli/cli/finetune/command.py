"""certvit finetune: train for clean or certified accuracy, from a checkpoint or from scratch."""

from certcli.cli.finetune.options import Order
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import Talk
from certcli.system.errors import UsageError

OFTEN = (*("preset", "loss", "epsilon", "epochs", "time_budget", "resume", "lr", "noise"),)
"""The options of most runs."""


@command(
    "certvit finetune m.safetensors --dataset digits --loss ce --epochs 20",
    "certvit finetune m.safetensors --loss margin -e 0.5 --time-budget 10m",
    page="finetune.md",
    often=OFTEN,
)
def finetune(order: Order, talk: Talk = Talk()) -> None:
    """Train on --dataset, choose the epoch on its validation images, and prove the bound of the
    result."""
    from certcli.cli.finetune.run import Training

    if order.settings.time_budget is not None and order.settings.steps is not None:
        raise UsageError("--steps and --time-budget exclude each other", "one of the two")
    training = Training(order, talk.sink())
    with training.held:
        training.run()
