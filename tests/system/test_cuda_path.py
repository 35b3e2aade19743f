"""Every command on a CUDA device that is pretended: no tensor stays on the CPU, and the answers are
the CPU's.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from certcli.adapt import fit as adapt_fit
from certcli.attack.catalogue import ATTACKS
from certcli.certify.methods import METHODS
from certcli.checkpoint.file import read_tensors
from tests.helpers import commands, grids
from tests.system.pretended_cuda import pretended_cuda

DATA = ("--dataset", "digits", "--limit", 2)
NOISE = ("--n0", 4, "--samples", 12, "-e", 0.01)
REAL = ("--arithmetic", "real", *DATA)
OPTIONS = {"patch": ("--patch", 2, *DATA), "smoothing": (*DATA, *NOISE)}
"""By method: others prove, on a device in real arithmetic alone."""
LAYER = ("--layers", "blocks.0.mlp.fc1", "--eta", 0.1)
NEW_HEAD = {
    "adapt, a new head": ("adapt NET -o OUT --force --goal certify --head 8,8 --epochs 1", DATA)
}
COMMANDS: dict[str, tuple[str, Sequence[object]]] = {
    "lipschitz": ("lipschitz NET", ()),
    **{
        f"certify, {name}": (
            f"certify {'CHAIN' if name in ('bcp', 'local-lip') else 'NET'} --method {name}",
            OPTIONS.get(name, REAL),
        )
        for name in METHODS.names()
        if name not in ("bcp", "local-lip") or grids.EVERY  # chains: seconds each
    },
    "attack": ("attack NET", (*DATA, *(word for name in ATTACKS.names() for word in ("-a", name)))),
    "attack, patch": ("attack NET --norm patch --patch 2", DATA),
    "constrain": ("constrain NET -o OUT --force", LAYER),
    "adapt": ("adapt NET -o OUT --force", DATA),
    **(NEW_HEAD if grids.EVERY else {}),
    "finetune": (
        "finetune NET -o OUT --force --steps 1 --batch-size 4 --validation-limit 4 --augment crop,warp",
        DATA,
    ),
}
"""By name: words, and more of them. NET and OUT are paths."""


def answer(row: str, folder: Path, device: str) -> str:
    words, more = COMMANDS[row]
    paths = {
        "CHAIN": folder / "chain.safetensors",
        "NET": folder / "net.safetensors",
        "OUT": folder / f"{device[:3]}.safetensors",
    }
    done = commands.console(
        *(paths.get(word, word) for word in words.split()), *more, "--device", device, "--quiet"
    )
    assert done.code == 0, done.err
    said = re.sub(
        r"; \S+ seconds an image|; \d+ passes gave .*", "", done.out
    )  # a GPU's batches are larger
    return said.replace(str(paths["OUT"]), "OUT")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cuda")
    shape = [
        word for key in ("embed_dim=8", "depth=1", "num_heads=2") for word in ("--arch-arg", key)
    ]
    assert (
        commands.console("init", "certvit_vit_digits", *shape, "-o", found / "net.safetensors").code
        == 0
    )
    assert (
        commands.console(
            "init", "certvit_4c3f", "--arch-arg", "img_size=4", "-o", found / "chain.safetensors"
        ).code
        == 0
    )
    return found


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch built for CUDA asks for its driver"
)
@pytest.mark.parametrize("row", COMMANDS)
def test_a_command_on_cuda_answers_as_on_the_cpu(
    row: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a GPU fits all images as one lot: with the CPU's lots, sums in another order move a bound by 3e-5
    monkeypatch.setattr(adapt_fit, "FEW", 1)
    expected = answer(row, folder, "cpu")
    with pretended_cuda():
        found = answer(row, folder, "cuda:0")
    assert found == expected
    if row.startswith("adapt"):
        weights, others = (
            read_tensors(folder / f"{name}.safetensors")[0] for name in ("cpu", "cud")
        )
        for name, weight in weights.items():
            # equal bytes, but for sums that depend on where memory lies: as of several processes
            torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-6)


def test_no_certificate_speaks_of_the_rounding_of_a_gpu(folder: Path) -> None:
    words = ("certify", folder / "net.safetensors", "--method", "lipschitz", *DATA)
    assert "as a CPU executes it in float64" in commands.console(*words).out
    with pretended_cuda():
        by_default = commands.console(*words, "--device", "cuda:0")
        named = commands.console(*words, "--device", "cuda:0", "--arithmetic", "float64")
    assert by_default.code == 0
    assert "certificates: real arithmetic" in by_default.out
    assert named.code == 5
    assert "the rounding of cuda's kernels is not proven" in named.err


def test_the_pretended_device_refuses_what_cuda_refuses() -> None:
    with pretended_cuda() as cuda:
        weight = torch.nn.Linear(3, 2).to(cuda).weight
        assert weight.is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(1, 3) @ weight.T
        with pytest.raises(TypeError, match="numpy"):
            weight.detach().numpy()
        with pytest.raises(RuntimeError, match="generator"):
            torch.empty(3, device=cuda).normal_(generator=torch.Generator())
        assert weight.cpu().detach().numpy().shape == (2, 3)
