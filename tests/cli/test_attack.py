"""`certvit attack` as a shell sees it: what it promises about its document, its files, its errors
and its exit codes.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from certcli.attack import catalogue, checks, run, settings, stages
from certcli.checkpoint.file import Checkpoint
from certcli.images.labelled import Batch
from certcli.models import build
from tests.helpers import commands, grids

QUICK = ("--no-checks", "--limit", 40)


@pytest.fixture(scope="module")
def net(workshop: Path) -> Path:
    return workshop / "plain.safetensors"


@pytest.fixture(scope="module")
def proven(workshop: Path) -> Path:
    return workshop / "certified.safetensors"


def test_the_document_counts_the_records(net: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    found = commands.document(
        "attack",
        net,
        "-a",
        "fgsm",
        "-a",
        "pgd-5",
        "-e",
        0.4,
        "-e",
        0.2,
        *QUICK,
        "--records",
        path,
    )
    rows = [row for row in commands.record_lines(path) if row["epsilon"] == 0.2]
    correct = [row for row in rows if row["label"] == row["prediction"]]
    standing = [
        row for row in correct if all(outcome is True for outcome in row["robust"].values())
    ]
    norms = sorted(row["norm"] for row in correct if row["norm"] is not None)
    assert (
        (found["images"], found["epsilon"], found["norm"])
        == (len(rows), 0.2, "l2")
        == (40, 0.2, "l2")
    )
    assert found["clean"] == len(correct) / 40
    assert found["robust"] == len(standing) / 40
    assert set(found["attacks"]) == {"fgsm", "pgd-5"}
    assert found["attacks"]["pgd-5"] == sum(row["robust"]["pgd-5"] is True for row in rows) / 40
    assert found["robust"] <= min(found["attacks"].values())
    assert found["median_norm"] == norms[len(norms) // 2]
    assert found["independent"] is False
    assert list(found["curve"]) == ["0.2", "0.4"]
    assert found["curve"]["0.2"] == found["robust"] >= found["curve"]["0.4"]
    assert [part["epsilon"] for part in found["parts"]] == [0.2, 0.4]
    assert all(
        low <= found[name] <= high
        for name, (low, high) in found["intervals"].items()
        if name in found
    )
    assert None in itertools.chain(*(row["robust"].values() for row in correct))


@pytest.mark.parametrize("name", settings.PRESETS)
def test_presets(net: Path, name: str) -> None:
    found = commands.document("attack", net, "--preset", name, "--limit", 6, "--no-checks")
    wanted = settings.PRESETS[name].parts
    parts = found["parts"] or [found]
    assert [(part["norm"], part["epsilon"]) for part in parts] == [
        (p.region.norm, p.region.radius) for p in wanted
    ]
    assert [set(part["attacks"]) for part in parts] == [
        {entry.label for entry in part.plan} for part in wanted
    ]
    assert found["preset"] == name
    assert all(part["independent"] for part in parts)
    assert (found["epsilon"], found["robust"]) == (parts[0]["epsilon"], parts[0]["robust"])


def test_a_preset_of_one_part_moves_to_other_radii(net: Path) -> None:
    found = commands.document(
        "attack", net, "--preset", "certvit", "-e", 1.58, "-e", 0.1, "--limit", 6, "--no-checks"
    )
    assert list(found["curve"]) == ["0.1", "1.58"]


BUDGETS = {
    "steps": ("-e 0.15", "--steps 1", "--steps 30"),
    "restarts": ("-a apgd-ce -e 0.2 --steps 1", "--restarts 1", "--restarts 9"),
}
"""The same attack with less and with more to spend."""


@pytest.mark.parametrize("name", BUDGETS)
def test_an_attack_may_spend_its_budget(net: Path, name: str) -> None:
    words, *budgets = BUDGETS[name]
    given = [
        ("attack", net, *f"{words} {budget}".split(), "--no-checks", "--limit", 100)
        for budget in budgets
    ]
    weak, strong = (commands.document(*words) for words in given)
    assert strong["robust"] < weak["robust"]


def test_a_seed_is_a_run(net: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate(
        (0, 0, 1)
    ):  # the whole split: a sample of it would depend on the seed, too
        path = tmp_path / f"{number}.jsonl"
        commands.document(
            "attack",
            net,
            "-a",
            "apgd-ce-2",
            "-e",
            0.3,
            "--no-checks",
            "--seed",
            seed,
            "--records",
            path,
        )
        found.append([row["norm"] for row in commands.record_lines(path)])
    assert found[0] == found[1] != found[2]


RUN = ("-a", "fgsm", "-a", "pgd-5", "-e", 0.2, "-e", 0.4, *QUICK, "--batch-size", 15)


@pytest.mark.parametrize(
    "kept", [700, 0.5, 1.0, *[0, 0.9] * grids.EVERY], ids=lambda kept: f"{kept} of the file"
)
def test_an_interrupted_run_goes_on_to_the_same_file_and_document(
    net: Path, tmp_path: Path, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole batches are read, one of them is attacked again, and the rest is written anew."""
    whole = tmp_path / "whole.jsonl"
    parts = tmp_path / "parts.jsonl"
    expected = commands.document("attack", net, *RUN, "--records", whole)
    written = whole.read_bytes()
    parts.write_bytes(written[: int(kept * len(written)) if isinstance(kept, float) else kept])
    complete = parts.read_bytes().count(b"\n") - 1
    attacked: list[int] = []

    def counted(model: object, batches: list[Batch], *words: object, **more: object) -> object:
        attacked.append(len(batches[0][0]))
        return run.attack_images(model, batches, *words, **more)

    monkeypatch.setattr(stages, "attack_images", counted)
    resumed = commands.document("attack", net, *RUN, "--records", parts, "--resume")
    counts = resumed.pop("resumed", {"records": 0, "computed_again": 0})
    assert resumed == expected
    assert parts.read_bytes() == written
    # batches of 15, 15 and 10 images at two radii
    new = [size for size, end in zip((15, 15, 10), (30, 60, 80), strict=True) if end > complete]
    assert attacked[: len(new)] == new
    assert counts == {"records": 80 - 2 * sum(new), "computed_again": 2 * sum(attacked[len(new) :])}
    assert len(attacked) == len(new) + (len(new) < 3)


