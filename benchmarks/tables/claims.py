"""Sentences of the papers that order rows, and what the runs say of every pair that they order."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import results
from benchmarks.tables.layout import Claim
from benchmarks.tables.rows import BY_NAME, ROWS


@dataclass(frozen=True)
class Sentence:
    """Of each network, each row of `better` exceeds each of `worse` in each column (sign +1) or falls
    below it (-1).

    seed: the paper. quote: a line of excerpts.txt. table: ours. theirs: what names of the paper's rows begin with;
    empty: it prints no such rows. open: of a pair, why its runs cannot show that the sentence holds.
    """

    seed: str
    quote: str
    table: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    columns: tuple[str, ...]
    sign: int = 1
    theirs: str = ""
    open: Mapping[str, str] | None = None


_EXISTING = ("gloro", "local-lip", "bcp")
_PARTS = {"local-lip": "not decided: parts of Local-Lip are not built"}
"""Masks in convolutions, and a singular vector of every training image: docs/chains.md."""
_MSVP = ("msvp", "msvp-1e-3")
_BASELINES = ("lipsformer", "l2former", "lnformer")
_STANDARD = ("clean", "fgsm", "pgd2")
_NAMES = {"none": "vit", "msvp": "specformer", "msvp-1e-3": "specformer"}
"""Our name of a row -> SpecFormer's."""


def _certvit(quote: str, worse: tuple[str, ...], *columns: str, sign: int = 1) -> Sentence:
    table = "certvit-1"
    return Sentence("certvit", quote, table, ("certvit",), worse, columns, sign, table, _PARTS)


def _specformer(
    number: int, quote: str, better: tuple[str, ...], worse: tuple[str, ...], *columns: str
) -> Sentence:
    table = f"specformer-{number}"
    return Sentence("specformer", quote, table, better, worse, columns, theirs=table)


def _cauchy(quote: str, better: str, *columns: str, sign: int = 1) -> Sentence:
    """The paper trains with SAM alone; its figures stand beside our rows of either optimiser."""
    worse = "covit" if better == "vit" else "vit"
    return Sentence("cauchy", quote, "cauchy-1", (better,), (worse,), columns, sign, "cauchy-")


SENTENCES = (
    _certvit(
        "better PGD and certified accuracy than existing works for all the datasets",
        _EXISTING,
        *("attacked", "certified"),
    ),
    _certvit("provide a good trade-off between clean and certified accuracy", _EXISTING, "clean"),
    _certvit(
        "successful in lowering the Lipschitz bounds of networks compared to the existing works",
        _EXISTING,
        "upper",
        sign=-1,
    ),
    _certvit(
        "CertViT also maintained accuracy close to the pre-trained network", ("standard",), "clean"
    ),
    _specformer(
        1,
        "Under standard training, our approach improves robust accuracy",
        _MSVP,
        ("none",),
        *("fgsm", "pgd2"),
    ),
    _specformer(1, "The clean accuracy is also improved", _MSVP, ("none",), "clean"),
    _specformer(1, "penalties that are too large", ("none",), ("msvp-1e-2",), *_STANDARD),
    Sentence(
        "specformer",
        "effectively reduces the spectral norms of attention weight matrices",
        "specformer-1",
        _MSVP,
        ("none",),
        ("norms",),
        -1,
    ),
    Sentence(
        "specformer",
        "manage the local Lipschitz constant of the attention layer by controlling the maximum singular values",
        "local-1",
        ("msvp-1e-3", "msvp-1e-2"),
        ("none",),
        ("local",),
        -1,
    ),
    _specformer(
        1,
        "SpecFormer achieves the best results among all the competitors",
        _MSVP,
        _BASELINES,
        *_STANDARD,
    ),
    _specformer(
        1,
        "Some baseline methods exhibit inferior performance when compared to vanilla ViTs",
        ("none",),
        _BASELINES,
        *_STANDARD,
    ),
    _specformer(
        2,
        "under adversarial training, SpecFormer outperforms the best counterparts",
        ("msvp",),
        ("none", "ard-prm"),
        *("clean", "cw20", "pgd20"),
    ),
    _specformer(
        2,
        "can greatly improve the robustness of ViT",
        ("ard-prm",),
        ("none",),
        *("cw20", "pgd20"),
    ),
    _cauchy(
        "MSA can only improve the robustness of ViTs under weak attacks, e.g., FGSM attack",
        "vit",
        "fgsm",
    ),
    _cauchy("FGSM and PGD-7, ViTs are generally exhibiting higher robust accuracy", "vit", "pgd7"),
    _cauchy(
        "it even compromises the robustness of ViTs under strong attacks, e.g., PGD attack",
        "covit",
        *("pgd7", "pgd7l2"),
    ),
    _cauchy("For a stronger CW attack, the result is almost reversed", "covit", "cw"),
    _cauchy("CoViTs are generally more robust than ViTs", "covit", "pgd20"),
    _cauchy(
        "Self-Attention could even hurt both the robustness and generalization power",
        "covit",
        "clean",
    ),
    _cauchy(
        "the most robust model has the lowest average maximum singular value",
        "covit",
        "sigma",
        sign=-1,
    ),
)


