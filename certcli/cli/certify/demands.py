"""What a certification is asked to show, and the options that contradict each other."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from certcli.certify.certificate import CertifiedAccuracy
from certcli.certify.methods import METHODS
from certcli.cli.certify.command import RADII, CertifyOptions
from certcli.cli.shared.command import typed_share
from certcli.cli.shared.output import Gate
from certcli.evaluation.threat import Threat
from certcli.system.errors import UsageError
from certcli.system.options import NOTE

AUTO = "auto"
PROVING = ("lipschitz", "box", "local", "local-lip", "bcp")
"""Methods that prove for an arithmetic, whichever --arithmetic names."""


@dataclass(frozen=True)
class CertifiedDemand:
    """--min-certified: a share of the images against a threat; a share of 0 demands nothing.

    Args:
        every: No record may rest on a file alone.
    """

    threat: Threat
    share: float = 0.0
    every: bool = False

    def check(self, accuracy: CertifiedAccuracy, gate: Gate) -> None:
        hits = round(accuracy.against(self.threat) * accuracy.images)
        gate.demand_share(
            hits,
            accuracy.images,
            self.share,
            f"certified accuracy at {self.threat.proven()}",
            "--min-certified",
        )


def require_compatible(options: CertifyOptions) -> tuple[CertifiedDemand | None, list[Threat]]:
    """Return the demand and the balls (patches wait for the image). UsageError: contradictions."""

    target = options.target
    methods = target.methods
    norm = options.local.norm
    if "patch" not in methods and options.patches.patches:
        raise UsageError(
            "--patch is for --method patch", "certvit certify ... --method patch --patch 32"
        )
    if "patch" in methods and methods != ["patch"]:
        raise UsageError(
            "--method patch stands alone: shares against patches and within radii cannot be compared",
            "certvit certify ... for the other methods",
        )
    for name in ("epsilon", "plot", "attack_records") if "patch" in methods else ():
        if getattr(target, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not go with --method patch", "leave it out"
            )
    demand = None
    threats = list[Threat]()
    if methods != ["patch"]:
        demand, threats = demand_of(
            target.minimum, [Threat(norm, radius) for radius in target.epsilon or RADII[norm]]
        )
    for method in methods:
        if method != AUTO:
            METHODS[method]
    if len(set(methods)) != len(methods) or (AUTO in methods and len(methods) > 1):
        raise UsageError(
            f"--method {' '.join(methods)}: name each method once, and auto alone", "--method auto"
        )
    if norm == "linf" and methods != ["local"]:
        raise UsageError(
            "--norm linf works with --method local only",
            "certvit certify ... --method local --norm linf -e 1/255",
        )
    if options.proof.arithmetic is not None and not set(methods) <= set(PROVING):
        reason = "smoothing has --precision, patch is about the network as it runs"
        raise UsageError(
            f"--arithmetic works with --method {', '.join(PROVING)}: {reason}",
            "leave out --arithmetic",
        )
    for method, values in (("smoothing", options.smoothing), ("local", options.local)):
        if method not in methods and AUTO not in methods and (unused := first_given(values)):
            raise UsageError(
                f"{unused} works with --method {method}, not with {', '.join(methods)}",
                f"leave it out, or --method {method}",
            )
    if target.radius == "largest" and not {"local", AUTO} & set(methods):
        raise UsageError(
            f"--radius works with --method local, not with {', '.join(methods)}: others compute each "
            "radius at once",
            "leave it out, or --method local",
        )
    if target.records is not None and len(methods) > 1:
        raise UsageError(
            "a file of records holds one method", "run them one by one, or leave out --records"
        )
    return demand, threats


def first_given(values: Any) -> str | None:
    """Return the first option of a method's panel that has another value than its default."""
    for one in fields(values):
        note = one.metadata.get(NOTE)
        if note is not None and getattr(values, one.name) != one.default:
            return max(note.names, key=len, default=f"--{one.name.replace('_', '-')}")
    return None


def demand_of(
    text: str | None, threats: Sequence[Threat], image: tuple[int, int] = (1, 1)
) -> tuple[CertifiedDemand, list[Threat]]:
    """Return the demand of "0.6@1.58", or "0.6" (the smallest threat), and ascending threats.

    A demanded patch must be among those certified, for the defence depends on them. UsageError when
    it is no share.
    """

    chosen = sorted(set(threats))
    share, at, size = (text or "0").partition("@")
    try:
        minimum = typed_share(share)
    except ValueError as failure:
        hint = "certvit certify --help shows how it is written"
        raise UsageError(f"--min-certified: {failure}", hint) from failure
    there = Threat.read(size, chosen[0].norm, image) if at else chosen[0]
    if there.norm == "patch" and there not in chosen:
        raise UsageError(
            f"--min-certified {text} names a patch that is not certified", f"add --patch {size}"
        )
    return CertifiedDemand(there, minimum), sorted({*chosen, there})
