"""Randomised smoothing: the confidence that is claimed, early stops, and the command."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor, nn

from certcli.certify.options import FARTHEST, HOPELESS, UNLIKELY, Smoothing
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.method import CACHED, STATED, SmoothingCertifier, _chance_of_so_few
from certcli.certify.smoothing.noise import Classifier, smoothed_classifier
from certcli.cli.shared.output import Sink
from certcli.evaluation.evidence import method_of
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.record_lines import JudgedImages, Run
from certcli.evaluation.records import read_records
from certcli.models.in_memory import open_module
from certcli.system.errors import CertvitError, DataError, UsageError
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.grids import EVERY

CPU = torch.device("cpu")


# the confidence


class Plane(nn.Module):
    """Class 1 where w x > 0: smoothed, p = Phi(w x / (sigma |w|)), and the radius is exactly |w x|
    / |w|.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        height = pixels.flatten(1).sum(dim=1)
        return torch.stack((-height, height), dim=1)


def certificates(
    settings: Smoothing, pixels: Tensor, batch_size: int = 4096, net: nn.Module | None = None
) -> list[Certificate]:
    net = net or Plane()
    certifier = SmoothingCertifier(
        net, net(pixels[:1]).shape[1], replace(settings, batch_size=batch_size), CPU
    )
    found: list[Certificate] = []
    for start in range(0, len(pixels), certifier.at_once):
        part = pixels[start : start + certifier.at_once]
        found += certifier.batch(range(start, start + len(part)), part, [1] * len(part))
    return found


@pytest.mark.parametrize(
    ("enough", "decide"), [(None, False), *[(0.2, False)] * EVERY, (0.2, True)]
)
def test_wrong_certificates_are_no_more_than_alpha_says(enough: float | None, decide: bool) -> None:
    """1,000 runs on a classifier whose radius is known: the share of radii beyond it, early success
    or not.
    """
    settings = Smoothing(sigma=0.5, n0=8, samples=64, alpha=0.05, enough=enough, decide=decide)
    true = 0.3
    pixels = torch.full((1000, 1, 1, 2), true / math.sqrt(2))  # w x / |w| = true
    found = certificates(settings, pixels)
    wrong = sum(row.radius > true for row in found) + sum(row.prediction == 0 for row in found)
    assert stats.binom.sf(wrong - 1, 1000, 0.05) > 1e-6
    assert (
        wrong >= 10
    )  # and no less than a tight bound gives: one that never errs certifies too little
    if enough is not None:
        assert {row.radius > enough for row in found} == {False, True}
        assert min(row.seconds for row in found) < max(row.seconds for row in found)


def test_early_stops_change_no_certificate_but_to_an_abstention() -> None:
    """Against CERTIFY as published, on the same draws: equal, or abstained."""

    class Patient(Smoothing):
        def hopeless(self, hits: int, drawn: int) -> bool:
            return False

    heights = torch.linspace(-0.4, 0.8, 100)
    pixels = (heights / math.sqrt(2)).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    values = {"sigma": 0.5, "n0": 8, "samples": 128, "alpha": 0.01}
    early = certificates(Smoothing(**values), pixels)
    whole = certificates(Patient(**values), pixels)
    changed = [
        (one, other) for one, other in zip(early, whole, strict=True) if one.radius != other.radius
    ]
    assert all(one.prediction is None for one, _ in changed)
    # each of at most 5 looks gives up an image that could be certified with probability HOPELESS
    assert len(changed) <= stats.binom.ppf(1 - 1e-6, 100, 5 * HOPELESS)
    spent = [sum(row.seconds for row in rows) for rows in (early, whole)]
    assert spent[0] > 0
    assert any(row.prediction is None for row in early)


