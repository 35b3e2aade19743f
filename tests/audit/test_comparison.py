"""Two audits side by side, and what a document says about its making."""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from certcli.report.document import (
    Audit,
    from_json,
)
from certcli.report.shares import changes
from certcli.system.errors import DataError
from tests.audit.conftest import QUICK
from tests.helpers.commands import attempt, certvit, document


def test_two_audits_are_compared_where_they_are_alike(
    workshop: Path, folder: Path, tmp_path: Path
) -> None:
    words = (
        "audit",
        workshop / "certified.safetensors",
        *QUICK,
        "--compare",
        folder / "certified.json",
    )
    same = document(*words)["changes"]
    assert {row["figure"] for row in same} >= {
        "Lipschitz bound",
        "clean",
        "after fgsm at 0.3",
        "certified, lipschitz at 0.3",
    }
    assert all(row["alike"] and row["before"] == row["after"] for row in same)
    other = document(*words, "--limit", 12)["changes"]
    assert {row["why"] for row in other if not row["alike"]} == {
        "not the same images (24 images before, 12 now)"
    }
    assert "is the word of that file" in " ".join(attempt(*words).stdout.split())
    for name, text in (("no.json", "{}"), ("not.json", "[")):
        (tmp_path / name).write_text(text)
        refused = attempt(*words[:-1], tmp_path / name)
        assert isinstance(refused.exception, DataError)
        assert "no document of an audit" in refused.exception.message


def test_attacks_with_other_settings_are_not_compared(certified_audit: dict[str, Any]) -> None:
    before = from_json(json.dumps(certified_audit))
    assert before.attack is not None
    attack = msgspec.structs.replace(before.attack, settings={**before.attack.settings, "seed": 1})
    rows = changes(before, msgspec.structs.replace(before, attack=attack, clean=None))
    assert {row.figure for row in rows if row.why == "attacks with other settings"} == {
        "after fgsm at 0.05",
        "after fgsm at 0.3",
    }
    assert [row.why for row in rows if row.figure == "clean"] == [
        "measured in one of the two audits only"
    ]
    assert all(row.alike for row in rows if row.figure.startswith("certified"))


def test_a_document_names_date_machine_and_attention(
    folder: Path, certified_audit: dict[str, Any]
) -> None:
    audit: Audit = from_json(json.dumps(certified_audit))
    assert audit.machine is not None
    assert audit.machine.threads == torch.get_num_threads()
    assert audit.attention_weight is not None
    assert audit.date[:2] == "20"
    assert certvit("log", folder / "certified.safetensors").exit_code == 0
