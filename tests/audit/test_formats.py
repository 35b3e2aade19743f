"""The formats of an audit: schemas, figures that agree with the document, and hostile names that
stay text.
"""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from certcli.report import audit_page, document, machine
from certcli.report.page import Figure, Gallery
from tests.audit.conftest import HOSTILE, QUICK
from tests.helpers.commands import certvit, problems

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "schema" / "audit.json").read_text())


def in_order(schema: Any) -> Any:
    """Return a schema with its alternatives sorted: their order is msgspec's own."""
    if isinstance(schema, list):
        return sorted(map(in_order, schema), key=repr)
    return (
        {key: in_order(value) for key, value in schema.items()}
        if isinstance(schema, dict)
        else schema
    )


def test_the_published_schema_is_the_documents(folder: Path) -> None:
    page = ROOT / "docs" / "schema" / "audit.json"
    stated, own = (
        in_order(json.loads(text)) for text in (page.read_text(), document.written_schema())
    )
    assert stated == own, "run: python -m certcli.report.document > docs/schema/audit.json"
    for name in ("certified", "plain"):
        text = (folder / f"{name}.json").read_text()
        assert problems(json.loads(text), SCHEMA) == []
        assert document.from_json(text).verdict
    wrong = json.loads((folder / "plain.json").read_text())
    del wrong["verdict"]
    wrong["clean"]["share"] = 1.5
    wrong["gate"]["passed"] = "yes"
    assert len(problems(wrong, SCHEMA)) == 3


class Read(HTMLParser):
    """Tags, addresses and event handlers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_a_page_stands_alone_and_hostile_names_stay_text(
    folder: Path, hostile: document.Audit
) -> None:
    figure = Figure(HOSTILE, [("data:image/png;base64,AA==", HOSTILE)] * 3, False)
    pictures = {name: Gallery(HOSTILE, HOSTILE, [figure]) for name in ("first", "patch", "fooled")}
    for text in (
        (folder / "certified.html").read_text(),
        audit_page.text_of(hostile, ".html", pictures),
    ):
        page = Read()
        page.feed(text)
        assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
        assert page.handlers == []
        inside = [address[1:] for address in page.addresses if address.startswith("#")]
        assert len(inside) >= 3
        assert [name for name in inside if f'id="{name}"' not in text] == []
        others = [address for address in page.addresses if not address.startswith("#")]
        assert all(address.startswith("data:image/png;base64,") for address in others)
        assert "docs/" not in text
        assert "url(" not in text
        assert "@import" not in text
        assert "prefers-color-scheme: dark" in text
        assert "@media print" in text
        assert page.tags.count("svg") == 1
        assert "title" not in page.tags[page.tags.index("svg") :]  # nothing needs a pointer
        broken = re.findall(
            r'<td class="long">(.*?)</td>', text, re.DOTALL
        )  # only these may be parted within a word
        assert [cell for cell in broken if max(map(len, unescape(cell).split())) <= 24] == []
    assert broken
    fooled = json.loads((folder / "certified.json").read_text())["attack"]["fooled"]["0.3"]
    assert (folder / "certified.html").read_text().count("<figcaption>image ") == min(6, fooled)


def test_machine_formats_keep_hostile_names_as_text(hostile: document.Audit) -> None:
    suite = ElementTree.fromstring(audit_page.text_of(hostile, ".xml")).find("testsuite")
    assert suite.get("name", "").startswith("</title><script>")
    assert {case.tag for case in suite} == {"properties", "testcase", "system-out", "system-err"}
    counted = {
        tag: sum(case.find(tag) is not None for case in suite) for tag in ("failure", "skipped")
    }
    assert (counted["failure"], counted["skipped"]) == (
        int(suite.get("failures", "")),
        int(suite.get("skipped", "")),
    )
    assert len(suite.findall("testcase")) == int(suite.get("tests", ""))
    assert json.loads(audit_page.text_of(hostile, ".json"))["network"]["name"] == HOSTILE


def objects(text: str, suffix: str) -> Any:
    """A report as JSON; XML elements as objects with their tag, attributes and children."""
    if suffix == ".sarif":
        return json.loads(text)

    def plain(element: ElementTree.Element) -> dict[str, Any]:
        return {
            "tag": element.tag,
            "attributes": element.attrib,
            "children": [plain(child) for child in element],
        }

    return plain(ElementTree.fromstring(text))


@pytest.mark.parametrize(
    ("suffix", "schema"), [(".sarif", "sarif-2.1.0.json"), (".xml", "junit.json")]
)
def test_sarif_and_junit_are_what_their_schemas_allow(
    folder: Path, hostile: document.Audit, suffix: str, schema: str
) -> None:
    """SARIF by the schema of OASIS; JUnit by Ant's JUnit.xsd within Jenkins' junit-10.xsd, as a
    JSON schema.
    """
    rules = json.loads((ROOT / "tests" / "helpers" / schema).read_text())
    for text in ((folder / f"certified{suffix}").read_text(), audit_page.text_of(hostile, suffix)):
        found = objects(text, suffix)
        assert problems(found, rules) == []
        found["unknown"] = 1
        assert len(problems(found, rules)) == 1


def read_annotation(line: str) -> tuple[str, dict[str, str], str]:
    """Return command, properties and message of a line, as GitHub's runner reads it."""
    command, _, message = line.removeprefix("::").partition("::")
    name, _, pairs = command.partition(" ")
    escapes = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))

    def unescaped(text: str) -> str:
        for escape, character in escapes:
            text = text.replace(escape, character)
        return text

    properties = dict(pair.split("=", 1) for pair in pairs.split(","))
    return name, {key: unescaped(value) for key, value in properties.items()}, unescaped(message)