def test_what_is_only_decided_costs_less_and_loses_little() -> None:
    """`decide`: the same draws, fewer of them; an image that is given up keeps a radius that its
    look may state.
    """
    heights = torch.linspace(-0.1, 0.9, 200)
    pixels = (heights / math.sqrt(2)).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    values = {"sigma": 0.5, "n0": 8, "samples": 256, "alpha": 0.01, "enough": 0.4}
    whole, decided = (
        certificates(Smoothing(**values, decide=decide), pixels) for decide in (False, True)
    )
    held = [sum(row.radius > 0.4 for row in rows) for rows in (whole, decided)]
    assert held[1] <= held[0] <= held[1] + stats.binom.ppf(1 - 1e-6, 200, 5 * UNLIKELY)
    assert {row.radius for row in decided if row.radius > 0.4} <= {row.radius for row in whole}
    kept = [row.radius for row in decided if 0 < row.radius <= 0.4]
    assert kept
    kept = [radius + noise.grid_loss((1, 1, 2), 0.5) for radius in kept]
    assert all(Smoothing(**values, decide=True).states(radius) for radius in kept)
    early = [radius for radius in kept if not Smoothing(**values).states(radius)]
    assert early  # found at a look at which the other run would have gone on
    assert not Smoothing(**values, decide=True).states(0.4321)


