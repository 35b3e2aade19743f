"""Laws of every certificate method: rows of a batch stand alone, torch's settings are those that
are stated, no network changes while it is certified, and `--arithmetic` is known to the methods
that have it.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import certvit
from certcli.api.networks import images_from
from certcli.attack.catalogue import ATTACKS
from certcli.certify.certificate import Certifier
from certcli.certify.lipschitz import as_executed
from certcli.certify.methods import METHODS, certify_images, options_of_method, prepare_method
from certcli.certify.options import REAL, Arithmetic, Local, Smoothing
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.cli.certify.demands import PROVING as SPOKEN_OF
from certcli.cli.verify import records as checks
from certcli.engine.replay import FAITHFUL, rows_are_apart
from certcli.images.labelled import Images
from certcli.models import build
from certcli.rounding import PRECISIONS
from certcli.system.errors import NoBoundError, UsageError
from certcli.system.torch_modes import SETTINGS
from tests.helpers import commands
from tests.helpers.grids import EVERY

SIZE = (1, 4, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("lipschitz", "box", "local", "local-lip", "bcp")},
    "smoothing": {"sigma": 0.25, "samples": 200, "n0": 20},
    "patch": {"patches": ["1"]},
}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def ready(method: str, net: nn.Module) -> tuple[Certifier, Images]:
    checkpoint = certvit.load(net, mean=0.0, std=1.0, input_size=SIZE)
    options = options_of_method(method, OPTIONS[method])
    pixels = torch.rand(2, *SIZE, generator=torch.Generator().manual_seed(1))
    labels = net(pixels).argmax(1)
    return prepare_method(method, checkpoint, torch.device("cpu"), options), images_from(
        checkpoint.record, pixels, labels
    )


def test_every_method_is_under_these_laws() -> None:
    assert set(OPTIONS) == set(METHODS.names())


@pytest.mark.parametrize("method", OPTIONS)
def test_a_network_that_changes_while_it_is_certified_has_no_certificate(method: str) -> None:
    certifier, images = ready(method, chain())
    network = certifier.networks[0]
    network.register_buffer("runs", torch.zeros(()))
    batch = certifier.batch

    def counts(*args: Any) -> Any:
        network.runs += 1
        return batch(*args)

    certifier.batch = counts  # type: ignore[method-assign]
    with pytest.raises(NoBoundError, match=r"'runs' changes|weights were changed"):
        list(certify_images(certifier, images, 2))


OTHERS = {
    "torch.autocast('cpu')": True, "the default dtype": torch.float64, "oneDNN": False,
    "the precision of float32 products": "medium",
}  # fmt: skip


@contextmanager
def other_settings() -> Iterator[None]:
    """Run the body as a caller with other settings would; they are the same after it."""
    before = {name: setting.read() for name, setting in SETTINGS.items()}
    try:
        for name, value in OTHERS.items():
            SETTINGS[name].write(value)
        with torch.inference_mode(), pytest.warns(UserWarning, match=r"autocast.*yours: True"):
            yield
        assert {name: SETTINGS[name].read() for name in OTHERS} == OTHERS
    finally:
        for name, value in before.items():
            SETTINGS[name].write(value)


@pytest.mark.parametrize("method", OPTIONS)
def test_a_method_runs_under_the_settings_that_are_stated(method: str) -> None:
    certifier, images = ready(method, chain())
    batch = certifier.batch
    seen: list[dict[str, Any]] = []

    def watched(*args: Any) -> Any:
        seen.append({name: setting.read() for name, setting in SETTINGS.items()})
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        return batch(*args)

    certifier.batch = watched  # type: ignore[method-assign]
    with other_settings():
        list(certify_images(certifier, images, 2))
    assert seen
    assert all(one == {name: setting.value for name, setting in SETTINGS.items()} for one in seen)


MADE = chain()


SMALL = build.initialise(
    "certvit_vit_digits", {"depth": 1, "embed_dim": 8, "num_heads": 1, "patch_size": 4}
)


def rewritten(change: Callable[..., Any], **options: Any) -> str:
    """Return the digest of a small network after a command that writes one."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "source.safetensors")
        SMALL.write(source, False)
        target = Path(folder, "target.safetensors")
        return change(source, target, dataset="digits", limit=20, **options).digest


