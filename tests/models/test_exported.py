"""Programs of torch.export: the network and the bound of the module that was exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import certvit
from certcli.system.errors import ArchitectureError, CheckpointError
from tests.helpers.commands import attempt
from tests.models.test_onnx import NETWORKS, SIZE, filled, margins_near

PIXELS: dict[str, Any] = {"mean": 0.5, "std": 0.25}


def exported_program(net: nn.Module, images: int = 2) -> Any:
    batch = {0: torch.export.Dim.DYNAMIC} if images > 1 else None
    return torch.export.export(net, (torch.rand(images, *SIZE),), dynamic_shapes=(batch,))


@pytest.mark.parametrize(("name", "images"), [("vit", 1), ("swin", 2), ("resnet", 2)])
def test_a_program_has_the_bound_of_its_module(name: str, images: int) -> None:
    net = filled(NETWORKS[name]())
    program = exported_program(net, images)
    native = certvit.load(net, **PIXELS, input_size=SIZE)
    pixels = torch.rand(2, *SIZE)
    upper = certvit.bound(native).upper
    assert upper.finite
    margins = margins_near(native, pixels[:1])
    for source in (program, program.module()):
        opened = certvit.load(source, **PIXELS)
        assert opened.record.input.size == SIZE
        assert certvit.bound(opened).upper.log10() == upper.log10()
        assert margins_near(opened, pixels[:1]) == pytest.approx(margins, rel=1e-6)
        # sums of the same numbers, in the order of a fused attention or of a written one
        assert torch.allclose(
            certvit.network(opened)(pixels), certvit.network(native)(pixels), atol=1e-5
        )


class Aliased(nn.Module):
    """y is read after it was changed through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x.flatten(1)[:, :4] - 1
        y.view(-1, 2, 2).relu_()
        return y


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Aliased(), "changes a tensor that is read elsewhere"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 4)).train(), "dropout in training"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).train(), "statistics of the batch|changes a tensor"),
    ],
)  # fmt: skip
def test_what_a_graph_without_memory_would_not_compute_is_refused(
    net: nn.Module, message: str
) -> None:
    with pytest.raises(ArchitectureError, match=message):
        certvit.load(exported_program(net), **PIXELS)


def test_an_operation_without_a_rule_is_named() -> None:
    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4].cumsum(1)

    result = certvit.bound(certvit.load(exported_program(Summed().eval()), mean=0, std=1))
    assert not result.upper.finite
    assert "cumsum" in result.bound.why


def test_files_of_programs_are_refused_with_the_call_that_helps(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 4)).eval()
    torch.export.save(exported_program(net), tmp_path / "net.pt2")
    torch.jit.trace(net, torch.rand(1, *SIZE)).save(str(tmp_path / "net.pt"))
    for name, kind in (("net.pt2", "torch.export"), ("net.pt", "TorchScript")):
        failure = attempt("lipschitz", tmp_path / name, "--mean", 0, "--std", 1).exception
        assert isinstance(failure, CheckpointError)
        assert f"a program of {kind}, and reading it runs code" in failure.message
        assert "torch.onnx.export(model, (image,)" in failure.hint