def test_transfer_is_judged_on_the_tested_network(net: Path, proven: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    words = ("-a", "pgd-10", "-e", 1.0, *QUICK)
    found = commands.document("attack", net, *words, "--source", proven, "--save-examples", path)
    assert found["clean"] == commands.document("attack", net, *words)["clean"]
    assert found["source"] == Checkpoint.read(proven).digest
    saved = load_file(path)
    logits = build.load(Checkpoint.read(net))(saved["adversarial"])
    assert torch.equal(logits.argmax(dim=1), saved["adversarial_predictions"])
    assert (saved["adversarial_predictions"] != saved["labels"]).all()
    assert len(saved["labels"]) == round((found["clean"] - found["robust"]) * found["images"])


def test_a_masked_network_is_flagged_on_stderr_and_in_the_document(
    net: Path, tmp_path: Path
) -> None:
    plain = Checkpoint.read(net)
    deaf = {
        name: tensor * 0 if name == "head.weight" else tensor
        for name, tensor in plain.tensors.items()
    }
    masked = tmp_path / "masked.safetensors"
    plain.derive(deaf, "test", {}).write(masked)
    outcome = commands.certvit("attack", masked, "-a", "pgd-3", "-e", 0.1, "--limit", 40, "--json")
    table = json.loads(outcome.stdout)
    assert "zero gradients" in {flag["name"] for flag in table["flags"]}
    assert all(
        flag["explanation"] and flag["raised_if"] and not flag["fatal"] for flag in table["flags"]
    )
    assert "zero gradients" in outcome.stderr
    honest = commands.document("attack", net, "-a", "pgd-3", "-e", 0.1, "--limit", 40)
    assert honest["flags"] == []
    assert set(honest["checks"]) == set(checks.CHECKS) - {"certified above attacked"}
    assert commands.document("attack", net, "-a", "pgd-3", "-e", 0.1, *QUICK)["checks"] == []


def test_gate_and_evidence(net: Path, tmp_path: Path) -> None:
    path = tmp_path / "o.safetensors"
    words = (net, "-a", "fgsm", "-e", 0.5, *QUICK)
    found = commands.document("attack", *words, "-o", path, "--min-robust", 0.0)
    written = Checkpoint.read(path)
    (entry,) = [entry for entry in written.record.evidence if entry.command == "attack"]
    assert entry.digest == written.digest == Checkpoint.read(net).digest
    assert {**entry.result}.items() <= found.items()
    assert entry.result["robust"] == found["robust"]
    assert found["gate"] == {"passed": True, "verdict": "passed", "reasons": []}
    assert entry.parameters["attacks"] == [["fgsm"]]
    commands.certvit("attack", *words, "--min-robust", 0.99, code=7)


def test_the_page_names_every_attack_preset_and_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attack.md").read_text()
    flat = " ".join(page.split())
    for name in (*catalogue.ATTACKS.names(), *settings.PRESETS):
        assert f"`{name}`" in page, name
    for check in checks.CHECKS.values():
        assert f"**{check.name}**" in page, check.name
        assert check.raised_if in flat, check.name
    for preset in settings.PRESETS.values():
        assert preset.open_choices in flat, preset.name
