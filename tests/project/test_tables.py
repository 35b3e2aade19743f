"""docs/tables.md says what benchmarks/tables/results.json holds, and that holds what its rows'
commands gave.
"""

import math
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.tables import claims, render, results
from benchmarks.tables.layout import Claim
from benchmarks.tables.rows import BY_NAME, ROWS, TABLES
from certcli.evaluation.intervals import share_interval

RUNS = results.read()


def test_the_page_is_the_results() -> None:
    written = {path: path.read_text() for path in (render.PAGE, *render.DATA.iterdir())}
    assert written == render.documents(), "run: python -m benchmarks.tables --render"


def test_every_row_has_its_table_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(ROWS)
    tables = {table.name: table for table in TABLES}
    for row in ROWS:
        assert len(row.cells) == len(tables[row.table].heads)
        assert set(row.after) <= set(BY_NAME)
        assert not row.same or (row.same in BY_NAME and not row.steps)
        known = {*row.steps, "cpu_seconds"}
        assert all(where.split("/")[0] in known for where in row.figures.values() if row.steps)
        columns = {
            column.key
            for other in ROWS
            if (other.same or other.name) == row.name
            for column in tables[other.table].columns
        }
        assert row.same or set(row.figures) <= columns


def test_published_figures_belong_to_rows_and_columns() -> None:
    columns = {table.name: {column.key for column in table.columns} for table in TABLES}
    for table, entry in results.published().items():
        assert entry["source"]
        for row, figures in entry["rows"].items():
            assert BY_NAME[row].table == table
            assert set(figures) <= columns[table]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_of_the_commands_that_its_row_shows(name: str) -> None:
    row = BY_NAME[name.rpartition("#")[0]]
    run = RUNS[name]
    assert set(run["figures"]) <= set(row.figures)
    if "earlier" in run:
        page, _, anchor = run["earlier"].partition("#")
        assert anchor
        assert (render.PAGE.parent / page).exists()
    else:
        assert run["commands"] == dict(row.steps)
        assert set(run["figures"]) == set(row.figures)
    kinds = {column.key: column.kind for table in TABLES for column in table.columns}
    for key, value in run["figures"].items():
        if kinds[key] == "percent":
            assert 0 <= value <= 1
        else:
            assert value is None or value == "inf" or math.isfinite(value)


@pytest.mark.parametrize(
    "name", [name for name in RUNS if "attack" in RUNS[name].get("images", {})]
)
def test_no_row_certifies_what_an_attack_breaks(name: str) -> None:
    """Image by image certified <= attacked <= clean; of two samples their intervals must allow it."""
    run = RUNS[name]
    row = BY_NAME[name.rpartition("#")[0]]
    shares = ("certified", "attacked", "clean")
    intervals = [
        share_interval(*render.hits_of(row, key, run)) for key in shares if key in run["figures"]
    ]
    for (low, _), (_, high) in pairwise(intervals):
        assert low <= high
    samples = run["images"]
    if "certify" in samples and samples["certify"] == samples["attack"]:
        assert run["figures"]["certified"] <= run["figures"]["attacked"] <= run["figures"]["clean"]


JUDGED: list[tuple[list[float], list[float], dict[str, Any], str]] = [
    ([0.9, 0.91, 0.92], [0.8, 0.81, 0.8], {}, "reproduced"),
    ([0.9, 0.91, 0.92], [0.8, 0.81, 0.8], {"sign": -1}, "refuted"),
    ([0.9, 0.91, 0.92], [0.8, 0.81, 0.8], {"open": "not built"}, "not built"),
    ([0.9, 0.91, 0.92], [0.8, 0.81, 0.8], {"sign": -1, "open": "not built"}, "refuted"),
    ([0.9, 0.7, 0.92], [0.8, 0.81, 0.8], {}, "not decided"),
    ([0.9], [0.8], {}, "not decided: one seed"),
    ([], [], {}, "not run"),
    ([0.9, 0.9, 0.9], [0.8], {}, "not decided: one seed"),  # only seeds that both have
]


