"""A few hundred edits of honest evidence (`make soundness`: 10,000): shown true, refuted, or called measured."""

from pathlib import Path

import pytest

from certcli.certify.methods import METHODS
from certcli.evaluation.evidence import OPTIONS
from certcli.verification import claims
from certcli.verification.claims import Claim
from tests.soundness import evidence_fuzz
from tests.soundness.evidence_fuzz import Laboratory, Verifier, campaign, judge, untrue

LIES = (("clean ", "clean 1"), ("digits (", "ImageNet-1k ("), (" images", "0 images"), ("bound 10^", "bound 10^-"))


@pytest.fixture(scope="module")
def lab(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    folder = tmp_path_factory.mktemp("evidence")
    return Laboratory(folder, workshop / "plain.safetensors", workshop / "certified.safetensors")


def test_no_edit_of_evidence_makes_a_false_figure_pass(lab: Laboratory) -> None:
    found = campaign(120, 1, lab)
    assert found["findings"] == []
    assert min(found["outcomes"][name] for name in ("refuted", "refused at the door", "true")) > 8, (
        "edits that all fail at the first byte, or change nothing, test nothing"
    )


def test_honest_evidence_of_every_kind_is_verified(lab: Laboratory) -> None:
    verifier = Verifier(lab)
    for number, checkpoint in enumerate(lab.networks):
        raw = evidence_fuzz.raw_of(checkpoint)
        assert judge(lab, number, raw, verifier, drawn=True) in (("true", []), ("true, or the author's word", []))


def test_the_oracle_knows_a_lie(lab: Laboratory) -> None:
    """Sentences that are false, each in one figure."""
    for number, checkpoint in enumerate(lab.networks):
        for raw, entry in zip(evidence_fuzz.raw_of(checkpoint)["evidence"], checkpoint.record.evidence, strict=True):
            if entry.digest != checkpoint.digest or entry.command not in ("certify", "lipschitz", "finetune"):
                continue
            honest = evidence_fuzz.view.sentence(entry)
            assert untrue(lab, number, raw, honest) is None, honest
            for old, new in LIES:
                lie = honest.replace(old, new, 1)
                assert lie == honest or untrue(lab, number, raw, lie), lie


@pytest.mark.parametrize("check", ["_judge", "_named"])
def test_a_check_that_is_left_out_is_found(lab: Laboratory, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """Without one of the checks of `log --verify` the same edits pass."""
    unchecked = Claim("evidence", "anything", "verified", "")
    monkeypatch.setattr(claims, check, lambda *_: unchecked if check == "_named" else ("verified", ""))
    assert campaign(150, 1, lab)["findings"]


def test_the_decoder_knows_every_certificate_method() -> None:
    assert set(OPTIONS) == set(METHODS.names())
