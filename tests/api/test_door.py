"""Python's door: what people hold is taken, and everything else is one CertvitError in Python's
words.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import certvit
import certvit.testing
from certcli import api
from certcli.models.build import OpenCheckpoint
from certcli.system.errors import CertvitError, DataError, UsageError
from tests.api.test_signatures import FUNCTIONS
from tests.helpers.commands import certvit as command
from tests.helpers.grids import EVERY

COUNT = 6


@pytest.fixture(scope="module")
def network() -> OpenCheckpoint:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    return certvit.load(module, mean=0.5, std=0.25, input_size=(3, 2, 2))


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(COUNT, 3, 2, 2, generator=torch.Generator().manual_seed(1)), torch.arange(
        COUNT
    ) % 3


class Numbered:
    """A data set as torch's DataLoader takes it: a length and items."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= COUNT:
            raise ValueError("beyond the end")
        x, y = images()
        return x[index], int(y[index])


def generated() -> Iterator[tuple[Tensor, Tensor]]:
    x, y = images()
    yield x[:4], y[:4]
    yield x[4:], y[4:]


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensors": images,
    "arrays": lambda: tuple(part.numpy() for part in images()),
    "float64 arrays": lambda: (images()[0].double().numpy(), images()[1].tolist()),
    "list of images": lambda: (list(images()[0]), images()[1].numpy()),
    "list of arrays": lambda: ([x.numpy() for x in images()[0]], images()[1]),
    "pair": lambda: (images(), None),
    "pairs": lambda: (list(zip(*images())), None),
    "pair of arrays": lambda: (tuple(part.numpy() for part in images()), None),
    "DataLoader": lambda: (DataLoader(TensorDataset(*images()), batch_size=4), None),
    "TensorDataset": lambda: (TensorDataset(*images()), None),
    "numbered items": lambda: (Numbered(), None),
    "list of batches": lambda: (list(generated()), None),
    "generator": lambda: (generated(), None),
    "generator of images": lambda: ((x for x in images()[0]), images()[1]),
    "dictionary": lambda: (dict(zip(("pixel_values", "labels"), images())), None),
    "dictionaries": lambda: ([{"image": x, "label": int(y)} for x, y in zip(*images())], None),
    "foreign bytes": lambda: (images()[0].numpy().astype(">f4"), images()[1]),
    "labels as floats": lambda: (images()[0], images()[1].double()),
}


@pytest.mark.parametrize("form", FORMS)
def test_images_are_taken_as_people_hold_them(network: OpenCheckpoint, form: str) -> None:
    expected = certvit.certify(network, *images())
    assert certvit.certify(network, *FORMS[form]()) == expected
    assert certvit.attack(network, *FORMS[form](), radii="8/255", attacks="fgsm") == certvit.attack(
        network, *images(), radii=[8 / 255], attacks=["fgsm"]
    )
    given, _ = FORMS[form]()
    assert certvit.slope(network, given, iterations=2) == certvit.slope(
        network, images()[0], iterations=2
    )
    given, _ = FORMS[form]()
    assert certvit.predict(network, given) == certvit.predict(network, images()[0])


