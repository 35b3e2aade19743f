"""Commands and the Python interface build the network of a checkpoint once and hand it on."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import Tensor

from certcli.checkpoint.file import tensors_digest
from certcli.models import build
from tests.helpers.commands import certvit
from tests.helpers.workshop import shape

DIGITS = ("--dataset", "digits", "--limit", 4)
COMMANDS: dict[str, tuple[object, ...]] = {
    "lipschitz": ("lipschitz", "m.safetensors", *DIGITS),
    "certify": (
        "certify",
        "m.safetensors",
        *DIGITS,
        "--method",
        "auto",
        "-e",
        0.1,
        "--sigma",
        0.1,
        "--samples",
        200,
    ),
    "attack": ("attack", "m.safetensors", *DIGITS, "--steps", 2, "--source", "p.safetensors"),
    "audit": ("audit", "m.safetensors", *DIGITS, "--time-budget", "1s"),
    "adapt": ("adapt", "p.safetensors", *DIGITS, "--epochs", 0),
    "constrain": ("constrain", "m.safetensors", *DIGITS, "--beta", 0.1),
    "finetune": (
        "finetune",
        "m.safetensors",
        *DIGITS,
        "--steps",
        1,
        "--loss",
        "margin",
        "--epsilon",
        0.1,
    ),
    "verify": ("verify", "m.safetensors"),
    "init": ("init", "certvit_vit_digits", *shape(), "-o", "i.safetensors"),
    "a file of others": ("lipschitz", "f.safetensors", "--arch", "certvit_4c3f", "--no-estimate"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_network_of_a_checkpoint_is_built_once(
    name: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: Counter[str] = Counter()

    class Counting(build.Building):
        def __init__(
            self, like: Mapping[str, Tensor] | None = None, *, initialise: bool = False
        ) -> None:
            super().__init__(like, initialise=initialise)
            built["a new network" if like is None else tensors_digest(like)] += 1

    for stem, of in (("m", "certified"), ("p", "plain")):
        (tmp_path / f"{stem}.safetensors").write_bytes(
            (workshop / f"{of}.safetensors").read_bytes()
        )
    save_file(build.initialise("certvit_4c3f", {}).tensors, tmp_path / "f.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "Building", Counting)
    certvit(*COMMANDS[name])
    assert set(built.values()) == {1}
