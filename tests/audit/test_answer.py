"""The answer for everyone: what comes first, how few images are said, and what stops an audit."""

import html
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN

from certcli.api.results import AuditReport
from certcli.audit import answer, gates
from certcli.audit.plan import AuditPlan, Typed
from certcli.evaluation.image_doubts import better_statistics
from certcli.images.labelled import OWN, Images
from certcli.models.pixels import PixelNormalize
from certcli.report.document import (
    AttackShares,
    CertifiedShares,
    Dataset,
    GlobalBound,
    PatchAttack,
    PatchShares,
    Share,
    from_json,
)
from certcli.report.shares import DENOISER, UNET, nearest_published, published
from tests.audit.conftest import QUICK, SUFFIXES
from tests.helpers.commands import attempt, document

ROOT = Path(__file__).parents[2]
DATASET = Dataset(name="d", split="test", images=60, digest="0" * 64)
BOUND = GlobalBound(
    upper=1e19,
    upper_finite=True,
    log10_upper=19.0,
    upper_text="1e+19",
    why="",
    drivers="",
    blocks=[],
    seconds=0.0,
)
SAME: dict[str, Any] = {
    "dataset": DATASET,
    "arithmetic": "",
    "title": "",
    "statement": "",
    "seconds": 0.0,
}


def found(
    fooled: int, correct: int, failure: float = 0.0, kept: int = 0, **more: Any
) -> gates.AuditFindings:
    """Findings of an attack on `correct` images and of certificates for as many."""
    left = {"0.12": Share.of(correct - fooled, correct)}
    attack = AttackShares(
        attacks=["pgd"], norm="l2", dataset=DATASET, clean=Share.of(correct, correct), robust=left,
        fooled={"0.12": fooled}, largest={"0.12": 0.1}, median_norm=None, settings={}, seconds=0.0,
    )  # fmt: skip
    certified = CertifiedShares(
        method="smoothing" if failure else "local", promise="", failure=failure, domain="", about="", average_radius=0.0,
        clean=Share.of(correct, correct), certified={"0.12": Share.of(kept, correct)}, abstained=0.0,
        parameters={"sigma": 0.12}, **SAME,
    )  # fmt: skip
    return gates.AuditFindings(
        bound=BOUND,
        dataset=DATASET,
        clean=Share.of(correct, correct),
        attack=attack,
        certificates=[certified],
        **more,
    )


LARGE = (3, 224, 224)
SMALL = (1, 8, 8)


@pytest.mark.parametrize(
    ("findings", "size", "said"),
    [
        (
            found(42, 45),
            LARGE,
            [
                "fooled by changes of l2 length 0.12 (0.079 of 255 levels a pixel on average, "
                "single pixels up to 26): 42 of 45",
                "nothing useful was proven about it as it is",
            ],
        ),
        (
            found(42, 45),
            SMALL,
            [
                "l2 length 0.12 (3.8 of 255 levels a pixel on average, single pixels up to 26): 42 of 45"
            ],
        ),
        (found(0, 45), LARGE, ["pgd fooled none of 45", "which proves nothing"]),
        (found(3, 4), LARGE, ["3 of 4 correct images (95 % interval 19 to 100 %)"]),
        (
            found(9, 45, 0.001, 15),
            LARGE,
            [
                "a majority vote over noisy copies), 15 of 45 images are certified at l2 0.12",
                "probability 99.9 %",
            ],
        ),
        (
            found(9, 45, 0.0, 30),
            LARGE,
            ["Proven: 30 of 45 images keep their class under every change of the pixels of l2"],
        ),
        (
            found(9, 45, failing="the network is right on 1 of 45 images"),
            LARGE,
            ["Nothing can be said about robustness yet"],
        ),
        (gates.AuditFindings(), LARGE, ["No images were judged"]),
        (gates.AuditFindings(dataset=DATASET), LARGE, ["too short to judge one image"]),
    ],
)
def test_one_sentence_says_it(
    findings: gates.AuditFindings, size: tuple[int, int, int], said: list[str]
) -> None:
    sentence = answer.headline(findings, AuditPlan(radii=(0.12,)), size)
    assert [words for words in said if words not in sentence] == []
    assert sentence[:1].isupper()
    assert sentence.endswith(".")


WITH_INTERVAL = re.compile(r"(\d+|none|the one) (of \d+)?[a-z0-9. ]*\(95 % interval \d+ to \d+ %\)")


def standing_alone(text: str) -> list[str]:
    """Shares of few images without their interval; the chances of certificates are no shares."""
    rest = WITH_INTERVAL.sub("", text.replace("99.9 %", ""))
    return [
        found[0]
        for found in re.finditer(r"(?:\d+|none) of (?:the )?(\d+)|[\d.]+ %", rest)
        if int(found[1] or 0) < 30
    ]