def network_and_method(name: str) -> tuple[str, str]:
    """Split a row's name into what two rows have in common when they are compared, and the method.

    The Cauchy paper's rows are method-optimiser (ours) or method-size (its own; its CoViT-L1 is to
    ViT-L)."""
    folder, _, last = name.rpartition("/")
    if not name.startswith("cauchy-"):
        return folder, last
    method, _, size = last.partition("-")
    return f"{folder}/{'l' if size == 'l1' else size}", method


def claims_of(sentence: Sentence, published: Mapping[str, Mapping[str, float]]) -> Iterator[Claim]:
    """Yield one claim for each pair of our rows that the sentence orders, and each of its columns."""
    ours = {network_and_method(row.name): row.name for row in ROWS if row.table == sentence.table}
    networks = dict.fromkeys(network for network, _ in ours)
    orders = itertools.product(networks, sentence.better, sentence.worse, sentence.columns)
    for network, better, worse, column in orders:
        names = [ours.get((network, method), "") for method in (better, worse)]
        if all(name and column in BY_NAME[name].figures for name in names):
            yield Claim(
                *names,
                column,
                sentence.sign,
                tuple(_their_pairs(sentence.theirs, better, worse, column, published)),
                sentence.seed,
                sentence.quote,
                (sentence.open or {}).get(worse, ""),
            )


def _their_pairs(
    prefix: str, better: str, worse: str, column: str, published: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, str]]:
    """Yield the paper's rows of the same comparison, network by network.

    Bounds are left out: the papers' are of another kind."""
    rows = {
        network_and_method(name): name
        for name, figures in published.items()
        if prefix and name.startswith(prefix) and column in figures and column != "upper"
    }
    for (network, method), name in rows.items():
        other = rows.get((network, _NAMES.get(worse, worse)))
        if method == _NAMES.get(better, better) and other:
            yield name, other


def _judged() -> Iterator[Claim]:
    """Yield the claims whose two rows were run with one seed at least."""
    figures = {
        name: row for table in results.published().values() for name, row in table["rows"].items()
    }
    runs = results.read()
    for sentence in SENTENCES:
        for claim in claims_of(sentence, figures):
            if differences(claim, runs):
                yield claim


MOST_SEEDS = 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's t with one degree of freedom less."""
_UNITS = ("upper", "norms", "sigma", "hoelder", "local")
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
    """The paper's differences, in points or the column's unit."""
    return [
        round(published[better][claim.column] - published[worse][claim.column], 2)
        for better, worse in claim.paper
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
    bounds = interval(claim, values)
    if bounds is None:
        return "not run" if not values else "not decided: one seed"
    mean, half = bounds
    if abs(mean) <= half:
        return "not decided"
    if mean * claim.sign < 0:
        return "refuted"
    return claim.open or "reproduced"


CLAIMS = tuple(_judged())
