"""What is read of others' files: networks by words, what is assumed of them, and traps in which a wrong network fits."""

from typing import Any

import pytest
import torch
from torch import nn

from certcli import models
from certcli.enclosure.domain import LocalNetwork
from certcli.enclosure.form import l2_ball
from certcli.errors import ArchitectureError
from certcli.lipschitz.network import prove
from certcli.nn.norms import TokenBatchNorm
from certcli.provenance import InputSpec

RGB = InputSpec((3, 32, 32), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("norm", ["identity", "batchnorm"])
def test_the_competitions_networks_load_by_name_and_have_bounds(norm: str) -> None:
    arguments = {"norm_layer": norm, "depth": 1}
    model = models.load(models.initialise("certvit_vit_pgd_2_3_16", arguments, RGB, 10, seed=0))
    names = models.tensors_of(model).keys()
    assert ("blocks.0.norm1.running_mean" in names) == (norm == "batchnorm")
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert prove(model, 10).upper.finite
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ball = l2_ball(pixels, 1e-3, squares_up_to=64, limit=4000)
    assert bool(LocalNetwork(model.double(), (3, 32, 32)).margins(ball, 0).isfinite().all())


def test_the_same_network_from_words() -> None:
    words = {
        "img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2, "num_classes": 10,
        "act_layer": "relu", "norm_layer": "identity", "global_pool": "avg", "pool_include_prefix": True,
    }  # fmt: skip
    made = models.initialise("certvit_vit_pgd_2_3_16", {}, RGB, 10, seed=0)
    spoken = models.create("vit_tiny_patch16_224", words, initialise=False)
    models.load_weights(spoken, made.tensors)
    named = models.load(made)
    pixels = torch.rand(2, 3, 32, 32)
    assert torch.equal(named.net(pixels), spoken(pixels))


def test_batch_norm_over_tokens_is_torchs() -> None:
    ours, theirs = TokenBatchNorm(6), nn.BatchNorm1d(6)
    tokens = 2 + torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(-1, 2, 6))
            norm.bias.copy_(torch.linspace(3, -3, 6))
    assert torch.equal(ours(tokens), theirs(tokens.mT).mT), "in training"
    assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]
    torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens.mT).mT)


WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("no norm", {"norm_layer": "torch.nn.Identity"}, "one of batchnorm"),
    ("no activation", {"act_layer": "tanhh"}, "one of celu"),
    ("a list", {"act_layer": ["relu"]}, "act_layer is a word"),
    ("eps", {"norm_eps": 0}, "norm_eps"),
    ("eps as text", {"norm_eps": "small"}, "norm_eps"),
    ("nothing with an eps", {"norm_eps": 1e-5, "norm_layer": "identity"}, "no norm with an eps"),
    ("maps", {"norm_layer": "rmsnorm2d", "depth": 1}, "rmsnorm2d|image"),
]


@pytest.mark.parametrize(("name", "arguments", "named"), WORDS, ids=[row[0] for row in WORDS])
def test_words_are_of_a_closed_table(name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArchitectureError, match=named):
        models.load(
            models.initialise("certvit_vit_digits", arguments, InputSpec((1, 8, 8), (0.5,), (0.5,)), 10, seed=0)
        )


def test_eps_is_that_of_every_norm() -> None:
    net = models.create("vit_tiny_patch16_224", {"depth": 1, "norm_eps": 1e-5}, initialise=False)
    assert {module.eps for module in net.modules() if isinstance(module, nn.LayerNorm)} == {1e-5}
    own = models.create("convnext_atto", {"norm_eps": 1e-3}, initialise=False)  # timm's constructor knows the word
    assert 1e-3 in {getattr(module, "eps", None) for module in own.modules()}
