"""What is shown was judged: adversarial images as files of 8 bits, beside the float images that
attacks make.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from certcli.attack.judge import nearest_within, rounded
from certcli.evaluation.perturbation import Region
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, document, record_lines

RUN = ("--dataset", "digits", "-a", "pgd", "--limit", 20, "--no-checks")


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("radius", [0.004, 0.02, 0.12, 0.5])
def test_images_with_8_bits_stay_in_the_region_and_use_it(norm: str, radius: float) -> None:
    draw = torch.Generator().manual_seed(1)
    images = rounded(torch.rand(6, 1, 8, 8, generator=draw))
    ascent = images + 0.01 * torch.randn(images.shape, generator=draw)
    region = Region(norm, radius)
    found = nearest_within(ascent, images, region)
    assert torch.equal(found, rounded(found))
    assert bool(region.contains(found, images).all())
    moved = (found - images).flatten(1).abs().amax(1) > 0
    if radius >= 0.02:  # 0.004 is one level
        assert bool(moved.all())
        lengths = (found - images).flatten(1).norm(dim=1) if norm == "l2" else None
        assert lengths is None or float(lengths.min()) > 0.5 * radius


def test_records_examples_and_document_say_both(workshop: Path, tmp_path: Path) -> None:
    net, records, saved = (tmp_path / name for name in ("n", "r.jsonl", "e.safetensors"))
    net = workshop / "plain.safetensors"
    found = document("attack", net, *RUN, "-e", 0.2, "--records", records, "--save-examples", saved)
    rows = [row for row in record_lines(records) if row["broken_by"]]
    assert found["fooled"] == len(rows) > 0
    assert found["fooled_8bit"] == sum(row["as_8bit"] for row in rows)
    tensors = load_file(saved)
    model = build.load(open_checkpoint(str(net)))
    with torch.no_grad():
        classes = model(rounded(tensors["adversarial"])).argmax(1)
    assert torch.equal(classes != tensors["labels"], tensors["as_8bit"])
    told = attempt("attack", net, *RUN, "-e", 0.2).stdout
    assert f"As 8-bit files, {found['fooled_8bit']} of {found['fooled']}" in told


def test_an_attack_among_images_of_8_bits_finds_such_images(workshop: Path, tmp_path: Path) -> None:
    saved = tmp_path / "e.safetensors"
    words = ("attack", workshop / "plain.safetensors", *RUN, "-e", 0.2, "--pixels", "8bit")
    found = document(*words, "--save-examples", saved)
    assert found["fooled_8bit"] == found["fooled"] > 0
    tensors = load_file(saved)
    assert torch.equal(tensors["adversarial"], rounded(tensors["adversarial"]))
    assert bool(tensors["as_8bit"].all())
    assert float(tensors["l2_norms"].max()) <= 0.2
    assert isinstance(attempt(*words[:-1], "16bit").exception, UsageError)


def test_the_audit_says_how_many_are_files(workshop: Path) -> None:
    few = ("--limit", 12, "-e", 0.3, "-a", "pgd", "--quiet", "--time-budget", "10m")
    audit = document("audit", workshop / "plain.safetensors", *few, "--method", "lipschitz")
    fooled, files = (audit["attack"][key]["0.3"] for key in ("fooled", "fooled_8bit"))
    assert 0 < files <= fooled
    told = "all" if files == fooled else str(files)
    assert f"({told} also as 8-bit files)" in audit["headline"]
