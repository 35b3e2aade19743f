"""`certify --arithmetic` at the command line: which methods know it, and records of another one."""

from pathlib import Path
from typing import get_type_hints

import pytest

from certcli.certify.local_options import Local
from certcli.certify.methods import METHODS
from certcli.certify.proof_options import ARITHMETICS, REAL
from certcli.cli.certify.run import PROVING as SPOKEN_OF
from certcli.rounding import PRECISIONS
from certcli.system.errors import UsageError
from tests.helpers.commands import certvit, document
from tests.helpers.grids import EVERY


def test_the_command_line_knows_the_arithmetics() -> None:
    assert (REAL, *PRECISIONS) == ARITHMETICS
    given = ("--dataset", "digits", "--limit", 4, "--arithmetic", "float32")
    for method in ("auto", "smoothing", "patch"):
        certvit("certify", "any.safetensors", "--method", method, *given, code=2)
    kinds = {name: get_type_hints(METHODS.load(name))["options"] for name in METHODS.names()}
    assert {name for name, kind in kinds.items() if "arithmetic" in kind.__dataclass_fields__} == set(SPOKEN_OF)
    certvit("certify", "any.safetensors", *given[:-1], "half", code=2)
    with pytest.raises(UsageError, match="half"):
        Local(arithmetic="half")


@pytest.mark.parametrize("method", ["lipschitz", "local", *["bcp"] * EVERY])
def test_records_of_another_arithmetic_are_refuted(method: str, workshop: Path, tmp_path: Path) -> None:
    checkpoint, records = workshop / "certified.safetensors", tmp_path / "records.jsonl"
    if method == "bcp":
        checkpoint = tmp_path / "chain.safetensors"
        certvit("init", "certvit_4c3f", "--arch-arg", "img_size=8", "-o", checkpoint)
    elif method == "local":
        checkpoint = workshop / "plain.safetensors"
    given = ("--limit", 6, "--dataset", "digits", "--arithmetic", "float32", "--records", records, "--effort", "norms")
    found = document("certify", checkpoint, "--method", method, *given)
    assert found["arithmetic"] == "float32"
    certvit("certify", checkpoint, "--dataset", "digits", "--verify", records)
    header, *rows = records.read_text().splitlines()
    assert '"arithmetic":"float32"' in header.replace(" ", "")
    records.write_text("\n".join([header.replace('"float32"', '"bf16"'), *rows, ""]))
    certvit("certify", checkpoint, "--dataset", "digits", "--verify", records, code=7)
    certvit("certify", checkpoint, "--dataset", "digits", "--verify", records, "--arithmetic", "bf16", code=2)
