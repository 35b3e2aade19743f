"""The six commands chained by file, as a shell would, on real digits; and what each promises about
its output.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch

from certcli.certify.lipschitz import certified_radii
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.models import build
from certcli.system.errors import GateError
from tests.helpers.commands import attempt, certvit, document

STAGES = ["plain", "adapted", "constrained", "certified"]


def test_the_chain_certifies_a_real_share(workshop: Path) -> None:
    """Chance is 10 %; a trained, certified net must be far above it, the plain one certifies
    nothing at 0.1.
    """
    plain = document("certify", workshop / "plain.safetensors", "-e", 0.1, "--split", "val")
    final = document(
        "certify", workshop / "certified.safetensors", "-e", 0.1, "-e", 0.3, "--split", "val"
    )
    assert plain["clean"] > 0.5
    assert plain["certified"]["0.1"] == 0.0
    assert final["certified"]["0.1"] > 0.3
    assert final["certified"]["0.1"] >= final["certified"]["0.3"]
    assert final["clean"] >= final["certified"]["0.1"]


def test_lineage_names_every_step(workshop: Path, certified: Checkpoint) -> None:
    commands = [step.command for step in certified.record.lineage]
    assert commands == ["init", "finetune", "adapt", "constrain", "finetune"]
    assert certified.record.dataset == "digits"
    for stage, child in pairwise(["init", *STAGES]):
        parent = Checkpoint.read(workshop / f"{stage}.safetensors")
        assert (
            Checkpoint.read(workshop / f"{child}.safetensors").record.lineage[-1].parent
            == parent.digest
        )
    steps = certified.record.lineage
    evidence = certified.record.evidence
    shown = [
        *(step.shown for step in steps),
        *((entry.parameters, entry.result) for entry in evidence),
    ]
    assert "/" not in json.dumps(
        shown
    )  # no path of any machine; digests of images are base64, which has a "/"


def test_a_plain_finetuned_checkpoint_loads_strictly_in_stock_timm(plain: Checkpoint) -> None:
    stock = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=1, num_heads=2, mlp_ratio=2,
        num_classes=10,
    ).eval()  # fmt: skip
    stock.load_state_dict(dict(plain.tensors), strict=True)
    images, _ = datasets.load_dataset("digits", plain.record.input, "val").tensors()
    with torch.no_grad():
        ours = build.load(plain)(images)
        theirs = stock((images - 0.5) / 0.5)
    assert torch.allclose(
        ours, theirs, atol=1e-5
    )  # the same float32 network: rounding of the normalisation only


def test_radii_of_known_logits() -> None:
    logits = torch.tensor(
        [[3.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 5.0, 5.0 - 1e-12]], dtype=torch.float64
    )
    rounding = torch.full((3, 3), 2e-12, dtype=torch.float64)
    pairs = torch.tensor([[0, 4.0, 1.0], [4.0, 0, 2.0], [1.0, 2.0, 0]], dtype=torch.float64)
    radii = certified_radii(logits, rounding, pairs)
    assert float(radii[0]) <= 0.5 - 5e-13  # min((3 - 1 - 2e-12) / 4, (3 - 0) / 1), rounded down
    assert float(radii[0]) > 0.5 - 1e-11
    assert radii[1:].tolist() == [0.0, 0.0]  # logits that may be tied certify nothing
    free = certified_radii(logits[:1], rounding[:1], torch.zeros(3, 3, dtype=torch.float64))
    assert free.tolist() == [float("inf")]  # margins that cannot move
    for slopes, doubt in (
        (torch.inf, 0.0),
        (torch.nan, 0.0),
        (1.0, torch.inf),
        (1.0, torch.nan),
        (0.0, torch.inf),
    ):
        known = torch.full((3, 3), slopes, dtype=torch.float64)
        assert certified_radii(
            logits[:1], torch.full_like(rounding[:1], doubt), known
        ).tolist() == [0.0]


def test_evidence_is_fresh_for_its_tensors_and_stale_for_others(
    workshop: Path, tmp_path: Path
) -> None:
    audited = tmp_path / "audited.safetensors"
    source = workshop / "certified.safetensors"
    certvit("lipschitz", source, "--limit", 4, "-o", audited)
    evidence = document("log", audited)["evidence"]
    by_command = {entry["command"]: entry["stale"] for entry in evidence}
    assert by_command == {"adapt": True, "constrain": True, "finetune": False, "lipschitz": False}
    assert Checkpoint.read(audited).digest == Checkpoint.read(source).digest
    certvit("verify", audited)
    forged = Checkpoint.read(audited)
    wrong = {**forged.record.evidence[-1].result, "log10_upper": -3.0}
    forged.with_evidence("lipschitz", forged.record.evidence[-1].parameters, wrong).write(
        tmp_path / "forged.safetensors"
    )
    assert isinstance(attempt("verify", tmp_path / "forged.safetensors").exception, GateError)
    changed = tmp_path / "changed.safetensors"
    certvit("constrain", audited, "--eta", 0.2, "--limit", 100, "-o", changed)
    evidence = document("log", changed)["evidence"]
    by_command = {entry["command"]: entry["stale"] for entry in evidence}
    assert by_command == {"adapt": True, "constrain": False, "finetune": True, "lipschitz": True}
    told = {tuple(entry["authors_word"]) for entry in evidence if entry["stale"]}
    assert told == {("parameters", "result")}, "what is proven of another network is not recomputed"


def test_constrain_as_printed_on_the_card(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`certvit constrain model.safetensors --beta 0.01`: no data, no output name, on a plain ViT."""
    (tmp_path / "model.safetensors").write_bytes((workshop / "plain.safetensors").read_bytes())
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.chdir(tmp_path)
    report = document("constrain", "model.safetensors", "--beta", 0.01)
    assert (tmp_path / "model.constrain.safetensors").exists()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert all(layer["after"] <= layer["before"] for layer in report["layers"])
    assert (
        sum(layer["after"] < 0.999 * layer["before"] for layer in report["layers"])
        >= len(report["layers"]) / 2
    )
    assert all(layer["error"] <= layer["eta"] for layer in report["layers"])
    assert report["kept"]["agreement"] >= 0.95
