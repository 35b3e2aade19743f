"""`init` of any timm name: what a freshly built network holds can be written, read back, and is the
same function.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.models import build
from tests.helpers.commands import certvit


def test_limits_that_clip_nothing_are_stored_as_the_largest_numbers(
    tmp_path: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    """As timm's Gemma 4: buffers of infinity until published weights are loaded. On finite numbers
    nothing changes.
    """

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("low", torch.tensor(-torch.inf))
            self.register_buffer("high", torch.tensor(torch.inf))

    monkeypatch.setattr(build, "create", lambda arch, arguments, *, initialise: Clipped())
    spec = InputSpec(size=(1, 2, 2), mean=(0.0,), std=(1.0,))
    made = build.initialise("clipped", {}, spec, 3, 0)
    made.write(tmp_path / "a.safetensors")
    back = Checkpoint.read(tmp_path / "a.safetensors")
    assert back.digest == made.digest
    x = torch.tensor([-3e38, -1.0, 0.0, 3e38])
    assert torch.equal(x.clamp(back.tensors["low"], back.tensors["high"]), x)


@pytest.mark.parametrize("arch", ["certvit_4c3f", "certvit_lip_digits", "certvit_sort_mnist"])
def test_a_reference_network_of_another_size_says_which_images_it_takes(arch: str) -> None:
    net = build.create(arch, {"in_chans": 3, "img_size": 32}, initialise=False)
    spec = build.spec_of(net)
    assert spec.size == (3, 32, 32)
    assert len(spec.mean) == len(spec.std) == 3
    assert net(torch.zeros(2, *spec.size)).shape == (2, 10)


def test_init_refuses_a_network_that_cannot_run(tmp_path: Path) -> None:
    """Exit 4, as any later command would: patches of 16 pixels on images of 8."""
    path = tmp_path / "made.safetensors"
    outcome = certvit(
        "init", "vit_tiny_patch16_224", "--arch-arg", "img_size=8", "-o", path, code=4
    )
    assert "does not take an image of size 3x8x8" in str(outcome.exception)
    assert not path.exists()
