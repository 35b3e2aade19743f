"""`certvit verify` compares the lineages of the files that it is given."""

import json
from dataclasses import replace
from pathlib import Path

from certcli.checkpoint.file import Checkpoint
from tests.helpers.commands import console


def test_lineage_is_compared_with_the_files_that_are_there(workshop: Path, tmp_path: Path) -> None:
    first = workshop / "constrained.safetensors"
    last = workshop / "certified.safetensors"
    told = json.loads(console("verify", str(first), str(last), "--json", folder=tmp_path).out)
    links = [
        claim
        for claim in told["checkpoints"][1]["claims"]
        if claim["entry"].startswith("lineage, step")
    ]
    assert [claim["status"] for claim in links] == ["verified"]
    forged = Checkpoint.read(last)
    steps = forged.record.lineage
    steps = (
        *steps[:-1],
        replace(steps[-1], command="alchemy"),
    )  # the file's own step, which no other file tells
    Checkpoint(forged.tensors, replace(forged.record, lineage=steps)).write(
        tmp_path / "own.safetensors"
    )
    told = json.loads(
        console("verify", str(first), "own.safetensors", "--json", folder=tmp_path).out
    )
    links = told["checkpoints"][1]["claims"]
    assert not any(
        "alchemy" in claim["statement"] for claim in links if claim["status"] == "verified"
    )
    steps = forged.record.lineage[1:]
    Checkpoint(forged.tensors, replace(forged.record, lineage=steps)).write(
        tmp_path / "f.safetensors"
    )
    done = console("verify", str(first), "f.safetensors", "--json", folder=tmp_path)
    assert done.code == 7
    assert any(
        "whose own lineage is another" in reason
        for reason in json.loads(done.out)["gate"]["reasons"]
    )
