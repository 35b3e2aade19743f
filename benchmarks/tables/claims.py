"""Sentences of the papers as inequalities between rows, and what the runs say of them."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.tables import results
from benchmarks.tables.layout import Claim


def _claims(
    root: str, theirs: tuple[str, ...], *lines: tuple[str, str, str, str, int]
) -> list[Claim]:
    """lines: (sentence, better, worse, column, sign), rows of the folder `root`.

    theirs: folders of the paper's rows, named as ours or `our name>their name`.
    """
    found = []
    for text, better, worse, column, sign in lines:
        pairs = []
        for folder in theirs:
            path, _, renamed = folder.partition(":")
            names = dict(entry.split(">") for entry in renamed.split(",") if entry)
            if not renamed or {better, worse} <= set(names):
                pairs.append(
                    (f"{path}/{names.get(better, better)}", f"{path}/{names.get(worse, worse)}")
                )
        found.append(Claim(text, f"{root}/{better}", f"{root}/{worse}", column, sign, tuple(pairs)))
    return found


_NETWORKS = ("certvit-1/mnist/4c3f", "certvit-1/cifar10/4c3f", "certvit-1/cifar10/6c2f")
_BACKBONES = ("vit-s", "deit-ti", "convit-ti")
_MSVP = ":none>vit,msvp>specformer,msvp-1e-3>specformer,msvp-1e-2>specformer"
_ROBUSTER = "MSVP makes a network of standard training more robust"
CLAIMS = (
    *_claims(
        "certvit-1/digits/4c3f",
        _NETWORKS,
        ("Local-Lip certifies more than BCP", "local-lip", "bcp", "certified", 1),
        (
            "Local-Lip (what is built of it; equal steps, half the batch) certifies more than GloRo",
            "local-lip",
            "gloro",
            "certified",
            1,
        ),
        ("CertViT certifies more than GloRo", "certvit", "gloro", "certified", 1),
        ("CertViT certifies more than Local-Lip", "certvit", "local-lip", "certified", 1),
        ("CertViT is more accurate than GloRo", "certvit", "gloro", "clean", 1),
    ),
    *_claims(
        "specformer-1/digits",
        tuple(f"specformer-1/{name}{_MSVP}" for name in _BACKBONES),
        (f"{_ROBUSTER} (PGD-2, lambda 1e-4)", "msvp", "none", "pgd2", 1),
        (f"{_ROBUSTER} (FGSM, lambda 1e-4)", "msvp", "none", "fgsm", 1),
        ("and more accurate (lambda 1e-4)", "msvp", "none", "clean", 1),
        (f"{_ROBUSTER} (PGD-2, lambda 1e-3)", "msvp-1e-3", "none", "pgd2", 1),
        (
            f"{_ROBUSTER} (PGD-2, lambda 1e-2, which the paper calls too large)",
            "msvp-1e-2",
            "none",
            "pgd2",
            1,
        ),
        ("MSVP lowers the bound (lambda 1e-3)", "msvp-1e-3", "none", "upper", -1),
    ),
    *_claims(
        "specformer-2/digits",
        tuple(f"specformer-2/{name}{_MSVP}" for name in _BACKBONES),
        ("MSVP makes adversarial training more robust (PGD-20)", "msvp", "none", "pgd20", 1),
        ("ARD and PRM do, too (PGD-20; Mo et al.)", "ard-prm", "none", "pgd20", 1),
    ),
    *_claims(
        "cauchy-1/digits",
        tuple(f"cauchy-1:vit-sam>vit-t{size},covit-sam>covit-t{size}" for size in range(1, 5)),
        ("SAM gives more accurate ViTs at equal cost", "vit-sam", "vit-adamw", "clean", 1),
        ("and more robust ones at equal cost (PGD-7, linf)", "vit-sam", "vit-adamw", "pgd7", 1),
        (
            "SAM gives more accurate ViTs at equal steps, twice the cost",
            "vit-sam-steps",
            "vit-adamw",
            "clean",
            1,
        ),
        (
            "and more robust ones at equal steps (PGD-7, linf)",
            "vit-sam-steps",
            "vit-adamw",
            "pgd7",
            1,
        ),
        ("CoViT is more accurate than ViT (SAM)", "covit-sam", "vit-sam", "clean", 1),
        ("CoViT is more robust than ViT (SAM; PGD-20, l2)", "covit-sam", "vit-sam", "pgd20", 1),
        ("CoViT has smaller singular values (SAM)", "covit-sam", "vit-sam", "sigma", -1),
        ("CoViT is more accurate than ViT (AdamW)", "covit-adamw", "vit-adamw", "clean", 1),
        (
            "CoViT is more robust than ViT (AdamW; PGD-20, l2)",
            "covit-adamw",
            "vit-adamw",
            "pgd20",
            1,
        ),
        ("CoViT has smaller singular values (AdamW)", "covit-adamw", "vit-adamw", "sigma", -1),
    ),
)

MOST_SEEDS = 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's t with one degree of freedom less."""
_UNITS = ("upper", "sigma", "hoelder")
"""Columns whose differences are shown in their own unit; the others are shares."""


def differences(claim: Claim, runs: Mapping[str, Any]) -> list[float]:
    """better - worse, seed by seed, of the seeds that both rows have."""
    found = []
    for seed in range(MOST_SEEDS):
        pair = [runs.get(results.key(name, seed)) for name in (claim.better, claim.worse)]
        if all(run is not None and claim.column in run["figures"] for run in pair):
            better, worse = (run["figures"][claim.column] for run in pair)  # type: ignore[index]
            found.append(better - worse)
    return found


def theirs(claim: Claim, published: Mapping[str, Mapping[str, float]]) -> list[float]:
    """The paper's differences, in points or the column's unit (its bounds are not of our kind: none)."""
    rows = [(published.get(better, {}), published.get(worse, {})) for better, worse in claim.paper]
    return [
        round(better[claim.column] - worse[claim.column], 2)
        for better, worse in rows
        if claim.column in better and claim.column in worse and claim.column != "upper"
    ]


def interval(claim: Claim, values: list[float]) -> tuple[float, float] | None:
    """Mean and half width of the 95 % interval of the mean difference, as shown; None of fewer than two seeds.

    By Student's t over the seeds, which vary training, not images.
    """
    if len(values) not in STUDENT:
        return None
    scale = 1 if claim.column in _UNITS else 100
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return scale * statistics.fmean(values), scale * half


def verdict(claim: Claim, values: list[float]) -> str:
    """Reproduced and refuted: the whole interval lies on one side of 0."""
    found = interval(claim, values)
    if found is None:
        return "not run" if not values else "not decided: one seed"
    mean, half = found
    if abs(mean) <= half:
        return "not decided"
    return "reproduced" if mean * claim.sign > 0 else "refuted"
