"""`certvit verify` refutes evidence and lineages that do not follow from the weights, the images and each other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certcli.certify import methods
from certcli.checkpoint import file, record
from certcli.system.errors import NoBoundError
from tests.helpers.commands import console

pytestmark = pytest.mark.usefixtures("proven_once")


def change(command: str, *path: str, value: Any) -> Callable[[file.Checkpoint], file.Checkpoint]:
    """The checkpoint with one number of the result of `command` changed, or made of the result."""

    def forge(checkpoint: file.Checkpoint) -> file.Checkpoint:
        entries = []
        for entry in checkpoint.record.evidence:
            result = json.loads(json.dumps(entry.result))
            if entry.command == command:
                place = result
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = value(result) if callable(value) else value
            entries.append(replace(entry, result=result))
        return recorded(checkpoint, evidence=tuple(entries))

    return forge


def recorded(checkpoint: file.Checkpoint, **fields: Any) -> file.Checkpoint:
    """The checkpoint with other fields of its record."""
    return file.Checkpoint(checkpoint.tensors, replace(checkpoint.record, **fields))


def with_steps(
    change: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> Callable[[file.Checkpoint], file.Checkpoint]:
    return lambda checkpoint: recorded(checkpoint, lineage=change(checkpoint.record.lineage))


def without_step(command: str) -> Callable[[file.Checkpoint], file.Checkpoint]:
    return with_steps(lambda steps: tuple(step for step in steps if step.command != command))


def trained_on_more(checkpoint: file.Checkpoint) -> file.Checkpoint:
    """As an older version wrote it, without the images: their number is then what the parameters
    say.
    """
    entries = [
        replace(
            entry,
            parameters={**entry.parameters, "images": 10_000},
            result={name: value for name, value in entry.result.items() if name != "dataset"},
        )
        if entry.command == "finetune"
        else entry
        for entry in checkpoint.record.evidence
    ]
    return recorded(checkpoint, evidence=tuple(entries))


def attacked(robust: float, **more: Any) -> Callable[[file.Checkpoint], file.Checkpoint]:
    found = {
        "norm": "l2",
        "epsilon": 0.3,
        "images": 20,
        "clean": 0.9,
        "robust": robust,
        "attacks": {"pgd": robust},
    }
    return lambda checkpoint: checkpoint.with_evidence(
        "attack", {}, {**found, "median_norm": None, **more}
    )


KEPT = {
    "images": 20,
    "logits_error": 0.1,
    "agreement": 1.0,
    "agreement_interval": [0.8, 1.0],
    "dataset": "digits",
    "accuracy_before": None,
    "accuracy_before_interval": None,
    "accuracy_after": None,
    "accuracy_after_interval": None,
    "split": "val",
    "took_part": False,
    "trained_on": False,
}


FORGERIES: list[tuple[str, Callable[[file.Checkpoint], file.Checkpoint], str]] = [
    ("certify share", change("certify", "certified", "0.3", value=1.0), "refuted"),
    ("certify radius", change("certify", "certified", value={"9": 0.5}), "refuted"),
    ("certify no radius", change("certify", "certified", value={"nan": 0.5}), "refuted"),
    ("certify clean", change("certify", "clean", value=1.0), "refuted"),
    ("certify mean", change("certify", "average_radius", value=3.0), "refuted"),
    (
        "certify mean just above",
        change("certify", "average_radius", value=lambda result: 1.001 * result["average_radius"]),
        "refuted",
    ),
    ("certify images", change("certify", "images", value=10_000), "refuted"),
    ("certify dataset", change("certify", "dataset", "digest", value="0" * 64), "unverified"),
    ("certify method", change("certify", "method", value="divination"), "refuted"),
    ("certify type", change("certify", "clean", value="all"), "refuted"),
    ("lipschitz log", change("lipschitz", "log10_upper", value=-1.0), "refuted"),
    ("lipschitz upper", change("lipschitz", "upper", value=0.5), "refuted"),
    ("lipschitz lower", change("lipschitz", "lower", value=1e9), "refuted"),
    ("finetune bound", change("finetune", "upper", value=0.5), "refuted"),
    ("finetune log", change("finetune", "log10_upper", value=-1.0), "refuted"),
    ("finetune text", change("finetune", "upper_text", value="0.5"), "refuted"),
    (
        "finetune text just below",
        change("finetune", "upper_text", value=lambda result: f"{0.995 * result['upper']:.4g}"),
        "refuted",
    ),
    ("finetune share", change("finetune", "certified", value=1.0), "refuted"),
    ("finetune arithmetic", change("finetune", "arithmetic", value="bf16"), "refuted"),
    ("finetune clean", change("finetune", "clean", value=1.0), "refuted"),
    ("finetune images", trained_on_more, "refuted"),
    ("attack", attacked(0.8), "unverified"),
    (
        "adapt",
        lambda checkpoint: checkpoint.with_evidence("adapt", {"calibration": "digits"}, KEPT),
        "unverified",
    ),
    ("certify for ever", change("certify", "parameters", value={"samples": 10**12}), "refuted"),
    ("attack above clean", attacked(0.95), "refuted"),
    ("attack bound as free text", attacked(0.8, bound="0.01 (proven)"), "refuted"),
    ("certify clean twice", change("certify", "certified", "clean", value=1.0), "refuted"),
    ("certify half an image", change("certify", "certified", "0.3", value=0.1234), "refuted"),
    ("certify name", change("certify", "dataset", "name", value="ImageNet-1k"), "refuted"),
    ("certify norm", change("certify", "parameters", value={"norm": "linf"}), "refuted"),
    ("certify promise", change("certify", "promise", value="probability 1"), "refuted"),
    ("certify for ages", change("certify", "parameters", value={"samples": 10**7}), "refuted"),
    (
        "certify denoiser",
        change("certify", "parameters", value={"denoiser_file": "/etc/passwd"}),
        "refuted",
    ),
    ("certify vast", change("certify", "average_radius", value=10**18), "refuted"),
    ("lipschitz free text", change("lipschitz", "bound", value="0.01 (proven)"), "refuted"),
    ("finetune free text", change("finetune", "upper_text", value="0.01 (proven)"), "refuted"),
    ("finetune half an image", change("finetune", "clean", value=0.97499), "refuted"),
    (
        "strange",
        lambda checkpoint: checkpoint.with_evidence("divination", {}, {"certified": 1.0}),
        "unverified",
    ),
    ("no evidence", lambda checkpoint: recorded(checkpoint, evidence=()), "nothing was verified"),
    (
        "std",
        lambda checkpoint: recorded(checkpoint, input=replace(checkpoint.record.input, std=(1.0,))),
        "refuted",
    ),
    (
        "stranger",
        lambda checkpoint: file.Checkpoint(
            checkpoint.tensors,
            checkpoint.record.with_evidence(record.Evidence("certify", {}, {}, "0" * 64)),
        ),
        "refuted",
    ),
    ("no adapt", without_step("adapt"), "refuted"),
    ("no finetune", without_step("finetune"), "refuted"),
    ("no step", with_steps(lambda steps: ()), "refuted"),
    ("a step after finetune", with_steps(lambda steps: (*steps, steps[-2])), "refuted"),
    ("init in the middle", with_steps(lambda steps: (*steps[:1], *steps)), "refuted"),
]


def test_honest_evidence_is_verified(lab: Path) -> None:
    done = console("verify", "m.safetensors", "--json", folder=lab)
    told = json.loads(done.out)
    assert done.code == 0, done.err
    assert told["gate"] == {"passed": True, "verdict": "passed", "reasons": []}
    assert {claim["status"] for claim in told["claims"] if claim["asked"]} == {"verified"}
    assert {claim["entry"].split(": ")[-1] for claim in told["claims"]} >= {
        "lipschitz",
        "certify",
        "finetune",
    }


@pytest.mark.parametrize(("name", "forge", "said"), FORGERIES, ids=[row[0] for row in FORGERIES])
def test_forged_evidence_is_not_verified(
    lab: Path,
    tmp_path: Path,
    name: str,
    forge: Callable[[file.Checkpoint], file.Checkpoint],
    said: str,
) -> None:
    forge(file.Checkpoint.read(lab / "m.safetensors")).write(tmp_path / "f.safetensors")
    done = console("verify", "f.safetensors", "--json", folder=tmp_path)
    told = json.loads(done.out)
    assert done.code == 7, told
    assert any(said in reason for reason in told["gate"]["reasons"]), told["gate"]
    if said == "refuted":
        assert any(claim["status"] == "refuted" for claim in told["claims"])


def test_measured_results_need_not_be_asked_for(lab: Path, tmp_path: Path) -> None:
    attacked(0.8)(file.Checkpoint.read(lab / "m.safetensors")).write(tmp_path / "f.safetensors")
    assert console("verify", "f.safetensors", "--proven-only", folder=tmp_path).code == 0


def test_a_sample_gives_an_interval_and_still_refutes(lab: Path, tmp_path: Path) -> None:
    words = ["--sample", "40", "--json"]
    done = console("verify", "m.safetensors", *words, "--proven-only", folder=lab)
    assert done.code == 0, done.err  # what no sample can tell (the mean radius) was not asked for
    told = json.loads(done.out)
    shares = [
        claim for claim in told["claims"] if claim["statement"].startswith(("clean", "certified"))
    ]
    assert shares
    assert all("of a sample of 40 images: between" in claim["why"] for claim in shares)
    statuses = {
        entry["command"]: entry["status"] for entry in told["evidence"] if not entry["stale"]
    }
    assert statuses.items() >= {
        ("certify", "unverified"),
        ("finetune", "unverified"),
        ("lipschitz", "verified"),
    }
    change("certify", "certified", "0.3", value=1.0)(
        file.Checkpoint.read(lab / "m.safetensors")
    ).write(tmp_path / "f.safetensors")
    assert console("verify", "f.safetensors", *words, folder=tmp_path).code == 7


def test_without_a_bound_another_arithmetic_than_real_is_refuted(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NoBoundError("none")

    monkeypatch.setattr(methods, "prepare_method", refuse)
    for arithmetic in ("real", "bf16"):
        forged = change("finetune", "arithmetic", value=arithmetic)(
            file.Checkpoint.read(lab / "m.safetensors")
        )
        forged.write(tmp_path / f"{arithmetic}.safetensors")
        told = json.loads(
            console("verify", f"{arithmetic}.safetensors", "--json", folder=tmp_path).out
        )
        claims_of = {
            claim["statement"] for claim in told["claims"] if claim["entry"].endswith("finetune")
        }
        assert ("how it was certified" in claims_of) is (arithmetic == "bf16")


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
    forged = file.Checkpoint.read(last)
    steps = forged.record.lineage
    steps = (
        *steps[:-1],
        replace(steps[-1], command="alchemy"),
    )  # the file's own step, which no other file tells
    recorded(forged, lineage=steps).write(tmp_path / "own.safetensors")
    told = json.loads(
        console("verify", str(first), "own.safetensors", "--json", folder=tmp_path).out
    )
    links = told["checkpoints"][1]["claims"]
    assert not any(
        "alchemy" in claim["statement"] for claim in links if claim["status"] == "verified"
    )
    steps = forged.record.lineage[1:]
    recorded(forged, lineage=steps).write(tmp_path / "f.safetensors")
    done = console("verify", str(first), "f.safetensors", "--json", folder=tmp_path)
    assert done.code == 7
    assert any(
        "whose own lineage is another" in reason
        for reason in json.loads(done.out)["gate"]["reasons"]
    )
