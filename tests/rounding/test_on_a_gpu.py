"""Whether a CUDA device's kernels lose more than is proven for a CPU's, in every memory format.

Nothing is claimed of them (`lipschitz.neighbour_errors`): a row that fails says why not.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from certcli.engine.table import NoRule
from certcli.models.build import keep_float32
from certcli.rounding import PRECISIONS, NeighbourErrors
from tests.helpers.executions import FORMATS, Laid, require_within
from tests.helpers.lipschitz_cases import ROWS
from tests.helpers.slopes import IMAGE
from tests.rounding.test_every_rule import OTHER_BATCHES, WITHOUT_ROUNDING, network

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")


@torch.no_grad()
def executions(model: nn.Module, pixels: Tensor, arithmetic: str) -> Iterator[Tensor]:
    """Yield the logits of the device in float64: together, one by one, in other memory formats."""
    dtype = PRECISIONS[arithmetic].dtype
    keep_float32(DEVICE)
    torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = arithmetic == "tf32"
    net = copy.deepcopy(model).to(DEVICE, dtype).eval()
    images = pixels.to(DEVICE, dtype)
    yield net(images).double().cpu()
    yield torch.cat([net(image[None]) for image in images]).double().cpu()
    for lay in FORMATS.values():
        with Laid(lay):
            yield net(images).double().cpu()
    keep_float32(DEVICE)


@pytest.mark.gpu
@pytest.mark.xfail(strict=False, reason="no certificate speaks of a GPU's kernels")
@pytest.mark.parametrize("arithmetic", PRECISIONS)
@pytest.mark.parametrize("offset", [0.0, 3e3])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in WITHOUT_ROUNDING])
def test_no_kernel_of_the_device_loses_more_than_is_proven(
    name: str, offset: float, arithmetic: str
) -> None:
    model = network(name, offset)
    try:
        analysis = NeighbourErrors(model, IMAGE, PRECISIONS[arithmetic])
    except NoRule:
        return  # refused: nothing is claimed
    noise = torch.rand(9, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pixels = torch.cat([noise, noise[:1].round(), torch.zeros_like(noise[:1])])
    for part in pixels.split(1) if name in OTHER_BATCHES else [pixels]:
        require_within(analysis, model, part, 0.5, arithmetic, executions)
