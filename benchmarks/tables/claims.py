"""Sentences of the papers as inequalities between rows, and what the runs say of them."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import results
from benchmarks.tables.layout import Claim


@dataclass(frozen=True)
class _Rows:
    """Rows that claims compare: the folder `root` of ours, and the paper's, named as ours or `our
    name>their name`.
    """

    seed: str
    root: str
    folders: tuple[str, ...]

    def claim(
        self,
        sentence: str,
        text: str,
        pair: tuple[str, str],
        column: str,
        sign: int = 1,
        *,
        open: str = "",
    ) -> Claim:
        """The sentence of the paper, what of it is compared, and the rows (better, worse)."""
        better, worse = (f"{self.root}/{name}" for name in pair)
        paper = tuple(self._pair(folder, pair) for folder in self.folders)
        return Claim(
            text,
            better,
            worse,
            column,
            sign,
            tuple(names for names in paper if names),
            self.seed,
            sentence,
            open,
        )

    @staticmethod
    def _pair(folder: str, pair: tuple[str, str]) -> tuple[str, str] | tuple[()]:
        """The paper's names of both rows; empty where it has no such rows."""
        path, _, renamed = folder.partition(":")
        names = dict(entry.split(">") for entry in renamed.split(",") if entry)
        if renamed and not set(pair) <= set(names):
            return ()
        better, worse = (f"{path}/{names.get(name, name)}" for name in pair)
        return better, worse


_NETWORKS = (
    "certvit-1/mnist/4c3f",
    "certvit-1/cifar10/4c3f",
    "certvit-1/cifar10/6c2f",
    "certvit-1/cifar100/8c2f",
    "certvit-1/tinyimagenet/8c2f",
)
_BACKBONES = ("vit-s", "deit-ti", "convit-ti")
_BASELINES = ("lipsformer", "l2former", "lnformer")
_MSVP = ":none>vit,msvp>specformer,msvp-1e-3>specformer"
_MSVP += "".join(f",{name}>{name}" for name in _BASELINES)
_SIZES = ("s1", "s2", "s3", "s4", "m1", "m2", "m3")
_GROUPS = (*((size, size) for size in _SIZES), ("l", "l1"))
"""ViT and CoViT of the Cauchy paper's Table 2, by group and number."""

_PARTS = "not decided: parts of Local-Lip are not built"
"""Its authors' clipped ReLU and schedule: our training certifies half of what its estimate says."""


def _optimisers(mixing: str, suffix: str) -> tuple[str, str]:
    return f"{mixing}-adamw>{mixing}{suffix}", f"{mixing}-sam>{mixing}{suffix}"


def _cauchy(table: str, groups: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The paper trains with SAM alone; its figures stand beside our rows of either optimiser."""
    folders = []
    for vit, covit in groups:
        renamed = _optimisers("vit", f"-{vit}") + _optimisers("covit", f"-{covit}")
        folders.append(f"{table}:{','.join(renamed)}")
    return tuple(folders)


def _certvit() -> Iterator[Claim]:
    rows = _Rows("certvit", "certvit-1/digits/4c3f", _NETWORKS)
    without_bcp = "certvit-1/cifar100/8c2f", "certvit-1/tinyimagenet/8c2f"
    three = tuple(name for name in _NETWORKS if name not in without_bcp)
    best = "better PGD and certified accuracy than existing works for all the datasets"
    yield rows.claim(best, "CertViT certifies more than GloRo", ("certvit", "gloro"), "certified")
    yield rows.claim(
        best, "CertViT withstands PGD more than GloRo", ("certvit", "gloro"), "attacked"
    )
    yield rows.claim(
        best,
        "CertViT certifies more than Local-Lip",
        ("certvit", "local-lip"),
        "certified",
        open=_PARTS,
    )
    yield _Rows("certvit", "certvit-1/digits/4c3f", three).claim(
        best, "CertViT certifies more than BCP", ("certvit", "bcp"), "certified"
    )
    yield rows.claim(
        "provide a good trade-off between clean and certified accuracy",
        "CertViT is more accurate than GloRo",
        ("certvit", "gloro"),
        "clean",
    )
    yield rows.claim(
        "successful in lowering the Lipschitz bounds of networks compared to the existing works",
        "CertViT has a smaller bound than GloRo",
        ("certvit", "gloro"),
        "upper",
        -1,
    )


def _specformer() -> Iterator[Claim]:
    yield from _standard_training("digits", "")
    yield from _standard_training("cifar10", "CIFAR-10: ")
    folders = tuple(f"specformer-2/{name}:none>vit,msvp>specformer" for name in _BACKBONES)
    rows = _Rows("specformer", "specformer-2/digits", folders)
    adversarial = "under adversarial training, SpecFormer outperforms the best counterparts"
    for attack, column in (("PGD-20", "pgd20"), ("CW-20", "cw20")):
        text = f"MSVP makes adversarial training more robust ({attack})"
        yield rows.claim(adversarial, text, ("msvp", "none"), column)
    yield rows.claim(
        "can greatly improve the robustness of ViT",
        "ARD and PRM do, too (PGD-20; Mo et al., as the paper quotes them)",
        ("ard-prm", "none"),
        "pgd20",
    )


def _standard_training(images: str, where: str) -> Iterator[Claim]:
    """The claims of SpecFormer's Table 1, by our rows on these images.

    Args:
        where: what the text of a claim begins with.
    """
    folders = tuple(f"specformer-1/{name}{_MSVP}" for name in _BACKBONES)
    rows = _Rows("specformer", f"specformer-1/{images}", folders)
    standard = "Under standard training, our approach improves robust accuracy"
    for attack, column in (("PGD-2", "pgd2"), ("FGSM", "fgsm")):
        text = f"MSVP makes a network of standard training more robust ({attack}, lambda 1e-4)"
        yield rows.claim(standard, where + text, ("msvp", "none"), column)
    text = "MSVP makes a network of standard training more robust (PGD-2, lambda 1e-3)"
    yield rows.claim(standard, where + text, ("msvp-1e-3", "none"), "pgd2")
    yield rows.claim(
        "The clean accuracy is also improved",
        f"{where}and more accurate (lambda 1e-4)",
        ("msvp", "none"),
        "clean",
    )
    yield rows.claim(
        "penalties that are too large",
        f"{where}MSVP with lambda 1e-2, which the paper calls too large, is less robust than none (PGD-2)",
        ("none", "msvp-1e-2"),
        "pgd2",
    )
    yield rows.claim(
        "effectively reduces the spectral norms of attention weight matrices",
        f"{where}MSVP lowers the bound (lambda 1e-3)",
        ("msvp-1e-3", "none"),
        "upper",
        -1,
    )
    best = "SpecFormer achieves the best results among all the competitors"
    worse = "Some baseline methods exhibit inferior performance when compared to vanilla ViTs"
    titles = ("LipsFormer", "L2Former", "LNFormer")
    for name, title in zip(_BASELINES, titles, strict=True):
        text = f"{where}MSVP is above {title} (PGD-2, lambda 1e-4)"
        yield rows.claim(best, text, ("msvp", name), "pgd2")
        yield rows.claim(worse, f"{where}ViT is above {title} (PGD-2)", ("none", name), "pgd2")


def _cauchy_claims() -> Iterator[Claim]:
    pairs = (("t1", "t1"), ("t2", "t2"), ("t3", "t3"), ("t4", "t4"))
    tiny = _Rows("cauchy", "cauchy-1/digits", _cauchy("cauchy-1", pairs))
    large = _Rows("cauchy", "cauchy-1/digits", _cauchy("cauchy-2", _GROUPS))
    weak = "FGSM and PGD-7, ViTs are generally exhibiting higher robust accuracy"
    head = "MSA can only improve the robustness of ViTs under weak attacks, e.g., FGSM attack"
    strong = "it even compromises the robustness of ViTs under strong attacks, e.g., PGD attack"
    small = "CoViTs are generally more robust than ViTs"
    hurt = "Self-Attention could even hurt both the robustness and generalization power"
    singular = "the most robust model has the lowest average maximum singular value"
    for tool, title in (("adamw", "AdamW"), ("sam", "SAM")):
        vit = (f"vit-{tool}", f"covit-{tool}")
        covit = (f"covit-{tool}", f"vit-{tool}")
        yield large.claim(head, f"ViT is more robust than CoViT ({title}; FGSM, linf)", vit, "fgsm")
        yield large.claim(
            weak, f"ViT is more robust than CoViT ({title}; PGD-7, linf)", vit, "pgd7"
        )
        yield large.claim(
            strong, f"CoViT is more robust than ViT ({title}; PGD-7, linf)", covit, "pgd7"
        )
        yield large.claim(
            strong, f"CoViT is more robust than ViT ({title}; PGD-7, l2)", covit, "pgd7l2"
        )
        yield tiny.claim(
            small, f"CoViT is more robust than ViT ({title}; PGD-20, l2)", covit, "pgd20"
        )
        yield tiny.claim(hurt, f"CoViT is more accurate than ViT ({title})", covit, "clean")
        yield tiny.claim(
            singular, f"CoViT has smaller singular values ({title})", covit, "sigma", -1
        )
    reversed_ = "For a stronger CW attack, the result is almost reversed"
    images = _Rows("cauchy", "cauchy-1/cifar10", _cauchy("cauchy-2", _GROUPS))
    for tool, title in (("adamw", "AdamW"), ("sam", "SAM")):
        covit = (f"covit-{tool}", f"vit-{tool}")
        yield images.claim(
            reversed_, f"CoViT is more robust than ViT ({title}; CW, l2)", covit, "cw"
        )


CLAIMS = (*_certvit(), *_specformer(), *_cauchy_claims())

MOST_SEEDS = 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's t with one degree of freedom less."""
_UNITS = ("upper", "sigma", "hoelder")
"""Columns whose differences are shown in their own unit; the others are shares."""


def differences(claim: Claim, runs: Mapping[str, Any]) -> list[float]:
    """better - worse, seed by seed, of the seeds that both rows have."""
    values = []
    for seed in range(MOST_SEEDS):
        pair = [runs.get(results.key(name, seed)) for name in (claim.better, claim.worse)]
        if all(run is not None and claim.column in run["figures"] for run in pair):
            better, worse = (run["figures"][claim.column] for run in pair)  # type: ignore[index]
            values.append(better - worse)
    return values


def theirs(claim: Claim, published: Mapping[str, Mapping[str, float]]) -> list[float]:
    """The paper's differences, in points or the column's unit (its bounds are not of our kind:
    none).
    """
    rows = [(published.get(better, {}), published.get(worse, {})) for better, worse in claim.paper]
    return [
        round(better[claim.column] - worse[claim.column], 2)
        for better, worse in rows
        if claim.column in better and claim.column in worse and claim.column != "upper"
    ]


def interval(claim: Claim, values: list[float]) -> tuple[float, float] | None:
    """Mean and half width of the 95 % interval of the mean difference, as shown; None of fewer than
    two seeds.

    By Student's t over the seeds, which vary training, not images.
    """
    if len(values) not in STUDENT:
        return None
    scale = 1 if claim.column in _UNITS else 100
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return scale * statistics.fmean(values), scale * half


def verdict(claim: Claim, values: list[float]) -> str:
    """Reproduced and refuted: the whole interval lies on one side of 0."""
    if claim.open and values:
        return claim.open
    interval_of = interval(claim, values)
    if interval_of is None:
        return "not run" if not values else "not decided: one seed"
    mean, half = interval_of
    if abs(mean) <= half:
        return "not decided"
    return "reproduced" if mean * claim.sign > 0 else "refuted"
