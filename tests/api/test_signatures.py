"""What Python's functions take: docs/api.md lists it, types name it, and options are fields of the
rooms' own options.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import certvit
import certvit.testing
from certcli import api
from certcli.api import door, options
from certcli.api.arguments import fields_of
from certcli.attack.settings import AttackSettings
from certcli.audit.plan import AuditPlan
from certcli.certify.methods import METHODS, Method, options_of_method
from certcli.certify.options import Patches
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
