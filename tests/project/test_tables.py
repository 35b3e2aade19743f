"""docs/tables.md says what benchmarks/tables/results.json holds, and that holds what its rows'
commands gave.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import claims, render, results
from benchmarks.tables.__main__ import chains, chosen
from benchmarks.tables.layout import Claim
from benchmarks.tables.rows import BY_NAME, DATA, ROWS, TABLES
from benchmarks.tables.run import arguments, figure, made_by, step
from certcli.evaluation.intervals import share_interval
from certcli.evaluation.threat import parse_radius, radius_key

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


def test_commands_are_filled_in_as_they_would_be_typed() -> None:
    names = {**{name: f"/{name}" for name in DATA}, "seed": "7"}
    for row in ROWS:
        for command in row.steps.values():
            module, words = arguments(
                command, names | {other: f"../{other}" for other in row.after}
            )
            assert (
                module == "certcli"
                or (Path(render.PAGE).parents[1] / f"{module.replace('.', '/')}.py").exists()
            )
            assert not any("{" in word for word in words)
    with pytest.raises(ValueError, match="nothing is known"):
        arguments("certvit certify {elsewhere}/net.safetensors", names)


def test_a_step_is_run_again_where_another_command_made_what_it_reads(tmp_path: Path) -> None:
    read = "python -m json.tool --compact made.json"

    def shown(maker: str, made: str) -> Any:
        (tmp_path / "made.json").write_text(made)
        return step([maker, read], {}, tmp_path, "read")["document"]

    assert shown("train for an epoch", "1") == 1
    assert shown("train for an epoch", "2") == 1  # kept
    assert shown("train for two", "2") == 2


def test_what_a_row_reads_is_made_by_other_rows() -> None:
    row = BY_NAME["certvit-1/mnist/4c3f/certvit"]
    before = list(BY_NAME["certvit-1/mnist/4c3f/standard"].steps.values())
    assert made_by(row) == [*before, *row.steps.values()]


def test_figures_are_found_by_step_and_key() -> None:
    documents = {"a": {"curve": {"1.58": 0.5}, "list": [{"mean": 1.0}, {"mean": 3.0}]}}
    assert figure(documents, "a/curve/1.58") == 0.5
    assert figure(documents, "a/list/1/mean") == 3.0
    assert figure(documents, "a/list/*/mean") == 2.0


def test_a_figure_at_a_radius_is_spelled_as_the_command_writes_it() -> None:
    """36/255 stood as 0.141176 in rows when documents had all of its digits: the rows could not end."""
    looked_at = 0
    for row in ROWS:
        for where in row.figures.values():
            name, *keys = where.split("/")
            if "certified" in keys[:-1]:
                words = row.steps[name].split() if row.steps else []
                radii = [words[i + 1] for i, word in enumerate(words) if word == "-e"]
                assert not words or keys[-1] in [radius_key(parse_radius(r)) for r in radii]
                looked_at += bool(words)
    assert looked_at


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


def test_rows_come_after_those_they_read() -> None:
    rows = chosen(["certvit-f1/*", "certvit-2/vit-t16"], quick=False)
    assert {"certvit-1/digits/4c3f/standard", "certvit-1/digits/4c3f/gloro"} < {
        row.name for row in rows
    }
    found = chains(rows)
    assert sorted(len(chain) for chain in found) == [1, 3]
    for chain in found:
        for place, row in enumerate(chain):
            assert set(row.after) <= {other.name for other in chain[:place]}
