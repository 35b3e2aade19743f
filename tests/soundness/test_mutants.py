"""The planter of faults: every kind of change is made once, means what its name says, and leaves
the file alone.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.soundness.mutants.__main__ import place_of
from tests.soundness.mutants.operators import mutants, mutated
from tests.soundness.mutants.rooms import ROOMS, ROOT

SOURCE = """
def up(x):
    return math.nextafter(x, math.inf)

def f(x, y=(2.0, 3.0), alpha=0.5, notes=None):
    if x < 0 or x > 50:
        raise ValueError(f"{x * 2}")
    notes.append(not x)
    return round(up(math.sqrt(x)) * len(y) + y[1] + max(alpha, x / 4) + gamma(9) + norm(y), ndigits=9)
"""
# a change of f or up, and what f(9) is then
CHANGES = {
    "up(math.sqrt(x)) * len(y) => (up(math.sqrt(x)), len(y))[0]": 3 + 3 + 2.25 + 13,
    "up(math.sqrt(x)) * len(y) => up(math.sqrt(x)) * len(y) ** 0.5": 3 * 2**0.5 + 3 + 2.25 + 13,
    "math.sqrt(x) => (x, math.sqrt(x))[0]": 18 + 3 + 2.25 + 13,
    "y[1] => y[0]": 6 + 2 + 2.25 + 13,
    "max(alpha, x / 4) => min(alpha, x / 4)": 6 + 3 + 0.5 + 13,
    "max(alpha, x / 4) => (alpha, max(alpha, x / 4))[0]": 6 + 3 + 0.5 + 13,
    "x / 4 => x * 2.0 ** (-10) / 4": 6 + 3 + 0.5 + 13,
    "x / 4 => (x, 4)[0]": 6 + 3 + 9 + 13,
    "alpha => alpha * 2.0": 6 + 3 + 2.25 + 13,
    "norm(y) => norm(y) * 0.9999990463256836": 6 + 3 + 2.25 + 13 * 0.9999990463256836,
    "notes.append(not x) => lambda: notes.append(not x)": 24.25,
    "x < 0 or x > 50 => x > 50": 24.25,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mutant_does_what_its_name_says(change: str, tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(SOURCE)
    (mutant,) = [found for found in mutants(file, tmp_path) if found.key.endswith(f": {change}")]
    scope: dict[str, Any] = {
        "math": math,
        "gamma": lambda terms: 0.0,
        "norm": lambda y: math.hypot(*y) ** 2,
    }
    exec(compile(SOURCE, str(file), "exec"), scope)
    assert scope["f"](9, notes=[]) == 24.25
    assert place_of(compile(mutated(mutant), str(file), "exec"), [scope["f"], scope["up"]])
    assert scope["f"](9, notes=[]) == round(CHANGES[change], 9)
    assert file.read_text() == SOURCE


def test_every_kind_of_change_is_made_and_messages_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    found = mutants(tmp_path / "m.py", tmp_path)
    assert len({mutant.key for mutant in found}) == len(found)
    assert not [mutant for mutant in found if "x * 2 " in mutant.key]
    assert {mutant.operator for mutant in found} == {
        *(
            "factor dropped",
            "term dropped",
            "sign turned",
            "power or divisor dropped",
            "root of a count",
        ),
        *(
            "root, abs or clamp dropped",
            "rounding dropped",
            "rounding turned",
            "max, min or sum",
            "alpha doubled",
            "term scaled",
            "constant scaled",
            "one of two, not the larger",
        ),
        *(
            "underestimated by 2^-20",
            "option ignored",
            "index lost",
            "check skipped",
            "condition dropped",
        ),
        *("call skipped", "negation dropped", "end of a range"),
    }


@pytest.mark.parametrize("name", ROOMS)
def test_every_source_and_test_of_a_room_exists(name: str) -> None:
    """A file that got another name would leave the campaign in silence."""
    room = ROOMS[name]
    missing = [part for part in room.sources if not (ROOT / "certcli" / part).exists()]
    missing += [part for part in room.tests if not (ROOT / "tests" / part).exists()]
    assert not missing
