"""Smoothing behind a denoiser: what is certified is the network on denoised images, and records say
of which denoiser.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from certcli.certify.smoothing.denoiser import Denoiser, read_denoiser
from certcli.system.errors import ArchitectureError, CertvitError
from tests.helpers.commands import attempt, document

RUN = (
    "--method",
    "smoothing",
    "--sigma",
    0.1,
    "--n0",
    16,
    "--samples",
    64,
    "--limit",
    6,
    "-e",
    0.05,
)


def dncnn(path: Path, last: float, spoil: Any = None) -> Path:
    """A DnCNN of four layers; last: standard deviation of its last one, 0 for the identity."""
    torch.manual_seed(0)
    net = Denoiser(1, 4, 4)
    torch.nn.init.normal_(net.dncnn[-1].weight, std=last)
    tensors: dict[str, Tensor] = {
        f"module.{name}": value.clone() for name, value in net.state_dict().items()
    }
    if spoil is not None:
        spoil(tensors)
    save_file(tensors, path)
    return path


def test_the_denoiser_is_part_of_what_is_smoothed(workshop: Path, tmp_path: Path) -> None:
    net = workshop / "plain.safetensors"
    records = tmp_path / "r.jsonl"
    same = dncnn(tmp_path / "same.safetensors", 0.0)
    other = dncnn(tmp_path / "other.safetensors", 0.05)
    bare = document("certify", net, *RUN)
    silent = document("certify", net, *RUN, "--denoiser", same)
    spoilt = document("certify", net, *RUN, "--denoiser", other, "--records", records)
    assert silent["average_radius"] == bare["average_radius"] != spoilt["average_radius"] > 0
    assert bare["parameters"].keys() == silent["parameters"].keys() - {"denoiser"}
    assert (
        silent["parameters"]["denoiser"]
        != spoilt["parameters"]["denoiser"]
        == read_denoiser(other, 1).digest
    )
    for words, code, named in (
        (("--denoiser", other), 0, ""),
        (("--denoiser", same), 6, "another denoiser"),
        ((), 6, "behind a denoiser"),
    ):
        done = attempt("verify", records, net, *words)
        assert getattr(done.exception, "code", done.exit_code) in (
            code,
            7 * (code == 0 and not spoilt["average_radius"]),
        )
        assert named in str(done.exception or "")
    done = attempt("certify", net, *RUN, "--records", records, "--resume", "--denoiser", same)
    assert "parameters denoiser" in str(done.exception)


def test_the_published_network() -> None:
    """x - dncnn(x), written out."""
    torch.manual_seed(1)
    net = Denoiser(3, 5, 3).eval()
    net.dncnn[3].running_mean.normal_()
    x = torch.rand(2, 3, 6, 6)
    first = net.dncnn[0]
    norm = net.dncnn[3]
    last = net.dncnn[5]
    hidden = torch.conv2d(
        torch.conv2d(x, first.weight, first.bias, padding=1).relu(), net.dncnn[2].weight, padding=1
    )
    hidden = (hidden - norm.running_mean[:, None, None]) / (norm.running_var + 1e-4).sqrt()[
        :, None, None
    ]
    assert torch.allclose(
        net(x), x - torch.conv2d(hidden.relu(), last.weight, padding=1), atol=1e-6
    )


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors["module.dncnn.3.running_var"]


def surplus(tensors: dict[str, Tensor]) -> None:
    tensors["module.head.weight"] = torch.ones(2)


def reshaped(tensors: dict[str, Tensor]) -> None:
    tensors["module.dncnn.2.weight"] = torch.ones(4, 4, 5, 5)


def deeper(tensors: dict[str, Tensor]) -> None:
    tensors["module.dncnn.999.weight"] = torch.ones(1)


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["conv.weight"] = tensors.pop("module.dncnn.0.weight")


def flat(tensors: dict[str, Tensor]) -> None:
    tensors["module.dncnn.0.weight"] = torch.ones(4)


def broken(tensors: dict[str, Tensor]) -> None:
    tensors["module.dncnn.2.weight"] *= torch.nan


@pytest.mark.parametrize("spoil", [missing, surplus, reshaped, deeper, renamed, flat, broken])
def test_anything_else_is_refused(tmp_path: Path, spoil: Any) -> None:
    with pytest.raises(CertvitError) as refused:
        read_denoiser(dncnn(tmp_path / "d.safetensors", 1.0, spoil), 1)
    assert refused.value.code in (3, 4)


def test_a_denoiser_of_other_channels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="for 1 channels, the network for 3"):
        read_denoiser(dncnn(tmp_path / "d.safetensors", 1.0), 3)


def test_a_published_pickle_of_tensors_is_read_and_another_pickle_is_not(tmp_path: Path) -> None:
    file = dncnn(tmp_path / "d.safetensors", 1.0)
    state = load_file(file)
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "d.pth.tar")
    assert read_denoiser(tmp_path / "d.pth.tar", 1).digest == read_denoiser(file, 1).digest
    torch.save({"state_dict": state, "run": Path("x")}, tmp_path / "code.pth.tar")
    with pytest.raises(CertvitError, match="not tensors alone"):
        read_denoiser(tmp_path / "code.pth.tar", 1)
