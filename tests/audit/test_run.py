"""`certvit audit`: what it says is what the commands find, within its time, and a gate that was not
measured fails.
"""

import html
import itertools
import json
import re
import shlex
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from PIL import Image

from certcli.attack.settings import AttackSettings
from certcli.audit import judging, plan
from certcli.audit import run as audit_run
from certcli.audit.attacking import Attacking
from certcli.certify import certificate, methods
from certcli.certify.smoothing import denoiser, noise
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import intervals, threat
from certcli.evaluation.records import packed
from certcli.images import datasets
from certcli.models import build, pixels
from certcli.system.errors import UsageError
from tests.audit.conftest import QUICK
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.diffusion import diffusion_folder as folder_of_diffusers


def test_the_answer_is_what_the_commands_find(
    workshop: Path, folder: Path, certified_audit: dict
) -> None:
    path = workshop / "certified.safetensors"
    words = ("--limit", 24, "-e", 0.05, "-e", 0.3, "--json", "--quiet")
    (found,) = certified_audit["certificates"]
    alone = document("certify", path, *words)
    assert {radius: share["share"] for radius, share in found["certified"].items()} == alone[
        "certified"
    ]
    assert found["dataset"] == alone["dataset"]
    assert found["clean"]["share"] == alone["clean"]
    # the images of a batch share a bound on their rounding, and the audit's first batches are small
    assert found["average_radius"] == pytest.approx(alone["average_radius"], rel=certificate.AGAIN)
    attacked = document("attack", path, "-a", "fgsm", *words)
    assert {
        radius: share["share"] for radius, share in certified_audit["attack"]["robust"].items()
    } == attacked["curve"]
    assert (
        certified_audit["bound"]["upper"] == document("lipschitz", path, "--no-estimate")["upper"]
    )
    assert certified_audit["slope"]["lower"] <= certified_audit["bound"]["upper"]
    held = found["certified"]["0.05"]
    assert f"{held['hits']} of 24 images" in certified_audit["verdict"][0]
    fooled = certified_audit["attack"]["fooled"]["0.3"]
    few = intervals.part_of(fooled, found["clean"]["hits"], "correct images")  # with its interval
    assert f"fgsm fooled {few} at l2 0.3" in certified_audit["verdict"][1]
    assert {item["stage"] for item in certified_audit["skipped"]} == {"local", "smoothing"}


def test_a_network_without_a_usable_proof_is_told_so(folder: Path) -> None:
    table = json.loads((folder / "plain.json").read_text())
    proven = any(
        item["failure"] == 0 and item["certified"]["0.05"]["hits"] for item in table["certificates"]
    )
    opening = (
        "The global bound proves nothing: 10^"
        if proven
        else "No usable proof: the global bound is 10^"
    )
    assert opening in table["verdict"][0]
    assert "LayerNorms alone contributes 1,000" in table["verdict"][0]
    smoothed = next(item for item in table["certificates"] if item["method"] == "smoothing")
    assert smoothed["failure"] == 0.001
    at = smoothed["certified"]["0.05"]
    assert any(
        f"certifies {at['hits']} of {at['images']} images" in line and "99.9 %" in line
        for line in table["verdict"]
    )
    assert {"local", "smoothing"} <= {item["method"] for item in table["certificates"]}
    again = table["reproduce"].split()
    assert again[:2] == ["certvit", "audit"]
    assert "--limit" in again


def test_evidence_is_verified_and_the_input_is_untouched(workshop: Path, folder: Path) -> None:
    audited = Checkpoint.read(folder / "certified.safetensors")
    assert audited.digest == Checkpoint.read(workshop / "certified.safetensors").digest
    fresh = [entry.command for entry in audited.record.evidence if entry.digest == audited.digest]
    assert fresh[-3:] == ["lipschitz", "certify", "attack"]
    certvit("verify", folder / "certified.safetensors", "--proven-only")
    wrong = {**audited.record.evidence[-2].result}
    wrong["certified"] = {"0.3": min(1.0, wrong["certified"]["0.3"] + 0.1)}
    forged = audited.with_evidence("certify", audited.record.evidence[-2].parameters, wrong)
    forged.write(folder / "forged.safetensors")
    certvit("verify", folder / "forged.safetensors", "--proven-only", code=7)


