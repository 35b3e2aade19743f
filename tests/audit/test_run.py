"""`certvit audit`: what it says is what the commands find, within its time, and a gate that was not measured fails."""

import csv
import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from certcli.attack.settings import AttackSettings
from certcli.audit import gates
from certcli.audit import judging as judged
from certcli.audit import run as audit_run
from certcli.audit.clock import Clock, OutOfTime, Part
from certcli.certify.certificate import Doubt
from certcli.certify.local_options import Local
from certcli.certify.methods import prepare
from certcli.certify.smoothing.functions import Classifier
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.threat import Threat
from certcli.images import datasets
from certcli.models import build
from certcli.report import formats
from certcli.report.document import Audit, Block, Gate, Judged, Share, Step, from_json, written_schema
from certcli.report.page import Picture
from certcli.system.errors import GateError, UsageError
from tests.helpers.commands import attempt, certvit, document

ROOT = Path(__file__).parents[2]
SUFFIXES = ("json", "csv", "html", "sarif", "xml", "svg", "md")
QUICK = ("--limit", 24, "-e", 0.05, "-e", 0.3, "-a", "fgsm", "--quiet")


@pytest.fixture(scope="module")
def folder(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One audit of the certified network with all that it can write, and one of the plain network."""
    made = tmp_path_factory.mktemp("audit")
    reports = [part for suffix in SUFFIXES for part in ("--report", made / f"certified.{suffix}")]
    certvit("audit", workshop / "certified.safetensors", *QUICK, *reports, "-o", made / "certified.safetensors")
    certvit("audit", workshop / "plain.safetensors", *QUICK, "--time-budget", "8s", "--report", made / "plain.json")
    return made


@pytest.fixture(scope="module")
def certified_audit(folder: Path) -> dict:
    return json.loads((folder / "certified.json").read_text())


def problems(value: Any, rule: dict, root: dict, at: str = "") -> list[str]:
    """What is wrong with a value by a JSON schema, in the words that ours uses; a word that is not known here is one."""
    if "$ref" in rule:
        return problems(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in rule:
        tried = [problems(value, one, root, at) for one in rule["anyOf"]]
        return [] if [] in tried else tried[0]
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    known = {
        "type", "enum", "properties", "required", "additionalProperties", "items", "prefixItems", "minimum", "maximum",
        "exclusiveMaximum", "pattern", "title", "description", "default", "minItems", "maxItems", "$schema", "$defs",
    }  # fmt: skip
    found = [f"{at}: the schema says {word}" for word in set(rule) - known]
    kind = rule.get("type")
    if kind is not None and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [*found, f"{at}: {value!r} is no {kind}"]
    found += [f"{at}: {value!r} is not of {rule['enum']}"] if value not in rule.get("enum", [value]) else []
    if isinstance(value, (int, float)) and not rule.get("minimum", value) <= value <= rule.get("maximum", value):
        found.append(f"{at}: {value} is out of range")
    if isinstance(value, str) and not re.search(rule.get("pattern", ""), value):
        found.append(f"{at}: {value!r} does not fit {rule['pattern']}")
    if isinstance(value, dict):
        inner = rule.get("properties", {})
        found += [f"{at}: no {name}" for name in rule.get("required", []) if name not in value]
        for name, item in value.items():
            extra = rule.get("additionalProperties", True)
            if name in inner or isinstance(extra, dict):
                found += problems(item, inner.get(name, extra), root, f"{at}.{name}")
            elif extra is False:
                found.append(f"{at}: {name} is not known")
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        for number, item in enumerate(value):
            each = first[number] if number < len(first) else rule.get("items")
            found += problems(item, each, root, f"{at}[{number}]") if isinstance(each, dict) else []
    return found


def test_the_published_schema_is_the_documents(folder: Path) -> None:
    page = ROOT / "docs" / "schema" / "audit.json"
    assert page.read_text() == written_schema(), "run: python -m certcli.report.document > docs/schema/audit.json"
    schema = json.loads(page.read_text())
    for name in ("certified", "plain"):
        text = (folder / f"{name}.json").read_text()
        assert problems(json.loads(text), schema, schema) == []
        assert from_json(text).verdict
    wrong = json.loads((folder / "plain.json").read_text())
    del wrong["verdict"]
    wrong["clean"]["share"] = 1.5
    wrong["gate"]["passed"] = "yes"
    assert len(problems(wrong, schema, schema)) == 3


def test_the_answer_is_what_the_commands_find(workshop: Path, folder: Path, certified_audit: dict) -> None:
    path, words = workshop / "certified.safetensors", ("--limit", 24, "-e", 0.05, "-e", 0.3, "--json", "--quiet")
    (found,) = certified_audit["certificates"]
    alone = document("certify", path, *words)
    assert {radius: share["share"] for radius, share in found["certified"].items()} == alone["certified"]
    assert found["dataset"] == alone["dataset"]
    assert found["clean"]["share"] == alone["clean"]
    # the audit takes batches of another size, in which sums may be made in another order
    assert found["average_radius"] == pytest.approx(alone["average_radius"], rel=1e-12)
    attacked = document("attack", path, "-a", "fgsm", *words)
    assert {radius: share["share"] for radius, share in certified_audit["attack"]["robust"].items()} == attacked[
        "curve"
    ]
    assert certified_audit["bound"]["upper"] == document("lipschitz", path, "--no-estimate")["upper"]
    assert certified_audit["slope"]["lower"] <= certified_audit["bound"]["upper"]
    held = found["certified"]["0.05"]
    assert f"{held['hits']} of 24 images" in certified_audit["verdict"][0]
    fooled = certified_audit["attack"]["fooled"]["0.3"]
    assert f"FGSM fooled {fooled} of {found['clean']['hits']} correct images at l2 0.3" in certified_audit["verdict"][1]
    assert {item["stage"] for item in certified_audit["skipped"]} == {"local", "smoothing"}


def test_a_network_without_a_usable_proof_is_told_so(folder: Path) -> None:
    found = json.loads((folder / "plain.json").read_text())
    proven = any(item["failure"] == 0 and item["certified"]["0.05"]["hits"] for item in found["certificates"])
    opening = "The global bound proves nothing: 10^" if proven else "No usable proof: the global bound is 10^"
    assert opening in found["verdict"][0]
    assert "LayerNorms alone contributes 1,000" in found["verdict"][0]
    smoothed = next(item for item in found["certificates"] if item["method"] == "smoothing")
    assert smoothed["failure"] == 0.001
    at = smoothed["certified"]["0.05"]
    assert any(
        f"certifies {at['hits']} of {at['images']} images" in line and "99.9 %" in line for line in found["verdict"]
    )
    assert {"local", "smoothing"} <= {item["method"] for item in found["certificates"]}
    again = found["reproduce"].split()
    assert again[:2] == ["certvit", "audit"]
    assert "--limit" in again


def test_evidence_is_verified_and_the_input_is_untouched(workshop: Path, folder: Path) -> None:
    audited = Checkpoint.read(folder / "certified.safetensors")
    assert audited.digest == Checkpoint.read(workshop / "certified.safetensors").digest
    fresh = [entry.command for entry in audited.record.evidence if entry.digest == audited.digest]
    assert fresh[-3:] == ["lipschitz", "certify", "attack"]
    certvit("log", folder / "certified.safetensors", "--verify", "--proven-only")
    wrong = {**audited.record.evidence[-2].result}
    wrong["certified"] = {"0.3": min(1.0, wrong["certified"]["0.3"] + 0.1)}
    forged = audited.with_evidence("certify", audited.record.evidence[-2].parameters, wrong)
    forged.write(folder / "forged.safetensors")
    certvit("log", folder / "forged.safetensors", "--verify", "--proven-only", code=7)


def test_what_is_shown_to_be_typed_works_here(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal names the files as they were typed, with what reading them needs; a document has no folders."""
    (tmp_path / "a b").mkdir()
    shutil.copy(workshop / "certified.safetensors", tmp_path / "a b" / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    words = ["audit", "a b/net.safetensors", "--as-stated", "--dataset", "digits", "--data-dir", ".", "--limit", "4"]
    words += ["--report", "r.json", "-a", "fgsm", "--quiet"]
    shown = attempt(*words).stdout
    again = shlex.split(re.sub(r"\s+", " ", shown.partition("Again: ")[2]))
    assert again[1:8] == words[:7]
    certvit(*again[1:], "--quiet")
    following = shlex.split(re.sub(r"\s+", " ", shown.partition("Next: ")[2].partition("\n  or:")[0]))
    certvit(*following[1:], "--quiet")
    assert "net.safetensors --as-stated" in json.loads(Path("r.json").read_text())["reproduce"]
    assert "a b" not in Path("r.json").read_text()


def test_the_records_are_one_line_an_image(folder: Path, certified_audit: dict) -> None:
    with (folder / "certified.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 24 == len(certified_audit["records"])
    held = sum(row["label"] == row["prediction"] and float(row["radius_lipschitz"]) > 0.3 for row in rows)
    assert held == certified_audit["certificates"][0]["certified"]["0.3"]["hits"]
    assert sum(row["withstood_0.3"] == "1" for row in rows) == certified_audit["attack"]["robust"]["0.3"]["hits"]


GATES = {
    "certified@0.05<0.01": True,
    "certified@0.05 < 1/100": True,
    "certified@0.05<=1": False,
    "proven@0.3<1": False,
    "robust@0.3<1": False,
    "clean<0.01": True,
    "upper>1e9": True,
    "upper>=0.001": False,
    "certified@0.07<=1.0": False,
}


def test_gates(workshop: Path) -> None:
    """Each on its own: those that fail do not hide the others, and radii that only a gate names are measured."""
    words = [part for gate in GATES for part in ("--fail-on", gate)]
    found = document("audit", workshop / "certified.safetensors", *QUICK, *words, code=7)
    assert {row["fail_on"]: row["passed"] for row in found["gate"]["judged"]} == GATES
    assert found["gate"]["passed"] is False
    schema = json.loads((ROOT / "docs" / "schema" / "audit.json").read_text())
    assert problems(found, schema, schema) == []  # what stands on stdout is the document, too
    assert len(found["gate"]["reasons"]) == sum(not passed for passed in GATES.values())
    met = [part for gate, passed in GATES.items() if passed for part in ("--fail-on", gate)]
    assert document("audit", workshop / "certified.safetensors", *QUICK, *met)["gate"]["passed"] is True


@pytest.mark.parametrize(
    ("gate", "hint"),
    [
        ("certifed@0.25<0.4", "did you mean 'certified'"),
        ("certified<0.4", "certified@0.25<0.4"),
        ("clean@0.5<0.4", "clean<0.9"),
        ("certified@0.25>0.4", "did you mean 'certified@0.25<0.4'"),
        ("upper<100", "did you mean 'upper>100'"),
        ("certified@0.25<40", "0.4 stands for 40 %"),
        ("upper>nan", ""),
        ("upper>1/0", ""),
        ("clean<0.9; clean<0.8", ""),
        ("clean<-1", ""),
        ("", ""),
    ],
)
def test_what_is_no_gate_is_refused(gate: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        gates.parse(gate)
    assert hint in refused.value.hint


def test_a_gate_that_was_not_measured_fails_and_says_why(workshop: Path) -> None:
    few = ("--quiet", "--json", "--limit", 8, "-e", 0.05)
    bare = Checkpoint.read(workshop / "init.safetensors")
    assert bare.record.dataset is None
    found = document("audit", workshop / "init.safetensors", *few, "--fail-on", "certified@0.1<0", code=7)
    assert found["clean"] is None
    assert found["attack"] is None
    assert "no labelled images" in found["gate"]["reasons"][0]
    assert found["gate"]["judged"][0]["measured"] is None
    assert "Without labelled images" in found["verdict"][-1]
    share = Share.of(1, 2)
    judged = gates.judge(
        [gates.parse("robust@0.5<0"), gates.parse("clean<0.4")], audit_run.Results(clean=share), (8, 8)
    )
    assert [row.passed for row in judged.judged] == [False, True]


def test_an_audit_of_one_second_names_every_stage_that_did_not_fit(workshop: Path) -> None:
    found = document("audit", workshop / "plain.safetensors", "--time-budget", "1s", "--quiet")
    done = {"bound": found["bound"], "clean": found["clean"], "attack": found["attack"]}
    missing = {item["stage"].partition(",")[0] for item in found["skipped"]}
    assert {name for name, value in done.items() if value is None} <= missing | {"attack"}
    assert {"smoothing", "attack", "clean"} & {item["stage"].partition(",")[0] for item in found["skipped"]}
    assert any("--time-budget" in line for line in found["next"])
    assert sum(share is not None for share in done.values()) + len(missing) >= 3


class OneBatch(Part):
    """Time for one batch, whatever it takes."""

    asked = 0

    @property
    def left(self) -> float:
        self.asked += 1
        return 1e6 if self.asked <= 3 else 0.0  # asked twice when it begins, and before its first batch


def test_rounds_find_what_one_round_finds(workshop: Path) -> None:
    """Attacks and certificates that go on where they ended: the same records, each image once, in order."""
    checkpoint = Checkpoint.read(workshop / "certified.safetensors")
    model, cpu = build.load(checkpoint), torch.device("cpu")
    images = datasets.load("digits", checkpoint.record.input, "test").in_turn(0).select(range(10))

    def attacking() -> judged.Attacking:
        return judged.Attacking(model, images, ["fgsm"], (0.05, 0.3), AttackSettings(), 10, 4, 1e-4, 60.0)

    rounds, whole = attacking(), attacking()
    counts = []
    while rounds.rest:
        rounds.go(OneBatch(1e6))
        counts.append(rounds.count)
    whole.go(Part(1e6))
    assert counts == [4, 8, 10]
    assert rounds.records == whole.records
    assert [row.index for row in rounds.records[:8:2]] != [row.index for row in rounds.records[8:16:2]]
    assert rounds.shares is not None
    assert rounds.shares.robust == whole.shares.robust
    assert len({row.index for row in rounds.exhibits()}) == len(rounds.exhibits()) == len(whole.exhibits())
    going = judged.Certifying(prepare("lipschitz", checkpoint, cpu), images, 4)
    while going.rest:
        assert going.go(OneBatch(1e6)) is False
    assert [row.index for row in going.rows] == images.indices.tolist()
    never = judged.Certifying(prepare("lipschitz", checkpoint, cpu), images, 4)
    assert never.go(Part(0.0)) is True
    assert never.rows == []


@pytest.mark.parametrize("runs", [True, False])
def test_large_networks_are_judged_in_bf16_where_that_is_fast(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """All stages share one network, loaded once."""

    def refused(model: build.PixelModel, precision: str) -> Classifier:
        if precision == "bf16":
            raise UsageError("this network does not run in bf16")
        return Classifier(model, precision)

    network = workshop / "plain.safetensors"  # made when it is first named
    load, loaded = build.load, []
    monkeypatch.setattr(build, "load", lambda *given, **more: (loaded.append(1), load(*given, **more))[1])

    monkeypatch.setattr(audit_run, "LARGE", 1)
    monkeypatch.setattr(build, "multiplies_bf16", lambda device: True)
    if not runs:
        monkeypatch.setattr(audit_run, "Classifier", refused)
    words = ("--limit", 4, "-e", 0.1, "-a", "fgsm", "--method", "smoothing", "--json", "--quiet")
    words += ("--fail-on", "certified@0.3<0")  # holds if it was measured: the noise must reach as far
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


def test_local_certificates_of_an_audit_answer_its_radii_alone(workshop: Path) -> None:
    """One enclosure for each radius that is asked about, in place of a search for the largest."""
    checkpoint = Checkpoint.read(workshop / "plain.safetensors")
    images = datasets.load("digits", checkpoint.record.input, "test").select(range(1))
    given = (images.indices.tolist(), images.fetch([0]), images.labels.tolist())
    certifier = prepare("local", checkpoint, torch.device("cpu"), Local(at=[1e-4, 1e-3, 0.4]))
    tried: list[float] = []
    proven = certifier.proven
    certifier.proven = lambda image, label, radius: tried.append(radius) or proven(image, label, radius)
    (found,) = certifier.batch(*given)
    assert [found.holds_at(Threat("l2", radius)) for radius in (1e-4, 1e-3, 0.4)] == [True, True, False]
    assert len(tried) == 3
    (confirmed,) = certifier.confirm([found], given[1], Doubt(0, 1e-6))
    assert confirmed.status == "verified"
    with pytest.raises(UsageError):
        Local(at=[0.2, 0.1])


def turn_for_ever() -> None:
    while True:
        pass


def test_a_stage_is_broken_off_and_the_timer_is_given_back() -> None:
    part = Clock(1.0).part(0.05)
    with pytest.raises(OutOfTime), part.ended():
        turn_for_ever()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "a timer left behind would ring in another test"
    with pytest.raises(OutOfTime), part.ended():
        pass


def test_wrong_words_are_refused_before_any_work(workshop: Path, tmp_path: Path) -> None:
    path = workshop / "plain.safetensors"
    before = path.read_bytes()
    for words in (
        ("--report", tmp_path / "x.doc"),
        ("-a", "pdg"),
        ("--method", "smooth"),
        ("--time-budget", "soon"),
        ("-o", path, "--force"),
    ):
        certvit("audit", path, *words, code=2)
    assert path.read_bytes() == before
    assert GateError.code == 7


def test_the_parts_of_a_bound_multiply_to_it(folder: Path) -> None:
    for name in ("certified", "plain"):
        bound = json.loads((folder / f"{name}.json").read_text())["bound"]
        assert abs(sum(block["log10"] for block in bound["blocks"]) - bound["log10_upper"]) < 0.01
        paths = [block["path"] for block in bound["blocks"]]
        assert len(paths) == len(set(paths))


HOSTILE = "</title><script>alert(1)</script>\"'&]]>--><svg onload=x>|`*\x1b[31m\u202e"


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Audit:
    """An audit in which every name that a file may choose is hostile."""
    audit = from_json((folder / "plain.json").read_text())
    network = msgspec.structs.replace(audit.network, name=HOSTILE, arch=HOSTILE, reading={HOSTILE: {"value": HOSTILE}})
    gate = Gate(
        passed=False, reasons=[HOSTILE], judged=[Judged(fail_on=HOSTILE, passed=False, measured=None, reason=HOSTILE)]
    )
    return msgspec.structs.replace(
        audit,
        network=network,
        gate=gate,
        verdict=[HOSTILE],
        doubts=[HOSTILE],
        reproduce=HOSTILE,
        lineage=[Step(command=HOSTILE, parameters={HOSTILE: HOSTILE}, seed=0, parent=None)],
        bound=msgspec.structs.replace(
            audit.bound, blocks=[Block(path=HOSTILE, kind=HOSTILE, log10=1.0, text=HOSTILE, why=HOSTILE)]
        ),
        dataset=msgspec.structs.replace(audit.dataset, name=HOSTILE),
    )


class Read(HTMLParser):
    """Tags, addresses and event handlers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_a_page_stands_alone_and_hostile_names_stay_text(folder: Path, hostile: Audit) -> None:
    picture = Picture(HOSTILE, ("data:image/png;base64,AA==",) * 3, (HOSTILE,) * 3, False)
    for text in ((folder / "certified.html").read_text(), formats.text_of(hostile, ".html", [picture])):
        page = Read()
        page.feed(text)
        assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
        assert page.handlers == []
        assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
        assert "url(" not in text
        assert "@import" not in text
        assert "prefers-color-scheme: dark" in text
        assert "@media print" in text
        assert page.tags.count("svg") == 2
        broken = re.findall(r'<td class="long">(.*?)</td>', text, re.DOTALL)  # only these may be parted within a word
        assert [cell for cell in broken if max(map(len, unescape(cell).split())) <= 24] == []
    assert broken
    fooled = json.loads((folder / "certified.json").read_text())["attack"]["fooled"]["0.3"]
    assert (folder / "certified.html").read_text().count("<figcaption>image ") == min(6, fooled)


def test_machine_formats_keep_hostile_names_as_text(hostile: Audit) -> None:
    suites = ElementTree.fromstring(formats.text_of(hostile, ".xml"))
    suite = suites.find("testsuite")
    assert suite is not None
    assert suite.get("name", "").startswith("</title><script>")
    assert {case.tag for case in suite} == {"properties", "testcase", "system-out", "system-err"}
    counted = {tag: sum(case.find(tag) is not None for case in suite) for tag in ("failure", "skipped")}
    assert (counted["failure"], counted["skipped"]) == (int(suite.get("failures", "")), int(suite.get("skipped", "")))
    assert len(suite.findall("testcase")) == int(suite.get("tests", ""))
    badge = ElementTree.fromstring(formats.text_of(hostile, ".svg"))
    assert {element.tag.rpartition("}")[2] for element in badge.iter()} == {"svg", "title", "rect", "g", "text"}
    card = formats.text_of(hostile, ".md")
    front = card.split("---\n")[1]
    assert [
        line for line in card.replace(front, "").splitlines() if "<script>" in line and not line.startswith("    ")
    ] == []
    assert all(line.isprintable() for line in card.splitlines())
    assert json.loads(formats.text_of(hostile, ".json"))["network"]["name"] == HOSTILE


SARIF = {  # of sarif-schema-2.1.0.json: what an object must have, and what of the rest it may have that we write
    "log": ({"version", "runs"}, {"$schema"}),
    "runs": ({"tool"}, {"invocations", "artifacts", "results"}),
    "tool": ({"driver"}, set()),
    "driver": ({"name"}, {"version", "rules"}),
    "rules": ({"id"}, {"shortDescription"}),
    "shortDescription": ({"text"}, set()),
    "invocations": ({"executionSuccessful"}, {"commandLine"}),
    "artifacts": (set(), {"location", "hashes"}),
    "location": (set(), {"uri"}),
    "hashes": (set(), {"certvit-function"}),
    "results": ({"message"}, {"ruleId", "ruleIndex", "kind", "level", "locations"}),
    "message": ({"text"}, set()),
    "locations": (set(), {"physicalLocation"}),
    "physicalLocation": ({"artifactLocation"}, {"region"}),
    "artifactLocation": (set(), {"uri"}),
    "region": (set(), {"startLine"}),
}  # fmt: skip
SUITE = {"name", "id", "package", "hostname", "timestamp", "tests", "failures", "errors", "time"}
JUNIT = {  # of Ant's JUnit.xsd, within Jenkins' junit-10.xsd: element -> (children in order, its attributes, further ones)
    "testsuites": ("(testsuite )*", set(), set()),
    "testsuite": ("properties (testcase )*system-out system-err ", SUITE, {"skipped"}),
    "properties": ("(property )*", set(), set()),
    "property": ("", {"name", "value"}, set()),
    "testcase": ("((skipped|error|failure) )?", {"name", "classname", "time"}, set()),
    "failure": ("", {"type"}, {"message"}),
    "skipped": ("", set(), {"type", "message"}),
    "system-out": ("", set(), set()),
    "system-err": ("", set(), set()),
}
VALUES = {
    "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "time": r"\d+\.\d+", "id": "0", "tests": r"\d+",
    "failures": r"\d+", "errors": r"\d+", "skipped": r"\d+", "hostname": "localhost",
}  # fmt: skip


def objects(value: Any, name: str) -> Iterator[tuple[str, dict]]:
    """Every object of a JSON document, with the key under which it, or the list that holds it, stands."""
    if isinstance(value, dict):
        yield name, value
        for key, inner in value.items():
            yield from objects(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, name)


def test_sarif_and_junit_are_what_their_schemas_allow(folder: Path, hostile: Audit) -> None:
    """Both schemas are closed: a property, an element or an attribute that they do not know is refused by a strict reader."""
    for suffix in (".sarif", ".xml"):
        for text in ((folder / f"certified{suffix}").read_text(), formats.text_of(hostile, suffix)):
            if suffix == ".sarif":
                for name, found in objects(json.loads(text), "log"):
                    needed, known = SARIF[name]
                    assert needed <= set(found) <= needed | known, name
                continue
            for element in ElementTree.fromstring(text).iter():
                children, needed, known = JUNIT[element.tag]
                assert re.fullmatch(children, "".join(f"{child.tag} " for child in element)), element.tag
                assert needed <= set(element.attrib) <= needed | known, element.tag
                for key, value in element.attrib.items():
                    assert re.fullmatch(VALUES.get(key, "(?s).+"), value), (key, value)


def test_sarif_has_what_the_standard_requires(folder: Path, hostile: Audit) -> None:
    """SARIF 2.1.0: version, runs, tool.driver.name (3.13, 3.14, 3.18); a message, a known rule, levels of kinds (3.27)."""
    for text in ((folder / "certified.sarif").read_text(), formats.text_of(hostile, ".sarif")):
        log = json.loads(text)
        assert log["version"] == "2.1.0"
        (run,) = log["runs"]
        driver = run["tool"]["driver"]
        assert driver["name"] == "certvit"
        names = [rule["id"] for rule in driver["rules"]]
        assert len(names) == len(set(names))
        for result in run["results"]:
            assert result["message"]["text"]
            assert names[result["ruleIndex"]] == result["ruleId"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert (result["kind"] == "fail") is (result["level"] != "none")  # 3.27.10: a level belongs to a failure
            for place in result["locations"]:
                uri = place["physicalLocation"]["artifactLocation"]["uri"]
                assert re.fullmatch(r"[A-Za-z0-9._~%/-]+", uri), uri
    assert [row["kind"] for row in run["results"] if row["ruleId"] == "certvit/gate"] == ["fail"]


def test_a_card_is_yaml_and_its_figures_are_the_audits(folder: Path, certified_audit: dict) -> None:
    yaml = pytest.importorskip("yaml")
    _, front, text = (folder / "certified.md").read_text().split("---\n", 2)
    (model,) = yaml.safe_load(front)["model-index"]
    found = {metric["name"]: metric["value"] for result in model["results"] for metric in result["metrics"]}
    share = certified_audit["certificates"][0]["certified"]["0.3"]["share"]
    assert found["certified accuracy, l2 0.3, lipschitz (proof), n = 24"] == pytest.approx(share, abs=1e-6)
    assert certified_audit["verdict"][1] in text
    assert "proven" in (folder / "certified.svg").read_text()


def test_a_method_that_is_named_is_the_one_that_runs(workshop: Path) -> None:
    """Of a network whose bound is hopeless, too: then its 0 % is measured."""
    words = (*QUICK, "--json", "--method", "lipschitz")
    found = document("audit", workshop / "plain.safetensors", *words, "--fail-on", "proven@0.05<0.1", code=7)
    assert [item["method"] for item in found["certificates"]] == ["lipschitz"]
    assert found["gate"]["judged"][0]["measured"] == 0.0
    assert {item["stage"] for item in found["skipped"]} >= {"local", "smoothing"}
    assert "--method lipschitz" in found["reproduce"]


def test_pages_of_certify_and_log(workshop: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page = workshop / "certified.safetensors", folder / "certify.html"
    found = document("certify", path, "--limit", 12, "-e", 0.1, "-e", 0.3, "--quiet", "--html", page)
    text = page.read_text()
    assert f"{100 * found['certified']['0.3']:.1f} %" in text
    assert found["checkpoint"] in text
    monkeypatch.chdir(workshop)  # a page names its files, not where they were
    again = shlex.split(unescape(re.sub("<[^>]+>", "", text.partition("<pre>")[2].partition("</pre>")[0])))
    assert document(*again[1:])["certified"] == found["certified"]
    certvit("certify", path, "--limit", 12, "--quiet", "--html", page, code=2)  # it is there already
    both = folder / "log.html"
    certvit("log", folder / "certified.safetensors", path, "--html", both)
    assert both.read_text().count("Evidence of certified.safetensors") == 2
    assert "(proven)" in both.read_text()  # in the words of the terminal
    certvit("log", folder / "certified.safetensors", "--html", folder / "certified.safetensors", "--force", code=2)
    for made in (page, both):
        read = Read()
        read.feed(made.read_text())
        assert "script" not in read.tags
        assert read.tags.count("svg") == 1
