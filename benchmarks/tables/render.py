"""results.json and published.json -> docs/tables.md and the data beside it (docs/tables/*.csv). Nothing
on that page is written by hand but each table's description.
"""

import csv
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import claims, papers, results
from benchmarks.tables.claims import CLAIMS
from benchmarks.tables.layout import ASSUMED, COUNTED, SOUND, Column, Row, Table
from benchmarks.tables.rows import DATA as DATA_NAMES
from benchmarks.tables.rows import ROWS, TABLES
from certcli.evaluation.intervals import share_interval

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"
DATA = PAGE.with_suffix("")
"""Folder of the tables' cells, a CSV file each, which the site shows as tables."""

CLOSE = 0.02
"""Counted figures of the paper have two or three digits."""

INTRODUCTION = """# The papers' tables

After this page you know which figures and sentences of three papers came out here, which did not, and how to run a row.
`python -m benchmarks.tables` writes this page from `benchmarks/tables/results.json`. To run one row:

    python -m benchmarks.tables --row NAME --data mnist=DIR --data cifar10=DIR ...

with NAME from the last column of its data, which each section links; `--list` prints every row's commands, `--quick`
runs the rows that should fit into 30 minutes on two cores. Rows with results are not run again; an interrupted row
continues after its last whole step.

**How to read.** Our figure is on the left, the paper's on its right; an empty cell was not run (or not published).
Figures of several seeds: mean ± standard deviation (number of seeds). "Sound bound": proven by certvit for this network.
"The paper's formula": the paper's computation, evaluated on our network; it is no certificate ([why](soundness.md)).
Accuracies are shares of the test images named in the commands; a share of 100 images is known to within 10 points, of
1,000 to within 3. CPU: seconds of all steps of one seed, one thread, without Python's start, and without another row's
network from which this one starts. Figures marked * are from [results.md](results.md). The papers' figures are those of
the tables in the headings ([papers](soundness.md#sources)).

**Verdicts.** *Reproduced* and *refuted*: counted figures within 2 % of the paper's or not (not decided if the paper does
not say what it counts); for differences between rows, see the claims below. *Contradicts itself*: another place of the
paper gives another figure. *Reached* and *not reached*: the row was trained until validation stopped rising or for an
hour of CPU time, and the paper's figure lies within the 95 % interval of ours or below it, or above. *Not decided*: run,
but the interval contains 0, or the training is too unlike the paper's. *Run*: the paper has no such figure. *Not run*:
empty, with what is lacking."""


def shown(column: Column, value: float) -> str:
    """One of our figures. Shares become percent; powers are given as logarithms."""
    if column.kind == "percent":
        return f"{100 * value:.1f}"
    if column.kind == "power":
        return power(value)
    if column.kind == "count":
        return f"{value:,.0f}"
    return (
        f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
    )


def power(log10: float) -> str:
    """10^x, written out where it is a number one can read."""
    return f"{10**log10:.3g}" if -2 < log10 < 4 else f"10^{log10:.1f}"


def ours(column: Column, runs: Sequence[Mapping[str, Any]]) -> str:
    values = [run["figures"][column.key] for run in runs if column.key in run["figures"]]
    if not values:
        return ""
    if any(not isinstance(value, (int, float)) for value in values):
        return "none"  # no finite bound
    star = "*" if any("earlier" in run for run in runs) else ""
    if len(values) == 1:
        return shown(column, values[0]) + star
    spread = statistics.stdev(values)
    if column.kind == "power":
        return f"10^{statistics.fmean(values):.1f} ± {spread:.1f} ({len(values)})"
    return f"{shown(column, statistics.fmean(values))} ± {shown(column, spread)} ({len(values)})"


def theirs(column: Column, published: Mapping[str, float]) -> str:
    if column.key not in published:
        return ""
    value = published[column.key]
    if column.kind == "count":
        return f"{value:,.0f}"
    return f"{value:.3g}" if column.kind == "power" else f"{value:g}"