def test_what_is_shown_to_be_typed_works_here(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminal, document, page and card have the same commands: files as they were typed, with what
    reading them needs.
    """
    (tmp_path / "a b").mkdir()
    shutil.copy(workshop / "certified.safetensors", tmp_path / "a b" / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    words = [
        "audit",
        "a b/net.safetensors",
        "--as-stated",
        "--dataset",
        "digits",
        "--data-dir",
        ".",
    ]
    words += ["--limit", "4", "-a", "fgsm", "--quiet"]
    reports = [part for name in ("r.json", "r.html") for part in ("--report", name)]
    shown = re.sub(r"\s+", " ", attempt(*words, *reports).stdout)
    table = json.loads(Path("r.json").read_text())
    for line in (table["reproduce"], *table["next"]):
        assert line in shown
        assert line in html.unescape(re.sub("<[^>]+>", "", Path("r.html").read_text()))
    again = shlex.split(table["reproduce"])
    assert again[1:8] == words[:7]
    certvit(*again[1:], "--quiet")
    certvit(*shlex.split(table["next"][0])[1:], "--quiet")


def test_an_anonymous_document_names_no_folder_and_says_so(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "of somebody"
    (secret / "photos").mkdir(parents=True)
    Image.new("L", (8, 8), 99).save(secret / "photos" / "holiday.png")
    shutil.copy(workshop / "certified.safetensors", secret / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    words = (
        "audit",
        secret / "net.safetensors",
        "--dataset",
        secret / "photos",
        "-a",
        "fgsm",
        "-q",
    )
    reports = [part for name in ("r.json", "r.html") for part in ("--report", name)]
    certvit(*words, *reports)
    assert "of somebody" in Path("r.json").read_text()
    assert "holiday" in Path("r.json").read_text()
    certvit(*words, *reports, "--anonymous", "--force")
    for name in reports[1::2]:
        text = html.unescape(Path(name).read_text())
        assert "of somebody" not in text
        assert "holiday" not in text
        assert "Left out" in text
    table = json.loads(Path("r.json").read_text())
    assert table["machine"]["cpu"] == ""
    assert table["network"]["path"] is None
    assert table["reproduce"].endswith("--anonymous")


@pytest.mark.parametrize("typed", ["vit_tiny_patch16_224", "sub/vit_tiny_patch16_224", "elsewhere"])
def test_a_folder_called_like_a_network_of_timm_is_told_from_it(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub" / "vit_tiny_patch16_224").mkdir(parents=True)
    (tmp_path / "vit_tiny_patch16_224").mkdir()
    monkeypatch.chdir(tmp_path)
    as_typed = {"vit_tiny_patch16_224": "./vit_tiny_patch16_224"}.get(typed, typed)
    assert plan.unmistakable(typed) == as_typed
    name = "./vit_tiny_patch16_224" if typed != "elsewhere" else typed
    assert plan.Typed(typed).anonymous().source == name


def test_an_audit_without_time_names_every_stage_that_did_not_fit(workshop: Path) -> None:
    found = document("audit", workshop / "plain.safetensors", "--time-budget", "0.1s", "--quiet")
    done = {"bound": found["bound"], "clean": found["clean"], "attack": found["attack"]}
    missing = {item["stage"].partition(",")[0] for item in found["skipped"]}
    assert {name for name, value in done.items() if value is None} <= missing | {"attack"}
    assert {"smoothing", "attack", "clean"} & {
        item["stage"].partition(",")[0] for item in found["skipped"]
    }
    assert any("--time-budget" in line for line in found["next"])
    assert sum(share is not None for share in done.values()) + len(missing) >= 3


def test_units_find_what_one_unit_finds(workshop: Path) -> None:
    """Each image once, in order; the first unit is small, so a slow network is answered about few."""
    checkpoint = Checkpoint.read(workshop / "certified.safetensors")
    model, cpu = build.load(checkpoint), torch.device("cpu")
    images = (
        datasets.load_dataset("digits", checkpoint.record.input, "test")
        .in_turn(0)
        .select(range(10))
    )
    clock = plan.Clock(1e6)
    stages = [
        Attacking(model, images, ["fgsm"], (0.05, 0.3), AttackSettings(), checkpoint.record, 128),
        judging.Classifying(model, images, 128),
        judging.Certifying(
            "lipschitz",
            lambda: methods.prepare_method("lipschitz", checkpoint, cpu),
            images,
            128,
            [threat.Threat("l2", 0.05)],
        ),
    ]
    for stage in stages:
        whole = stage.judge(list(range(10)))
        counts = []
        while stage.rest:
            stage.go(clock, 1e6)
            counts.append(stage.count)
        assert counts == ([1, 3, 7, 10] if stage.first == 1 else [4, 10])
        if isinstance(stage, Attacking):
            alike = zip(itertools.chain(*whole), stage.records, strict=True)
            assert all(one.agrees(other) for one, other in alike)
        elif isinstance(stage, judging.Certifying):
            assert [row.index for row in stage.rows] == images.indices.tolist()
        else:
            assert stage.rows == whole
    attacking = stages[0]
    assert isinstance(attacking, Attacking)
    shown = [row.index for row in attacking.exhibits()]
    assert len(set(shown)) == len(shown) > 0


def test_an_attack_that_is_broken_off_keeps_the_radii_that_ended(workshop: Path) -> None:
    checkpoint = Checkpoint.read(workshop / "certified.safetensors")
    images = datasets.load_dataset("digits", checkpoint.record.input, "test").in_turn(0)
    stage = Attacking(
        build.load(checkpoint),
        images,
        ["fgsm"],
        (0.05, 0.3),
        AttackSettings(),
        checkpoint.record,
        4,
    )
    whole = stage.judge([0])
    del stage._mine[1:]  # in the second radius
    stage.broken = True
    stage.take([])
    assert [*map(packed, stage.rows)] == [packed(records[:1]) for records in whole]
    assert list(stage.shares.robust) == ["0.05"]


@pytest.mark.parametrize("runs", [True, False])
def test_large_networks_are_judged_in_bf16_where_that_is_fast(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """All stages share one network, loaded once."""

    def refused(model: pixels.PixelModel, precision: str) -> noise.Classifier:
        if precision == "bf16":
            raise UsageError("this network does not run in bf16")
        return noise.Classifier(model, precision)

    network = workshop / "plain.safetensors"  # made when it is first named
    load = build.load
    loaded = []
    monkeypatch.setattr(
        build, "load", lambda *given, **more: (loaded.append(1), load(*given, **more))[1]
    )

    monkeypatch.setattr(audit_run, "LARGE", 1)
    monkeypatch.setattr(build, "multiplies_bf16", lambda device: True)
    if not runs:
        monkeypatch.setattr(audit_run, "Classifier", refused)
    words = ("--limit", 4, "-e", 0.1, "-a", "fgsm", "--method", "smoothing", "--json", "--quiet")
    words += (
        "--fail-on",
        "certified@0.3<0",
    )  # holds if it was measured: the noise must reach as far
    found = document("audit", network, *words)
    assert len(loaded) == 1
    precision = "bf16" if runs else "float32"
    (smoothed,) = found["certificates"]
    assert smoothed["arithmetic"] == smoothed["parameters"]["precision"] == precision
    assert list(smoothed["certified"]) == ["0.1", "0.3"]
    assert found["attack"]["settings"]["precision"] == precision
    assert ("--precision bf16" in found["reproduce"]) is runs
    certvit("audit", workshop / "plain.safetensors", "--precision", "half", code=2)
    certvit("audit", workshop / "plain.safetensors", "--limit", 0, "--dataset", "digits", code=6)


def turn_for_ever() -> None:
    while True:
        pass


def test_a_stage_is_broken_off_and_the_timer_is_given_back() -> None:
    with pytest.raises(plan.OutOfTime), plan.EndsAfter(0.05):
        turn_for_ever()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), (
        "a timer left behind would ring in another test"
    )
    with pytest.raises(plan.OutOfTime), plan.EndsAfter(0.0):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ring_that_is_lost_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what a handler raises inside `__del__`: the stage would have gone on for ever."""

    class Deaf:
        def __del__(self) -> None:
            turn_for_ever()

    def work() -> None:
        Deaf()
        turn_for_ever()

    monkeypatch.setattr("certcli.audit.plan.AGAIN", 0.2)
    with pytest.raises(plan.OutOfTime), plan.EndsAfter(0.05):
        work()


def test_the_parts_of_a_bound_multiply_to_it(folder: Path) -> None:
    for name in ("certified", "plain"):
        bound = json.loads((folder / f"{name}.json").read_text())["bound"]
        assert abs(sum(block["log10"] for block in bound["blocks"]) - bound["log10_upper"]) < 0.01
        paths = [block["path"] for block in bound["blocks"]]
        assert len(paths) == len(set(paths))


def test_a_method_that_is_named_is_the_one_that_runs(workshop: Path) -> None:
    """Of a network whose bound is hopeless, too: then its 0 % is measured."""
    words = (*QUICK, "--json", "--method", "lipschitz")
    found = document(
        "audit", workshop / "plain.safetensors", *words, "--fail-on", "proven@0.05<0.2", code=7
    )
    assert [item["method"] for item in found["certificates"]] == ["lipschitz"]
    assert found["gate"]["judged"][0]["measured"] == 0.0
    assert {item["stage"] for item in found["skipped"]} >= {"local", "smoothing"}
    assert "--method lipschitz" in found["reproduce"]


def test_a_denoiser_stands_before_the_smoothed_network(workshop: Path, tmp_path: Path) -> None:
    model = folder_of_diffusers(tmp_path / "model")
    words = ("--limit", 3, "-e", 0.05, "--time-budget", "10m", "--method", "smoothing", "--json")
    audit = document("audit", workshop / "plain.safetensors", *words, "--denoiser", model)
    assert audit["certificates"], audit["skipped"]
    (smoothed,) = audit["certificates"]
    assert smoothed["parameters"]["denoiser"] == denoiser.read_denoiser(model, 1).at(0.05).digest
    assert "behind a denoiser (diffusers UNet2DModel" in smoothed["about"]
    assert f"--denoiser {model}" in audit["reproduce"]


def test_a_denoiser_that_is_refused_costs_no_audit(workshop: Path, tmp_path: Path) -> None:
    net = workshop / "plain.safetensors"
    for path, code in ((tmp_path / "nowhere", 3), (folder_of_diffusers(tmp_path, {"twist": 1}), 4)):
        certvit("audit", net, *QUICK, "--denoiser", path, code=code)


def test_attacks_among_images_that_a_file_can_hold(workshop: Path) -> None:
    """Each success survives the file; the document and the command that repeats it say so."""
    words = ("--limit", 12, "-e", 0.5, "-a", "pgd-10", "--method", "lipschitz", "--json", "-q")
    audited = document("audit", workshop / "plain.safetensors", *words, "--pixels", "8bit")
    attack = audited["attack"]
    assert attack["settings"]["pixels"] == "8bit"
    assert attack["fooled"]["0.5"] == attack["fooled_8bit"]["0.5"] > 0
    assert "--pixels 8bit" in audited["reproduce"]
    certvit("audit", workshop / "plain.safetensors", "--pixels", "16bit", code=2)


def test_a_stage_that_ends_during_an_import_lets_it_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off inside `import sympy`, the next gradient of the process failed."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.3)\nWHOLE = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def stage() -> None:
        with plan.EndsAfter(0.05):
            __import__("slow_to_import")
            time.sleep(5)

    with pytest.raises(plan.OutOfTime):
        stage()
    assert sys.modules.pop("slow_to_import").WHOLE


class EndsSlowly:
    """Busy when it is deleted, so that the time ends there."""

    def __del__(self) -> None:
        time.sleep(0.2)


@pytest.mark.parametrize("by", ["__del__", "a weak reference's callback"])
def test_time_that_ends_while_an_object_is_deleted_ends_the_stage_soon_after(
    by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what is raised there, and printed "Exception ignored" in the audit's output."""
    before = sys.unraisablehook
    rings: list[float] = []

    def stage() -> None:
        with plan.EndsAfter(0.05):
            if by == "__del__":
                EndsSlowly()
            else:
                one = {1}
                weak = weakref.ref(one, lambda _: time.sleep(0.2))
                assert weak() is one
                del one
            rings.append(signal.getitimer(signal.ITIMER_REAL)[0])
            time.sleep(1)

    with pytest.raises(plan.OutOfTime):
        stage()
    assert 0 < rings[0] < 0.1  # of five seconds between two rings
    assert sys.unraisablehook is before
    assert "ignored" not in capsys.readouterr().err
