"""Edited files of records by the thousand: `python -m tests.soundness.record_fuzz --count 20000`.

An edited file may be refused, or its run ends in the result of the honest file. Two ways are tried.
*every*: each record is computed again, as where evidence is written, and no figure may be better
for the network than that of the honest file.
*gate*: the gate demands one image more than there are, and must not pass.
"""

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from certcli.attack.findings import attack_again, findings_of
from certcli.attack.settings import AttackSettings
from certcli.attack.stages import Campaign, attack_run, stages_of, tasks_of
from certcli.certify import methods
from certcli.certify.method_choice import MethodChoice
from certcli.checkpoint.file import Checkpoint
from certcli.cli.certify.command import CertifyOptions, CertifyTarget
from certcli.cli.certify.demands import CertifiedDemand
from certcli.cli.certify.run import CertifyTask, run_all
from certcli.cli.shared.groups import BatchDevice, Source
from certcli.cli.shared.output import Sink
from certcli.evaluation import intervals
from certcli.evaluation.image_records import AttackRecord
from certcli.evaluation.records import RecordFile
from certcli.evaluation.threat import Threat
from certcli.images import datasets
from certcli.models import build
from tests.helpers.workshop import Workshop
from tests.soundness.edits import Case, edit_text, run_edits

IMAGES = 10


def passes(share: float, demand: float | None = None) -> bool:
    """Tell whether a gate passes on a share of the images."""
    asked = intervals.Demand(GATE if demand is None else demand)
    return intervals.verdict_of(round(share * IMAGES), IMAGES, asked) == intervals.PASSED


GATE = max(number / 100 for number in range(100) if passes(1.0, number / 100))
"""The largest demand that all images meet: the honest files, which miss one, do not."""
BATCH = 4
RADII = (0.01, 0.05)
FORGED: Sequence[tuple[str, Any]] = (
    *(("radius", value) for value in (9.9, "inf", 0.0, 0.05000001, 1e999, -1.0)),
    *(("failure", value) for value in (0.5, 1e-9, 1.0)),
    *(("prediction", value) for value in (None, 3.7, -6, 99, 3)),
    *(("label", value) for value in (99, 3, "3")),
    *(("pixels", value) for value in ("0" * 16, "", 0)),
    *(("index", value) for value in (1e999, -1, "5", 10**400, 5)),
    *(
        ("robust", value)
        for value in ({"pgd": True}, {"pgd": None}, {}, {"fgsm": True, "pgd": True})
    ),
    *(("norm", value) for value in (None, 0.0, 0.01)),
    *(("broken_by", value) for value in (None, "pgd", "x")),
    *(("epsilon", value) for value in (0.01, 0.05, 10**400)),
    *(("method", value) for value in ("local", ["lipschitz"])),
)


def edited_records_file(text: str, rng: random.Random) -> str:
    """Return the file after one to three edits: of values, of the fields that count, of lines, or
    of every record at once.
    """
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.3:
            lines[place] = edit_text(lines[place], rng).replace("\n", " ")
        elif kind < 0.65:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                row = json.loads(lines[place])
                row.update([rng.choice(FORGED)])
                lines[place] = json.dumps(row)
        elif kind < 0.72 and len(lines) > 1:
            lines.insert(rng.randrange(len(lines)), lines.pop(place))
        elif kind < 0.77:
            lines.insert(rng.randrange(len(lines)), lines[place])
        elif kind < 0.83 and len(lines) > 1:
            del lines[place]
        else:
            lines = [most_robust_record(line) for line in lines]
    return "\n".join(lines) + "\n"


def most_robust_record(line: str) -> str:
    """Return the record of the most robust image of all; the line itself where it is no record."""
    try:
        row = json.loads(line)
        if "radius" in row:
            row |= {"radius": 9.9, "prediction": row["label"]}
        elif "robust" in row:
            row |= {
                "robust": dict.fromkeys(row["robust"], True),
                "norm": None,
                "l2": None,
                "broken_by": None,
            }
            row |= {"prediction": row["label"], "adversarial_prediction": row["label"]}
        return json.dumps(row)
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return line


class Runs:
    """Runs of both commands that continue a file of records; the network is prepared once."""

    def __init__(self, net: Path, folder: Path) -> None:
        self.net = Checkpoint.read(net)
        self.path = folder / "edited.jsonl"
        self.images = datasets.load_dataset("digits", self.net.record.input, "test").limit(IMAGES)
        self.certifier = methods.prepare_method(
            "lipschitz", self.net, BatchDevice(device="cpu").pick()
        )
        stages = stages_of(["pgd-3"], None, "l2", RADII, AttackSettings())
        self.settings = AttackSettings()
        model = build.load(self.net)
        drawn = [stage.ready(model, self.net.record, self.settings) for stage in stages]
        self.tasks = tasks_of(drawn, self.images)
        self.campaign = Campaign(model, self.tasks, self.settings, BATCH)

    def certify(self, share: float, every: bool) -> list[float]:
        """Return the clean share, and the certified share at each radius."""
        threats = [Threat("l2", radius) for radius in RADII]
        sink = Sink(as_json=True, quiet=True)
        demand = CertifiedDemand(threats[0], share, every)
        target = CertifyTarget(records=self.path, resume=self.path.exists())
        options = CertifyOptions(
            source=Source(ckpt=""),
            target=target,
            machine=BatchDevice(device="cpu", batch_size=BATCH),
        )
        choice = MethodChoice("lipschitz", "", ready={"lipschitz": self.certifier})
        (found,) = run_all(
            choice, CertifyTask(self.net, self.images, threats, demand), options, sink
        )
        return [found.accuracy.clean, *found.accuracy.certified.values()]

    def attack(self, share: float, every: bool) -> list[float]:
        """Return the clean share, and the robust share at each radius."""
        about = attack_run(self.tasks, self.settings, BATCH, self.net.digest, self.images)
        rows: dict[int, list[AttackRecord]] = {}
        keys = ("task", "epsilon", "index")
        resume = self.path.exists()
        with RecordFile(self.path, about, self.images, keys, resume=resume) as file:
            for number, part in self.campaign.run(file):
                rows.setdefault(number, []).extend(part)
        if file.taken:
            attack_again(self.campaign, rows[0], file.taken, share > 0, every, "the file")
        summaries = findings_of(self.tasks, rows, ()).parts[0].summaries
        return [summaries[0].clean, *(summary.robust for summary in summaries)]


@contextlib.contextmanager
def edited_records(net: Path) -> Iterator[Case]:
    """Yield the case of a campaign: one edited file of records, continued by `certify` or by
    `attack`.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(net, Path(folder))
        honest: list[tuple[Callable[[float, bool], list[float]], str, list[float]]] = []
        for run_again in (runs.certify, runs.attack):
            runs.path.unlink(missing_ok=True)
            figures = run_again(0.0, False)
            honest.append((run_again, runs.path.read_text(), figures))

        def case(rng: random.Random) -> tuple[str, list[str]]:
            run_again, text, figures = rng.choice(honest)
            every = rng.random() < 0.5
            runs.path.write_text(edited_records_file(text, rng))
            found = run_again(0.0 if every else GATE, every)
            better = any(a > b for a, b in zip(found, figures, strict=True))
            is_lie = better if every else passes(found[1]) and not passes(figures[1])
            lies = [f"{run_again.__name__} {found} instead of {figures}"] * is_lie
            return "the honest result" if found == figures else "another result", lies

        yield case


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(run_edits(__doc__, edited_records(Workshop(name) / "certified.safetensors")))