def row_cells(
    table: Table, row: Row, runs: Mapping[str, Any], published: Mapping[str, Any]
) -> list[str]:
    mine = own_runs(row, runs)
    cells = list(row.cells)
    for column in table.columns:
        cells += [ours(column, mine), theirs(column, printed(row, published))]
    seconds = [sum(run["cpu_seconds"].values()) for run in mine]
    status_text = status(table, row, runs, printed(row, published))
    cells += [
        status_text,
        f"{statistics.fmean(seconds):.0f}" if any(seconds) else "",
        row.note,
        row.same or row.name,
    ]
    return cells


def own_runs(row: Row, runs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of every seed, also of the row whose runs it shows."""
    runs_of = (
        runs.get(results.key(row.same or row.name, seed)) for seed in range(claims.MOST_SEEDS)
    )
    return [run for run in runs_of if run is not None]


def printed(row: Row, published: Mapping[str, Any]) -> Mapping[str, float]:
    """The paper's figures of the row."""
    return published.get(row.paper or row.name, {})


def lacking(row: Row) -> str:
    """What a row that was not run would need."""
    data = [
        name for name in DATA_NAMES if any("{" + name + "}" in step for step in row.steps.values())
    ]
    if not row.steps:
        return "the paper's own training, on GPUs"
    hours = " and a GPU's hours" if row.table == "certvit-1" and not row.paper else ""
    return f"needs {', '.join(data) or 'a run'}{hours}"


def status(table: Table, row: Row, runs: Mapping[str, Any], published: Mapping[str, float]) -> str:
    """What the row says of the paper: see *Verdicts* in the introduction."""
    mine = own_runs(row, runs)
    if not mine:
        return f"not run: {lacking(row)}"
    columns = {column.key: column for column in table.columns}
    said: dict[str, list[str]] = {}
    for key, value in published.items():
        if columns[key].promise in (COUNTED, ASSUMED):
            close = abs(mine[0]["figures"][key] / value - 1) <= CLOSE
            verdict = (
                "reproduced"
                if close
                else "refuted"
                if columns[key].promise == COUNTED
                else "not decided"
            )
            said.setdefault(verdict, []).append(columns[key].heading.partition(",")[0])
    for column in table.columns:
        counted = mine[0]["figures"].get(column.key) if column.against else None
        if counted is not None and counted != published[column.against]:
            said.setdefault("contradicts itself", []).append("its Table 4")
    for key in ("clean", "attacked", "certified"):
        if row.full and key in published:
            best = max(share_interval(*hits_of(row, key, run))[1] for run in mine)
            said.setdefault(
                "reached" if 100 * best >= published[key] else "not reached", []
            ).append(columns[key].heading)
    for claim in CLAIMS:
        if claim.better == (row.same or row.name) and claim.column in columns:
            verdict = claims.verdict(claim, claims.differences(claim, runs))
            heading = columns[claim.column].heading
            said.setdefault(verdict, [])
            said[verdict] += [] if heading in said[verdict] else [heading]
    if said:
        return "; ".join(f"{verdict} ({', '.join(headings)})" for verdict, headings in said.items())
    return f"not decided: {table.apart}" if published else "run"


def hits_of(row: Row, key: str, run: Mapping[str, Any]) -> tuple[int, int]:
    """Of a figure that is a share of images: how many, of how many."""
    images = run["images"][row.figures[key].partition("/")[0]]
    return round(run["figures"][key] * images), images


def table_rows(
    table: Table, runs: Mapping[str, Any], published: Mapping[str, Any]
) -> list[list[str]]:
    """The cells of a table below its heads."""
    heads = list(table.heads)
    for column in table.columns:
        sound = f" ({column.promise})" if column.promise == SOUND else ""
        heads += [column.heading + sound, "paper"]
    heads += ["verdict", "CPU s", "note", "row"]
    rows = [row for row in ROWS if row.table == table.name]
    return [heads, *(row_cells(table, row, runs, published) for row in rows)]


def table_lines(table: Table, runs: Mapping[str, Any], reported: Mapping[str, Any]) -> list[str]:
    lines = [f"## {table.title}", "", *textwrap.wrap(table.about, 118), ""]
    return [*lines, *data_link(table.name), *agreement_lines(table, runs, reported["rows"])]


def data_link(name: str) -> list[str]:
    """A line by itself, which the site's hook replaces by the table."""
    return [f"[tables/{name}.csv](tables/{name}.csv)", ""]


def agreement_lines(
    table: Table, runs: Mapping[str, Any], published: Mapping[str, Any]
) -> list[str]:
    """How far counted figures are from the paper's: they need no training and no luck."""
    lines = []
    for column in [column for column in table.columns if column.promise in (COUNTED, ASSUMED)]:
        pairs = [
            (run["figures"][column.key] / published[row][column.key], row)
            for row in published
            if (run := runs.get(results.key(row, 0))) is not None and column.key in published[row]
        ]
        if pairs:
            middle = statistics.median(ratio for ratio, _ in pairs)
            close = sum(abs(ratio - 1) <= CLOSE for ratio, _ in pairs)
            away, row = max(pairs, key=lambda pair: abs(pair[0] - 1))
            text = f"{column.heading}: ours over the paper's {middle:.3f} in the median, {close} of {len(pairs)} within "
            lines += textwrap.wrap(
                f"- {text}{100 * CLOSE:.0f} %; farthest `{row}`, {away:.3f}.", 118
            )
    return [*lines, ""] if lines else []


VERDICTS = (
    "contradicts itself",
    "refuted",
    "reproduced",
    "not reached",
    "reached",
    "not decided",
    "run",
    "not run",
)


BEFORE_THEM = (
    "What the papers say that holds, and what does not, in ten sentences (the evidence stands below and in "
    "[soundness](soundness.md)):"
)
TEN_SENTENCES = (
    "1. CertViT's step from pre-trained weights to weights of lower norm works: norms fall and outputs stay close with our "
    "default map; its own (l1) raises some layers' norms and can cost the accuracy. By itself the step certifies nothing.",
    "2. Its L2 attention, as its authors' code computes it, is not Lipschitz; with the factor that they leave out it is.",
    "3. On digits its pipeline certifies as much as GloRo within the interval and more than BCP; it is less accurate than "
    "GloRo and than the network that it starts from, withstands PGD less than GloRo and Local-Lip, and its bound is larger "
    "than GloRo's and BCP's.",
    '4. "Better for all the datasets" contradicts its own table, and the GloRo that it prints on MNIST lies 12.7 points '
    "below its authors' figure, which is above CertViT's.",
    "5. Its parameter counts are real, but of other networks than its hyper-parameters describe, and it prints two values "
    "of eta and of beta; its FLOPs are of other epochs than its tables print.",
    "6. SpecFormer's penalty lowers the spectral norms of W_q, W_k and W_v; that it makes a network more robust or more "
    "accurate than a plain ViT was not decided in any of our runs.",
    "7. On digits it lies above the three replaced attentions under both attacks, and so does the plain ViT, by as much "
    "(five seeds): the advantage is theirs to lose, not the penalty's; on CIFAR-10 no such difference was seen.",
    "8. Its Theorem 4.3 fails at the origin, and its Algorithm 1 as printed does not normalise.",
    "9. The Cauchy paper's observation comes out, attention ahead under FGSM and PGD-7 in linf (digits, AdamW; not on "
    "CIFAR-10 with SAM in as many steps), behind under CW in l2 (CIFAR-10), but its strong attacks are all in l2: strength "
    "and norm are confounded.",
    "10. Its Theorem 2 is false as printed; that ViTs are Lipschitz on a bounded set of images holds.",
)


def verdict_rows(runs: Mapping[str, Any], published: Mapping[str, Any]) -> list[list[str]]:
    """How many rows of each table have which verdict; of several the first in the order of
    VERDICTS.
    """
    lines = [["table", *VERDICTS]]
    for table in TABLES:
        figures = published.get(table.name, {"rows": {}})["rows"]
        counts = dict.fromkeys(VERDICTS, 0)
        for row in ROWS:
            if row.table == table.name:
                said = f"; {status(table, row, runs, printed(row, figures))}"
                counts[next(verdict for verdict in VERDICTS if f"; {verdict}" in said)] += 1
        lines.append([table.title, *map(str, counts.values())])
    return lines


def summary_lines() -> list[str]:
    """What was judged, and ten sentences of what came of it."""
    text = "Rows of each table by verdict; a row with several counts under the first of them:"
    sentences = [textwrap.fill(line, 118, subsequent_indent="   ") for line in TEN_SENTENCES]
    head = ["## In short", "", text, "", *data_link("verdicts")]
    return [*head, textwrap.fill(BEFORE_THEM, 118), "", *sentences, ""]


def quick_lines(runs: Mapping[str, Any], whole: Mapping[str, Any] | None) -> list[str]:
    """What `--quick` takes, by the CPU seconds that its rows recorded, and from end to end where
    that was run.
    """
    keys = [results.key(row.name, seed) for row in ROWS if row.steps for seed in row.quick_seeds]
    done = [runs[key] for key in keys if key in runs and "earlier" not in runs[key]]
    seconds = sum(sum(run["cpu_seconds"].values()) for run in done)
    text = (
        f"Rows marked quick, once for each of at most three seeds: {len(keys)}. Run: {len(done)}, in "
        f"{seconds:.0f} CPU seconds of one thread, {seconds / 120:.0f} minutes on two cores that have nothing else to do. "
    )
    if whole is None:
        text += "This is a sum: `--quick` itself was not run from end to end."
    else:
        text += (
            f"From end to end, with nothing there before and --jobs {whole['jobs']}: {whole['runs']} runs in "
            f"{whole['seconds'] / 60:.0f} minutes by the clock{whole.get('note', '')}."
        )
    return ["## What `--quick` takes", "", *textwrap.wrap(text, 118), ""]


def machine_lines(runs: Mapping[str, Any]) -> list[str]:
    machines = {tuple(sorted(run["machine"].items())) for run in runs.values() if "machine" in run}
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine)
        for machine in sorted(machines, key=str)
    ]
    return [
        "## Machines",
        "",
        *[line for entry in lines for line in textwrap.wrap(f"- {entry}", 118)],
    ]


