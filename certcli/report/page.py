"""One self-contained page: words, tables, a chart in SVG, pictures. No network, no script; every
string is escaped.

Names in a checkpoint may be hostile: the template escapes every string, and the page forbids
scripts to itself."""

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from jinja2 import Environment
from markupsafe import Markup, escape
from PIL import Image
from torch import Tensor

from certcli.report.document import Block
from certcli.system.errors import plain_lines

WIDTH = 480
LEFT = 50
RIGHT = 466
TOP = 14
BOTTOM = 250
HEIGHT = 292
"""Of the chart, in CSS pixels: about the width of a phone, so that its text is readable there."""
MOST_CONSTANTS = 60
MOST_TICKS = 6


Mark = tuple[float, float, float, float]
"""Radius, share, and the ends of its 95 % interval."""


@dataclass(frozen=True)
class PlotLine:
    """A share against the radius, constant from each point to the next.

    Attributes:
        kind: "proven", "probability" or "attacked".
        points: (radius, share beyond it), ascending.
        marks: shares at the radii of the plan, drawn as dots with their intervals.
    """

    label: str
    kind: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Figure:
    """images: (data URI, caption), side by side. large: of more pixels than are shown."""

    caption: str
    images: Sequence[tuple[str, str]]
    large: bool


@dataclass(frozen=True)
class Gallery:
    title: str
    note: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Table:
    """numbers: columns that are set right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: tuple[int, ...] = ()
    note: str = ""


def render(page: Mapping[str, Any]) -> str:
    """Return the page of its parts; one that is empty is left out.

    Args:
        page: chip: the verdict of the gates, and a sentence about it; headline, points: the answer
            in one sentence, and in three lines; first: one picture beside it, whose images bear
            both answers; about: scale of `first`, and what it is compared with; next, commands:
            (what it is for, the command); gates: (verdict, its sentence); examples, galleries:
            further pictures, and those further down; words: what the page's words mean;
            constants: the parts of the network, in order.
    """
    environment = Environment(autoescape=True, finalize=_printable)
    environment.filters["typed"] = _code_between_backticks
    template = environment.from_string(
        files("certcli.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    plot = chart_of(page.get("curves", ()))
    return template.render(page=page, plot=plot, constants=bars(page.get("constants", ())))


def _printable(value: Any) -> Any:
    """Spell out terminal escapes and text directions: they would be obeyed, or make the file
    invalid. A percent sign stays on the line of its number.
    """
    return plain_lines(value).replace(" %", "\u00a0%") if type(value) is str else value


def _code_between_backticks(value: str) -> Markup:
    """Set what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(_printable(value)))))


def proven_steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve that nowhere exceeds what shares at some radii prove.

    An image that is certified at a radius is so at smaller ones: between two radii, the share at
    the larger one is proven, and beyond the last none.

    Args:
        points: (radius, share certified there), ascending.
    """
    shares = [share for _, share in points]
    return [points[0], *zip([radius for radius, _ in points], [*shares[1:], shares[-1]])]


def ticks(end: float) -> list[float]:
    """Return 0, and further round numbers up to `end`."""
    if not end > 0:
        return [0.0]
    raw = end / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9)
    )
    return [step * number for number in range(int(end / step * (1 + 1e-9)) + 1)]


def chart_of(curves: Sequence[PlotLine]) -> dict[str, Any] | None:
    """Return where everything of the chart stands; None without curves."""
    if not curves:
        return None
    end = 1.08 * max(max(radius for radius, _ in curve.points) for curve in curves) or 1.0

    def x(radius: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * radius / end, 1)

    def y(share: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    lines = []
    for curve in curves:
        first, *rest = curve.points
        path = f"M{x(first[0])} {y(first[1])}" + "".join(
            f"H{x(radius)}V{y(share)}" for radius, share in rest
        )
        # elsewhere nothing is known beyond the last point
        falls = curve.kind == "proven" and curve.points[-1][1] == 0
        last = RIGHT if falls else x(curve.points[-1][0])
        path += f"H{RIGHT}" if falls else ""
        lines.append(
            {
                "style": curve.kind,
                "path": path,
                "area": "" if curve.kind == "attacked" else f"{path}H{last}V{BOTTOM}H{LEFT}Z",
                "dots": [{"x": x(radius), "y": y(share)} for radius, share, *_ in curve.marks],
                "whiskers": "".join(
                    f"M{x(radius)} {y(low)}V{y(high)}" for radius, _, low, high in curve.marks
                ),
            }
        )
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
        "x_ticks": [{"at": x(radius), "text": f"{radius:g}"} for radius in ticks(end)],
        "y_ticks": [{"at": y(share / 4), "text": f"{25 * share} %"} for share in range(5)],
        "lines": lines,
    }


def bars(rows: Sequence[Block]) -> list[dict[str, Any]]:
    """Return rows with bars' lengths in percent; beyond MOST_CONSTANTS the largest, in order."""
    threshold = min(
        sorted((abs(row.log10) for row in rows), reverse=True)[:MOST_CONSTANTS], default=0.0
    )
    shown = [row for row in rows if abs(row.log10) >= threshold][:MOST_CONSTANTS]
    largest = max((abs(row.log10) for row in shown), default=0.0) or 1.0
    return [
        {"row": row, "width": round(100 * abs(row.log10) / largest, 1), "small": row.log10 < 0}
        for row in shown
    ]


LARGEST = 160
"""Pixels a side of a picture on a page; larger images are made smaller."""


def data_uri(image: Tensor) -> str:
    """(c, h, w) in [0, 1], c = 1 or 3 (else the first channel) -> data:image/png;base64,..."""
    pixels = image.detach().cpu().double().clamp(0, 1)
    pixels = pixels if pixels.shape[0] in (1, 3) else pixels[:1]
    rows = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = (
        Image.fromarray(rows[:, :, 0], "L") if rows.shape[2] == 1 else Image.fromarray(rows, "RGB")
    )
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def magnified(image: Tensor, adversarial: Tensor) -> tuple[Tensor, float]:
    """The change around grey, times a factor that fills the range; and the factor."""
    delta = (adversarial - image).double()
    peak = float(delta.abs().max())
    factor = 0.5 / peak if peak > 0 else 1.0
    return 0.5 + factor * delta, factor
