"""What an audit found, as the evidence that the commands would have written, for `log` and `log --verify`."""

from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.report.document import Attacked, Audit, Certified, Patched, to_json


def with_evidence(checkpoint: Checkpoint, audit: Audit, attention_weight: float | None, seed: int) -> Checkpoint:
    """The same tensors with entries of lipschitz, certify (the best method last) and attack."""
    if audit.bound is not None:
        result = {
            "upper": audit.bound.upper,
            "log10_upper": audit.bound.log10_upper,
            "lower": None if audit.slope is None else audit.slope.lower,
            "why": audit.bound.why,
            "attention_weight": attention_weight,
        }
        about: dict[str, Any] = {"images": 0 if audit.slope is None else audit.slope.images}
        checkpoint = checkpoint.with_evidence("lipschitz", about, result)
    for found in sorted(audit.certificates, key=_worth):
        about = {
            "dataset": found.dataset.name,
            "split": found.dataset.split,
            "limit": found.dataset.images,
            "seed": seed,
            "method": found.method,
        }
        checkpoint = checkpoint.with_evidence("certify", about, _certified(found))
    if audit.patched is not None:
        dataset = audit.patched.dataset
        about = {
            "dataset": dataset.name,
            "split": dataset.split,
            "limit": dataset.images,
            "seed": seed,
            "method": "patch",
        }
        checkpoint = checkpoint.with_evidence("certify", about, _against_patches(audit.patched))
    if audit.attack is not None:
        parameters = {
            "dataset": audit.attack.dataset.name,
            "split": audit.attack.dataset.split,
            "images": audit.attack.dataset.images,
            "attacks": [audit.attack.attacks],
            "radii": [[float(radius) for radius in audit.attack.robust]],
            "norm": [audit.attack.norm],
            "settings": audit.attack.settings,
        }
        checkpoint = checkpoint.with_evidence("attack", parameters, _attacked(audit.attack))
    return checkpoint


def _worth(found: Certified) -> tuple[bool, float]:
    """Proofs that certify something after statements of chance, statements of chance after proofs that certify nothing."""
    best = max((share.share for share in found.certified.values()), default=0.0)
    return found.failure == 0 and best > 0, best


def _certified(found: Certified) -> dict[str, Any]:
    return {
        "dataset": to_plain(found.dataset),
        "clean": found.clean.share,
        "certified": {radius: share.share for radius, share in found.certified.items()},
        "average_radius": found.average_radius,
        "images": found.clean.images,
        "method": found.method,
        "failure": found.failure,
        "promise": found.promise,
        "arithmetic": found.arithmetic,
        "parameters": found.parameters,
    }


def _against_patches(found: Patched) -> dict[str, Any]:
    return {
        "dataset": to_plain(found.dataset),
        "clean": found.clean.share,
        "certified": {size: share.share for size, share in found.certified.items()},
        "images": found.clean.images,
        "method": "patch",
        "failure": 0.0,
        "promise": "proof",
        "arithmetic": found.arithmetic,
        "parameters": found.parameters,
    }


def _attacked(found: Attacked) -> dict[str, Any]:
    first = next(iter(found.robust))
    return {
        "dataset": to_plain(found.dataset),
        "clean": found.clean.share,
        "robust": found.robust[first].share,
        "epsilon": float(first),
        "norm": found.norm,
        "images": found.clean.images,
        "attacks": {", ".join(found.attacks): found.robust[first].share},
        "curve": {radius: share.share for radius, share in found.robust.items()},
        "median_norm": found.median_norm,
    }


def to_plain(part: Any) -> Any:
    return to_json(part)