def test_the_check_finds_what_stands_alone() -> None:
    assert standing_alone("3 of 4 correct images; none of the 5, 20.0 % (95 % interval 1 to 2 %)")
    assert not standing_alone(
        "none of 4 correct images (95 % interval 0 to 60 %), 2 of 3 (95 % interval 1 to 2 %), 99.9 %"
    )


@pytest.mark.parametrize("failure", [0.0, 0.001])
@pytest.mark.parametrize(
    ("fooled", "correct", "kept"), [(0, 1, 0), (0, 7, 0), (3, 7, 4), (29, 29, 0), (0, 29, 29)]
)
def test_no_share_of_few_images_stands_alone(
    fooled: int, correct: int, kept: int, failure: float
) -> None:
    findings = found(fooled, correct, failure, kept)
    findings.patched = PatchShares(
        procedure="voting",
        clean=Share.of(kept, correct),
        certified={"2x2": Share.of(kept, correct)},
        parameters={},
        **SAME,
    )
    findings.patch_attack = PatchAttack(
        patch="2x2",
        dataset=DATASET,
        clean=Share.of(correct, correct),
        robust=Share.of(kept, correct),
        seconds=0.0,
    )
    plan = AuditPlan(
        radii=(0.12,),
        gates=tuple(map(gates.parse_gate, ("certified@0.12<0.5", "robust@0.12<0.5", "clean<1"))),
    )
    judged = gates.judge_gates(plan.gates, findings, (8, 8))
    for text in (
        answer.headline(findings, plan, LARGE),
        *answer.verdict_sentences(findings, plan),
        *(row.reason for row in judged.judged),
    ):
        assert standing_alone(text.rpartition(", found ")[2]) == [], text


def test_no_share_of_few_images_stands_alone_in_evidence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # a share and its interval in one line
    shown = attempt("log", folder / "certified.safetensors").stdout
    sentences = [line for line in shown.splitlines() if " 24 images of " in line]
    assert sentences
    assert [found for text in sentences for found in standing_alone(text)] == []


def test_the_scale_is_the_length_of_an_even_change() -> None:
    for size in (LARGE, SMALL):
        change = torch.full(size, answer.grey_levels(0.12, size) / 255, dtype=torch.float64)
        assert float(change.norm()) == pytest.approx(0.12, rel=1e-12)
    assert "l2 0.12 is 0.079 of 255 grey levels on average" in answer.scale(
        found(42, 45), AuditPlan(radii=(0.12,)), LARGE
    )


@pytest.mark.parametrize("suffix", ["python", *SUFFIXES])
def test_levels_of_a_pixel_stand_beside_the_norm_and_are_called_an_average(
    folder: Path, suffix: str
) -> None:
    """An l2 length is no claim about each pixel: somebody who works in security reads linf 16/255."""
    if suffix == "python":
        audit = from_json((folder / "certified.json").read_text())
        report = AuditReport(**{name: getattr(audit, name) for name in audit.__struct_fields__})
        text = f"{report!r} {report._repr_html_()} {report.scale} {report.points}"
    else:
        text = html.unescape((folder / f"certified.{suffix}").read_text())
    sentences = re.findall(r"[^;:?]*\blevels\b[^;:?]*", " ".join(text.split()))
    assert [one for one in sentences if "l2" not in one or "on average" not in one] == []
    assert "nobody sees" not in text
    assert sentences


def test_the_largest_change_of_a_pixel_is_measured(folder: Path) -> None:
    attack = from_json((folder / "certified.json").read_text()).attack
    for at, largest in attack.largest.items():
        assert float(at) / 8 < largest <= float(at)  # of 64 pixels
    assert list(attack.largest) == [at for at, count in attack.fooled.items() if count]


def test_published_figures_stand_in_the_docs() -> None:
    page = (ROOT / "docs" / "results.md").read_text().splitlines()
    for row in published():
        fooled, smoothed = (
            f"{part['hits']} of {part['images']} at {part['radius']:g}"
            for part in (row["fooled"], row["smoothed"])
        )
        cells = [
            row["name"],
            row["images"],
            " x ".join(map(str, row["input"])),
            fooled,
            f"{row['log10_bound']:g}",
            smoothed,
            f"`{row['command']}`",
        ]
        assert f"| {' | '.join(cells)} |" in page
    for size in (LARGE, SMALL, (3, 32, 32)):
        assert (known := nearest_published(size)) is not None
        assert known["input"] == list(size)
    assert nearest_published((3, 1024, 1024)) is None