def test_the_published_algorithm_agrees_within_its_interval() -> None:
    """CERTIFY written down from the paper, with other random numbers, on a small net of three
    classes.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    pixels = torch.rand(12, 3, 2, 2)
    sigma = 0.3
    n = 400
    alpha = 0.001
    found = certificates(Smoothing(sigma=sigma, n0=50, samples=n, alpha=alpha), pixels, net=net)
    generator = torch.Generator().manual_seed(3)
    certified = 0
    for image, row in zip(pixels, found, strict=True):
        with torch.no_grad():
            noisy = image + sigma * torch.randn(20_000, *image.shape, generator=generator)
            counts = torch.bincount(net(noisy).argmax(1), minlength=3)
        top = int(counts.argmax())
        share = float(counts.max()) / 20_000
        deviation = 6 * math.sqrt(share * (1 - share) * (1 / n + 1 / 20_000)) + 1 / n
        if row.prediction is None:
            assert (
                stats.beta.ppf(
                    alpha, n * max(share - deviation, 1e-9), n * (1 - share + deviation) + 1
                )
                < 0.5
            )
            continue
        certified += 1
        assert row.prediction == top
        low, high = (
            sigma * stats.norm.ppf(stats.beta.ppf(alpha, n * p, n * (1 - p) + 1))
            for p in (max(share - deviation, 0.5), min(share + deviation, 1.0))
        )
        assert low <= row.radius <= high * (1 + 1e-9)
    assert certified >= 4


def test_radii_are_rounded_down_and_the_reach_is_the_largest() -> None:
    settings = Smoothing(sigma=0.25, samples=1000, alpha=0.001)
    exact = 0.25 * stats.norm.ppf(stats.beta.ppf(0.001, 990, 11))
    assert exact * (1 - 1e-6) < settings.radius(990, 1000) < exact
    assert (
        settings.reach
        == settings.radius(1000, 1000)
        == pytest.approx(0.25 * stats.norm.ppf(0.001**0.001))
    )
    assert settings.radius(500, 1000) == 0.0
    assert settings.looks == (100, 200, 400, 800, 1000)
    stopping = Smoothing(sigma=0.25, samples=1000, alpha=0.001, enough=0.1)
    assert sum(stopping.levels.values()) <= 0.001
    assert stopping.radius(100, 100) > 0.1 > settings.radius(100, 100) == 0.0
    assert settings.states(settings.reach)
    for beyond in (1 + 1e-6, 2.0, 1e6):  # its chance would be 1, which no draw refutes
        assert not settings.states(settings.reach * beyond)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_the_chance_of_so_few_hits_is_the_sum_of_theirs(p: float) -> None:
    chances = [math.comb(5, hits) * p**hits * (1 - p) ** (5 - hits) for hits in range(6)]
    for hits in range(6):
        assert _chance_of_so_few(hits, 5, p) == pytest.approx(sum(chances[: hits + 1]), abs=1e-12)


def test_a_class_that_the_network_has_not_has_no_hits() -> None:
    certifier = SmoothingCertifier(Plane(), 2, Smoothing(sigma=0.2, n0=8, samples=64), CPU)
    claims = [Certificate(0, 1, top, 0.0, "smoothing", 0.001) for top in (1, 2, 7)]
    assert certifier._hits(claims, torch.ones(3, 1, 1, 2), 0, noise.CONFIRM) == [64, 0, 0]


@pytest.mark.parametrize(
    "given",
    [
        {"sigma": "auto"},
        {"sigma": "x"},
        {"samples": 1e3},
        {"samples": 10**12},
        {"n0": True},
        {"alpha": [1]},
        {"precision": 3},
    ],
)
def test_parameters_from_a_file_are_not_believed(given: dict[str, Any]) -> None:
    honest = {name: getattr(Smoothing(), name) for name in STATED} | {"noise": noise.VERSION}
    images = JudgedImages("digits", "test", 1, "0" * 64)
    run = Run(
        command="certify",
        checkpoint="0" * 64,
        dataset=images,
        method="smoothing",
        norm="l2",
        parameters=honest,
    )
    assert method_of(run, Path("r")) == "smoothing"
    with pytest.raises(DataError, match="states parameters that no smoothing has"):
        method_of(msgspec.structs.replace(run, parameters={**honest, **given}), Path("r"))


# the command

RUN = (
    "--method",
    "smoothing",
    "--sigma",
    0.2,
    "--n0",
    16,
    "--samples",
    100,
    "--limit",
    12,
    "-e",
    0.1,
    "-e",
    0.2,
)


def with_sigma(sigma: object) -> tuple[object, ...]:
    """Return the words of RUN with another sigma: two are refused."""
    place = RUN.index("--sigma") + 1
    return (*RUN[:place], sigma, *RUN[place + 1 :])


def stripped(path: Path) -> list[dict[str, Any]]:
    """Header and records, but for the seconds."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_smoothing_certifies_what_no_bound_can(workshop: Path, tmp_path: Path) -> None:
    net = workshop / "plain.safetensors"
    whole, parts, other = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "other"))
    found = document("certify", net, *RUN, "--records", whole)
    assert (found["promise"], found["arithmetic"], found["failure"]) == (
        "probability 0.999",
        "float32",
        0.001,
    )
    assert (
        found["certified"]["0.1"]
        > document("certify", net, "-e", 0.1, "--limit", 12)["certified"]["0.1"]
    )
    run, rows = read_records(whole, "certify")
    assert run.parameters["sigma"] == 0.2
    assert all(row.failure == 0.001 and row.radius <= found["reach"] for row in rows)
    parts.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:6]) + b'{"torn')
    assert document("certify", net, *RUN, "--records", parts, "--resume") == found
    document("certify", net, *RUN, "--records", other, "--batch-size", 37)
    assert stripped(parts) == stripped(whole)
    assert [(row.get("index"), row.get("radius")) for row in stripped(other)[1:]] == [
        (row.get("index"), row.get("radius")) for row in stripped(whole)[1:]
    ]
    for words, named in (
        (with_sigma(0.3), "parameters sigma is 0.2 there and 0.3 here"),
        ((*RUN, "--alpha", 0.01), "parameters alpha"),
        ((*RUN, "--seed", 1), "parameters seed"),
        ((*RUN, "--precision", "bf16"), "parameters arithmetic"),
    ):
        failure = attempt("certify", net, *words, "--records", whole, "--resume").exception
        assert isinstance(failure, UsageError)
        assert named in failure.message
    refused = attempt("attack", net, "-a", "fgsm", "--only-certified", whole).exception
    assert isinstance(refused, UsageError)
    assert "smoothed classifier" in refused.message


@pytest.mark.parametrize(
    ("stem", "radius", "methods", "because"),
    [
        ("certified", 0.1, ["lipschitz"], "with proof"),
        ("plain", 0.2, ["smoothing", "local"], "neighbourhood: 0 of 1 images"),
        ("plain", 0.005, ["local"], "certified at 0.005, with proof"),
    ],
)
def test_auto_says_which_certificate_is_worth_having(
    workshop: Path, stem: str, radius: float, methods: list[str], because: str
) -> None:
    words = (
        "certify",
        workshop / f"{stem}.safetensors",
        "--method",
        "auto",
        *RUN[2:8],
        "--limit",
        1 if radius == 0.2 else 2,
        "-e",
        radius,
    )
    found = document(*words)
    assert because in found["reason"]
    assert [part["method"] for part in found.get("methods", [found])] == methods
    if stem == "certified":
        assert f"--method {methods[0]}: " in attempt(*words).stdout


