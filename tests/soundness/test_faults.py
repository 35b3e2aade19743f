"""A few faults of two quick commands (`make soundness`: hundreds of all); writing in place is found
out.
"""

import contextlib
import os
from pathlib import Path

import pytest

from certcli.checkpoint import file, header
from certcli.report import audit_page
from tests.helpers.runs import M
from tests.soundness import fault_fuzz
from tests.soundness.edits import campaign
from tests.soundness.fault_fuzz import Faults, Laboratory
from tests.soundness.forked_runs import OTHER

pytestmark = pytest.mark.skipif(
    "CERTVIT_SOUNDNESS" not in os.environ, reason="make soundness: 15 s of CPU time"
)


@pytest.fixture
def faults(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    # a fork of a process that other tests ran on two threads waits for ever for the second one
    monkeypatch.setattr(fault_fuzz, "FAULTS", [f for f in fault_fuzz.FAULTS if f != "threads"])
    nets = {M: workshop / "plain.safetensors", OTHER: workshop / "init.safetensors"}
    return Faults(Laboratory(tmp_path, nets, ("init", "log")))


def test_faults_lose_nothing(faults: Faults) -> None:
    report = campaign(faults, 16)
    assert report["findings"] == []
    assert {outcome.rsplit(": ")[-1] for outcome in report["outcomes"]} >= {"killed", "8"}


def test_writing_in_place_is_found_out(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file, header, audit_page):
        monkeypatch.setattr(module, "atomic_file", contextlib.nullcontext)
    assert campaign(faults, 16)["findings"]