def documents() -> dict[Path, str]:
    """The page and its data, by the files that hold them."""
    runs = results.read()
    published = results.published()
    figures = {name: row for table in published.values() for name, row in table["rows"].items()}
    headings = {column.key: column.heading for table in TABLES for column in table.columns}
    claimed = papers.claim_rows(headings, runs, figures)
    data = {
        "verdicts": verdict_rows(runs, published),
        "sentences": papers.sentence_rows(claimed),
        "claims": [papers.CLAIM_HEADS, *claimed],
        "findings": [papers.FINDING_HEADS, *papers.finding_rows()],
        "columns": [papers.COLUMN_HEADS, *papers.column_rows()],
    }
    lines = [INTRODUCTION, "", *summary_lines()]
    lines += papers.claim_lines(claimed) + data_link("sentences") + data_link("claims")
    lines += papers.finding_lines() + data_link("findings")
    lines += papers.baseline_lines(figures)
    lines += papers.column_lines() + data_link("columns")
    for table in TABLES:
        reported = published.get(table.name, {"source": "", "rows": {}})
        data[table.name] = table_rows(table, runs, reported["rows"])
        lines += table_lines(table, runs, reported)
    lines += quick_lines(runs, results.quick()) + machine_lines(runs)
    page = "\n".join(lines).rstrip() + "\n"
    return {
        PAGE: page,
        **{DATA / f"{name}.csv": comma_separated(rows) for name, rows in data.items()},
    }


def comma_separated(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write() -> None:
    DATA.mkdir(exist_ok=True)
    for path, text in documents().items():
        path.write_text(text)
