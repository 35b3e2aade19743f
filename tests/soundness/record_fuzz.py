"""Edited files of records by the thousand: `python -m tests.soundness.record_fuzz --count 20000`.

An edited file may be refused, or its run ends in the result of the honest file; two ways are tried. *every*: all records are
computed again, as where evidence is written: what is found may be no better for the network than what the honest file gives.
*gate*: the gate asks for one image more than there are: it must not pass. Counted beside these: exceptions that are not
certvit's own.
"""

import argparse
import collections
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from certcli.attack.campaign import Campaign, run_of, stages_of, tasks_of
from certcli.attack.findings import findings_of
from certcli.attack.resumed import attack_again
from certcli.attack.run import Attacked
from certcli.attack.settings import AttackSettings
from certcli.certify import methods
from certcli.certify.choice import Choice
from certcli.certify.local_options import Local
from certcli.certify.patch.options import Patches
from certcli.certify.smoothing.options import Smoothing
from certcli.checkpoint.file import Checkpoint
from certcli.cli.certify.options import Options, Target
from certcli.cli.certify.run import Demand, Task, run_all
from certcli.cli.shared.groups import Evaluation, Machine, Output, Source
from certcli.cli.shared.output import Sink
from certcli.evaluation.records import RecordFile
from certcli.images import datasets
from certcli.models import build
from certcli.system.errors import CertvitError
from tests.soundness.fuzz import mutate_json

IMAGES, BATCH = 10, 4
RADII = (0.01, 0.05)
Outcome = str
FORGED: Sequence[tuple[str, Any]] = (
    *(("radius", value) for value in (9.9, "inf", 0.0, 0.05000001, 1e999, -1.0)),
    *(("failure", value) for value in (0.5, 1e-9, 1.0)),
    *(("prediction", value) for value in (None, 3.7, -6, 99, 3)),
    *(("label", value) for value in (99, 3, "3")),
    *(("pixels", value) for value in ("0" * 16, "", 0)),
    *(("index", value) for value in (1e999, -1, "5", 10**400, 5)),
    *(("robust", value) for value in ({"pgd": True}, {"pgd": None}, {}, {"fgsm": True, "pgd": True})),
    *(("norm", value) for value in (None, 0.0, 0.01)),
    *(("broken_by", value) for value in (None, "pgd", "x")),
    *(("epsilon", value) for value in (0.01, 0.05, 10**400)),
    *(("method", value) for value in ("local", ["lipschitz"])),
)


