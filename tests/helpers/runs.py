"""A short run of each command that writes, and its outputs."""

import inspect
from pathlib import Path

from certcli.cli.main import COMMANDS
from certcli.cli.shared.command import info_of, spelling
from certcli.cli.shared.options import Writes

M = "m.safetensors"
ADAPTER = str(Path(__file__).parent / "adapter")
"""Another bias of the head."""
FEW = ["--dataset", "digits", "--limit", "12", "--quiet", "--force"]
RUNS = {
    "init": ["init", "certvit_vit_digits", "--quiet", "--force"],
    "adapt": ["adapt", M, *FEW, "--epochs", "1"],
    "constrain": ["constrain", M, *FEW, "--layers", "*fc1"],
    "finetune": ["finetune", M, *FEW, "--loss", "ce", "--steps", "1", "--validation-limit", "10"],
    "merge": ["merge", M, ADAPTER, "--quiet", "--force"],
    "lipschitz": ["lipschitz", M, "--no-estimate", "--quiet", "--force"],
    "audit": ["audit", M, *FEW, "--time-budget", "10m", "-a", "fgsm", "--method", "lipschitz"],
    "certify": ["certify", M, *FEW],
    "attack": ["attack", M, *FEW, "-a", "fgsm", "-e", "2"],
    "log": ["log", M, "--quiet"],
    "verify": ["verify", M, "--proven-only", "--quiet"],
}
"""A short run of each command, its outputs to be added."""
ENDINGS = {
    "--plot": ".png",
    "--gallery": ".png",
    "--report": ".json",
    "--html": ".html",
    "--records": ".jsonl",
}


OF_QUERIES = "--result"
"""Written where --vnnlib is read: `tests/certify/test_vnnlib.py`."""


def outputs_of(name: str) -> list[str]:
    """Return the options of a command that name a file to be written."""
    options = [
        spelling(parameter.name, info_of(parameter.annotation))[-1]
        for parameter in inspect.signature(COMMANDS[name]).parameters.values()
        for note in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(note, Writes)
    ]
    return [option for option in options if option != OF_QUERIES]


def named_words(name: str) -> list[tuple[str, str]]:
    """Return each of these options with a file for it."""
    return [
        (option, f"out{option}{ENDINGS.get(option, '.safetensors')}") for option in outputs_of(name)
    ]


WRITING = [name for name in COMMANDS if outputs_of(name)]
