"""Results as Python shows them: one line in a shell, a small table in a notebook."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from certcli.attack.run import RobustAccuracy
from certcli.evaluation import image_records, intervals, threat
from certcli.lipschitz import bound, network
from certcli.report.document import Audit

V = TypeVar("V")


class Shown:
    """A result's representations: `headline` in one line, `rows` (the first a header) below it."""

    @property
    def headline(self) -> str:
        raise NotImplementedError

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        return ()

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    def _repr_html_(self) -> str:
        tags = ["th"] + ["td"] * (len(self.rows) - 1)
        rows = (
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in zip(tags, self.rows)
        )
        table = f"<table>{''.join(rows)}</table>" if self.rows else ""
        return f"<p>{escape(self.headline)}</p>{table}"


class ProvenBound(Shown, network.NetworkBound):
    """The proven bound |f(x) - f(y)| <= upper |x - y| of a network, pixel l2, for images in [0, 1]."""

    @property
    def headline(self) -> str:
        if not self.upper.finite:
            return f"no finite bound: {self.bound.why}"
        of = ", f(x) its features" if self.bound.kind == bound.FEATURES else ""
        return f"proven: |f(x) - f(y)| <= {self.upper} |x - y| for all images in [0, 1]{of}"

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        steps = [
            (step.path, step.kind, str(step.constant), str(step.cumulative))
            for step in self.charges
        ]
        return _first_rows(("layer", "theorem for", "constant", "product so far"), steps)


class Certificates(Shown, list[image_records.Certificate]):
    """One certificate an image, in the order of the images."""

    @property
    def headline(self) -> str:
        if not self:
            return "no certificates"
        hits = sum(one.correct for one in self)
        radii = sorted((one.radius for one in self if one.correct), reverse=True)
        middle = (
            f", median certified radius {threat.proven_radius(radii[len(radii) // 2], 3)}"
            if any(radii)
            else ""
        )
        right = (
            f"{hits} images are classified correctly{intervals.interval_of_few(hits, len(self))}"
        )
        return f"{len(self)} certificates by {self[0].method}: {right}{middle}"

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        cells = []
        for one in self:
            certified = (
                ", ".join(one.held)
                if isinstance(one.held, tuple)
                else threat.proven_radius(one.held, 4)
            )
            cells.append((str(one.index), str(one.label), str(one.prediction), certified))
        return _first_rows(("image", "label", "prediction", "certified"), cells)


class AsTyped(dict[str, V]):
    """Values by radius as it was typed, "8/255"; the key of the records is answered as well."""

    def __init__(
        self, values: Iterable[tuple[str, V]], names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__((names.get(key, key), value) for key, value in values)
        self._names = names

    def __missing__(self, key: str) -> V:
        if key not in self._names:
            raise KeyError(key)
        return self[self._names[key]]


@dataclass(frozen=True)
class AttackedAccuracy(RobustAccuracy):
    """The accuracy that the attacks leave at one radius.

    Attributes:
        examples: tensors by name (`attack.findings.collect`), a row for each image that fell at
            this radius or a smaller one; None unless asked for.
    """

    examples: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)


class AttackCurve(Shown, tuple[AttackedAccuracy, ...]):
    """The accuracy that the attacks leave, one entry a radius, ascending."""

    @property
    def examples(self) -> dict[str, Tensor] | None:
        """Return the examples of all radii, which are those of the largest."""
        return self[-1].examples

    @property
    def headline(self) -> str:
        last = self[-1]
        shares = ", ".join(
            f"{intervals.share_text(one.robust, one.images, threat.attacked_percent)} "
            f"at {threat.attacked_radius(one.epsilon)}"
            for one in self
        )
        right = f"{last.images} images, {intervals.share_text(last.clean, last.images)} right"
        return f"{right}; under {', '.join(last.attacks)} in {last.kind}: {shares}"

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        shown = []
        for one in self:
            shown.append(
                (
                    threat.attacked_radius(one.epsilon),
                    threat.attacked_percent(one.robust),
                    f"{threat.percent_ends(one.intervals['robust'])} %",
                )
            )
        return [("radius", "robust", "95 % interval"), *shown]


class AuditReport(Audit, Shown):
    """The document of an audit: headline, verdict, doubts, bound, certificates, attacks, gates."""

    __repr__ = Shown.__repr__

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        doubts = [("doubt", text) for text in self.doubts]
        gates = [("gate", text) for text in self.gate.reasons]
        return [("", "answer"), *(("", text) for text in self.verdict), *doubts, *gates]


def _first_rows(
    header: Sequence[str], rows: Sequence[Sequence[str]], limit: int = 12
) -> Sequence[Sequence[str]]:
    """Return the header and the first rows; () without rows."""
    more = [(f"and {len(rows) - limit} more",)] if len(rows) > limit else []
    return [header, *rows[:limit], *more] if rows else ()