def test_chance_level_comes_first_and_stops_the_rest(workshop: Path) -> None:
    """A network with random weights: no attack, no certificate, and a gate that fails for this
    reason.
    """
    words = (
        "audit",
        workshop / "init.safetensors",
        *QUICK,
        "--dataset",
        "digits",
        "--fail-on",
        "robust@0.05<0.1",
    )
    audit = document(*words, code=7)
    assert audit["headline"].startswith(
        "Nothing can be said about robustness yet: the network is right on"
    )
    assert audit["attack"] is None
    assert audit["certificates"] == []
    assert "about chance" in audit["gate"]["reasons"][0]
    assert audit["scale"] == audit["reference"] == ""  # of radii that nothing was said about
    assert not [doubt for doubt in audit["doubts"] if doubt in audit["headline"]]


@pytest.mark.parametrize(
    ("trained_on", "options"),
    [
        (None, "--dataset FOLDER"),
        ("torch/mnist", "--dataset torch/mnist --data-dir FOLDER"),
        ("a folder of somebody", "--dataset FOLDER"),
    ],
)
def test_without_images_the_next_step_names_those_of_its_training(
    trained_on: str | None, options: str
) -> None:
    typed = Typed("m.safetensors", trained_on=trained_on)
    assert answer.next_steps(gates.AuditFindings(), AuditPlan(), typed) == [
        f"certvit audit m.safetensors {options}"
    ]
    plan, empty = AuditPlan(), gates.AuditFindings()
    said = " ".join([answer.headline(empty, plan, LARGE), *answer.verdict_sentences(empty, plan)])
    assert said.count("No images") == 1


def test_images_without_labels_are_not_called_right() -> None:
    findings = gates.AuditFindings(dataset=msgspec.structs.replace(DATASET, split=OWN))
    findings.patched = PatchShares(
        procedure="voting",
        clean=Share.of(7, 8),
        certified={"2x2": Share.of(5, 8)},
        parameters={},
        **SAME,
    )
    assert "the network's own answer on 7 of 8" in " ".join(
        answer.verdict_sentences(findings, AuditPlan())
    )


def test_powers_of_ten_do_not_contradict_the_table() -> None:
    """10^20 beside 1.92e+19 reads as another bound."""
    assert answer.magnitude(math.log10(1.92e19), "1.92e+19") == "10^19.3"
    assert answer.magnitude(math.log10(1234.5), "1,235") == "1,235"


def test_other_pixel_statistics_that_fit_better_are_named() -> None:
    """A network that is right exactly with the means of ImageNet."""
    pixels, labels = torch.rand(40, 3, 8, 8), torch.ones(40).long()
    images = Images(
        "made",
        "test",
        ("a", "b"),
        labels,
        torch.arange(40),
        lambda positions: pixels[list(positions)],
    )
    model = torch.nn.Module()
    model.normalize = PixelNormalize((0.5,) * 3, (0.5,) * 3)

    def classify(batch: torch.Tensor) -> torch.Tensor:
        fits = float(model.normalize.mean[0]) == IMAGENET_DEFAULT_MEAN[0]
        return torch.tensor([[0.0, 1.0]] if fits else [[1.0, 0.0]]).expand(len(batch), 2)

    model.forward = classify
    ((said, options),) = better_statistics(model, images, [False] * 40)
    assert "with ImageNet's pixel statistics the network is right on 40 of 40 images" in said
    assert options == ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    assert float(model.normalize.mean[0]) == 0.5
    assert list(better_statistics(model, images, [True] * 40)) == []


@pytest.mark.parametrize(
    ("size", "changes", "gpu", "wanted"),
    [
        ((3, 224, 224), {}, True, True),
        ((3, 256, 256), {}, True, True),
        ((3, 224, 224), {}, False, False),
        ((3, 32, 32), {}, True, False),
        ((1, 224, 224), {}, True, False),
        ((3, 225, 225), {}, True, False),
        ((3, 224, 224), {"denoiser": Path("d")}, True, False),
        ((3, 224, 224), {"methods": ("local",)}, True, False),
    ],
)
def test_who_may_not_retrain_is_told_of_a_denoiser_where_this_machine_can_run_it(
    size: tuple[int, int, int], changes: dict[str, Any], gpu: bool, wanted: bool
) -> None:
    """And no command names a file that is nowhere."""
    findings = found(29, 29)
    findings.input = size
    findings.gpu = gpu
    plan = AuditPlan(radii=(0.12,), **changes)
    assert (DENOISER in answer.verdict_sentences(findings, plan)) is wanted
    steps = answer.next_steps(findings, plan, Typed("net", dataset="d"))
    assert UNET not in " ".join(steps)
