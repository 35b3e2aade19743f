"""Python's interface: its page and its notebook run, errors name keyword arguments, and modules are
bounded like files.
"""

import copy
import json
import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import certvit
import certvit.testing
from certcli import api, testing
from certcli.api import arguments, networks
from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    CheckpointError,
    UsageError,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
DIGITS = {"mean": 0.5, "std": 0.5, "input_size": (1, 8, 8)}


@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=lambda page: page.name)
def test_the_code_of_the_page_runs(
    page: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes((workshop / "certified.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= (5 if page == PAGE else 1)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert page != PAGE or (tmp_path / "copy.safetensors").exists()


def test_the_notebook_runs() -> None:
    """With less training, fewer images and less time than a reader takes."""
    document = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert "EPOCHS, IMAGES, SECONDS = 20, 40, 30" in cells[0]
    cells[0] = cells[0].replace("20, 40, 30", "1, 4, 1")
    names: dict = {}
    for cell in cells:
        exec(compile(cell, "notebook.ipynb", "exec"), names)
    assert names["certified"].images == 4


def test_every_function_is_in_certvit() -> None:
    own = {
        name
        for name, value in vars(api).items()
        if getattr(value, "__module__", "") == api.__name__
    }
    own |= {
        name for name in vars(networks) if name in ("load", "save", "history", "network", "images")
    }
    assert {name for name in own if name[0] != "_"} == set(api.FUNCTIONS)
    assert set(api.FUNCTIONS) <= set(certvit.__all__)
    for name in certvit.testing.__all__:
        assert getattr(certvit.testing, name) is getattr(testing, name)


def test_the_wheel_holds_both_names() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    hatch = tools.get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {})
    setuptools = tools.get("setuptools", {}).get("packages", {}).get("find", {})
    packages = {
        name.rstrip("*") for name in (*hatch.get("packages", ()), *setuptools.get("include", ()))
    }
    assert {"certcli", "certvit"} <= packages


def test_assertions_fail_with_figures(certified: Checkpoint) -> None:
    images, labels = (
        datasets.load_dataset("digits", certified.record.input, "val").limit(20).tensors()
    )
    share = testing.assert_certified(certified, images, labels, radii=0.05, at_least=0.1)
    assert share.images == 20
    wrong = (labels + 1) % 10
    with pytest.raises(
        AssertionError, match=r"\d+ of 20 images \(95 % interval .*50 % were demanded"
    ):
        testing.assert_certified(certified, images, wrong, radii=0.05, at_least=0.5)
    with pytest.raises(AssertionError, match="the proven bound is"):
        testing.assert_bound(certified, 1e-3)
    with pytest.raises(AssertionError, match="left by fgsm"):
        testing.assert_robust(certified, images, wrong, radii=0.05, at_least=0.9, attacks=["fgsm"])
    with pytest.raises(testing.NotDecidedError, match="more images decide it"):
        testing.assert_certified(certified, images, labels, radii=0.05, at_least=share.share - 0.01)
    with pytest.raises(UsageError, match="no share"):
        testing.assert_certified(certified, images, labels, at_least=40)


def perceptron(width: int = 8, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))


def with_a_hook(module: nn.Sequential) -> None:
    module[2].register_forward_hook(lambda part, inputs, output: 9 * output)


def with_a_patched_forward(module: nn.Sequential) -> None:
    module[2].forward = types.MethodType(lambda part, x: 9 * x.relu(), module[2])  # type: ignore[method-assign]


def extended(module: nn.Sequential) -> None:
    class Larger(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 9 * super().forward(x)

    large = Larger(8, 3)
    large.load_state_dict(module[3].state_dict())
    module[3] = large


@pytest.mark.parametrize("change", [with_a_hook, with_a_patched_forward, extended])
def test_no_module_hides_a_factor(change: Callable[[nn.Sequential], None]) -> None:
    """The bound stays above a slope of the module as it runs, whatever the types of its parts
    promise.
    """
    module = perceptron()
    change(module)
    bound_result = certvit.bound(certvit.load(module, **DIGITS))
    assert bound_result.upper.finite != (change is with_a_hook)
    x, y = torch.rand(2, 50, 1, 8, 8)
    outputs = [module((each - 0.5) / 0.5).detach() for each in (x, y)]
    slopes = (outputs[0] - outputs[1]).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert float(slopes.max()) <= float(bound_result.upper)


def test_a_module_is_copied() -> None:
    module = perceptron().train()
    before = copy.deepcopy(module.state_dict())
    opened = certvit.load(module, **DIGITS)
    upper = str(certvit.bound(opened).upper)
    assert module.training
    assert all(weight.requires_grad for weight in module.parameters())
    tanh = certvit.load(nn.Sequential(module[0], module[1], nn.Tanh(), module[3]), **DIGITS)
    assert tanh.digest != opened.digest
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module[1].weight.mul_(100)
    assert str(certvit.bound(opened).upper) == upper


def test_doubts_about_a_file_are_warnings(workshop: Path) -> None:
    with pytest.warns(UserWarning, match="carries its own record: arch, mean ignored"):
        opened = certvit.load(workshop / "plain.safetensors", arch="certvit_vit_digits", mean=0.4)
    assert opened.reading.line().startswith("network: certvit_vit_digits, heads 2")


class Hidden(nn.Linear):
    """Weights that the state does not hold, and a certificate would not cover."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {}


MODULES: dict[str, tuple[nn.Module, dict[str, Any], type[CertvitError], str]] = {
    "no statistics": (perceptron(), {}, UsageError, "which images does the Sequential take"),
    "statistics of 255": (perceptron(), {**DIGITS, "std": 127.5}, UsageError, "another scale"),
    "size of two": (perceptron(), {**DIGITS, "input_size": (8, 8)}, UsageError, "which images"),
    "another size": (
        perceptron(),
        {**DIGITS, "input_size": (1, 9, 9)},
        ArchitectureError,
        "no classifier of images",
    ),
    "no logits": (nn.Conv2d(1, 4, 3), DIGITS, ArchitectureError, "one row of logits"),
    "one logit": (perceptron(classes=1), DIGITS, ArchitectureError, "one logit"),
    "NaN": (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)),
        DIGITS,
        CheckpointError,
        "NaN",
    ),
    "no values": (perceptron().to("meta"), DIGITS, ArchitectureError, "cannot be copied"),
    "hidden weights": (
        nn.Sequential(nn.Flatten(), Hidden(64, 3)),
        DIGITS,
        ArchitectureError,
        "no tensor of its state",
    ),
    "options of files": (perceptron(), {**DIGITS, "arch": "vit"}, UsageError, "no option 'arch'"),
}
nn.init.constant_(MODULES["NaN"][0][2].running_var, float("nan"))  # type: ignore[index]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_refused_in_one_line(name: str) -> None:
    module, options, kind, message = MODULES[name]
    with pytest.raises(kind, match=message) as refusal:
        certvit.load(module, **options)
    assert "--" not in refusal.value.message + refusal.value.hint


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "certify": (
        lambda net: certvit.certify(net, "digits", samples=1),
        "lipschitz has no option 'samples'",
    ),
    "choice": (
        lambda net: certvit.certify(net, "digits", method="local", effort="tokns"),
        "unknown effort 'tokns'\ndid you mean 'tokens'",
    ),
    "method": (
        lambda net: certvit.certify(net, "digits", method="lcal"),
        "unknown method 'lcal'\ndid you mean 'local'",
    ),
    "open": (lambda net: certvit.load(net, mean=0.5), "no option 'mean'"),
    "file": (
        lambda net: certvit.load("x.safetensors", input_size=(1, 8, 8)),
        "arch_args={'img_size'",
    ),
    "nothing": (lambda net: certvit.load("x.safetensors"), "no file x.safetensors"),
    "patch": (lambda net: certvit.certify(net, "digits", method="patch"), 'patches=["32"]'),
    "dataset": (lambda net: certvit.images(net, "torch/mnist"), "needs data_dir"),
    "save": (
        lambda net: certvit.save(certvit.load(perceptron(), **DIGITS), "x"),
        "no architecture",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_speak_python(certified: Checkpoint, name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(CertvitError) as refusal:
        call(certvit.load(certified))
    shown = "\n".join((str(refusal.value), *getattr(refusal.value, "__notes__", ())))
    assert words in shown
    assert not re.search(r"(^|\s)--?[a-z]|exit", shown), shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("check --arch and --arch-arg", "check arch and arch_args"),
        (
            "--as-stated if it is; --arch NAME for another",
            "as_stated=True if it is; arch=NAME for another",
        ),
        (
            "--arch-arg num_heads=4, or pass --force",
            "arch_args num_heads=4, or pass force=True",
        ),
        ("certvit finetune --noise first", "certvit finetune --noise first"),
        ("choose another -o", "choose another path"),
    ],
)
def test_options_become_arguments(text: str, expected: str) -> None:
    assert arguments.in_python(text) == expected
    assert arguments.in_python(expected) == expected


def test_results_show_themselves_in_a_line_and_a_table(certified: Checkpoint) -> None:
    network = certvit.load(certified)
    images = certvit.images(network, "digits", limit=15)
    results = (
        certvit.bound(network),
        certvit.certify(network, images),
        certvit.certify(network, images, method="patch", patches=["1"]),
        certvit.attack(network, images, radii=[0.1, 0.2], attacks=["fgsm"]),
        certvit.audit(network, images, seconds=1, attacks=("fgsm",)),
    )
    for result in results:
        assert re.fullmatch(r"<[^\n]{10,400}>", repr(result))
        html = result._repr_html_()
        assert html.startswith("<p>")
        assert 2 <= html.count("<tr>") <= 14
        assert html.count("<td>") == html.count("</td>")
    assert len(repr(network)) < 100
