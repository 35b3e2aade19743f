"""What Python's functions take: docs/api.md lists it, types name it, and options are fields of the
rooms' own options.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import certvit
import certvit.testing
from certcli import api
from certcli.api import door, options
from certcli.api.arguments import fields_of
from certcli.attack.settings import AttackSettings
from certcli.audit.plan import AuditPlan
from certcli.certify.methods import METHODS, Method, options_of_method
from certcli.certify.options import Patches
from certcli.models.build import OpenCheckpoint
from certcli.system.errors import UsageError

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(certvit, name) for name in api.FUNCTIONS},
    **{name: getattr(certvit.testing, name) for name in certvit.testing.__all__ if name[0] == "a"},
}
OPTIONS: dict[str, tuple[Any, Any, set[str]]] = {
    "predict": (Patches, options.PatchOptions, set()),
    "attack": (AttackSettings, options.AttackOptions, {"classes", "restart"}),
    "audit": (AuditPlan, options.AuditOptions, {"gates", "budget"}),
    **{
        name: (type(options_of_method(name, {})), options.CertifyOptions, set())
        for name in get_args(Method)
    },
}
"""The class of the options, what a caller may set of it, and what the functions set themselves."""
OPTIONS["smoothing"][2].update(("batch_size", "denoiser", "denoiser_file", "denoiser_module"))
WIDER: dict[Any, tuple[Any, ...]] = {
    options.Radii: (Sequence[float], tuple[float, ...]),
    options.Words: (list[str], tuple[str, ...]),
    options.Radius: (float,),
    options.Radius | None: (float | None,),
    str | Path | None: (Path | None,),
}
"""Types of keyword arguments -> those of the fields that they are read into."""


def test_the_names_of_methods_are_those_of_the_registry() -> None:
    assert list(get_args(Method)) == METHODS.names()


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_fields_of_the_room(name: str) -> None:
    kind, offered, internal = OPTIONS[name]
    chosen = fields_of(kind, offered)
    assert {*chosen.values(), *internal} == {item.name for item in fields(kind)}
    types = get_type_hints(kind)
    for keyword, hint in get_type_hints(offered).items():
        if keyword in chosen:
            assert types[chosen[keyword]] in (hint, *WIDER.get(hint, ())), keyword
    rows = re.findall(
        r"^\| (.*) \| (.*) \|$",
        PAGE.partition("| options of |")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    (names,) = [row[1] for row in rows if name in re.findall(r"[\w-]+", row[0])]
    assert set(re.findall(r"`(\w+)`", names)) == set(chosen)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_page_shows_each_signature(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", PAGE, re.MULTILINE)
    parameters = [
        one.replace(annotation=one.empty)
        for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    ]
    assert f"({row})" == str(inspect.Signature(parameters)).replace("'", '"')


@pytest.fixture(scope="module")
def network() -> OpenCheckpoint:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    return certvit.load(module, mean=0.5, std=0.25, input_size=(3, 2, 2))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_call_says_what_to_pass(name: str) -> None:
    """A misspelled name the nearest one, a lacking or superfluous argument the form of the call."""
    signature = door.Signature(FUNCTIONS[name])
    for known in (*signature.names, *signature.options):
        with pytest.raises(UsageError, match=f"{name} has no option '{known}x'") as refusal:
            FUNCTIONS[name](**{f"{known}x": 1})
        assert f"did you mean '{known}'" in refusal.value.hint
    for arguments in ((), (1,) * 20):
        with pytest.raises(UsageError, match=f"^{name}: ") as refusal:
            FUNCTIONS[name](*arguments)
        assert refusal.value.hint.startswith(f"{name}({signature.names[0]}")


@pytest.mark.parametrize(
    ("name", "old", "value"),
    [
        ("bounds", "eps", 0.01),
        ("shares", "sizes", [0.1]),
        ("slope", "data", torch.rand(1, 3, 2, 2)),
        ("predict", "pixels", torch.rand(1, 3, 2, 2)),
        ("assert_robust", "radius", 0.0),
        ("assert_bound", "network", None),
        ("certify", "at", [0.01]),
    ],
)
def test_a_name_of_the_last_release_says_the_new_one(
    network: OpenCheckpoint, name: str, old: str, value: Any
) -> None:
    x = torch.rand(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    y = certvit.network(network)(x).argmax(1)
    usual = {
        "source": network,
        "images": x,
        "labels": y,
        "certificates": certvit.certify(network, x, y),
    }
    usual |= {"at_least": 0.0, "at_most": 1e9, "attacks": "fgsm", "radii": 0.1, "method": "local"}
    known = set(door.Signature(FUNCTIONS[name]).names) - ({"method"} if name == "bounds" else set())
    new = door.RENAMED[old]
    arguments = {key: usual[key] for key in usual.keys() & known if key != new}
    value = network if value is None else value
    with pytest.warns(
        DeprecationWarning, match=rf"{name}\({old}=...\) is now {name}\({new}=...\)"
    ) as seen:
        renamed = FUNCTIONS[name](**arguments, **{old: value})
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = FUNCTIONS[name](**arguments, **{new: value})
    assert repr(renamed) == repr(expected)
