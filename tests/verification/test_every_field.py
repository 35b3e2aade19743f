"""Each field of each report, edited by hand: refuted, refused, or named as the author's word."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certcli.audit import attacking
from certcli.checkpoint.schema import Json, ReportFields, decode_json
from certcli.report.document import from_json
from certcli.system.errors import Refused
from certcli.verification.documents import (
    document_contradictions,
    evidence_of_document,
    kind_of,
    verify_laws,
)
from tests.helpers import commands, grids

Place = tuple[str | int, ...]
IMAGES = ("--dataset", "digits", "--limit", 4)
WAYS = ("--method", "lipschitz", "--method", "box", "--method", "smoothing", "--samples", 100)
COMMANDS: dict[str, tuple[object, ...]] = {
    "lipschitz": ("lipschitz", "--limit", 2),
    "certify": ("certify", *IMAGES, *WAYS, "-e", 0.1, "-e", 0.3),
    "patch": ("certify", *IMAGES, "--method", "patch", "--patch", 1),
    "audit": ("audit", *IMAGES, "--method", "lipschitz", "--method", "patch", "--patch", 1),
}
WEAKER = {
    "certify": ("average_radius", "certified", "bound.upper", "bound.log10_upper"),
    "patch": ("certified",),
    "audit": ("average_radius", "attack", "slope", "bound.upper", "bound.log10_upper"),
    "lipschitz": ("layers.*.log10_upper", "layers.*.log10_cumulative", "layers.*.upper"),
}
"""Fields that may state less than what is proven."""
EXTREME = (0, -1, 5e-324, 1.7e308, -1.7e308, 2**63, 10**19)
WORDS = ("title", "statement", "about", "why", "drivers")
"""Named as the words of a bound or a certificate."""
RECOMPUTED = {
    "patch": ("parameters.cell.*", "parameters.rows"),
    "audit": ("patched.parameters.cell.*", "patched.parameters.rows", "patched.parameters.masks"),
}
"""Parameters of a classifier behind masks: that of the changed ones is certified again."""


def leaves(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each number, text, switch or null, of each list its first entry alone."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:1]):
            yield from leaves(inner, (*path, place))
    else:
        yield path, value


def edited(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [type(value)(value * 2 + 1), type(value)(value / 2)]
    return ["linf" if value == "l2" else "all" if value == "box" else f"{value}5"]


def put(report: Any, path: Place, value: Any) -> Any:
    changed = copy.deepcopy(report)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def containers(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each dictionary and list below, of each list those of its first entry alone."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in parts:
        if isinstance(inner, (dict, list)):
            yield (*path, key), inner
            yield from containers(inner, (*path, key))


def require_judged(report: Any) -> None:
    """Require that numbers of any size, and other containers, end in a judgement or a refusal, not
    in a bug."""
    others = {int: EXTREME, float: EXTREME, dict: [[], "x"], list: [{}, "x", [[]]]}
    for place, value in [*leaves(report), *containers(report)]:
        for other in others.get(type(value), ()):
            text = json.dumps(put(report, place, other))
            with contextlib.suppress(Refused):
                if (kind := kind_of(decode_json(text, Json))) == "lipschitz":
                    verify_laws(decode_json(text, ReportFields))
                elif kind == "audit":
                    from_json(text)
                else:
                    assert evidence_of_document(json.loads(text), 0)
                    list(document_contradictions(json.loads(text)))


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_edited_field_is_refuted_or_named(
    kind: str,
    workshop: Path,
    tmp_path: Path,
    proven_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attacking, "PATCHED", 1)
    network = workshop / "certified.safetensors"
    command, *words = COMMANDS[kind]
    report = commands.document(command, network, *words)
    require_judged(report)
    path = tmp_path / "r.json"
    again = ("verify", path, network, "--dataset", "digits", "--proven-only", "--json", "-q")
    path.write_text(json.dumps(report))
    honest = json.loads(commands.console(*again).out)
    assert honest["verified"], honest
    named = honest["claims"][-1]["statement"]
    passed = set()
    count = 0
    for place, value in leaves(report):
        field = ".".join("*" if isinstance(key, int) else key for key in place)
        words = {*re.findall(r"\w+", named), *WORDS}
        if words & {*map(str, place)} or any(name in field for name in WEAKER[kind]):
            continue
        others = [other for other in edited(value) if other != value]
        for other in others if grids.EVERY else others[count % max(1, len(others)) :][:1]:
            path.write_text(json.dumps(put(report, place, other)))
            done = commands.console(*again)
            count += 1
            assert done.code in (0, 3, 4, 6, 7), (field, other, done.err)
            if done.code == 0:
                passed.add(field)
    assert count > 20
    assert passed <= {*RECOMPUTED.get(kind, ())}