def test_radii_beyond_enough_are_not_drawn_for(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("certify", workshop / "plain.safetensors", *RUN, "--enough", 0.1)
    shown = certvit(*words)
    assert re.search(r"^0\.1 +\d+\.\d % .*\n0\.2 +not drawn for +-$", shown.stdout, re.MULTILINE), (
        shown.stdout
    )
    assert shown.stderr.count("% after") == 0
    assert document(*words)["not_drawn_for"] == ["0.2"]
    assert "not_drawn_for" not in document(*words[:-2])
    assert "--enough 0.1" in attempt(*words, "--min-certified", "0.5@0.2").exception.message
    # where there is no terminal: a line a minute
    seconds = itertools.count(0.0, 30.0)
    monkeypatch.setattr(Sink, "clock", staticmethod(lambda: next(seconds)))
    lines = [line for line in certvit(*words).stderr.splitlines() if "% after" in line]
    assert len(lines) == int(next(seconds) / 30.0 - 1) // 2
    assert re.fullmatch(
        r"certify \(smoothing\): \d+ % after 1 min, about \d+(\.\d h| min) left", lines[0]
    )
    assert certvit(*words, "--quiet").stderr == ""


def test_where_memory_ends_batches_are_halved_and_nothing_changes() -> None:
    class Narrow(Plane):
        def forward(self, pixels: Tensor) -> Tensor:
            if len(pixels) > 9:
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
                )
            return super().forward(pixels)

    class Never(Plane):
        def forward(self, pixels: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    pixels = torch.linspace(-0.2, 0.5, 6).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    settings = Smoothing(sigma=0.3, n0=10, samples=100, batch_size=64)
    wide, narrow = (SmoothingCertifier(net, 2, settings, CPU) for net in (Plane(), Narrow()))
    radii = [[row.radius for row in one.batch(range(6), pixels, [1] * 6)] for one in (wide, narrow)]
    assert radii[0] == radii[1]
    assert max(radii[0]) > 0
    assert wide.remark == "" != narrow.remark
    with pytest.raises(torch.OutOfMemoryError):
        SmoothingCertifier(Never(), 2, settings, CPU).batch([0], pixels[:1], [1])


@pytest.mark.parametrize(("side", "largest"), [(8, 64), (182, CACHED)])
def test_photographs_run_in_batches_that_stay_in_the_caches(side: int, largest: int) -> None:
    class Sized(Plane):
        sizes: ClassVar[set[int]] = set()

        def forward(self, pixels: Tensor) -> Tensor:
            self.sizes.add(len(pixels))
            return super().forward(pixels)

    settings = Smoothing(sigma=0.3, n0=10, samples=400, batch_size=64)
    net = Sized()
    SmoothingCertifier(net, 2, settings, CPU).batch([0], torch.rand(1, 1, side, side), [1])
    assert max(net.sizes) == largest


def test_what_is_done_to_pixels_in_the_cache_is_what_is_done_to_them_at_once() -> None:
    pixels = torch.rand(2, 3, 30, 30)
    rows = [0, 1, 1, 0, 1] * 20
    given = (0.2, 3, rows, range(100), noise.CERTIFY, rows)

    def finish(drawn: Tensor) -> Tensor:
        return ((drawn - 0.4) / 0.3).to(torch.bfloat16)

    whole = noise.noisy(pixels, *given)
    assert torch.equal(finish(whole), noise.noisy(pixels, *given, finish))
    assert torch.equal(
        whole[50:51], noise.noisy(pixels, 0.2, 3, rows[50:51], [50], noise.CERTIFY, rows[50:51])
    )
    assert noise.noisy(pixels, 0.2, 3, [], [], noise.CERTIFY, []).shape == (0, 3, 30, 30)


def test_logits_that_are_no_numbers_are_refused() -> None:
    broken: Any = lambda pixels: torch.full((len(pixels), 2), math.nan)  # noqa: E731
    certifier = SmoothingCertifier(broken, 2, Smoothing(), CPU)
    with pytest.raises(CertvitError, match="NaN"):
        certifier.batch([0], torch.zeros(1, 1, 1, 2), [0])


def test_a_network_that_mixes_its_batch_is_refused() -> None:
    class Neighbour(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight * (x.roll(1, 0) - x)

    def ready(norm: nn.Module) -> Classifier:
        return smoothed_classifier(
            open_module(nn.Sequential(norm, nn.Flatten()), 0.0, 1.0, (1, 2, 2)), CPU, "float32"
        )

    assert ready(nn.BatchNorm2d(1)).precision == "float32"
    slightly = Neighbour(
        1
    ).half()  # weights are widened when they are loaded, so float32 is looked at
    nn.init.constant_(slightly.weight, 0.01)  # float16 may differ by 3 %
    for mixing in (nn.BatchNorm2d(1, track_running_stats=False), slightly):
        with pytest.raises(UsageError, match="beside it"):
            ready(mixing)


@pytest.mark.parametrize("sigma", [1e-3, 0.06, 0.25, 1.0, 7.0, 1e4])
def test_the_noise_of_an_image_is_that_of_another_one_moved(sigma: float) -> None:
    """Added in floats as they are, the last bits of the sum would tell which image it was."""
    images = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    images[0, 0] = torch.linspace(0, 1, 81).view(9, 9)
    images = torch.cat([images, 1 + 5.4 * sigma * images[:1]])  # at the largest radius
    step = 2.0 ** -noise.grid_bits(sigma)
    grid = (images.double() / step).round()
    drawn = [
        noise.noisy(image.expand(50, -1, -1, -1), sigma, 3, [7] * 50, range(50)).double() / step
        for image in images
    ]
    assert all(torch.equal(one, one.round()) for one in drawn)
    moved = [one - start for one, start in zip(drawn, grid, strict=True)]
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[0], moved[2])
    assert float(torch.stack(drawn).abs().max()) <= 2**24
    assert float(moved[0].std()) * step == pytest.approx(sigma, rel=0.03)


def test_a_network_that_reads_last_bits_reads_nothing() -> None:
    """f gives 0 where the last bits of the noisy image are those that one image leaves: Voracek and
    Hein's. In floats as they are it certifies that image and misjudges its neighbours.
    """

    class LastBits(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            steps = pixels.flatten(1).double() * 2.0**24
            return torch.stack([steps.frac().abs().sum(1), torch.full((len(pixels),), 1e-9)], 1)

    settings = Smoothing(sigma=0.25, n0=16, samples=200)
    pixels = torch.rand(8, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    pixels[4:] = pixels[4:].mul(256).round() / 256
    rows = SmoothingCertifier(LastBits(), 2, settings, CPU).batch(range(8), pixels, [0] * 8)
    assert {row.prediction for row in rows} == {1}


@pytest.mark.parametrize("side", [1, 64, 512])
def test_what_the_grid_moves_is_taken_off_each_radius(side: int) -> None:
    always: Any = lambda pixels: torch.eye(2)[[1] * len(pixels)]  # noqa: E731
    settings = Smoothing(sigma=0.5, n0=4, samples=20)
    pixels = torch.zeros(1, 1, side, side)
    [row] = SmoothingCertifier(always, 2, settings, CPU).batch([0], pixels, [1])
    assert row.radius <= settings.reach - side * 2.0 ** -noise.grid_bits(0.5)
    assert row.radius == pytest.approx(settings.reach, rel=1e-3)


def test_no_radius_is_beyond_the_grid() -> None:
    settings = Smoothing(sigma=0.5, alpha=0.999, samples=10_000_000)
    assert ndtri(0.999 ** (1 / 10_000_000)) > FARTHEST
    assert settings.reach <= 0.5 * FARTHEST
    assert settings.states(settings.reach)


WRONG = {
    "sigma": [2e6, 1e308, math.inf, math.nan, 0.0, -1.0],
    "n0": [0],
    "samples": [0, 10**15],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k in WRONG for v in WRONG[k]])
def test_numbers_that_no_run_has_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{name} .+ is not possible"):
        Smoothing(**{"sigma": 0.25} | {name: value})
