"""Reports of `certify`, `attack`, read as the evidence that the run writes with -o."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from certcli.checkpoint.record import Evidence
from certcli.checkpoint.schema import Digest, Json, Share, convert_json
from certcli.evaluation.evidence import count_of
from certcli.evaluation.evidence_schema import AttackResult, CertifyResult, ImageCount, JudgedImages
from certcli.evaluation.intervals import share_interval
from certcli.system.errors import Refused, one_line

REPORTS: Mapping[str, frozenset[str]] = {
    "lipschitz": frozenset({"proof"}),
    "certify": frozenset({"method", "certified"}),
    "attack": frozenset({"attacks", "robust"}),
    "audit": frozenset({"certificates"}),
}
"""Who writes reports, and fields that make a document one of theirs."""
OF_THE_METHOD = ("norm", "domain", "sigma", "reach", "passes")
"""Fields beside the evidence that the method states when it is made ready again."""
DERIVED = ("bound", "intervals", "not_drawn_for", "methods")
WORDS_OF_AUDITS = "words, blocks, abstained and seconds of its bound and certificates"
SHOWN_NAMES = 40
"""Fields that nothing recomputes, of which a person reads the names."""


def kind_of(document: Mapping[str, Any]) -> str:
    """Return the command that writes such a document; Refused for any other."""
    command = document.get("command")
    for name, fields in REPORTS.items():
        if command == name and fields <= document.keys():
            if document.get("schema") != 1:
                raise Refused("its schema is not 1, the one that this version reads")
            return name
    raise Refused("no lipschitz, certify, attack or audit writes such a document")


def unread_fields(names: Iterable[str]) -> str:
    """Return the names of fields that nothing recomputes, in one line."""
    spelled = [one_line(name)[:40] for name in sorted(names)]
    more = len(spelled) - SHOWN_NAMES
    return ", ".join([*spelled[:SHOWN_NAMES], *([f"{more} more"] if more > 0 else [])])


def unread_of(document: Mapping[str, Any]) -> str:
    """Return the fields of a report of certify, attack or audit that nothing recomputes."""
    checked = {"schema", "command", "checkpoint"}
    kind = kind_of(document)
    if kind == "certify":
        checked |= {"dataset", *CertifyResult.__struct_fields__, *OF_THE_METHOD, *DERIVED}
    elif kind == "attack":
        checked |= {*AttackResult.__struct_fields__}
    else:
        checked |= {"bound", "slope", "certificates", "patched", "attack"}
    words = {WORDS_OF_AUDITS} if kind == "audit" else set()
    return unread_fields({*document, *words} - checked)


def contradictions(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a report of certify says twice, and differently.

    Its fields at the top are those of the first of several methods; an interval follows from its
    share.
    """
    parts = _methods(document)
    for name, value in parts[0].items():
        if document.get(name) != value:
            yield f"{one_line(name)[:40]} is another one in its methods"
    for part in parts:
        intervals = part.get("intervals")
        claimed = {"clean": part.get("clean"), **convert_json(part.get("certified"), Json)}
        shares = convert_json(claimed, dict[str, Share])
        images = convert_json(part.get("images"), ImageCount)
        if intervals is None:
            continue
        if not isinstance(intervals, dict) or intervals.keys() != shares.keys():
            yield "its intervals are not those of its shares"
            return
        for key, share in shares.items():
            interval = convert_json(intervals[key], tuple[Share, Share])
            ends = share_interval(count_of(share, images), images)
            if not all(map(_near, interval, ends)):
                yield f"the interval at {one_line(key)[:40]} is not that of its share"


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def method_fields(document: Mapping[str, Any], entries: Sequence[Evidence]) -> dict[int, Json]:
    """Return, by the number of the entry, what the report says of each method beside the evidence."""
    parts = iter(_methods(document))
    return {
        number: _kept(next(parts), OF_THE_METHOD)
        for number, entry in enumerate(entries)
        if entry.command == "certify"
    }


def entries_of(document: Mapping[str, Any], seed: int) -> list[Evidence]:
    """Return the evidence that a report of certify or attack states. seed: of the choice of its
    images.

    Raises:
        Refused: it names no network or no images.
    """
    kind = kind_of(document)
    digest = convert_json(document.get("checkpoint"), Digest)
    images = convert_json(document.get("dataset"), JudgedImages)
    if kind == "attack":
        result = _kept(document, AttackResult.__struct_fields__)
        return [Evidence("attack", {}, result, digest)]
    bounds = [
        Evidence("lipschitz", {}, convert_json(part["bound"], Json), digest)
        for part in _methods(document)
        if "bound" in part
    ]
    about = {
        "dataset": images.name,
        "split": images.split,
        "limit": images.images,
        "seed": seed,
    }
    return bounds + [
        Evidence("certify", {**about, "method": result.get("method")}, result, digest)
        for result in _certified(document)
    ]


def _methods(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results of each method: the document itself where it holds one."""
    methods = document.get("methods", [document])
    if not isinstance(methods, list) or not methods:
        raise Refused("its methods are no list of results")
    if not all(isinstance(part, dict) for part in methods):
        raise Refused("its methods are no list of results")
    return methods


def _certified(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each method, with the shares at radii for which the method was drawn."""
    for part in _methods(document):
        result = _kept({**part, "dataset": document["dataset"]}, CertifyResult.__struct_fields__)
        shares, left_out = result.get("certified"), part.get("not_drawn_for", [])
        if isinstance(shares, dict) and isinstance(left_out, list):
            drawn = {key: share for key, share in shares.items() if key not in left_out}
            result["certified"] = drawn or shares
        yield result


def _kept(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: document[name] for name in names if name in document}
