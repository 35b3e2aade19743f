"""What stands beside the bound in an audit: published formulas (none a certificate), Jacobians of blocks, comparisons."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from certcli import data, models
from certcli.checkpoint import Checkpoint
from certcli.cli.main import app
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.estimate import jacobian_norms
from certcli.lipschitz.formulas import FORMULAS, evaluate
from certcli.lipschitz.jacobian import block_inputs, block_norms, block_paths, hoelder_bounds
from certcli.lipschitz.network import bound_network
from certcli.nn.l2_attention import L2Attention


def report(*words: object) -> dict:
    outcome = CliRunner().invoke(app, ["lipschitz", *[str(word) for word in words], "--json", "--quiet"])
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_labelled_and_are_no_bounds(plain: Checkpoint, name: str) -> None:
    result = evaluate(name, models.load(plain), plain.record.input.size)
    assert result.flaw
    assert result.source
    assert not isinstance(result, Bound)
    assert all(value >= 0 for _, value in result.layers)


def test_kims_formula_as_printed_is_exceeded_and_our_bound_is_not() -> None:
    """Two tokens, large W_Q: the true slope grows with its square, the printed formula with its first power."""
    torch.manual_seed(0)
    attention = L2Attention(6, 1, 3, bias=False, out_width=6, proj_bias=False).double().eval()
    attention.query.weight.data = 20 * torch.linalg.qr(torch.randn(6, 3).double())[0].T.contiguous()
    # |W_V| = |W_O| = 1: then `proj` is W_O W_h^T W_V / sqrt(dh), of norm 20 / sqrt(3)
    attention.proj.weight.data = 20 / 3**0.5 * torch.linalg.qr(torch.randn(6, 3).double())[0].contiguous()

    class Lone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x)

    net = Lone().eval()
    # two tokens torn between each other: |q_0 - q_1|^2 / sqrt(dh) = r with r / (1 + e^r) at its largest
    apart = (1.278 * 3**0.5) ** 0.5 / 20 * torch.nn.functional.normalize(attention.query.weight.data[0], dim=0)
    x = torch.stack([torch.zeros(6, dtype=torch.float64), apart]).unsqueeze(0)
    slope = float(jacobian_norms(net, x, 60).max())
    printed = evaluate("l2former", net, (2, 6)).layers[0][1]
    assert slope > printed
    assert slope <= float(bound_network(net, (2, 6), 6).upper)


def test_block_jacobians_against_the_dense_matrix(plain: Checkpoint) -> None:
    model = models.load(plain, dtype=torch.float64)
    images = data.load("digits", plain.record.input, "val").limit(3).tensors()[0].double()
    assert block_paths(model) == ["blocks.0"]
    measured = block_norms(model, images, iterations=60)["blocks.0"]
    hoelder = hoelder_bounds(model, images)["blocks.0"]
    x, _ = block_inputs(model, images, ["blocks.0"])["blocks.0"]
    for position in range(3):
        dense = torch.autograd.functional.jacobian(model.net.blocks[0], x[[position]])
        exact = float(torch.linalg.matrix_norm(dense.reshape(x[0].numel(), -1), 2))
        assert float(measured[position]) <= exact * (1 + 1e-12)  # rounding of float64
        assert float(measured[position]) >= 0.99 * exact  # sixty power iterations
        assert exact <= float(hoelder[position]) * (1 + 1e-12)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_report_holds_what_was_asked_for(workshop: Path, tmp_path: Path) -> None:
    plot = tmp_path / "violins.png"
    found = report(
        workshop / "certified.safetensors", "--compare", workshop / "plain.safetensors", "--formula", "autolip",
        "--formula", "certvit", "--jacobian", "--limit", 4, "--plot", plot,
    )  # fmt: skip
    assert [formula["certificate"] for formula in found["formulas"]] == [False, False]
    assert found["compare"]["other_log10_upper"] > found["log10_upper"]
    assert found["jacobian"][0]["images"] == 4
    assert found["jacobian"][0]["largest"] >= found["jacobian"][0]["mean"] > 0
    assert found["lower"] <= found["upper"]
    assert plot.stat().st_size > 1000
    heads = report(workshop / "plain.safetensors", "--no-estimate", "--heads")["heads"]
    weight = Checkpoint.read(workshop / "plain.safetensors").tensors["blocks.0.attn.qkv.weight"].double()
    exact = [float(torch.linalg.matrix_norm(part, 2)) for part in weight.chunk(6)]
    assert [entry["map"] for entry in heads] == ["q", "k", "v"]
    proven = [norm for entry in heads for norm in entry["upper"]]
    assert all(value >= true for value, true in zip(proven, exact, strict=True))
    layers = tmp_path / "layers.png"
    report(workshop / "plain.safetensors", "--no-estimate", "--plot", layers)
    assert layers.stat().st_size > 1000


@pytest.mark.parametrize("view", [[], ["--layers"], ["--worst"], ["--layers", "--worst"]])
def test_views_for_a_person(workshop: Path, view: list[str]) -> None:
    words = ["lipschitz", str(workshop / "plain.safetensors"), "--no-estimate", "--quiet", *view]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0
    for part in ("patch_embed", "blocks.0", "norm", "upper bound (proven", "certified within"):
        assert part in outcome.stdout