Run = Callable[[Any, torch.Tensor, torch.Tensor], Any]
BRIEF = {"attacks": ("fgsm",), "methods": ("lipschitz",), "radii": (0.1,)}
RUNS: dict[str, Run] = {
    "load": lambda net, x, y: certvit.load(MADE, mean=0.0, std=1.0, input_size=SIZE).digest,
    "bound": lambda net, x, y: certvit.bound(net).upper,
    "slope": lambda net, x, y: certvit.slope(net, x, iterations=2),
    "bounds": lambda net, x, y: certvit.bounds(net, x, 0.1).lower.tolist(),
    "certify": lambda net, x, y: [
        replace(row, seconds=0.0)
        for row in certvit.certify(net, x, y, method="smoothing", sigma=0.5, samples=50)
    ],
    "predict": lambda net, x, y: certvit.predict(net, x),
    "adapt": lambda net, x, y: rewritten(certvit.adapt, epochs=0),
    "constrain": lambda net, x, y: rewritten(certvit.constrain),
    "finetune": lambda net, x, y: rewritten(certvit.finetune, loss="ce", steps=1),
    "audit": lambda net, x, y: certvit.audit(net, x, y, seconds=20.0, **BRIEF).clean,
    **{
        f"attack {name}": lambda net, x, y, name=name: list(
            certvit.attack(net, x, y, attacks=[name], norm=ATTACKS[name].norms[-1], steps=2)
        )
        for name in ATTACKS.names()
        if name not in ("saga", "autoattack-full")  # of attention; the same as autoattack
    },
}  # fmt: skip
"""What is stated of a network at images, for each function of Python that runs it."""
RUN_NOTHING = {"history", "images", "network", "save", "shares"}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_stated_in_python_is_of_the_settings_that_are_stated(name: str) -> None:
    torch.manual_seed(0)
    net = certvit.load(chain(), mean=0.0, std=1.0, input_size=SIZE)
    pixels, labels = torch.rand(4, *SIZE), torch.zeros(4, dtype=torch.long)
    expected = RUNS[name](net, pixels, labels)
    with other_settings():
        again = RUNS[name](net, pixels, labels)
    assert again == expected


def test_every_function_of_python_is_among_these() -> None:
    functions = {name for name in certvit.__all__ if inspect.isfunction(getattr(certvit, name))}
    assert {name.partition(" ")[0] for name in RUNS} | RUN_NOTHING == functions


