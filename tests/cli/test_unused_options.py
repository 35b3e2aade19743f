"""An option that the chosen method or a switch that is off would drop in silence is refused."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from certcli.certify.options import Local, Smoothing
from certcli.cli.certify.demands import first_given
from certcli.finetune import settings
from certcli.finetune.losses import LOSSES
from certcli.system import errors, options
from tests.helpers.commands import console

OTHERS: dict[str, Any] = {
    "attack_norm": "l2",
    "attack_steps": 3,
    "ard_prm": 0.3,
    "attack_ramp": 0.5,
    "attack_epsilon": 0.1,
    "stiefel_lr": 0.2,
    "weight_decay": 0.2,
    "ramp": 0.7,
    "worst_weight": 0.2,
    "enclosed": 4,
}
PANELS = {"Attacks on training images": "adversarial"}
"""Panels of finetune whose options all serve one switch."""


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for group in settings.SWITCHES.values() for name in group} - {*settings.FILLED_IN}
    ),
)
def test_an_option_of_a_switch_that_is_off_is_refused(name: str) -> None:
    default = settings.FinetuneSettings.__dataclass_fields__[name].default
    assert OTHERS[name] != default
    with pytest.raises(errors.UsageError, match=f"--{name.replace('_', '-')}"):
        settings.FinetuneSettings(loss="ce", optimiser="adamw", **{name: OTHERS[name]})


def served() -> list[tuple[str, str]]:
    """Return each option of a panel of one switch, with the switch."""
    notes = (
        (one.name, one.metadata.get(options.NOTE)) for one in fields(settings.FinetuneSettings)
    )
    switches = [(name, PANELS.get(note.panel or "")) for name, note in notes if note is not None]
    assert {switch for _, switch in switches} >= set(PANELS.values())
    return [(name, switch) for name, switch in switches if switch not in (None, name)]


@pytest.mark.parametrize(("name", "switch"), served())
def test_a_panel_of_one_switch_is_refused_without_it(
    name: str, switch: str, workshop: Path
) -> None:
    option = f"--{name.replace('_', '-')}"
    words = ("--dataset", "digits", "--loss", "ce", option, OTHERS[name])
    done = console("finetune", workshop / "plain.safetensors", *words)
    assert done.code == 2
    assert option in done.err
    assert f"--{switch}" in done.err


@pytest.mark.parametrize("name", settings.OF_A_CHOICE)
def test_an_option_of_another_choice_is_refused(name: str) -> None:
    option, values = settings.OF_A_CHOICE[name]
    others: dict[str, Any] = {"loss": "margin", "optimiser": "stiefel", "adversarial": "pgd"}
    wrong = dict.fromkeys(("ramp", "worst_weight", "enclosed"), "ce")
    wrong |= {"attack_steps": "fgsm", "stiefel_lr": "adamw"}
    others |= {option: wrong.get(name, "stiefel")}
    assert others[option] not in values
    with pytest.raises(errors.UsageError, match=f"--{name.replace('_', '-')} has no meaning with"):
        settings.FinetuneSettings(**others, **{name: OTHERS[name]})
    settings.FinetuneSettings(**{**others, option: values[0]}, **{name: OTHERS[name]})


@pytest.mark.parametrize("loss", [loss.name for loss in LOSSES if loss.needs != "nothing"])
def test_a_loss_with_a_radius_has_its_ramp(loss: str) -> None:
    assert loss in settings.OF_A_CHOICE["ramp"][1]


def test_defaults_are_not_given() -> None:
    for kind in (Smoothing, Local):
        assert first_given(kind()) is None
        assert fields(kind)
