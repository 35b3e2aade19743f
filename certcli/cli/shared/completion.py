"""How `--help` names an option's values, and which names the shell completes."""

from collections.abc import Callable, Iterator
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

NAMES = {
    "--attack": "certcli.attack.catalogue:ATTACKS",
    "--loss": "certcli.finetune.losses:LOSSES",
    "--method": "certcli.certify.methods:METHODS",
    "audit --method": "certcli.cli.audit.options:METHODS",
    "--prox": "certcli.constrain.settings:PENALTIES",
}
"""Option, or command and option -> where its names are: a registry, or a tuple of names."""
ARCHITECTURES = ("--arch", "ARCH")
WORDS = {bool: "", int: "N", float: "NUMBER", Path: "PATH", str: "NAME"}
"""What stands for a value of a type where the option names nothing better; a flag takes no value."""


def with_completion(command: str, spelled: str, base: Any, info: Any) -> OptionInfo | ArgumentInfo:
    """Return Typer's note with a word for the value and the names to complete.

    Args:
        command: the command's name.
        spelled: the option's long spelling, or the argument's metavar.
        base: the type of the value: one of WORDS, or a list or union with None of it.
        info: the note.
    """
    completed = copy(info)
    if completed.metavar is None:
        completed.metavar = WORDS.get(_type_of_value(base), "VALUE")
    target = NAMES.get(f"{command} {spelled}", NAMES.get(spelled))
    if target is not None:
        completed.autocompletion = _registered(target)
    elif spelled in ARCHITECTURES:
        completed.autocompletion = _architectures
    return completed


def _type_of_value(base: Any) -> Any:
    if get_origin(base) is None:
        return base
    return next((_type_of_value(part) for part in get_args(base) if part is not type(None)), None)


def _registered(target: str) -> Callable[[str], list[Any]]:
    def complete(incomplete: str) -> list[Any]:
        module, _, attribute = target.partition(":")
        entries = getattr(import_module(module), attribute)
        pairs = [
            (entry, "") if isinstance(entry, str) else (entry.name, entry.summary)
            for entry in entries
        ]
        return [pair for pair in pairs if pair[0].startswith(incomplete)]

    return complete


def _architectures(incomplete: str) -> Iterator[str]:
    """Return the names of timm's models and of ours. Takes the seconds that torch takes to load."""
    import_module("certcli.models.build")
    import timm

    yield from timm.list_models(f"{incomplete}*")