def test_a_caller_of_python_is_told_once_and_an_ordinary_one_nothing() -> None:
    net, pixels = chain(), torch.rand(1, *SIZE)
    checkpoint = certvit.load(net, mean=0.0, std=1.0, input_size=SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = certvit.predict(checkpoint, pixels)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast") as told:
        again = certvit.predict(checkpoint, pixels)
    assert len(told) == 1
    assert again == plain


def expert(x: Tensor) -> Tensor:
    """At most two rows of a batch are served."""
    served = x.flatten(1).sum(1) > 0
    return x * (served & (served.cumsum(0) <= 2)).view(-1, 1, 1, 1)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "a capacity": expert,
    "a branch": lambda x: x * 2 if x.mean() > 0 else x,
    "a list": lambda x: x * x.flatten().tolist()[0],
    "a mean": lambda x: x + 1e-9 * x.mean(0),
    "the next": lambda x: x + x.roll(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "swallowed": lambda x: x + torch.nan_to_num(x.sum(0)),
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed_are_not_proven_apart(name: str) -> None:
    assert not rows_are_apart(MIXED[name], torch.rand(6, *SIZE))


def test_who_reads_the_places_of_largest_entries_chooses_by_the_image() -> None:
    """In this batch nothing is mixed; in another one of its size, a pixel of the first image is."""

    def chosen(x: Tensor) -> Tensor:
        _, places = nn.functional.max_pool2d(x[:, :1], SIZE[1:], return_indices=True)
        table = torch.cat([torch.zeros(SIZE[1] * SIZE[2] - 1), x[0, 0, 0, :1]])
        return x + table[places]

    pixels = torch.rand(6, *SIZE)
    pixels[:, :, 0, 0] = 2.0
    assert torch.equal(chosen(pixels), pixels)
    assert not rows_are_apart(chosen, pixels)
    assert rows_are_apart(lambda x: nn.functional.max_pool2d(x, 2), pixels)


def test_half_of_the_bits_of_not_a_number_may_be_a_number() -> None:
    def lower_halves(x: Tensor) -> Tensor:
        return x + x.view(torch.float16)[..., ::2].float().mean(0)

    pixels = torch.randint(0, 256, (6, *SIZE)) / 256  # lower halves are 0
    assert torch.equal(lower_halves(pixels), pixels)
    assert not rows_are_apart(lower_halves, pixels)


@pytest.mark.parametrize(("source", "target"), permutations(range(5), 2))
def test_no_row_moves_any_other_unseen(source: int, target: int) -> None:
    def moved(x: Tensor) -> Tensor:
        return torch.cat([x[:target], x[target : target + 1] + x[source], x[target + 1 :]])

    assert not rows_are_apart(moved, torch.rand(5, *SIZE))


@pytest.mark.parametrize("rows", [1, 2, 7, 128])
def test_rows_of_an_ordinary_network_are_proven_apart(rows: int) -> None:
    assert rows_are_apart(chain(), torch.rand(rows, *SIZE))


def test_not_a_number_goes_through_every_function_of_one_tensor() -> None:
    names = [name for name in FAITHFUL if hasattr(nn.functional, name) or hasattr(torch, name)]
    gone = []
    for name in names:
        function = getattr(torch, name, None) or getattr(nn.functional, name)
        try:
            result = function(torch.full((2, 2), torch.nan))
        except (TypeError, ValueError, RuntimeError, IndexError):
            continue  # it takes more than a tensor
        if isinstance(result, Tensor) and not result.isnan().all():
            gone.append(name)
    assert not gone


class Crowded(nn.Module):
    """Class 0, but for rows beyond the second of a batch whose mean pixel is high."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2)
        self.head.weight.data.zero_()
        self.head.bias.data = torch.tensor([1.0, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        high = x.mean((1, 2, 3)) > 0.7
        dropped = high & (high.cumsum(0) > 2)
        return self.head(x.flatten(1)) + dropped[:, None] * torch.tensor([-2.0, 2.0])


CROWDED = {"smoothing": [0.2] * 7 + [0.95] * 7, "patch": [0.2, 0.95, 0.95]}
"""The first batches serve all rows, as a comparison of one batch sees them."""


@pytest.mark.parametrize("method", CROWDED)
def test_no_certificate_of_a_class_that_single_images_do_not_have(method: str) -> None:
    checkpoint = certvit.load(Crowded().eval(), mean=0.0, std=1.0, input_size=SIZE)
    pixels = torch.stack([torch.full(SIZE, value) for value in CROWDED[method]])
    rows = certvit.certify(
        checkpoint,
        pixels,
        torch.zeros(len(pixels), dtype=torch.int64),
        method=method,
        **OPTIONS[method],
    )
    assert [row.prediction for row in rows] == [0] * len(pixels)


class Drawn(nn.Module):
    """The number of the draw -> class 0 for those that choose the class, class 1 for all others."""

    def forward(self, x: Tensor) -> Tensor:
        first = (x.flatten(1)[:, :1] < 20).float()
        return torch.cat([first, 1 - first], dim=1)


def test_draws_that_chose_the_class_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbered(
        pixels: Tensor, sigma: float, seed: int, names: Any, samples: Any, *rest: Any
    ) -> Any:
        return torch.tensor(list(samples), dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, *SIZE)

    monkeypatch.setattr(noise, "noisy", numbered)
    settings = Smoothing(sigma=0.25, samples=21, n0=20, alpha=0.5)
    certifier = SmoothingCertifier(Drawn(), 2, settings, torch.device("cpu"))
    (row,) = certifier.batch([0], torch.zeros(1, *SIZE), [0])
    assert row.radius == 0
    assert row.prediction is None


def test_the_command_line_knows_the_arithmetics(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    path.touch()
    assert (REAL, *PRECISIONS) == get_args(Arithmetic)
    given = ("--dataset", "digits", "--limit", 4, "--arithmetic", "float32")
    for method in ("auto", "smoothing", "patch"):
        commands.certvit("certify", path, "--method", method, *given, code=2)
    kinds = {name: get_type_hints(METHODS.load(name))["options"] for name in METHODS.names()}
    assert {
        name for name, kind in kinds.items() if "arithmetic" in kind.__dataclass_fields__
    } == set(SPOKEN_OF)
    commands.certvit("certify", path, *given[:-1], "half", code=2)
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
        commands.certvit("init", "certvit_4c3f", "--arch-arg", "img_size=8", "-o", checkpoint)
    elif method == "local":
        checkpoint = workshop / "plain.safetensors"
    given = (
        "--limit",
        2,
        "--dataset",
        "digits",
        "--arithmetic",
        "float32",
        "--records",
        records,
        *(["--effort", "tokens"] if method == "local" else []),
    )
    found = commands.document("certify", checkpoint, "--method", method, *given)
    assert found["arithmetic"] == "float32"
    commands.certvit("verify", records, checkpoint, "--dataset", "digits")
    header, *rows = records.read_text().splitlines()
    assert '"arithmetic":"float32"' in header.replace(" ", "")
    records.write_text("\n".join([header.replace('"float32"', '"bf16"'), *rows, ""]))
    commands.certvit("verify", records, checkpoint, "--dataset", "digits", code=7)
    commands.certvit("verify", records, checkpoint, "--arithmetic", "bf16", code=2)
