"""An audit for programs: SARIF 2.1.0, JUnit XML, GitHub's annotations; every string is escaped."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from msgspec.structs import asdict

from certcli.evaluation import intervals, threat
from certcli.report.document import Audit
from certcli.report.shares import share_rows
from certcli.system.errors import plain_lines

ROOT = "%SRCROOT%"
"""Base of addresses in the file: code scanning takes it for the repository."""
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "certvit/gate": "A gate of --fail-on: a quantity is worse than demanded, was not measured, or is not decided.",
    "certvit/no-usable-proof": "No proof certifies an image: the network's class may change under the smallest change.",
    "certvit/fooled": "Attacks changed the class of correctly classified images.",
    "certvit/not-done": "A stage of the audit was not done: nothing is known of what it would have found.",
}

LEVELS = {"passed": "none", "not decided": "warning", "failed": "error"}
"""SARIF's level of a gate, by its verdict."""
ANNOTATIONS = {"none": "notice", "note": "notice", "warning": "warning", "error": "error"}
"""GitHub's command, by SARIF's level."""


@dataclass(frozen=True)
class AuditOutcome:
    """What an audit tells another program. subject: what stays the same from run to run.

    Args:
        level: SARIF's; "none": a requirement that was met.
    """

    rule: str
    text: str
    subject: str
    level: str = "note"


def outcomes(audit: Audit) -> Iterator[AuditOutcome]:
    """Yield each gate by its verdict, then what an audit warns of as notes."""
    for row in audit.gate.judged:
        yield AuditOutcome("certvit/gate", row.reason, row.fail_on, LEVELS[row.verdict])
    proofs = [shares.certified for shares in audit.certificates if shares.failure == 0]
    proofs += [] if audit.patched is None else [audit.patched.certified]
    certified = any(share.hits for shares in proofs for share in shares.values())
    if audit.bound is not None and not certified:
        yield AuditOutcome("certvit/no-usable-proof", audit.verdict[0], "proof")
    if audit.attack is not None:
        names = ", ".join(audit.attack.attacks)
        for radius, count in audit.attack.fooled.items():
            fooled = intervals.part_of(count, audit.attack.clean.hits, "correct images")
            if count:
                yield AuditOutcome(
                    "certvit/fooled", f"{names} fooled {fooled} at l2 {radius}", f"{names}@{radius}"
                )
    for item in audit.skipped:
        yield AuditOutcome("certvit/not-done", f"{item.stage}: {item.why}", item.stage)


def as_annotations(audit: Audit) -> str:
    """Return a GitHub workflow command a line: failed gates are errors, open ones warnings.

    Source: GitHub, *Workflow commands for GitHub Actions*; the escapes are those of
    `@actions/core`: %, CR and LF everywhere, `:` and `,` in properties.
    """
    return "".join(_annotation(outcome, audit.network.path) for outcome in outcomes(audit))


def _annotation(outcome: AuditOutcome, path: str | None) -> str:
    properties = {"file": path, "title": outcome.rule.replace("/", ": ")}
    written = ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in properties.items()
        if value is not None
    )
    return f"::{ANNOTATIONS[outcome.level]} {written}::{_escaped(outcome.text)}\n"


