"""What stands beside the bound: published formulas (none a certificate), Jacobians of blocks,
comparisons.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.formulas import FORMULAS, formula_value
from benchmarks.tables.jacobians import (
    block_jacobian_norms,
    block_paths,
    hoelder_bounds,
    module_inputs,
)
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.lipschitz.bound import Bound
from certcli.models import build
from tests.helpers.commands import certvit, document


def report(*words: object) -> dict:
    return document("lipschitz", *words, "--quiet")


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_labelled_and_are_no_bounds(plain: Checkpoint, name: str) -> None:
    result = formula_value(name, build.load(plain), plain.record.input.size)
    assert result.flaw
    assert result.source
    assert not isinstance(result, Bound)
    assert all(value >= 0 for _, value in result.layers)


def test_block_jacobians_against_the_dense_matrix(plain: Checkpoint) -> None:
    model = build.load(plain, dtype=torch.float64)
    images = (
        datasets.load_dataset("digits", plain.record.input, "val").limit(3).tensors()[0].double()
    )
    assert block_paths(model) == ["blocks.0"]
    measured = block_jacobian_norms(model, images, iterations=60)["blocks.0"]
    hoelder = hoelder_bounds(model, images)["blocks.0"]
    x, _ = module_inputs(model, images, {"block": model.net.blocks[0]})["block"]
    for position in range(3):
        dense = torch.autograd.functional.jacobian(model.net.blocks[0], x[[position]])
        exact = float(torch.linalg.matrix_norm(dense.reshape(x[0].numel(), -1), 2))
        assert float(measured[position]) <= exact * (1 + 1e-12)  # rounding of float64
        assert float(measured[position]) >= 0.99 * exact  # sixty power iterations
        assert exact <= float(hoelder[position]) * (1 + 1e-12)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_report_holds_what_was_asked_for(workshop: Path, tmp_path: Path) -> None:
    plot = tmp_path / "both.png"
    found = report(
        workshop / "certified.safetensors", "--compare", workshop / "plain.safetensors",
        "--limit", 4, "--plot", plot,
    )  # fmt: skip
    assert found["compare"]["other_log10_upper"] > found["log10_upper"]
    assert found["lower"] <= found["upper"]
    assert plot.stat().st_size > 1000
    layers = tmp_path / "layers.png"
    report(workshop / "plain.safetensors", "--no-estimate", "--plot", layers)
    assert layers.stat().st_size > 1000


@pytest.mark.parametrize("view", [[], ["--layers"], ["--worst"], ["--layers", "--worst"]])
def test_views_for_a_person(workshop: Path, view: list[str]) -> None:
    words = ["lipschitz", str(workshop / "plain.safetensors"), "--no-estimate", "--quiet", *view]
    outcome = certvit(*words)
    for part in ("patch_embed", "blocks.0", "norm", "upper bound (proven", "certified within"):
        assert part in outcome.stdout
