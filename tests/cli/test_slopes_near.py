"""`certvit lipschitz --around`, `certvit.bounds(around=...)`, and `verify` of what they state."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import certvit as api
from certcli.certify.around import Around, AroundImages, NearImage
from tests.enclosure.test_zonotope_networks import require_withstood
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.workshop import Workshop

WORDS = ("--dataset", "digits", "--limit", 1, "--no-estimate")


@pytest.fixture(scope="module")
def report(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    picture = tmp_path_factory.mktemp("near") / "near.svg"
    words = ("--around", 0.02, "--plot", picture)
    shown = document("lipschitz", workshop / "plain.safetensors", *WORDS, *words)
    assert all(label in picture.read_text() for label in ("measured", "proven"))
    return dict(shown)


def test_the_report_says_what_is_proven_and_what_is_measured(report: dict[str, Any]) -> None:
    (row,) = report["around"]["images"]
    others = [j for j in range(10) if j != row["prediction"]]
    assert all(0 < row["lower"][j] <= row["upper"][j] < 1.1 * row["lower"][j] for j in others)
    reach = min(row["margins"][j] / row["upper"][j] for j in others)
    assert 0 < row["certified"] <= min(0.02, reach) <= row["certified"] * (1 + 1e-6)
    assert row["certified"] <= row["certified_by_integral"] <= 0.02
    # |m_j(y) - m_j(z)| <= sqrt 2 |f(y) - f(z)|
    assert max(row["lower"]) / 2**0.5 <= row["logits_upper"] < 3 * max(row["lower"])


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a margin": lambda row: row["margins"].__setitem__(row["rival"], 99.0),
    "a rival": lambda row: row.update(rival=row["prediction"]),
    "a slope": lambda row: row["lower"].__setitem__(row["rival"], 2 * row["upper"][row["rival"]]),
    "a bound of a margin": lambda row: row["upper"].__setitem__(
        (row["prediction"] + 1) % 10, 0.99 * row["upper"][(row["prediction"] + 1) % 10]
    ),
    "the logits' bound": lambda row: row.update(logits_upper=0.99 * row["logits_upper"]),
    "the radius": lambda row: row.update(certified=1.01 * row["certified"]),
    "the radius by the integral": lambda row: row.update(
        certified_by_integral=1.01 * row["certified_by_integral"]
    ),
    "the prediction": lambda row: row.update(prediction=(row["prediction"] + 1) % 10),
    "the image": lambda row: row.update(index=10**6),
    "the number of classes": lambda row: row["upper"].pop(),
}


def proven(row: dict[str, Any]) -> NearImage:
    """Return what proving the slopes of a report's image again gives."""
    margins, upper, lower = (
        torch.tensor(row[name], dtype=torch.float64) for name in ("margins", "upper", "lower")
    )
    around, label, logits = Around(0.02), row["prediction"], row["logits_upper"]
    radii = row["certified"], row["certified_by_integral"]
    return NearImage(around, label, margins, upper, lower, logits, *radii, areas=upper)


def verified(report: dict[str, Any], workshop: Workshop, folder: Path, code: int) -> str:
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    done = attempt("verify", path, workshop / "plain.safetensors", "--dataset", "digits")
    assert getattr(done.exception, "code", done.exit_code) == code, done.output
    return done.output + str(done.exception)


@pytest.mark.parametrize("what", [None, "other images", *FORGED])
def test_verify_proves_the_slopes_again(
    what: str | None,
    report: dict[str, Any],
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = proven(report["around"]["images"][0])
    monkeypatch.setattr(AroundImages, "each", lambda network, pixels, near: iter([once]))
    forged = json.loads(json.dumps(report))
    if what == "other images":
        forged["around"]["dataset"]["digest"] = "0" * 64
        assert what in verified(forged, workshop, tmp_path, 7)
    elif what is not None:
        FORGED[what](forged["around"]["images"][0])
        assert "refuted" in verified(forged, workshop, tmp_path, 7)
    else:
        assert "proven again: " in verified(forged, workshop, tmp_path, 0)


def test_memory_is_told_before_it_is_taken(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("certcli.certify.around.available", lambda device: 2.0**20)
    words = ("lipschitz", workshop / "plain.safetensors", *WORDS, "--around", 0.1)
    assert "GiB" in str(certvit(*words, code=5).exception)


def test_python_returns_tensors() -> None:
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))
    pixels = torch.rand(2, 1, 4, 4)
    network = api.load(nn.Sequential(*layers).eval(), mean=0, std=1, input_size=(1, 4, 4))
    near = api.bounds(network, pixels, around=0.05)
    box = api.bounds(network, pixels, around="1/255", norm="linf")
    for part in (near, box):
        assert part.upper.shape == part.slopes.shape == (2, 3)
        assert bool((part.slopes <= part.upper).all())
        assert bool((part.upper <= 1.2 * part.slopes).all())
        assert bool((part.radii > 0).all())
        assert bool((part.slopes.amax(1) / 2**0.5 <= part.logits).all())
        assert part.why == ("", "")
        assert bool((part.radii <= part.radii_by_integral).all())
    assert box.radii.equal(box.radii_by_integral)
    for wrong in ({}, {"radii": 0.1, "around": 0.1}, {"around": 0.1, "labels": [0, 1]}):
        with pytest.raises(api.CertvitError, match=r"one of them|without labels"):
            api.bounds(network, pixels, **wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("activation", [nn.Identity(), nn.GELU()])
def test_no_attack_succeeds_within_the_radius_by_the_integral(activation: nn.Module) -> None:
    """Of a linear network it is the distance of the nearest other class, as far as pixels can go."""
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(16, 6), activation, nn.Linear(6, 3)
    model = nn.Sequential(*layers).double().eval()
    pixels = (1.5 * torch.rand(1, 1, 4, 4, dtype=torch.float64) - 0.25).clamp(0, 1)
    balls = [Around(radius, slopes=False) for radius in (2.0, 0.4, 0.2)]
    small, middle, near = AroundImages(model, (1, 4, 4)).each(pixels, balls)
    assert (small.by_integral, middle.around.radius) == (0.2, 0.4)
    label = near.prediction
    require_withstood(model, pixels, label, near.by_integral, "l2", in_box=True)
    if isinstance(activation, nn.Identity):
        rows = (layers[3].weight @ layers[1].weight).detach()
        others = [j for j in range(3) if j != label]
        slopes = rows[label] - rows
        falling = torch.where(pixels.flatten() == 0, slopes.clamp_max(0), slopes)
        falling = torch.where(pixels.flatten() == 1, falling.clamp_min(0), falling)
        distance = float((near.margins / falling.norm(dim=1))[others].min())
        assert distance * (1 - 1e-9) <= near.by_integral < distance
    else:
        assert near.radius * 1.01 < near.by_integral < 2.0
