"""The planted counterexamples are real, and no certificate method reaches them."""

import json
from pathlib import Path

import pytest
import torch

import certvit
from certcli.certify.methods import METHODS
from certcli.system.errors import CertvitError
from examples.planted import CASES, SIZE
from examples.planted.__main__ import main


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
