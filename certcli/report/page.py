"""One self-contained page: words, tables, two figures in SVG, pictures. No network, no script; every string is escaped.

Names in a checkpoint are hostile: the template escapes all that it is given, and the page forbids scripts to itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from certcli.evaluation.radii import attacked_radius, proven_percent, proven_radius
from certcli.system.errors import plain

LEFT, RIGHT, TOP, BOTTOM = 64, 700, 14, 290
LEGEND = 20
BAR_LEFT, BAR_RIGHT, BAR_STEP = 190, 620, 22
MOST_BARS = 80
SHORT = 2.0
"""Powers of ten below which the axis of the bars has marks at 1, 2, 5 between them."""


@dataclass(frozen=True)
class Curve:
    """kind: "proven", "probability" or "attacked". points: (radius, share), ascending; between two the curve is constant.

    marked: points that were measured there, drawn as dots.
    """

    label: str
    kind: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """value: log10 of a proven constant. title: the law, shown where the pointer rests."""

    name: str
    value: float
    text: str
    title: str


@dataclass(frozen=True)
class Picture:
    """uris: data URIs of image, change, changed image; alt: their words. large: more pixels than are shown."""

    caption: str
    uris: tuple[str, str, str]
    alt: tuple[str, str, str]
    large: bool


@dataclass(frozen=True)
class Table:
    """numbers: columns that are set right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Gate:
    passed: bool
    text: str


@dataclass(frozen=True)
class Command:
    what: str
    line: str


@dataclass(frozen=True)
class Page:
    """What a page shows; a part that is empty is left out."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    doubts: Sequence[str] = ()
    gates: Sequence[Gate] = ()
    tables: Sequence[Table] = ()
    curves: Sequence[Curve] = ()
    curve_note: str = ""
    bars: Sequence[Bar] = ()
    bar_note: str = ""
    pictures: Sequence[Picture] = ()
    commands: Sequence[Command] = ()
    facts: Sequence[str] = field(default_factory=list)


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_shown)
    template = environment.from_string(files("certcli.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(page=page, plot=plot(page.curves), bars=bars(page.bars))


def _shown(value: Any) -> Any:
    """What a template prints, escapes and directions spelled out: they would be obeyed, or make the file invalid."""
    return plain(value) if type(value) is str else value


def point(kind: str, radius: float, share: float) -> str:
    """A point of a curve in words: a proven figure rounded down, an attacked one's radius up."""
    if kind == "attacked":
        return f"{100 * share:.1f} % at {attacked_radius(radius)}"
    return f"{proven_percent(share)} at {proven_radius(radius)}"


def ticks(end: float, most: int = 6) -> list[float]:
    """0, and further round numbers up to `end`."""
    if not end > 0:
        return [0.0]
    raw = end / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * number for number in range(int(end / step * (1 + 1e-9)) + 1)]


def plot(curves: Sequence[Curve]) -> dict[str, Any] | None:
    """Where everything of the curves' figure stands; None without curves."""
    if not curves:
        return None
    end = 1.08 * max(max(radius for radius, _ in curve.points) for curve in curves) or 1.0
    low = BOTTOM + 52

    def x(radius: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * radius / end, 1)

    def y(share: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    lines = []
    for number, curve in enumerate(curves):
        first, *rest = curve.points
        path = f"M{x(first[0])} {y(first[1])}" + "".join(f"H{x(radius)}V{y(share)}" for radius, share in rest)
        path += (
            f"H{RIGHT}" if curve.kind == "proven" and curve.points[-1][1] == 0 else ""
        )  # beyond the last point nothing else is known
        last = RIGHT if path.endswith(f"H{RIGHT}") else x(curve.points[-1][0])
        lines.append(
            {
                "label": curve.label,
                "kind": curve.kind,
                "path": path,
                "area": "" if curve.kind == "attacked" else f"{path}H{last}V{BOTTOM}H{LEFT}Z",
                "dots": [
                    {"x": x(radius), "y": y(share), "text": point(curve.kind, radius, share)}
                    for radius, share in (curve.points if curve.marked else ())
                ],
                "legend": low + 16 + LEGEND * number,
            }
        )
    return {
        "width": RIGHT + 20,
        "height": low + 16 + LEGEND * len(curves),
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
        "x_ticks": [{"at": x(radius), "text": f"{radius:g}"} for radius in ticks(end)],
        "y_ticks": [{"at": y(share / 4), "text": f"{25 * share} %"} for share in range(5)],
        "lines": lines,
    }


def bars(rows: Sequence[Bar]) -> dict[str, Any] | None:
    """Where everything of the bars' figure stands; None without bars. Beyond MOST_BARS the largest are kept, in order."""
    if not rows:
        return None
    least = sorted((abs(row.value) for row in rows), reverse=True)[:MOST_BARS][-1]
    rows = [row for row in rows if abs(row.value) >= least][:MOST_BARS]
    low, high = min(0.0, *(row.value for row in rows)), max(0.0, *(row.value for row in rows))
    span = high - low or 1.0
    top, bottom = 6, 6 + BAR_STEP * len(rows)

    def x(value: float) -> float:
        return round(BAR_LEFT + (BAR_RIGHT - BAR_LEFT) * (value - low) / span, 1)

    step = max(1, math.ceil(span / 6))
    marks = [float(step * number) for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
    if span < SHORT:
        marks = [math.log10(size * 10.0**power) for power in range(-2, 3) for size in (1, 2, 5)]
    return {
        "width": RIGHT + 20,
        "height": bottom + 26,
        "left": BAR_LEFT,
        "top": top,
        "bottom": bottom,
        "step": BAR_STEP,
        "zero": x(0.0),
        "ticks": [
            {"at": x(mark), "text": f"{10**mark:.3g}" if abs(mark) < 3 else f"10^{mark:g}"}
            for mark in marks
            if low <= mark <= high
        ],
        "rows": [
            {
                "name": row.name if len(row.name) <= 28 else f"{row.name[:27]}…",
                "title": row.title,
                "text": row.text,
                "small": row.value <= 0,
                "x": min(x(0.0), x(row.value)),
                "width": round(max(1.0, abs(x(row.value) - x(0.0))), 1),
                "y": top + BAR_STEP * number,
            }
            for number, row in enumerate(rows)
        ],
    }
