"""Reports of `certify` and `attack`, read as the evidence that the same run writes into a checkpoint with -o."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from certcli.checkpoint.record import Evidence
from certcli.checkpoint.schema import Digest, convert
from certcli.evaluation.evidence import AttackResult, CertifyResult, JudgedImages
from certcli.system.errors import Refused


def kind_of(document: Mapping[str, Any]) -> str:
    """Return the command that writes such a document; Refused for any other."""
    if "proof" in document:
        return "lipschitz"
    if document.get("command") == "audit":
        return "audit"
    if {"method", "certified"} <= document.keys():
        return "certify"
    if {"attacks", "robust"} <= document.keys():
        return "attack"
    raise Refused("no lipschitz, certify, attack or audit writes such a document")


def entries_of(document: Mapping[str, Any], seed: int) -> list[Evidence]:
    """Return the evidence that a report of certify or attack states. seed: of the choice of its images.

    Raises:
        Refused: it names no network or no images.
    """
    kind = kind_of(document)
    digest = convert(document.get("checkpoint"), Digest)
    images = convert(document.get("dataset"), JudgedImages)
    if kind == "attack":
        result = _kept(document, AttackResult.__struct_fields__)
        return [Evidence("attack", {}, result, digest)]
    about = {
        "dataset": images.name,
        "split": images.split,
        "limit": images.images,
        "seed": seed,
    }
    return [
        Evidence("certify", {**about, "method": result.get("method")}, result, digest)
        for result in _certified(document)
    ]


def _certified(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each method, with the shares at radii for which the method was drawn."""
    methods = document.get("methods", [document])
    if not isinstance(methods, list) or not all(isinstance(part, dict) for part in methods):
        raise Refused("its methods are no list of results")
    for part in methods:
        result = _kept({**part, "dataset": document["dataset"]}, CertifyResult.__struct_fields__)
        shares, left_out = result.get("certified"), part.get("not_drawn_for", [])
        if isinstance(shares, dict) and isinstance(left_out, list):
            drawn = {key: share for key, share in shares.items() if key not in left_out}
            result["certified"] = drawn or shares
        yield result


def _kept(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: document[name] for name in names if name in document}
