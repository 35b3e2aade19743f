"""An audit of the certified network with all that it can write, and one of the plain network."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from certcli.report.document import Audit, Block, GateReport, GateResult, LineageStep, from_json
from tests.helpers.commands import certvit

SUFFIXES = ("json", "html", "sarif", "xml")
QUICK = (
    "--limit",
    24,
    "-e",
    0.05,
    "-e",
    0.3,
    "-a",
    "fgsm",
    "--quiet",
    "--time-budget",
    "10m",
)  # far more than it takes
HOSTILE = "</title><script>alert(1)</script>\"'&]]>--><svg onload=x>|`*\x1b[31m\u202e"


@pytest.fixture(scope="session")
def folder(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audit")
    reports = [part for suffix in SUFFIXES for part in ("--report", made / f"certified.{suffix}")]
    certvit(
        "audit",
        workshop / "certified.safetensors",
        *QUICK,
        *reports,
        "-o",
        made / "certified.safetensors",
    )
    few = ("--limit", 6, "--report", made / "plain.json")
    certvit("audit", workshop / "plain.safetensors", *QUICK, *few)
    return made


@pytest.fixture(scope="session")
def certified_audit(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "certified.json").read_text())


@pytest.fixture(scope="session")
def hostile(folder: Path) -> Audit:
    """An audit in which every name that a file may choose is hostile."""
    audit = from_json((folder / "plain.json").read_text())
    network = msgspec.structs.replace(
        audit.network, name=HOSTILE, arch=HOSTILE, reading={HOSTILE: {"value": HOSTILE}}
    )
    judged = [
        GateResult(fail_on=HOSTILE, passed=False, verdict="failed", measured=None, reason=HOSTILE)
    ]
    block = Block(path=HOSTILE, kind=HOSTILE, log10=1.0, text=HOSTILE, why=HOSTILE)
    return msgspec.structs.replace(
        audit,
        network=network,
        gate=GateReport(passed=False, verdict="failed", reasons=[HOSTILE], judged=judged),
        headline=HOSTILE,
        next=[HOSTILE],
        verdict=[HOSTILE],
        doubts=[HOSTILE],
        reproduce=HOSTILE,
        lineage=[LineageStep(command=HOSTILE, parameters={HOSTILE: HOSTILE}, seed=0, parent=None)],
        bound=msgspec.structs.replace(audit.bound, blocks=[block]),
        dataset=msgspec.structs.replace(audit.dataset, name=HOSTILE),
    )
