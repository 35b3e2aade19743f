"""What judges images: exact intervals, records that know their run, resumed certificates, figures
over common images.
"""

import json
import math
import resource
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from certcli.certify import methods
from certcli.certify.certificate import certified_accuracy
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import image_records, intervals, record_lines, records, threat
from certcli.images import datasets, labelled
from certcli.report import figures
from certcli.system.errors import DataError, OutputError, UsageError
from tests.helpers import commands, grids

pytestmark = pytest.mark.usefixtures("proven_once")


def tail(trials: int, least: int, p: Fraction) -> Fraction:
    """P[Binomial(trials, p) >= least], exactly."""
    return sum(
        (math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(least, trials + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize(
    ("successes", "trials"), [(1, 7), (5, 10), (99, 100), (100, 100), (3, 100)]
)
@pytest.mark.parametrize("alpha", [0.001, 0.05])
def test_confidence_bounds_against_exact_sums(successes: int, trials: int, alpha: float) -> None:
    """The stated p is on the safe side of the exact quantile, and no further than 1e-10 from it."""
    low = Fraction(intervals.lower_confidence(successes, trials, alpha))
    assert (
        tail(trials, successes, low)
        <= Fraction(alpha)
        < tail(trials, successes, low * (1 + Fraction(1, 10**10)))
    )
    high = Fraction(intervals.upper_confidence(successes, trials, alpha))
    if successes < trials:
        least = tail(trials, trials - successes, 1 - high)  # failures, as successes of 1 - p
        assert (
            least
            <= Fraction(alpha)
            < tail(trials, trials - successes, 1 - high * (1 - Fraction(1, 10**10)))
        )


def test_intervals_agree_with_known_values() -> None:
    # R: binom.test(5, 10), binom.test(0, 10), binom.test(10, 10)
    for counts, ends in (
        ((5, 10), (0.1870860, 0.8129140)),
        ((0, 10), (0.0, 0.3084971)),
        ((10, 10), (0.6915029, 1.0)),
        ((1, 1), (0.025, 1.0)),
    ):
        assert intervals.share_interval(*counts) == pytest.approx(ends, abs=1e-6)
    for wrong in ((1, 0), (3, 2), (-1, 4)):
        with pytest.raises(DataError):
            intervals.share_interval(*wrong)
    for alpha in (0.0, 1.0, -0.5, 1.5, math.nan):
        for bound in (intervals.lower_confidence, intervals.upper_confidence):
            with pytest.raises(ValueError, match="alpha"):
                bound(3, 4, alpha)


def test_digests_are_of_labels_and_pixels(plain: Checkpoint) -> None:
    images = datasets.load_dataset("digits", plain.record.input, "test").select(range(12))
    same = datasets.load_dataset("digits", plain.record.input, "test").select(range(12))
    assert images.digest == replace(same, name="other name").digest
    relabelled = replace(images, labels=images.labels.roll(1))
    brighter = replace(images, fetch=lambda asked: images.fetch(asked) * 0.999)
    fewer = images.select(range(11))
    turned = images.select(range(12)[::-1])
    assert (
        len({images.digest, relabelled.digest, brighter.digest, fewer.digest, turned.digest}) == 5
    )
    assert fewer.digests.items() <= images.digests.items()
    assert turned.digests == images.digests


@pytest.fixture(scope="module")
def proven(workshop: Path) -> Path:
    return workshop / "certified.safetensors"


@pytest.mark.parametrize(
    "kept", [100, 0.4, 1.0, *[0, 0.9] * grids.EVERY], ids=lambda kept: f"{kept} of the file"
)
def test_a_resumed_certify_is_an_uninterrupted_one(
    proven: Path, tmp_path: Path, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; whole batches are read, and some of their records found again."""
    whole = tmp_path / "whole.jsonl"
    parts = tmp_path / "parts.jsonl"
    words = ("certify", proven, "--limit", 40, "--batch-size", 15)
    expected = commands.document(*words, "--records", whole)
    written = whole.read_bytes()
    parts.write_bytes(written[: int(kept * len(written)) if isinstance(kept, float) else kept])
    complete = parts.read_bytes().count(b"\n") - 1
    certified: list[int] = []
    prepare = methods.prepare_method

    def counting(*given: Any) -> Any:
        certifier = prepare(*given)
        batch = certifier.batch
        certifier.batch = lambda indices, *rest: (
            certified.append(len(indices)),
            batch(indices, *rest),
        )[1]
        return certifier

    monkeypatch.setattr(methods, "prepare_method", counting)
    taken = max(end for end in (0, 15, 30, 40) if end <= max(0, complete))
    again = min(taken, records.FEW)
    told = {"resumed": {"records": taken, "computed_again": again}} if taken else {}
    assert commands.document(*words, "--records", parts, "--resume") == {**expected, **told}
    assert parts.read_bytes() == written
    new = [size for size, end in zip((15, 15, 10), (15, 30, 40), strict=True) if end > taken]
    assert certified == new + [size for size in (min(again, 15), again - 15) if size > 0]


def test_records_of_another_run_are_refused_and_the_difference_is_named(
    proven: Path, workshop: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    commands.document("certify", proven, "--limit", 20, "--records", path)
    before = path.read_bytes()
    others = [
        ("checkpoint", "certify", workshop / "constrained.safetensors", "--limit", 20),
        ("dataset images is 20 there and 21 here", "certify", proven, "--limit", 21),
        ("dataset split", "certify", proven, "--limit", 20, "--split", "val"),
        (
            "command is certify there and attack here",
            "attack",
            proven,
            "-a",
            "fgsm",
            "--limit",
            20,
            "--no-checks",
        ),
    ]
    for named, *words in others:
        failure = commands.attempt(*words, "--records", path, "--resume").exception
        assert isinstance(failure, UsageError), (words, failure)
        assert named in failure.message
    assert isinstance(
        commands.attempt("certify", proven, "--limit", 20, "--records", path).exception, UsageError
    )
    assert isinstance(commands.attempt("certify", proven, "--resume").exception, UsageError)
    assert path.read_bytes() == before
    path.write_bytes(before.replace(b'"index"', b'"undex"', 1))
    failure = commands.attempt(
        "certify", proven, "--limit", 20, "--records", path, "--resume"
    ).exception
    assert isinstance(failure, DataError)
    assert "line 2 of" in failure.message


def test_the_method_and_its_parameters_belong_to_the_run(plain: Checkpoint, tmp_path: Path) -> None:
    images = datasets.load_dataset("digits", plain.record.input, "test").select(range(3))
    run = record_lines.Run.of(
        "certify",
        plain.digest,
        images,
        "smoothing",
        norm="l2",
        parameters={"sigma": 0.25, "n": 100},
    )
    with records.RecordFile(tmp_path / "r.jsonl", run, images):
        pass
    turned = msgspec.structs.replace(run, parameters={"n": 100, "sigma": 0.25})
    assert json.dumps(run.to_json()) == json.dumps(turned.to_json())
    for other, named in (
        (msgspec.structs.replace(run, method="local"), "method is smoothing there and local here"),
        (
            msgspec.structs.replace(run, parameters={"sigma": 0.5, "n": 100}),
            "parameters sigma is 0.25 there and 0.5 here",
        ),
        (
            msgspec.structs.replace(run, parameters={"sigma": 0.25}),
            "parameters n is 100 there and null here",
        ),
        (msgspec.structs.replace(run, norm="linf"), "norm is l2 there and linf here"),
    ):
        with pytest.raises(UsageError, match=named):
            records.RecordFile(tmp_path / "r.jsonl", other, images, resume=True)


OneImage = tuple[record_lines.Run, labelled.Images, image_records.Certificate]


@pytest.fixture
def one_image(plain: Checkpoint) -> OneImage:
    """A run on one image, and its record."""
    images = datasets.load_dataset("digits", plain.record.input, "test").select(range(1))
    run = record_lines.Run.of("certify", plain.digest, images, "local", norm="l2", parameters={})
    certificate = image_records.Certificate(
        int(images.indices[0]), int(images.labels[0]), 3, 0.5, "local", 0.0
    )
    return run, images, certificate


def test_a_disk_that_fills_is_one_error_and_what_fitted_is_gone_on_with(
    one_image: OneImage, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the full disk: writes fail, and so does closing what
    is buffered.
    """
    run, images, row = one_image
    path = tmp_path / "r.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with records.RecordFile(path, run, images) as file:
            with pytest.raises(ValueError, match="not JSON compliant"):
                file.write([msgspec.structs.replace(row, radius=math.nan)])
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
            for _ in range(1000):
                file.write([row])

    try:
        with pytest.raises(OutputError, match="cannot write"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 5000
    assert records.RecordFile(path, run, images, resume=True).earlier > 10


def test_two_runs_do_not_write_one_file(one_image: OneImage, tmp_path: Path) -> None:
    run, images, _ = one_image
    path = tmp_path / "r.jsonl"
    with records.RecordFile(path, run, images):
        whole = path.read_bytes()
        for options in ({"force": True}, {"resume": True}):
            with pytest.raises(OutputError, match="another run writes it"):
                records.RecordFile(path, run, images, **options)
        assert path.read_bytes() == whole
    with pytest.raises(UsageError, match="another run") as refused:
        records.RecordFile(path, msgspec.structs.replace(run, norm="linf"), images, resume=True)
    assert refused.tb is not None  # it holds the refused object, which must not hold the file
    for kept in (len(whole), 20):  # stopped behind its header, and within it
        path.write_bytes(whole[:kept])
        with records.RecordFile(path, run, images, resume=True):
            assert path.read_bytes() == whole
    other = image_records.Certificate(999, 1, 1, 0.5, "local", 0.0, pixels="0" * 16).to_json()
    path.write_bytes(whole + json.dumps(other).encode() + b"\n")
    with pytest.raises(DataError, match="has a record of image 999"):
        records.RecordFile(path, run, images, resume=True)


def test_the_header_says_what_was_assumed_of_the_network(workshop: Path, tmp_path: Path) -> None:
    """It decides nothing: a file from before there was such a line is continued, and read by
    whoever reads records.
    """
    path = tmp_path / "r.jsonl"
    words = ("certify", workshop / "certified.safetensors", "--records", path)
    commands.certvit(*words, "--limit", 4)
    header, *rows = path.read_text().splitlines()
    stated = json.loads(header)
    assert stated["network"]["architecture"]["from"] == "its record"
    assert stated["network"]["mean"]["value"] == "0.5"
    del stated["network"]
    path.write_text("\n".join([json.dumps(stated), *rows[:2]]) + "\n")
    commands.certvit(*words, "--limit", 4, "--resume")
    assert len(path.read_text().splitlines()) == 5
    run, read = records.read_records(path, "certify")
    assert run.checkpoint == stated["checkpoint"]
    assert [row.index for row in read] == [json.loads(row)["index"] for row in rows]


BROKEN = {
    "nothing": b"",
    "no header": b'{"index": 3, "label": 1}\n',
    "another schema": b'{"schema": "certvit-records/0"}\n',
    "a number": b"3\n",
    "nonsense": b"\xff\xfe\n",
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_are_no_records(kind: str, proven: Path, tmp_path: Path) -> None:
    """One line and exit code 6, also for a file that is not there: never a bug."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(BROKEN[kind])
    for command, word in (("certify", "--attack-records"), ("attack", "--only-certified")):
        for named in (path, tmp_path / "absent.jsonl", tmp_path):
            failure = commands.attempt(command, proven, word, named, "--limit", 5).exception
            assert isinstance(failure, DataError), (command, named, failure)
            assert str(named) in failure.message


def test_a_figure_compares_the_images_that_both_know(
    proven: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked = tmp_path / "a.jsonl"
    left = commands.document(
        "attack",
        proven,
        "-a",
        "fgsm",
        "-e",
        0.1,
        "-e",
        0.3,
        "--limit",
        30,
        "--no-checks",
        "--records",
        attacked,
    )
    drawn: list[tuple[Any, ...]] = []
    draw = figures.draw_certified
    monkeypatch.setattr(
        figures, "draw_certified", lambda *given: (drawn.append(given), draw(*given))
    )
    words = ("certify", proven, "-e", 0.3, "--limit", 60, "--plot", tmp_path / "f.png", "--force")
    whole = commands.document(*words)
    common = commands.document(*words, "--attack-records", attacked)
    assert whole == common  # the figure changes nothing but itself
    (every, nothing, *_), (some, shares, _, _, title, *_) = drawn
    assert len(every["lipschitz: certified (proven)"]) == whole["images"] == 60
    assert nothing == {}
    assert len(some["lipschitz: certified (proven)"]) == 30
    assert {radius: shares[radius] for radius in (0.1, 0.3)} == {
        float(r): share for r, share in left["curve"].items()
    }
    assert shares[0.0] == left["clean"]
    assert (
        sum(radius > 0.3 for radius in some["lipschitz: certified (proven)"]) / 30 <= left["robust"]
    )
    assert title == "certified on digits (test), n = 30"
    told = f"30 of these images: {100 * left['clean']:.1f} % at 0, {threat.attacked_percent(left['curve']['0.1'])} at 0.1"
    shown = commands.attempt(*words, "--attack-records", attacked).stdout
    assert told in shown
    (clean,) = [line for line in shown.splitlines() if line.startswith("clean ")]
    assert f"{100 * left['clean']:.1f} %" in clean
    several = commands.attempt(
        *words,
        "--method",
        "lipschitz",
        "--method",
        "smoothing",
        "--method",
        "bcp",
        "--limit",
        2,
        "--attack-records",
        attacked,
    )
    assert "skipped bcp: " in several.stderr
    (above,) = [line for line in several.stdout.splitlines() if line.startswith("attack ")]
    assert "measured" in above
    other = workshop / "constrained.safetensors"
    for refused, named in (
        (("certify", other), "another network"),
        (("certify", proven, "--split", "val"), "is another one in"),
    ):
        failure = commands.attempt(
            *refused, "--attack-records", attacked, "--plot", tmp_path / "g.png"
        ).exception
        assert isinstance(failure, DataError)
        assert named in failure.message
    assert not (tmp_path / "g.png").exists()
    commands.document(
        "attack",
        proven,
        "-a",
        "fgsm",
        "--norm",
        "linf",
        "--limit",
        3,
        "--no-checks",
        "--records",
        attacked,
        "--force",
    )
    failure = commands.attempt(
        "certify", proven, "--attack-records", attacked, "--plot", tmp_path / "g.png"
    ).exception
    assert isinstance(failure, DataError)
    assert "in l2" in failure.message


def test_the_document_says_what_was_certified(proven: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    found = commands.document(
        "certify",
        proven,
        "-e",
        0.3,
        "-e",
        0.1,
        "--limit",
        50,
        "--records",
        path,
        "--min-certified",
        0,
    )
    run, rows = records.read_records(path, "certify")
    assert found["checkpoint"] == run.checkpoint == Checkpoint.read(proven).digest
    assert found["dataset"] == msgspec.to_builtins(run.dataset)
    assert (found["promise"], found["method"], found["failure"]) == ("proof", "lipschitz", 0.0)
    assert found["bound"]["upper"] > 0
    expected = certified_accuracy(rows, [threat.Threat("l2", 0.1), threat.Threat("l2", 0.3)])
    assert found["certified"] == expected.certified
    assert found["intervals"]["0.3"] == list(
        intervals.share_interval(round(50 * expected.certified["0.3"]), 50)
    )
    assert found["gate"] == {"passed": True, "verdict": "passed", "reasons": []}
    assert all(len(row.pixels) == 16 for row in rows)


def test_an_abstention_and_an_unbounded_radius_survive_the_file() -> None:
    for certificate in (
        image_records.Certificate(3, 1, None, 0.0, "smoothing", 0.001, seconds=0.5),
        image_records.Certificate(4, 1, 1, float("inf"), "lipschitz", 0.0),
        image_records.Certificate(5, 1, 2, 0.25, "local", 0.0, rung="zonotope"),
    ):
        row = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
        assert msgspec.convert(row, image_records.Certificate) == certificate
    rows = [
        image_records.Certificate(1, 1, None, 0.0, "smoothing", 0.001),
        image_records.Certificate(2, 1, 1, 0.5, "smoothing", 0.001),
    ]
    found = certified_accuracy(
        rows, [threat.Threat("l2", 0.25), threat.Threat("l2", 0.5)]
    ).to_json()
    assert (found["clean"], found["certified"], found["abstained"]) == (
        0.5,
        {"0.25": 0.5, "0.5": 0.0},
        0.5,
    )
    assert found["failure"] == 0.001
