"""Evidence that a command writes is evidence that certvit reads."""

from pathlib import Path

import pytest

from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.evidence import decode_evidence
from tests.helpers.commands import attempt

WRITING = [
    "attack -a pgd-3 -e 0.1",
    "attack -a fgsm -a pgd-3 -e 0.1 -e 0.3",
    "attack -a pgd-3 --norm linf -e 0.05 -e 0.1",
    "attack -a pgd-3 -e 0.1 -e 0.3 --pixels 8bit",
    "attack -a pgd-3 -e 0.1 -e 0.3 --independent --no-checks",
    "certify -e 0.1 -e 0.5",
    "certify --method lipschitz --method smoothing --sigma 0.25 --n0 8 --samples 32 -e 0.1",
    "certify --method patch --patch 2 --patch 3",
    "lipschitz",
    "constrain --beta 0.01",
    "finetune --loss margin -e 0.5 --steps 2 --validation-limit 32",
    "audit -e 0.1 -e 0.3 -a pgd-3 --method lipschitz --time-budget 30s",
]


@pytest.mark.parametrize("words", WRITING)
def test_what_a_command_writes_is_understood(words: str, workshop: Path, tmp_path: Path) -> None:
    """A field that only the writer knows would refute its own file."""
    command, *options = words.split()
    file = tmp_path / "written.safetensors"
    limit = {"lipschitz": (), "constrain": ("--limit", 40), "finetune": ("--limit", 64)}
    images = limit.get(command, ("--limit", 8))
    done = attempt(
        command, workshop / "certified.safetensors", *options, *images, "--dataset", "digits",
        "--quiet", "-o", file,
    )  # fmt: skip
    assert file.exists(), (done.output, done.exception)
    entries = Checkpoint.read(file).record.evidence
    assert entries[-1].command == ("attack" if command == "audit" else command)
    for entry in entries:
        decode_evidence(entry)