PICTURE = Image.new("RGB", (2, 2))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes of pixels": (lambda: (images()[0] * 255).byte().numpy(), "pixels of type uint8"),
    "channels last": (lambda: images()[0].permute(0, 2, 3, 1).numpy(), "do not fit"),
    "nothing": (lambda: iter(()), "no images"),
    "of 255": (lambda: images()[0] * 255, r"\[0, 1\]"),
    "NaN": (lambda: images()[0] / 0 * 0, r"\[0, 1\]"),
    "sizes": (lambda: [torch.rand(3, 2, 2), torch.rand(3, 3, 3)], "several sizes"),
    "texts": (lambda: ["a", "b"], "not 'a'"),
    "objects": (lambda: np.array([object()]), "not a ndarray"),
    "PIL": (lambda: PICTURE, "not a Image"),
    "a pair of PIL": (lambda: (PICTURE, 0), "not a Image"),
    "pairs of PIL": (lambda: [(PICTURE, 0)], "not a Image"),
    "a batch of PIL, as datasets": (
        lambda: {"image": [PICTURE] * 2, "label": [0, 1]},
        "not a Image",
    ),
    "a triple": (lambda: (*images(), ["a.png"] * COUNT), "an item of 3 parts"),
    "dictionary": (lambda: {"inputs": [], "answers": []}, "is no pair of images and labels"),
    "labels twice": (lambda: generated(), "passed twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_images_is_refused(network: OpenCheckpoint, name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(DataError, match=message) as refusal:
        certvit.certify(network, given(), None if "PIL" in name else images()[1])
    assert refusal.value.hint


@pytest.mark.parametrize(
    "labels", [np.eye(3)[[0, 1, 2, 0, 1, 2]], [0.5] * COUNT, [float("nan")] * COUNT, "012012", 3j]
)
def test_labels_are_whole_numbers(network: OpenCheckpoint, labels: Any) -> None:
    with pytest.raises(DataError):
        certvit.certify(network, images()[0], labels)


def test_an_endless_generator_ends(
    network: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("certcli.api.networks.free_bytes", lambda: 10_000)
    with pytest.raises(DataError, match="do not fit into memory"):
        certvit.predict(network, itertools.repeat(torch.rand(3, 2, 2)))


ENDLESS = 10**400
ODD: tuple[Any, ...] = (
    None, True, -1, ENDLESS, 2.5, float("nan"), 3j, "", "nosuch", "8/0", b"x", (), [], [None], [[]], {}, {"a": 1}, {1},
    object(), int, print, iter(()), range(3), Path("nosuch"), np.array([]), np.array("x"), np.float32(0.5), np.int64(2),
    torch.tensor(0.5), torch.tensor([]), torch.rand(2, 2), torch.zeros(1, dtype=torch.complex64), nn.Identity(),
    torch.device("meta"),
)  # fmt: skip
"""Values of many types, few of which any argument takes."""


def calls(network: OpenCheckpoint, folder: Path) -> dict[str, dict[str, Any]]:
    """Return arguments with which each function runs."""
    x, y = images()
    whole = {"source": network}
    there = folder / "there.safetensors"
    there.touch()  # a command reads its options, and refuses to replace it
    changing = {"source": "certvit/digits", "path": there, "dataset": "digits", "limit": 8}
    return {
        "load": {"source": nn.Flatten(), "mean": 0, "std": 1, "input_size": (3, 2, 2)},
        "save": {"checkpoint": network, "path": folder / "x.safetensors"},
        "history": whole,
        "network": whole,
        "images": {**whole, "dataset": "digits"},
        "bound": whole,
        "bounds": {**whole, "images": x[:1], "radii": 0.01},
        "slope": {**whole, "images": x, "iterations": 1},
        "certify": {**whole, "images": x, "labels": y},
        "shares": {"certificates": certvit.certify(network, x, y), "radii": [0.1]},
        "predict": {**whole, "images": x},
        "attack": {**whole, "images": x, "labels": y, "attacks": ["fgsm"]},
        "audit": {**whole, "images": x, "labels": y, "seconds": 0.01},
        "adapt": {**changing, "keep": 1.0},
        "constrain": {**changing, "eta": 0.1, "layers": "head"},
        "finetune": {**changing, "epochs": 1},
    }


OPTIONS = {
    "certify": ("arithmetic", "samples", "sigma", "radii", "patches", "effort"),
    "attack": ("steps", "relative_step", "seed", "stop_early", "precision", "restarts"),
    "audit": ("radii", "sigma", "attacks", "methods", "patches", "seed", "batch_size", "limit"),
    "predict": ("patches", "procedure"),
    "adapt": ("limit", "head", "goal", "device"),
    "constrain": ("eta", "prox", "arch_arg", "seed"),
    "finetune": ("loss", "lr", "noise", "mean"),
}
"""Keyword arguments that are fields of options, as a sample."""


@pytest.mark.parametrize("name", api.FUNCTIONS)
def test_no_argument_of_any_type_ends_in_a_raw_error(
    network: OpenCheckpoint, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(certvit, name)
    usual = calls(network, tmp_path)[name]
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    raw: list[str] = []
    for place, argument in enumerate((*names, *OPTIONS.get(name, ()))):
        for value in ODD if EVERY else ODD[place % 3 :: 3]:
            if value is ENDLESS and argument in ("iterations", "samples", "restarts", "steps"):
                continue  # a valid number, of more steps than anybody waits for
            try:
                function(**{**usual, argument: value})
            except CertvitError as refusal:
                shown = re.sub(r"certvit \w+ --help", "", f"{refusal} {refusal.hint}")
                if re.search(r"(^|\s)--?[a-z]|Traceback", shown):
                    raw.append(f"{argument}={value!r:.40}: {shown}")
            except Exception as failure:
                raw.append(f"{argument}={value!r:.40}: {type(failure).__name__}: {failure!s:.90}")
    assert not raw, "\n".join(raw)


def test_words_of_the_command_line_lead_to_those_of_python(network: OpenCheckpoint) -> None:
    for wrong, right in (("gates", "fail_on"), ("time_budget", "seconds"), ("epsilon", "radii")):
        with pytest.raises(UsageError, match=f"no option '{wrong}'") as refusal:
            certvit.audit(network, *images(), **{wrong: ["clean<0.1"]})
        assert f"did you mean '{right}'" in refusal.value.hint


@pytest.mark.parametrize(
    "gate",
    ["nosuch", "certifed @ 0.25 < 0.4", "clean>0.4", "clean < 4", 'a "b" --dataset x', "a'b"],
)
def test_a_gate_is_quoted_as_it_was_typed(network: OpenCheckpoint, gate: str) -> None:
    with pytest.raises(UsageError) as refusal:
        certvit.audit(network, *images(), fail_on=gate)
    assert gate in refusal.value.message
    assert "fail_on" in refusal.value.message
    assert "--fail-on" not in refusal.value.hint


def test_radii_are_answered_as_they_were_typed(network: OpenCheckpoint) -> None:
    certificates = certvit.certify(network, *images())
    summary = certvit.shares(certificates, ["8/255", 0.1])
    assert list(summary.certified) == ["8/255", "0.1"]
    assert summary.certified["8/255"] == summary.certified[repr(8 / 255)]
    assert summary.against(summary.threats[0]) == summary.certified["8/255"]
    assert set(summary.to_json()["intervals"]) == {"clean", "8/255", "0.1"}
    with pytest.raises(KeyError):
        summary.certified["9/255"]
    with pytest.raises(UsageError, match="one radius"):
        certvit.bounds(network, images()[0], [0.1, 0.2])


def test_examples_are_returned(network: OpenCheckpoint) -> None:
    x, _ = images()
    labels = certvit.network(network)(x).argmax(1)
    curve = certvit.attack(network, x, labels, radii=[0.01, 1], attacks="pgd", return_examples=True)
    examples = curve.examples
    for one in curve:
        assert len(one.examples["indices"]) == one.fooled
        assert bool((one.examples["epsilons"] <= one.epsilon).all())
    assert len(examples["indices"]) == round(len(x) * (1 - curve[-1].robust)) > 0
    answers = certvit.network(network)(examples["adversarial"]).argmax(1)
    assert bool((answers != examples["labels"]).all())
    assert torch.equal(x[examples["indices"]], examples["images"])
    without = certvit.attack(network, x, labels, radii=0.0, attacks="fgsm", return_examples=True)
    assert without.examples["adversarial"].shape == (0, 3, 2, 2)
    assert certvit.attack(network, x, labels, attacks="fgsm").examples is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adapt", {"keep": 1.0, "limit": 8}),
        ("constrain", {"eta": 0.05, "layers": ["*mlp*", "head"], "limit": 20}),
        ("finetune", {"loss": "ce", "epochs": 1, "limit": 32, "lr": None}),
    ],
)
def test_what_writes_a_network_is_the_command(
    name: str, options: dict[str, Any], workshop: Path, tmp_path: Path, capfd: Any
) -> None:
    source = workshop / "plain.safetensors"
    words = [(f"--{key}", one) for key, value in options.items() for one in np.ravel(value) if one]
    command(
        name,
        source,
        *(word for pair in words for word in pair),
        "-o",
        tmp_path / "typed.safetensors",
    )
    typed = certvit.load(tmp_path / "typed.safetensors")
    capfd.readouterr()
    for number, network in enumerate((source, certvit.load(source))):
        written = FUNCTIONS[name](network, tmp_path / f"{number}.safetensors", **options)
        assert written.digest == typed.digest
        assert written.record.lineage[-1].command == name
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UsageError, match="exists already") as refusal:
        FUNCTIONS[name](source, tmp_path / "0.safetensors", **options)
    assert "force=True" in refusal.value.hint
    with pytest.raises(UsageError, match="limit"):
        FUNCTIONS[name](source, tmp_path / "other.safetensors", limit="few")
