"""`certify --arithmetic` at the command line: which methods know it, and records of another one."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from certcli.certify.lipschitz import as_executed
from certcli.certify.methods import METHODS
from certcli.certify.options import ARITHMETICS, REAL, Local
from certcli.cli.certify.run import PROVING as SPOKEN_OF
from certcli.cli.verify import records as checks
from certcli.rounding import PRECISIONS
from certcli.system.errors import UsageError
from tests.helpers.commands import certvit, document
from tests.helpers.grids import EVERY


def test_the_command_line_knows_the_arithmetics(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    path.touch()
    assert (REAL, *PRECISIONS) == ARITHMETICS
    given = ("--dataset", "digits", "--limit", 4, "--arithmetic", "float32")
    for method in ("auto", "smoothing", "patch"):
        certvit("certify", path, "--method", method, *given, code=2)
    kinds = {name: get_type_hints(METHODS.load(name))["options"] for name in METHODS.names()}
    assert {
        name for name, kind in kinds.items() if "arithmetic" in kind.__dataclass_fields__
    } == set(SPOKEN_OF)
    certvit("certify", path, *given[:-1], "half", code=2)
    with pytest.raises(UsageError, match="half"):
        Local(arithmetic="half")


class Rounding:
    """Of the classes 0 and 1 on the whole box, and less of it near an image."""

    on_box = torch.tensor([[0.5], [0.0]])

    def __call__(self, images: Tensor, radii: Tensor, tops: Tensor) -> Tensor:
        return torch.full((len(images), 1), 0.25)


def test_radii_as_executed_are_what_rounding_leaves_of_real_ones() -> None:
    radii, tops, images = (
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0, 1, 0]),
        torch.zeros(3, 1, 1, 1),
    )

    def found(rounding: Any, count: int) -> list[float]:
        real = radii[:count]
        left = as_executed(
            rounding, images[:count], tops[:count], real, lambda rows, lost: real[rows] - lost[:, 0]
        )
        return left.tolist()

    assert found(None, 3) == [1.0, 2.0, 3.0]
    assert found(Rounding(), 3) == [0.75, 2.0, 2.75]
    assert found(Rounding(), 0) == []


@pytest.mark.parametrize("method", ["lipschitz", "local", *["bcp"] * EVERY])
def test_records_of_another_arithmetic_are_refuted(
    method: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "STEPS", 4)  # of attacks inside radii, which find nothing here
    checkpoint = workshop / "certified.safetensors"
    records = tmp_path / "records.jsonl"
    if method == "bcp":
        checkpoint = tmp_path / "chain.safetensors"
        certvit("init", "certvit_4c3f", "--arch-arg", "img_size=8", "-o", checkpoint)
    elif method == "local":
        checkpoint = workshop / "plain.safetensors"
    given = (
        "--limit",
        3,
        "--dataset",
        "digits",
        "--arithmetic",
        "float32",
        "--records",
        records,
        *(["--effort", "norms"] if method == "local" else []),
    )
    found = document("certify", checkpoint, "--method", method, *given)
    assert found["arithmetic"] == "float32"
    certvit("verify", records, checkpoint, "--dataset", "digits")
    header, *rows = records.read_text().splitlines()
    assert '"arithmetic":"float32"' in header.replace(" ", "")
    records.write_text("\n".join([header.replace('"float32"', '"bf16"'), *rows, ""]))
    certvit("verify", records, checkpoint, "--dataset", "digits", code=7)
    certvit("verify", records, checkpoint, "--arithmetic", "bf16", code=2)