def _escaped(text: str) -> str:
    return plain_lines(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def as_sarif(audit: Audit) -> str:
    """Return one run: each gate a result (kind pass or fail), what an audit warns of as notes."""
    where = {"uri": quote(audit.network.path or audit.network.name)}
    where |= {} if audit.network.path is None else {"uriBaseId": ROOT}
    location = {"artifactLocation": where, "region": {"startLine": 1}}
    ended = {"endTimeUtc": f"{audit.date}Z"} if audit.date else {}
    run = {
        "tool": {
            "driver": {
                "name": "certvit",
                "version": audit.versions.get("certvit", "0"),
                "rules": [
                    {"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()
                ],
            }
        },
        "invocations": [{"commandLine": audit.reproduce, "executionSuccessful": True, **ended}],
        "originalUriBaseIds": {
            ROOT: {"description": {"text": "The root of the repository that holds the network."}}
        },
        "artifacts": [{"location": where, "hashes": {"certvit-function": audit.checkpoint}}],
        "results": [
            {**_sarif_result(outcome), "locations": [{"physicalLocation": location}]}
            for outcome in outcomes(audit)
        ],
        "properties": {"headline": audit.headline, **machine_properties(audit)},
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _sarif_result(outcome: AuditOutcome) -> dict[str, Any]:
    subject = f"{outcome.rule}\n{outcome.subject}".encode()
    return {
        "ruleId": outcome.rule,
        "ruleIndex": list(RULES).index(outcome.rule),
        "kind": "pass" if outcome.level == "none" else "fail",
        "level": outcome.level,
        "message": {"text": outcome.text},
        "partialFingerprints": {"certvit/v1": sha256(subject).hexdigest()},
    }


def machine_properties(audit: Audit) -> dict[str, str]:
    """Return date, machine and versions under flat names."""
    return {
        **({"date": audit.date} if audit.date else {}),
        **{f"version.{name}": version for name, version in audit.versions.items()},
        **({} if audit.machine is None else {k: str(v) for k, v in asdict(audit.machine).items()}),
    }


def xml_text(text: str) -> str:
    """Characters that XML 1.0 may hold; others become U+FFFD."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def as_junit(audit: Audit) -> str:
    """One suite: a test a gate, a skipped test a stage that was not done, figures as properties,
    the verdict as its output.

    Allowed by Ant's JUnit.xsd (windyroad), the strictest, and by Jenkins' junit-10.xsd. Documents
    travel: no host is named.
    """
    name = xml_text(audit.network.name)
    element = ElementTree.SubElement
    root = ElementTree.Element("testsuites")
    counts = {
        "name": name,
        "tests": str(len(audit.gate.judged) + len(audit.skipped) + 1),
        "failures": str(sum(not row.passed for row in audit.gate.judged)),
        "errors": "0",
        "skipped": str(len(audit.skipped)),
        "id": "0",
        "package": "certvit.audit",
        "hostname": "localhost",
        "time": f"{audit.seconds:.2f}",
        "timestamp": audit.date or "1970-01-01T00:00:00",
    }
    suite = element(root, "testsuite", counts)
    properties = element(suite, "properties")
    for key, value in (figures(audit) | machine_properties(audit)).items():
        element(properties, "property", {"name": key, "value": xml_text(value)})

    def case(what: str, seconds: float = 0.0) -> ElementTree.Element:
        words = {"classname": f"certvit.audit.{name}", "name": xml_text(what)}
        return element(suite, "testcase", {**words, "time": f"{seconds:.2f}"})

    case("audit", audit.seconds)
    for row in audit.gate.judged:
        test = case(row.fail_on)
        if not row.passed:
            message = xml_text(row.reason)
            kind = "gate" if row.verdict == "failed" else "gate not decided"
            element(test, "failure", {"message": message, "type": kind}).text = message
    for item in audit.skipped:
        element(case(item.stage), "skipped", {"message": xml_text(item.why)})
    said = "\n".join(filter(None, (audit.headline, *audit.verdict)))
    element(suite, "system-out").text = xml_text(said)
    element(suite, "system-err")
    ElementTree.indent(root, " ")
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def figures(audit: Audit) -> dict[str, str]:
    """Return every figure of the audit under a flat name, with n where it is a share."""
    values = {"checkpoint": audit.checkpoint}
    if audit.bound is not None:
        values["upper"] = audit.bound.upper_text
    if audit.slope is not None:
        values["slope"] = threat.rounded_down(audit.slope.lower, 6)
    if audit.attention_weight is not None:
        values["attention_weight"] = threat.rounded_up(audit.attention_weight, 6)
    for row in share_rows(audit):
        values[row.key] = f"{row.share.share:.4f} (n = {row.share.images}, {row.holds})"
    return values
