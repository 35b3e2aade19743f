"""Hundreds of edits and a few faults in seconds (`make soundness`: 130,000): each of the fuzzers still
finds what it is for; planted counterexamples are real, and no certificate reaches them.
"""

import contextlib
import json
import pickle
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import certvit
from certcli.certify.methods import METHODS
from certcli.checkpoint import file, tensor_files
from certcli.evaluation import records
from certcli.evaluation.evidence import Claim
from certcli.report import audit_page
from certcli.system.errors import CertvitError
from certcli.verification import evidence
from examples.planted import CASES, SIZE
from examples.planted.__main__ import main
from tests.helpers.grids import EVERY
from tests.helpers.runs import OTHER, M
from tests.soundness import fault_fuzz, file_fuzz
from tests.soundness.edits import BAIT, Raw, campaign
from tests.soundness.evidence_fuzz import edited_evidence, judge_record, run
from tests.soundness.evidence_oracle import Laboratory, raw_of, untrue
from tests.soundness.fault_fuzz import Faults
from tests.soundness.record_fuzz import edited_records

LIES = (
    ("clean ", "clean 1"),
    ("digits (", "ImageNet-1k ("),
    (" images", "0 images"),
    ("bound 10^", "bound 10^-"),
)


@pytest.fixture(scope="module")
def lab(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(
        tmp_path_factory.mktemp("evidence"),
        workshop / "plain.safetensors",
        workshop / "certified.safetensors",
    )


def ended(report: Raw, word: str) -> int:
    """Return the number of edits whose outcome has this word in it."""
    return sum(count for outcome, count in report["outcomes"].items() if word in outcome)


def told(findings: list[str]) -> set[str]:
    """The commands that findings are about."""
    return {finding.split()[1] for finding in findings}


def test_hostile_files_are_read_or_refused(tmp_path: Path) -> None:
    with file_fuzz.hostile_files(tmp_path) as case:
        report = campaign(case, 200)
    assert report["findings"] == []
    assert 100 < ended(report, "refused") < 190, (
        "edits that all pass, or all fail at the first byte, test nothing"
    )


def test_the_watch_sees_files_sockets_pickles_and_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    watch = file_fuzz.Watch()
    bait = tmp_path / BAIT
    bait.write_bytes(pickle.dumps(print))
    with watch.watching():
        pickle.loads(bait.read_bytes())
        open("/etc/hostname").close()
        socket.socket().close()
        subprocess.run(["true"], check=True)
    assert {"open", "pickle.find_class", "socket.__new__", "subprocess.Popen"} <= {
        word.split()[0] for word in watch.seen
    }


def test_no_edit_of_records_makes_a_network_better(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edited_records(workshop / "certified.safetensors") as case:
        report = campaign(case, 40, seed=1)
        assert report["findings"] == []
        assert 30 < ended(report, "refused") < 60
        # without this check, lies of both commands pass
        monkeypatch.setattr(records, "places_to_repeat", lambda *_: [])
        found = campaign(
            case, 200, seed=1, enough=lambda lies: told(lies) == {"certify", "attack"}
        )["findings"]
        assert told(found) == {"certify", "attack"}


def test_no_edit_of_evidence_makes_a_false_figure_pass(lab: Laboratory) -> None:
    with edited_evidence(lab) as case:
        report = campaign(case, 40, seed=1)
    assert report["findings"] == []
    assert min(ended(report, word) for word in ("refuted", "refused at the door", "true")) > 4


@pytest.mark.parametrize("check", ["_share_claim", "_names_images"])
def test_a_check_that_is_left_out_is_found(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """Without one of the checks of `certvit verify` the same edits pass."""
    unchecked = Claim("anything", "verified", "")
    monkeypatch.setattr(
        evidence, check, lambda *_: unchecked if check == "_names_images" else ("verified", "")
    )
    with edited_evidence(lab) as case:
        assert campaign(case, 150, seed=1, enough=bool)["findings"]


def test_honest_evidence_of_every_kind_is_verified(lab: Laboratory) -> None:
    for number, checkpoint in enumerate(lab.networks):
        assert judge_record(lab, number, raw_of(checkpoint)) in (
            ("true", []),
            ("true, or the author's word", []),
        )


def test_the_oracle_knows_a_lie(lab: Laboratory) -> None:
    """Sentences that are false, each in one figure."""
    for number, checkpoint in enumerate(lab.networks):
        for raw, entry in zip(
            raw_of(checkpoint)["evidence"], checkpoint.record.evidence, strict=True
        ):
            if entry.digest != checkpoint.digest or entry.command not in (
                "certify",
                "lipschitz",
                "finetune",
            ):
                continue
            honest = run.evidence_sentence(entry)
            assert untrue(lab, number, raw, honest) is None, honest
            for old, new in LIES:
                lie = honest.replace(old, new, 1)
                assert lie == honest or untrue(lab, number, raw, lie), lie


@pytest.fixture
def faults(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    if not EVERY:
        pytest.skip("make soundness: 15 s of CPU time")
    # a fork of a process that other tests ran on two threads waits for ever for the second one
    monkeypatch.setattr(fault_fuzz, "FAULTS", [f for f in fault_fuzz.FAULTS if f != "threads"])
    nets = {M: workshop / "plain.safetensors", OTHER: workshop / "init.safetensors"}
    return Faults(fault_fuzz.Laboratory(tmp_path, nets, ("init", "log")))


def test_faults_lose_nothing(faults: Faults) -> None:
    report = campaign(faults, 16)
    assert report["findings"] == []
    assert {outcome.rsplit(": ")[-1] for outcome in report["outcomes"]} >= {"killed", "8"}


def test_writing_in_place_is_found_out(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file, tensor_files, audit_page):
        monkeypatch.setattr(module, "atomic_file", contextlib.nullcontext)
    assert campaign(faults, 16)["findings"]


@pytest.mark.parametrize("name", CASES)
def test_a_careless_radius_holds_another_class_and_ours_does_not(name: str) -> None:
    planted = CASES[name].make()
    with torch.no_grad():
        label, other = (
            planted.net(torch.stack([planted.image, planted.adversary])).argmax(dim=1).tolist()
        )
    assert label != other
    assert planted.distance < planted.careless
    assert min(float(planted.image.min()), float(planted.adversary.min())) >= 0
    assert max(float(planted.image.max()), float(planted.adversary.max())) <= 1
    network = certvit.load(planted.net, mean=0.0, std=1.0, input_size=SIZE)
    claims = []
    for method in METHODS.names():
        if method in ("smoothing", "patch"):  # about another classifier, another threat
            continue
        try:
            (row,) = certvit.certify(
                network, planted.image[None], torch.tensor([label]), method=method
            )
        except CertvitError:  # a refusal claims nothing
            continue
        claims.append(row.radius)
        assert row.radius < planted.distance
    assert claims
    assert (
        name in ("cancelling", "l2-attention") or max(claims) > planted.distance / 20
    )  # refusing everything is no answer


def test_the_cases_are_written_for_other_tools(tmp_path: Path) -> None:
    main(tmp_path)
    assert json.loads((tmp_path / "cases.json").read_text()).keys() == CASES.keys()
    assert {file.stem for file in tmp_path.glob("*.safetensors")} == CASES.keys()
