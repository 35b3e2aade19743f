"""The papers' networks: the parameters that CertViT's Table 1 counts, and what CoViT computes."""

from dataclasses import replace

import pytest
import torch

from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.nn.layers import ClippedReLU
from certcli.system.errors import ArchitectureError

PARAMETERS = {
    "certvit_4c3f_mnist": 1_973_536,
    "certvit_4c3f_cifar10": 2_528_096,
    "certvit_6c2f_cifar10": 2_360_672,
    "certvit_8c2f_cifar100": 2_436_864,
    "certvit_8c2f_tinyimagenet": 5_257_984,
    "certvit_l2_vit_mnist": 1_094_528,
    "certvit_l2_vit_cifar10": 4_086_912,
    "certvit_l2_vit_cifar100": 4_916_736,
    "certvit_l2_vit_tinyimagenet": 9_060_864,
}
"""As Table 1 of the paper prints them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_those_of_the_paper(name: str) -> None:
    with torch.device("meta"):
        net = build.create(name, {}, initialise=False)
    assert sum(parameter.numel() for parameter in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["certvit_4c3f_cifar10", "certvit_l2_vit_mnist"])
def test_a_small_one_has_a_finite_bound(name: str) -> None:
    shape = {"img_size": 8} if "4c3f" in name else {"img_size": 14, "depth": 1, "embed_dim": 32}
    checkpoint = build.initialise(name, shape)
    model = build.load(checkpoint)
    assert float(bound_network(model, model.input_size, 10).upper) < 1e20


COVIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2}


@pytest.mark.parametrize(
    ("name", "depth", "kernels"),
    [("t1", 4, 1), ("t2", 4, 4), ("t3", 8, 1), ("t4", 8, 4)],
)
def test_the_covits_have_the_depths_and_kernels_of_the_cauchy_paper(
    name: str, depth: int, kernels: int
) -> None:
    with torch.device("meta"):
        net = build.create(f"certvit_covit_{name}", {}, initialise=False)
    assert len(net.blocks) == depth
    for block in net.blocks:
        assert block.attn.convolution.weight.shape == (128 * kernels, 128, 3)
    small = build.load(build.initialise(f"certvit_covit_{name}", COVIT))
    assert float(bound_network(small, small.input_size, 10).upper) < 1e40


def test_several_kernels_of_one_size_compute_what_one_of_them_can() -> None:
    """The claim of `CoViT`, by which 4 x K3 against K3 compares two forms of the same functions."""
    several = build.initialise("certvit_covit_t2", COVIT)
    single = build.initialise("certvit_covit_t1", COVIT)
    tensors = {name: value.double() for name, value in several.tensors.items()}
    for block in range(2):
        path = f"blocks.{block}.attn"
        output = tensors[f"{path}.proj.weight"]
        kernel = torch.einsum("oi,idt->odt", output, tensors.pop(f"{path}.convolution.weight"))
        bias = output @ tensors.pop(f"{path}.convolution.bias")
        tensors[f"{path}.convolution.weight"] = kernel
        tensors[f"{path}.convolution.bias"] = bias
        tensors[f"{path}.proj.weight"] = torch.eye(12, dtype=torch.float64)
    merged = build.load(replace(single, tensors=tensors))
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    original = build.load(several, dtype=torch.float64)
    assert torch.allclose(merged(images), original(images), atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kernel": 2}, "odd kernel"),
        ({"kernel": 0}, "odd kernel"),
        ({"kernels": [3, 5]}, "kernel=5 computes"),
    ],
)
def test_kernels_without_a_middle_and_of_several_sizes_are_refused(
    arguments: dict[str, object], match: str
) -> None:
    with pytest.raises(ArchitectureError, match=match):
        build.create("certvit_covit_t1", arguments, initialise=False)


def test_thresholds_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="thresholds"):
        ClippedReLU((5,))(torch.zeros(2, 1))
