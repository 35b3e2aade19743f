"""What a certification is asked to show, and the options that contradict each other."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from certcli.certify.certificate import CertifiedAccuracy
from certcli.certify.methods import METHODS
from certcli.cli.certify.command import RADII, CertifyOptions
from certcli.cli.shared import command, output
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

    def check(self, accuracy: CertifiedAccuracy, gate: output.Gate) -> None:
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
    patch = "patch" in methods
    conflicting = [name for name in ("epsilon", "plot", "attack_records") if getattr(target, name)]
    _require_none(
        (
            not patch and options.patches.patches,
            "--patch is for --method patch",
            "certvit certify ... --method patch --patch 32",
        ),
        (
            patch and methods != ["patch"],
            "--method patch stands alone: shares against patches and within radii cannot be compared",
            "certvit certify ... for the other methods",
        ),
        (
            patch and conflicting,
            f"--{''.join(conflicting[:1]).replace('_', '-')} does not go with --method patch",
            "leave it out",
        ),
    )
    demand, threats = None, list[Threat]()
    if methods != ["patch"]:
        demand, threats = demand_of(
            target.minimum, [Threat(norm, radius) for radius in target.epsilon or RADII[norm]]
        )
    for method in methods:
        if method != AUTO:
            METHODS[method]
    named = ", ".join(methods)
    panels = {"smoothing": options.smoothing, "local": options.local}
    unused = [
        (method, first_given(values))
        for method, values in panels.items()
        if not {method, AUTO} & set(methods)
    ]
    _require_none(
        (
            len(set(methods)) != len(methods) or (AUTO in methods and len(methods) > 1),
            f"--method {' '.join(methods)}: name each method once, and auto alone",
            "--method auto",
        ),
        (
            norm == "linf" and methods != ["local"],
            "--norm linf works with --method local only",
            "certvit certify ... --method local --norm linf -e 1/255",
        ),
        (
            options.proof.arithmetic is not None and not set(methods) <= set(PROVING),
            f"--arithmetic works with --method {', '.join(PROVING)}: smoothing has --precision, "
            "patch is about the network as it runs",
            "leave out --arithmetic",
        ),
        *(
            (
                option,
                f"{option} works with --method {method}, not with {named}",
                f"leave it out, or --method {method}",
            )
            for method, option in unused
        ),
        (
            target.radius == "largest" and not {"local", AUTO} & set(methods),
            f"--radius works with --method local, not with {named}: others compute each radius at "
            "once",
            "leave it out, or --method local",
        ),
        (
            target.records is not None and len(methods) > 1,
            "a file of records holds one method",
            "run them one by one, or leave out --records",
        ),
    )
    return demand, threats


def _require_none(*contradictions: tuple[Any, str, str]) -> None:
    """Raise UsageError for the first of these that holds: whether it does, its cause, its hint."""
    for holds, cause, hint in contradictions:
        if holds:
            raise UsageError(cause, hint)


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
        minimum = command.typed_share(share)
    except ValueError as failure:
        hint = "certvit certify --help shows how it is written"
        raise UsageError(f"--min-certified: {failure}", hint) from failure
    there = Threat.read(size, chosen[0].norm, image) if at else chosen[0]
    if there.norm == "patch" and there not in chosen:
        raise UsageError(
            f"--min-certified {text} names a patch that is not certified", f"add --patch {size}"
        )
    return CertifiedDemand(there, minimum), sorted({*chosen, there})
