"""The networks of CertViT's Table 1: their parameters, and a proof for each kind of them."""

import pytest
import torch

from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.nn.activations import ClippedReLU

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


def test_thresholds_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="thresholds"):
        ClippedReLU((5,))(torch.zeros(2, 1))
