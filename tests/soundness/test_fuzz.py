"""Hundreds of edits in seconds (`make soundness`: 130,000). Each of the three fuzzers still finds
what it is for.
"""

import pickle
import socket
import subprocess
from pathlib import Path

import pytest

from certcli.certify.methods import METHODS
from certcli.evaluation import resumed
from certcli.evaluation.claim import Claim
from certcli.evaluation.evidence_schema import OPTIONS
from certcli.verification import evidence
from tests.soundness import file_fuzz
from tests.soundness.edits import BAIT, Raw, campaign
from tests.soundness.evidence_fuzz import edited_evidence, judge_record, run
from tests.soundness.evidence_oracle import Laboratory, raw_of, untrue
from tests.soundness.record_fuzz import edited_records

LIES = (
    ("clean ", "clean 1"),
    ("digits (", "ImageNet-1k ("),
    (" images", "0 images"),
    ("bound 10^", "bound 10^-"),
)


@pytest.fixture(scope="module")
def lab(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    folder = tmp_path_factory.mktemp("evidence")
    return Laboratory(folder, workshop / "plain.safetensors", workshop / "certified.safetensors")


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
        monkeypatch.setattr(resumed, "places_to_repeat", lambda *_: [])
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


def test_the_decoder_knows_every_certificate_method() -> None:
    assert set(OPTIONS) == set(METHODS.names())
