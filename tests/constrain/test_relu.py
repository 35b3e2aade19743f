"""The one-sided distance of layers followed by ReLU: its definition, its majorant, its optimum,
where it applies.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.constrain.methods import PENALTIES
from certcli.constrain.network import LayerCalibration, constrain_to, rectified_paths
from certcli.constrain.relu import RectifiedStatistics, not_followed_by_relu
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.statistics import energy
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.constrain_layers import collect, constrain
from tests.helpers.workshop import shape

ROUNDING = 1e-9
"""Relative: float64 sums of some thousand terms."""

IMAGES = torch.rand(24, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BATCHES = list(IMAGES.split(6))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc = nn.Linear(144, 10)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout()
        self.shared = nn.Linear(10, 10)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).flatten(1)
        x = self.act(self.drop(self.fc(x)))
        both = self.shared(x)
        return self.last(both.relu() + both)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


def rectified(
    net: Net, path: str, groups: int = 1, memory: int | None = None
) -> RectifiedStatistics:
    calibration = LayerCalibration(
        net, [path], BATCHES, BATCHES[:1], groups, memory, frozenset([path])
    )
    ((layer,),) = map(list, calibration.parts())
    assert isinstance(layer, RectifiedStatistics)
    return layer


def pre_activations(net: Net, path: str, weight: Tensor) -> Tensor:
    """(tokens, out) before the ReLU, from the definition of the layer."""
    x = IMAGES
    if path == "conv":
        return F.conv2d(
            x, weight.reshape(net.conv.weight.shape), net.conv.bias, padding=1
        ).mT.transpose(1, -1)
    return F.linear(F.relu(net.conv(x)).flatten(1), weight, net.fc.bias)


def one_sided(old: Tensor, new: Tensor) -> float:
    """sum dist(z - y, df(y))^2, entry by entry."""
    return float(torch.where(old > 0, new - old, new.clamp_min(0)).square().sum())


def moved(layer: RectifiedStatistics, seed: int, size: float = 0.3) -> Tensor:
    noise = torch.randn(
        layer.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return layer.weight + size * noise * layer.weight.std()


@pytest.mark.parametrize("path", ["conv", "fc"])
def test_the_distance_is_its_definition_and_lies_below_every_majorant(net: Net, path: str) -> None:
    layer = rectified(net, path)
    with torch.no_grad():
        old, (first, second) = (
            pre_activations(net, path, layer.weight),
            (moved(layer, 1), moved(layer, 2, 1.0)),
        )
        new = pre_activations(net, path, first)
        sums = layer.at(first)
        assert float(sums.errors) == pytest.approx(one_sided(old, new), rel=ROUNDING)
        assert float(layer.energies) == pytest.approx(
            float(old.clamp_min(0).square().sum()), rel=ROUNDING
        )
        # what comes after the ReLU moves by no more
        assert float((F.relu(new) - F.relu(old)).square().sum()) <= float(sums.errors) * (
            1 + ROUNDING
        )
        for other in (first, second, layer.weight):
            change = other - layer.weight
            majorant = (
                float(energy(change, layer.grams))
                - 2 * float((change * sums.crosses).sum())
                + float(sums.shifts)
            )
            value = float(layer.errors(other))
            assert value <= majorant * (1 + ROUNDING) + ROUNDING
            # a convex function lies above its tangent; seen.gradients is half the gradient
            assert (
                value
                >= float(sums.errors + 2 * (sums.gradients * (other - first)).sum()) - ROUNDING
            )
        change = first - layer.weight
        touching = (
            float(energy(change, layer.grams))
            - 2 * float((change * sums.crosses).sum())
            + float(sums.shifts)
        )
        assert touching == pytest.approx(
            float(sums.errors), rel=1e-6
        )  # the majorant cancels some digits


@pytest.mark.parametrize("name", PENALTIES.names())
@pytest.mark.parametrize(("path", "groups"), [("conv", 2), ("fc", 1)])
def test_the_result_is_feasible_and_no_feasible_point_passes_its_limit(
    net: Net, path: str, name: str, groups: int
) -> None:
    layer = rectified(net, path, groups)
    eta = 0.2
    result = constrain(layer, prox=name, eta=eta, iterations=200, ridge=0.0)
    assert result.feasible
    assert result.distance == "relu"
    weight = result.weight.flatten(1)
    with torch.no_grad():
        old = pre_activations(net, path, layer.weight)
        new = pre_activations(net, path, weight)
    assert one_sided(old, new) <= eta**2 * float(old.clamp_min(0).square().sum()) * (1 + ROUNDING)
    assert result.gap is not None
    value = PENALTIES.load(name).value
    lower = float(value(weight)) / (1 + result.gap)
    for seed in range(10):
        rival = moved(layer, seed, 2.0)
        # W0 + s (W - W0) has h <= s^2 h(W)
        excess = float((layer.relative_errors(rival) / eta).max())
        rival = layer.weight + (rival - layer.weight) / max(1.0, excess)
        assert float(layer.relative_errors(rival).max()) <= eta * (1 + ROUNDING)
        assert float(value(rival)) >= lower * (1 - ROUNDING)


def test_it_reaches_the_optimum_and_lies_below_the_plain_one(net: Net) -> None:
    layer = rectified(net, "conv")
    found = constrain(layer, eta=0.2, iterations=2000)
    assert found.gap is not None
    assert found.gap <= 2e-3
    plain = constrain(collect(net, BATCHES, ["conv"])["conv"], eta=0.2)
    error = float(layer.relative_errors(plain.weight.flatten(1)).max())
    again = constrain(layer, eta=error, iterations=300)
    assert again.after < plain.after


def test_inputs_read_again_are_those_that_were_kept(net: Net) -> None:
    kept = rectified(net, "fc")
    read = rectified(net, "fc", memory=8 * 2 * 144 * 144)
    assert kept.inputs is not None
    assert kept.inputs.kept is not None
    assert read.inputs is not None
    assert read.inputs.kept is not None
    tight = rectified(net, "conv", memory=8 * 2 * 81)
    assert tight.inputs is not None
    assert tight.inputs.kept is None
    free = rectified(net, "conv")
    assert torch.equal(tight.at(moved(free, 0)).gradients, free.at(moved(free, 0)).gradients)
    assert tight.held_out_error(moved(free, 0)) == free.held_out_error(moved(free, 0))


def test_where_it_applies_is_read_from_the_graph(net: Net) -> None:
    reasons = not_followed_by_relu(net, (1, 6, 6), ["conv", "fc", "shared", "last", "nowhere"])
    assert set(reasons) == {"shared", "last", "nowhere"}
    assert "add" in reasons["shared"]
    assert "output" in reasons["last"]
    assert rectified_paths(net, (1, 6, 6), ["conv", "last"], "auto") == {"conv"}
    assert rectified_paths(net, (1, 6, 6), ["conv", "last"], "plain") == frozenset()
    with pytest.raises(UsageError, match="'last' is not followed by ReLU"):
        rectified_paths(net, (1, 6, 6), ["conv", "last"], "relu")
    with pytest.raises(UsageError, match="no distance"):
        rectified_paths(net, (1, 6, 6), ["conv"], "euclid")
    with pytest.raises(UsageError, match="does not work with 'ball'"):
        list(
            constrain_to(
                LayerCalibration(net, ["conv"], BATCHES, rectified=frozenset(["conv"])),
                ConstrainSettings("ball", ridge=None),
            )
        )


def test_the_command(tmp_path: Path) -> None:
    """A ViT whose MLPs use ReLU: fc1 alone is followed by it."""
    start = tmp_path / "vit.safetensors"
    certvit("init", "certvit_vit_digits", *shape(act_layer="relu"), "-o", start, "--quiet")
    common = ("constrain", start, "--limit", 20, "--eta", 0.2, "--iterations", 20, "--quiet")
    report = document(*common, "--distance", "auto", "-o", tmp_path / "auto.safetensors")
    assert {layer["path"]: layer["distance"] for layer in report["layers"]} == {
        "patch_embed.proj": "plain",
        "blocks.0.attn.qkv": "plain",
        "blocks.0.attn.proj": "plain",
        "blocks.0.mlp.fc1": "relu",
        "blocks.0.mlp.fc2": "plain",
        "head": "plain",
    }
    assert all(layer["feasible"] and layer["error"] <= 0.2 for layer in report["layers"])
    refused = attempt(*common, "--distance", "relu", "-o", tmp_path / "relu.safetensors")
    assert "patch_embed.proj' is not followed by ReLU" in str(refused.exception)
    certvit(
        *common,
        "--distance",
        "relu",
        "--layers",
        "*.fc1",
        "-o",
        tmp_path / "relu.safetensors",
        "--memory",
        "64K",
    )
