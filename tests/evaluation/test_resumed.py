"""Records that an earlier run left: how many are computed again, and that no forged one helps a
result. Evidence that a command writes is evidence that certvit reads.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certcli.certify import methods
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import evidence, evidence_schema, records
from tests.helpers.commands import attempt, document

pytestmark = pytest.mark.usefixtures("proven_once")


@pytest.mark.parametrize(
    ("hits", "gate", "every", "repeated"),
    [
        ([1] * 1000, False, False, 20),
        ([1] * 10, False, False, 10),
        ([1] * 10_000, False, False, records.ENOUGH),
        ([1] * 1000, False, True, 1000),
        ([0] * 1000, False, True, 1000),
        ([1] * 1000, True, False, 1000),
        ([0] * 1000, True, False, 20),
        ([90, 1, 1, 1, 1, 0, 0], True, False, 7),
    ],
)
def test_what_a_gate_or_an_output_rests_on_is_computed_again(
    hits: list[int], gate: bool, every: bool, repeated: int
) -> None:
    places = records.places_to_repeat(hits, gate, every)
    assert places == sorted(set(places))
    assert len(places) == repeated
    resting = [place for place, count in enumerate(hits) if every or (gate and count)]
    assert set(resting) <= set(places)


def test_every_method_states_known_parameters(certified: Checkpoint) -> None:
    assert set(evidence_schema.OPTIONS) == set(methods.METHODS.names())


Row = dict[str, Any]
FORGERIES: dict[str, Callable[[Row], None]] = {
    "radius 9.9": lambda row: row.update(radius=9.9, prediction=row["label"]),
    "pixels all zero": lambda row: row.update(radius=9.9, pixels="0" * 16),
    "label 99": lambda row: row.update(radius=9.9, label=99, prediction=99),
    "failure .5": lambda row: row.update(radius=9.9, failure=0.5),
    "prediction 3.7": lambda row: row.update(radius=9.9, prediction=3.7),
}


NINE = ("--limit", 9, "--batch-size", 3)
BEYOND = ("--limit", 20, "-e", 5)
HONEST: dict[str, tuple[object, ...]] = {
    "smoothing": ("--method", "smoothing", "--sigma", 0.1, "--n0", 10, "--samples", 50, "-e", 0.05),
    "local": ("--method", "local", "--effort", "tokens", "-e", 0.001),
}


@pytest.fixture(scope="module")
def made(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole files of records: of `BEYOND`, and of each honest run."""
    folder = tmp_path_factory.mktemp("records")
    document(
        "certify", workshop / "certified.safetensors", *BEYOND, "--records", folder / "beyond.jsonl"
    )
    for name, given in HONEST.items():
        document(
            "certify",
            workshop / "plain.safetensors",
            *NINE,
            *given,
            "--records",
            folder / f"{name}.jsonl",
        )
    return folder


WAYS: dict[str, tuple[str, ...]] = {
    "gate": ("--min-certified", "0.7"),
    "evidence": ("-o", "n.safetensors"),
    "alone": (),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "gate") for kind in FORGERIES), ("radius 9.9", "evidence"), ("radius 9.9", "alone")],
)
def test_forged_certificates_pass_no_gate_and_enter_no_evidence(
    workshop: Path, made: Path, tmp_path: Path, kind: str, way: str
) -> None:
    path = tmp_path / "r.jsonl"
    output = tmp_path / "n.safetensors"
    head, *rows = map(json.loads, (made / "beyond.jsonl").read_text().splitlines())
    for row in rows:
        FORGERIES[kind](row)
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))
    words = (output if word == "n.safetensors" else word for word in WAYS[way])
    run = ("certify", workshop / "certified.safetensors", *BEYOND, "--records", path)
    done = attempt(*run, "--resume", *words)
    assert getattr(done.exception, "code", None) == 6, done.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("method", "way"), [*(("smoothing", way) for way in WAYS), ("local", "gate")]
)
def test_honest_records_of_methods_that_draw_or_search_agree(
    workshop: Path, made: Path, tmp_path: Path, method: str, way: str
) -> None:
    """Though noisy images share other batches than before, and a search began elsewhere."""
    path = tmp_path / "r.jsonl"
    run = ("certify", workshop / "plain.safetensors", *NINE, *HONEST[method], "--records", path)
    lines = (made / f"{method}.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    words = [
        tmp_path / word if word == "n.safetensors" else "0" if word == "0.7" else word
        for word in WAYS[way]
    ]
    found = document(*run, "--resume", *words)
    assert found["resumed"]["records"] in (6, 7)
    assert found["resumed"]["computed_again"] == found["resumed"]["records"]


WRITING = [
    "attack -a pgd-3 -e 0.1",
    "attack -a fgsm -a pgd-3 -e 0.1 -e 0.3",
    "attack -a pgd-3 --norm linf -e 0.05 -e 0.1",
    "attack -a pgd-3 -e 0.1 -e 0.3 --pixels 8bit",
    "attack -a pgd-3 -e 0.1 -e 0.3 --no-checks",
    "attack --norm patch --patch 1 --patch 2 --steps 2",
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
        evidence.decode_evidence(entry)