def edited(text: str, rng: random.Random) -> str:
    """One to three edits: of values anywhere, of the fields that count, of whole lines; or every record claims the best."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, kind = rng.randrange(len(lines)), rng.random()
        if kind < 0.35:
            lines[place] = mutate_json(lines[place], rng).replace("\n", " ")
        elif kind < 0.75:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                row = json.loads(lines[place])
                row.update([rng.choice(FORGED)])
                lines[place] = json.dumps(row)
        elif kind < 0.85 and len(lines) > 1:
            lines.insert(rng.randrange(len(lines)), lines.pop(place))
        elif kind < 0.9:
            lines.insert(rng.randrange(len(lines)), lines[place])
        elif kind < 0.95 and len(lines) > 1:
            del lines[place]
        else:
            lines = [best(line) for line in lines]
    return "\n".join(lines) + "\n"


def best(line: str) -> str:
    """The line if its image were the most robust of all; itself where it is no record."""
    try:
        row = json.loads(line)
        if "radius" in row:
            row |= {"radius": 9.9, "prediction": row["label"]}
        elif "robust" in row:
            row |= {"robust": dict.fromkeys(row["robust"], True), "norm": None, "l2": None, "broken_by": None}
            row |= {"prediction": row["label"], "adversarial_prediction": row["label"]}
        return json.dumps(row)
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return line


class Runs:
    """Runs of both commands that go on with a file, their network made ready once. Each gives what it found, as numbers."""

    def __init__(self, net: Path, folder: Path) -> None:
        self.net, self.path = Checkpoint.read(net), folder / "edited.jsonl"
        self.images = datasets.load("digits", self.net.record.input, "test").limit(IMAGES)
        self.certifier = methods.prepare("lipschitz", self.net, Machine(device="cpu").pick())
        stages = stages_of(["pgd-3"], None, "l2", RADII, AttackSettings())
        self.settings = AttackSettings()
        drawn = [stage.with_draws(0, self.net.record.classes) for stage in stages]
        self.tasks = tasks_of(drawn, self.images)
        self.campaign = Campaign(build.load(self.net), self.tasks, self.settings, BATCH)

    def certify(self, share: float, every: bool) -> list[float]:
        """Clean, and certified at each radius."""
        demand, sink = Demand(share, RADII[0], every), Sink(as_json=True, quiet=True)
        target = Target(records=self.path, resume=self.path.exists())
        machine = Machine(device="cpu", batch_size=BATCH)
        options = Options(Source(ckpt=""), target, Smoothing(), Local(), Patches(), Evaluation(), machine, Output())
        choice = Choice("lipschitz", "", ready={"lipschitz": self.certifier})
        (found,) = run_all(choice, Task(self.net, self.images, RADII, demand), options, sink)
        return [found.found.clean, *found.found.certified.values()]

    def attack(self, share: float, every: bool) -> list[float]:
        """Clean, and robust at each radius."""
        about = run_of(self.tasks, self.settings, BATCH, self.net.digest, self.images)
        rows: dict[int, list[Attacked]] = {}
        keys, resume = ("task", "epsilon", "index"), self.path.exists()
        with RecordFile(self.path, about, self.images, keys, resume=resume) as file:
            for number, part in self.campaign.run(file):
                rows.setdefault(number, []).extend(part)
        if file.taken:
            attack_again(self.campaign, rows, file.taken, share, every, "the file")
        summaries = findings_of(self.tasks, rows, ()).parts[0].summaries
        return [summaries[0].clean, *(summary.robust for summary in summaries)]


def campaign(net: Path, count: int, seed: int) -> dict[str, Any]:
    """So many edits, counted by outcome; what must not be stands in `lies` and `unexpected`."""
    outcomes: collections.Counter[Outcome] = collections.Counter()
    lies: list[str] = []
    unexpected: list[str] = []
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(net, Path(folder))
        ways: list[tuple[str, Callable[[float, bool], list[float]], str, list[float]]] = []
        for name, way in (("certify", runs.certify), ("attack", runs.attack)):
            runs.path.unlink(missing_ok=True)
            honest = way(0.0, False)
            ways.append((name, way, runs.path.read_text(), honest))
        for number in range(count):
            name, way, text, honest = ways[number % 2]
            every = number % 4 < 2
            runs.path.write_text(edited(text, rng))
            try:
                found = way(0.0 if every else honest[1] + 1 / IMAGES, every)
            except CertvitError as refusal:
                outcomes[f"{name}: refused ({refusal.code})"] += 1
                continue
            except Exception as failure:
                unexpected.append(f"{number}: {type(failure).__name__}: {failure}"[:200])
                continue
            better = [a > b for a, b in zip(found, honest, strict=True)]
            outcomes[f"{name}: {'the honest result' if found == honest else 'another result'}"] += 1
            if any(better) if every else better[1]:
                lies.append(f"{number}: {name} {found} instead of {honest}")
    return {"edits": count, "outcomes": dict(sorted(outcomes.items())), "lies": lies, "unexpected": unexpected}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--net", type=Path, help="a certified network of digits; else one is made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(given.net or made(Path(folder)), given.count, given.seed)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return int(bool(found["lies"] or found["unexpected"]))


def made(folder: Path) -> Path:
    """A network with certificates: a few seconds of training."""
    from typer.testing import CliRunner

    from certcli.cli.main import app

    for words in (
        ("init", "certvit_4c3f", "-o", folder / "i.safetensors"),
        (
            "finetune", folder / "i.safetensors", "--dataset", "digits", "--loss", "margin", "--epsilon", 0.1, "--epochs", 3,
            "-o", folder / "n.safetensors",
        ),
    ):  # fmt: skip
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, (done.output, done.exception)
    return folder / "n.safetensors"


if __name__ == "__main__":
    sys.exit(main())
