"""What an audit found, as the evidence that the commands would have written, for `log` and `verify`."""

from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.report.document import (
    AttackShares,
    Audit,
    CertifiedShares,
    Dataset,
    PatchShares,
    to_json,
)


def with_evidence(checkpoint: Checkpoint, audit: Audit, seed: int) -> Checkpoint:
    """Return the same tensors with entries of lipschitz, certify (the best method last) and attack."""
    if audit.bound is not None:
        result = {
            "upper": audit.bound.upper,
            "log10_upper": audit.bound.log10_upper,
            "lower": None if audit.slope is None else audit.slope.lower,
            "why": audit.bound.why,
            "attention_weight": audit.attention_weight,
        }
        about: dict[str, Any] = {"images": 0 if audit.slope is None else audit.slope.images}
        checkpoint = checkpoint.with_evidence("lipschitz", about, result)
    shares: list[CertifiedShares | PatchShares] = [*sorted(audit.certificates, key=_worth)]
    shares += [] if audit.patched is None else [audit.patched]
    for shares_of in shares:
        result = _certify_entry(shares_of)
        about = _images_entry(shares_of.dataset) | {
            "limit": shares_of.dataset.images,
            "seed": seed,
            "method": result["method"],
        }
        checkpoint = checkpoint.with_evidence("certify", about, result)
    if audit.attack is not None:
        about = _images_entry(audit.attack.dataset) | {
            "images": audit.attack.dataset.images,
            "attacks": [audit.attack.attacks],
            "radii": [[float(radius) for radius in audit.attack.robust]],
            "norm": [audit.attack.norm],
            "settings": audit.attack.settings,
        }
        checkpoint = checkpoint.with_evidence("attack", about, _attack_entry(audit.attack))
    return checkpoint


def _images_entry(dataset: Dataset) -> dict[str, Any]:
    return {"dataset": dataset.name, "split": dataset.split}


def _worth(shares: CertifiedShares) -> tuple[bool, float]:
    """Proofs that certify something come last, those that certify nothing first."""
    best = max((share.share for share in shares.certified.values()), default=0.0)
    return shares.failure == 0 and best > 0, best


def _certify_entry(shares: CertifiedShares | PatchShares) -> dict[str, Any]:
    if isinstance(shares, PatchShares):
        special: dict[str, Any] = {"method": "patch", "failure": 0.0, "promise": "proof"}
    else:
        special = {
            name: getattr(shares, name)
            for name in ("method", "failure", "promise", "average_radius")
        }
    return special | {
        "dataset": to_json(shares.dataset),
        "clean": shares.clean.share,
        "certified": {size: share.share for size, share in shares.certified.items()},
        "images": shares.clean.images,
        "arithmetic": shares.arithmetic,
        "parameters": shares.parameters,
    }


def _attack_entry(shares: AttackShares) -> dict[str, Any]:
    first = next(iter(shares.robust))
    return {
        "dataset": to_json(shares.dataset),
        "clean": shares.clean.share,
        "robust": shares.robust[first].share,
        "epsilon": float(first),
        "norm": shares.norm,
        "images": shares.clean.images,
        "attacks": {", ".join(shares.attacks): shares.robust[first].share},
        "curve": {radius: share.share for radius, share in shares.robust.items()},
        "median_norm": shares.median_norm,
    }
