"""Sentences of the papers as inequalities between rows, and what the runs say of them."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.tables import results
from benchmarks.tables.layout import Claim

_T1, _T2, _C1 = "specformer-1/digits", "specformer-2/digits", "cauchy-1/digits"
_ROBUSTER = "MSVP makes a network of standard training more robust"
CLAIMS = (
    Claim(f"{_ROBUSTER} (PGD-2, lambda 1e-4)", f"{_T1}/msvp", f"{_T1}/none", "pgd2"),
    Claim(f"{_ROBUSTER} (FGSM, lambda 1e-4)", f"{_T1}/msvp", f"{_T1}/none", "fgsm"),
    Claim("and more accurate (lambda 1e-4)", f"{_T1}/msvp", f"{_T1}/none", "clean"),
    Claim(f"{_ROBUSTER} (PGD-2, lambda 1e-3)", f"{_T1}/msvp-1e-3", f"{_T1}/none", "pgd2"),
    Claim("MSVP lowers the bound (lambda 1e-3)", f"{_T1}/msvp-1e-3", f"{_T1}/none", "upper", -1),
    Claim(
        "MSVP makes adversarial training more robust (PGD-20)",
        f"{_T2}/msvp",
        f"{_T2}/none",
        "pgd20",
    ),
    Claim("ARD and PRM do, too (PGD-20; Mo et al.)", f"{_T2}/ard-prm", f"{_T2}/none", "pgd20"),
    Claim("SAM gives more accurate ViTs at equal cost", f"{_C1}/vit-sam", f"{_C1}/vit-adamw", "clean"),
    Claim(
        "SAM gives ViTs that are more robust (PGD-7, linf)",
        f"{_C1}/vit-sam",
        f"{_C1}/vit-adamw",
        "pgd7",
    ),
    Claim(
        "SAM gives more accurate ViTs at equal steps, twice the cost",
        f"{_C1}/vit-sam-steps",
        f"{_C1}/vit-adamw",
        "clean",
    ),
    Claim("and more robust ones (PGD-7, linf)", f"{_C1}/vit-sam-steps", f"{_C1}/vit-adamw", "pgd7"),
    Claim("CoViT is more accurate than ViT (SAM)", f"{_C1}/covit-sam", f"{_C1}/vit-sam", "clean"),
    Claim("CoViT is more robust than ViT (SAM; FGSM)", f"{_C1}/covit-sam", f"{_C1}/vit-sam", "fgsm"),
    Claim("CoViT has smaller singular values (SAM)", f"{_C1}/covit-sam", f"{_C1}/vit-sam", "sigma", -1),
)

MOST_SEEDS = 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's t with one degree of freedom less."""


def differences(claim: Claim, runs: Mapping[str, Any]) -> list[float]:
    """better - worse, seed by seed, of the seeds that both rows have."""
    found = []
    for seed in range(MOST_SEEDS):
        pair = [runs.get(results.key(name, seed)) for name in (claim.better, claim.worse)]
        if all(run is not None and claim.column in run["figures"] for run in pair):
            better, worse = (run["figures"][claim.column] for run in pair)  # type: ignore[index]
            found.append(better - worse)
    return found


def verdict(claim: Claim, values: list[float]) -> tuple[str, str]:
    """(verdict, 95 % interval of the mean difference): by Student's t over the seeds, which varies training, not images."""
    if len(values) not in STUDENT:
        return "not run" if not values else "not decided: one seed", ""
    mean, half = statistics.fmean(values), STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    scale = 1 if claim.column in ("upper", "sigma", "hoelder") else 100
    shown = f"{scale * mean:+.2f} ({scale * (mean - half):+.2f} to {scale * (mean + half):+.2f})"
    if abs(mean) <= half:
        return "not decided", shown
    return ("reproduced" if mean * claim.sign > 0 else "refuted"), shown
