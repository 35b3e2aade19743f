"""Two views of `certvit lipschitz` are both shown, or refused by name."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from certcli.cli.lipschitz.options import REFUSED, VIEWS, Views
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit, document

KEYS = {
    "--heads": "heads",
    "--compare": "compare",
    "--jacobian": "jacobian",
}
"""Where a view stands in the JSON document; a plot is a file."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "m.safetensors"
    certvit("init", "certvit_vit_digits", "--arch-arg", "depth=1", "-o", path)
    return path


def test_every_view_is_listed() -> None:
    fields = set(Views.__dataclass_fields__) - {"layers", "worst"}  # rows and order of one table
    assert set(VIEWS.values()) == fields
    assert {option for pair in REFUSED for option in pair} <= set(VIEWS)


@pytest.mark.parametrize("pair", combinations(VIEWS, 2), ids=" ".join)
def test_two_views_are_both_shown_or_refused(
    pair: tuple[str, str], network: Path, tmp_path: Path
) -> None:
    values: dict[str, list[Any]] = {
        "--compare": [network],
        "--plot": [tmp_path / "f.svg"],
    }
    words = ["lipschitz", network, "--no-estimate", "--limit", 1]
    for option in pair:
        words += [option, *values.get(option, [])]
    if pair in REFUSED or pair[::-1] in REFUSED:
        failure = attempt(*words).exception
        assert isinstance(failure, UsageError)
        assert all(option in str(failure) for option in pair)
        return
    shown = document(*words)
    for option in pair:
        assert (tmp_path / "f.svg").exists() if option == "--plot" else shown[KEYS[option]]