def test_annotations_are_one_line_an_outcome_and_escaped(
    folder: Path, hostile: document.Audit
) -> None:
    nasty = "100 % of it:, done\r\n::error::no"
    network = msgspec.structs.replace(hostile.network, path="models/a,b:c%d\n.safetensors")
    judged = [
        document.GateResult(
            fail_on=nasty, passed=False, verdict=verdict, measured=None, reason=nasty
        )
        for verdict in ("failed", "not decided", "passed")
    ]
    gate = document.GateReport(passed=False, verdict="failed", reasons=[nasty], judged=judged)
    audit = msgspec.structs.replace(hostile, network=network, gate=gate)
    text = machine.as_annotations(audit)
    lines = text.removesuffix("\n").split("\n")
    assert "\r" not in text
    assert len(lines) == len(list(machine.outcomes(audit))) > len(judged)
    commands = [read_annotation(line) for line in lines]
    assert [command for command, _, _ in commands[:3]] == ["error", "warning", "notice"]
    assert {command for command, _, _ in commands[3:]} == {"notice"}
    for _, properties, message in commands:
        assert properties["file"] == "models/a,b:c%d\n.safetensors"
        assert properties["title"].startswith("certvit: ")
        assert not message.startswith("::")
    assert commands[0][2].startswith("100 % of it:, done\\r")
    plain = document.from_json((folder / "plain.json").read_text())
    assert "file=" not in machine.as_annotations(plain)  # outside every repository


def test_annotations_stand_on_stdout_after_the_answer(workshop: Path) -> None:
    words = ("audit", workshop / "certified.safetensors", *QUICK, "--fail-on", "upper>1e-3")
    done = certvit(*words, "--format", "github", code=7)
    lines = done.stdout.splitlines()
    (failed,) = [line for line in lines if line.startswith("::error ")]
    assert read_annotation(failed)[2].startswith("Lipschitz bound: required at most 0.001")
    assert [line for line in certvit(*words, code=7).stdout.splitlines() if line[:2] == "::"] == []
    for refused in (("--format", "gitlab"), ("--format", "github", "--json")):
        certvit(*words, *refused, code=2)