@pytest.mark.parametrize(("better", "worse", "claim", "verdict"), JUDGED)
def test_a_claim_is_judged_by_its_interval(
    better: list[float], worse: list[float], claim: dict[str, Any], verdict: str
) -> None:
    runs = {
        results.key(name, seed): {"figures": {"clean": value}}
        for name, values in {"t/a": better, "t/b": worse}.items()
        for seed, value in enumerate(values)
    }
    judged = Claim("t/a", "t/b", "clean", **{"sign": 1, **claim})
    assert claims.verdict(judged, claims.differences(judged, runs)) == verdict


def test_claims_name_rows_and_the_papers_own_figures() -> None:
    published = {
        name: figures
        for table in results.published().values()
        for name, figures in table["rows"].items()
    }
    for claim in claims.CLAIMS:
        assert claim.column in BY_NAME[claim.better].figures
        assert claim.column in BY_NAME[claim.worse].figures
        assert all(set(pair) <= set(published) for pair in claim.paper)
    on_digits, on_photographs = [
        claim
        for claim in claims.CLAIMS
        if claim.better.endswith("/msvp")
        and claim.worse.endswith("/none")
        and claim.column == "pgd2"
    ]
    for msvp in (on_digits, on_photographs):
        # 29.53 - 22.35 and so on, SpecFormer's Table 1
        assert claims.theirs(msvp, published) == [7.18, 3.64, 0.27]


GLORO = "certvit-1/mnist/4c3f/gloro"
HOUR = {"clean": 0.9, "attacked": 0.6}
"""Shares of 1,000 images: 0.6 is known to within 3.1 points."""
TWICE = "certvit-1/cifar10/vit/network"
"""Its paper counts this network in two tables."""
SAID: list[tuple[str, list[dict[str, float]], dict[str, float], str]] = [
    ("certvit-2/vit-t16", [], {"parameters": 5.7}, "not run: needs a run"),
    ("certvit-2/vit-t16", [{"parameters": 5.72}], {"parameters": 5.7}, "reproduced (parameters)"),
    ("certvit-2/vit-t16", [{"parameters": 6.0}], {"parameters": 5.7}, "refuted (parameters)"),
    ("certvit-2/vit-t16", [{"adapt": 8.0}], {"adapt": 6.4}, "not decided (L2 adaptation)"),
    ("certvit-1/cifar10/4c3f/bcp", [{"clean": 0.8}], {"clean": 97.0},
     "not decided: a shorter training"),
    (GLORO, [HOUR], {"clean": 97.0, "attacked": 63}, "not reached (clean %); reached (PGD %)"),
    (GLORO, [HOUR], {"attacked": 63.2}, "not reached (PGD %)"),
    ("certvit-1/digits/vit/standard", [{"clean": 0.8}], {}, "run"),
    ("specformer-2/digits/msvp", [{"pgd20": share} for share in (0.6, 0.61, 0.62)], {},
     "not run (clean %, CW-20 %); reproduced (PGD-20 %)"),
    (TWICE, [{"parameters": 100, "tabulated": 100}], {"parameters": 100}, "reproduced (parameters)"),
    (TWICE, [{"parameters": 100, "tabulated": 90}], {"parameters": 100},
     "reproduced (parameters); contradicts itself (its Table 4)"),
    (TWICE, [{"parameters": 90, "tabulated": 100}], {"parameters": 100}, "refuted (parameters)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "figures", "published", "verdict"), SAID)
def test_what_a_row_says_of_the_paper(
    name: str, figures: list[dict[str, float]], published: dict[str, float], verdict: str
) -> None:
    row = BY_NAME[name]
    (table,) = [table for table in TABLES if table.name == row.table]
    images = {"certify": 1000, "attack": 1000}
    others = [f"specformer-2/digits/{other}" for other in ("none", "ard-prm")]
    runs: dict[str, Any] = {}
    for seed, entry in enumerate(figures):
        runs[results.key(name, seed)] = {"figures": entry, "images": images}
        worse = {"figures": {"pgd20": 0.5, "clean": 0.9}}
        runs |= {results.key(other, seed): worse for other in others}
    assert render.status(table, row, runs, published) == verdict


def test_quick_rows_fit_into_half_an_hour_on_two_cores() -> None:
    """By what each of them took when it was run by itself, which all were."""
    keys = [results.key(row.name, seed) for row in ROWS for seed in row.quick_seeds if row.steps]
    assert [key for key in keys if key not in RUNS] == []
    assert sum(sum(RUNS[key]["cpu_seconds"].values()) for key in keys) <= 2 * 30 * 60
