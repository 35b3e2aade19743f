"""Edits of honest evidence by the thousand: `python -m tests.soundness.evidence_fuzz --count 10000`.

The law: what `log` then shows of an entry is true, or `log --verify` refutes it or leaves it unchecked, or it is called
measured. Truth is computed here, from the network and its images, and compared with the words on the screen.
"""

import argparse
import collections
import copy
import functools
import json
import math
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from certcli.certify.methods import certify, options_of, prepare
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.cli.log import view
from certcli.cli.main import app
from certcli.cli.shared import pages
from certcli.cli.shared.groups import Machine
from certcli.cli.shared.inputs import evaluation_images
from certcli.cli.shared.output import Sink
from certcli.cli.shared.verify import Asked, _certifier
from certcli.evaluation.evidence import AUTHORS_WORD, COMMANDS, as_json, command_of
from certcli.evaluation.records import describe
from certcli.lipschitz.network import prove_checkpoint
from certcli.report.page import render
from certcli.system.errors import CertvitError
from certcli.verification import claims as verification
from certcli.verification.claims import Again, Claim, Request, check, statuses, verdict
from certcli.verification.report import SLACK

Raw = dict[str, Any]
MARK = "zzmark"
FORGED = (f"0.01 (proven) {MARK}", f"ImageNet-1k {MARK}", MARK)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 60, 255, 10**7, 2**63, 2**70, 10**400, 0.0, 0.25, 0.5, 0.9, 0.001, 0.999, 1.0),
    *(1e-300, 1e308, 58 / 60, 0.9749, "", "nan", "inf", "0.5", "0.50", "5e-1", " 0.5", "l2", "linf", "proof", "digits"),
    *("probability 0.999", "probability 1", "lipschitz", "local", "smoothing", "bcp", "val", "test", "train", "0" * 64),
    *("x" * 5000, "\x1b[31m", "é\u202e", [], {}, [[1]], {"clean": 1.0}, {"9": 1.0}, *FORGED),
)
KEYS = (
    "clean",
    "certified",
    "bound",
    "norm",
    "0.50",
    "5e-1",
    "nan",
    " 0.3",
    "0.3",
    "9",
    "images",
    "denoiser_file",
    MARK,
)
LONGEST = 30_000
"""Characters that evidence may take on a screen: it holds 256 radii at most."""


def run(*words: object) -> None:
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == 0, (words, outcome.output, outcome.exception)


def written(stem: Path, checkpoint: Path, *commands: tuple[object, ...]) -> Path:
    """The checkpoint with the evidence of one command after the other."""
    for number, (command, *words) in enumerate(commands):
        output = stem.with_suffix(f".{number}.safetensors")
        run(command, checkpoint, *words, "-o", output, "-q")
        checkpoint = output
    return checkpoint


class Heard(Sink):
    """What a person would see."""

    def __init__(self) -> None:
        super().__init__(as_json=True, quiet=True)
        self.lines: list[str] = []

    def text(self, line: str = "") -> None:
        self.lines.append(line)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **_: Any) -> None:
        self.lines += [title, *("  ".join(row) for row in rows)]


class Laboratory:
    """Two networks with honest evidence of every command and of every kind of certificate, and what is true of them."""

    def __init__(self, folder: Path, plain: Path, certified: Path) -> None:
        self.known: dict[str, Again | CertvitError] = {}
        digits, local = ("--dataset", "digits", "--limit"), ("--method", "local", "--effort", "norms")
        noise = ("--method", "smoothing", "--sigma", 0.25, "--n0", 16, "-n", 120, "-e", 0.1, "-e", 0.3)
        first = written(
            *(folder / "plain", plain, ("lipschitz", "--limit", 2)),
            *(
                ("certify", *digits, 6, *local, "-e", "0.001", "-e", "0.02"),
                ("certify", *digits, 5, *local, "--norm", "linf", "--seed", 1),
                ("certify", *digits, 8, *noise),
                ("attack", *digits, 6, "-e", 0.2, "-a", "fgsm"),
            ),
        )
        radii = ("-e", 0.1, "-e", "26/255", "-e", 0.3)
        second = written(folder / "certified", certified, ("lipschitz", "--limit", 2), ("certify", *digits, 40, *radii))
        self.networks, self.entries = [Checkpoint.read(first), Checkpoint.read(second)], list[Raw]()
        for checkpoint in self.networks:  # what was kept of an earlier network, as if it were about this one
            entries: list[Raw] = raw_of(checkpoint)["evidence"]
            kept = [{**e, "digest": checkpoint.digest} for e in entries if e["command"] in ("adapt", "constrain")]
            fresh = [e for e in entries if e["digest"] == checkpoint.digest]
            self.entries += fresh + kept

    @functools.cache  # noqa: B019 (one laboratory a campaign)
    def proven(self, number: int) -> Any:
        return prove_checkpoint(self.networks[number]).upper

    @functools.cache  # noqa: B019
    def truth(self, number: int, dataset: str, split: str, limit: int | None, seed: int, how: str) -> Raw:
        """What certificates by this method (how: its name and options, as JSON) really say of these images."""
        checkpoint = self.networks[number]
        method, options = json.loads(how)
        images = evaluation_images(checkpoint.record, dataset, None, split, limit, seed, Heard())
        certifier = prepare(method, checkpoint, torch.device("cpu"), options_of(method, options))
        rows = [row for batch in certify(certifier, images, 64) for row in batch]
        told = {name: getattr(certifier, name) for name in ("promise", "failure", "arithmetic", "norm")}
        return {
            **told,
            "parameters": json.loads(json.dumps(dict(certifier.parameters))),
            "dataset": describe(images),
            "rows": [(row.correct, row.radius) for row in rows],
        }


def edit(record: Raw, lab: Laboratory, rng: random.Random) -> None:
    """One edit in place: of any value of the evidence, or one that a careful forger makes fit together."""
    evidence: list[Raw] = record["evidence"]
    entry = rng.choice(evidence)
    kind = rng.random()
    if kind < 0.45:
        scatter(entry, lab, rng)
    elif kind < 0.9:
        rng.choice(CAREFUL)(entry, lab, rng)
    elif kind < 0.93:
        evidence.append({**copy.deepcopy(rng.choice(lab.entries)), "digest": entry["digest"]})  # of another network
    elif kind < 0.95:
        twin = copy.deepcopy(entry)
        evidence.append(twin)
        scatter(twin, lab, rng)
    elif kind < 0.97:
        other = rng.choice(evidence)
        name = rng.choice(("parameters", "result", "digest", "command"))
        entry[name], other[name] = other[name], entry[name]
    elif kind < 0.985 and record["lineage"]:
        scatter(rng.choice(record["lineage"]), lab, rng)
    else:
        record[rng.choice(("dataset", "class_names", "foreign"))] = rng.choice(VALUES)


def scatter(entry: Raw, lab: Laboratory, rng: random.Random) -> None:
    """Another value, a value more, less or elsewhere."""
    *way, last = rng.choice([path for path in places(entry) if path])
    place: Any = entry
    for key in way:
        place = place[key]
    value, kind = place[last], rng.random()
    if kind < 0.35:
        place[last] = copy.deepcopy(rng.choice(VALUES))
    elif kind < 0.55 and isinstance(value, (int, float)) and not isinstance(value, bool):
        place[last] = value * rng.choice((0.0, 0.5, 0.999, 1 - 2e-6, 1 + 2e-6, 1.001, 2, 10, -1)) + rng.choice(
            (0, 0, 1e-3, 1)
        )
    elif kind < 0.65 and way:
        del place[last]
    elif isinstance(value, dict):
        value[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif isinstance(value, list):
        value.append(copy.deepcopy(rng.choice(VALUES)))
    else:
        other = rng.choice(lab.entries)
        place[last] = copy.deepcopy(rng.choice([part(other, path) for path in places(other)]))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def part(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


# ---- what a careful forger does: every field that is compared fits the lie


def _certify(forge: Callable[[Raw, Raw, random.Random], None]) -> Callable[[Raw, Laboratory, random.Random], None]:
    def careful(entry: Raw, lab: Laboratory, rng: random.Random) -> None:
        if (
            entry["command"] == "certify"
            and isinstance(entry["result"], dict)
            and isinstance(entry["parameters"], dict)
        ):
            forge(entry["result"], entry["parameters"], rng)
        else:
            scatter(entry, lab, rng)

    careful.__name__ = forge.__name__
    return careful


def another_count(result: Raw, about: Raw, rng: random.Random) -> None:
    images = result["images"]
    step = rng.choice((-1, 1, 2)) / images
    if rng.random() < 0.5:
        result["clean"] = round(result["clean"] * images + step * images) / images
    for key in list(result["certified"]):
        result["certified"][key] = min(
            result["clean"], round(result["certified"][key] * images + step * images) / images
        )


def another_radius(result: Raw, about: Raw, rng: random.Random) -> None:
    key = rng.choice(list(result["certified"]))
    share = result["certified"].pop(key)
    result["certified"][
        rng.choice((f"{float(key) * 2:g}", repr(float(key) * 1.01), f"{float(key) / 2:g}", f"0{key}"))
    ] = share


def another_norm(result: Raw, about: Raw, rng: random.Random) -> None:
    result["parameters"]["norm"] = "linf" if result["parameters"].get("norm") == "l2" else "l2"


def another_method(result: Raw, about: Raw, rng: random.Random) -> None:
    given = {"lipschitz": {}, "bcp": {}, "local": {"effort": "norms", "norm": "l2", "symbols": 0, "steps": 4}}
    name = rng.choice(list(given))
    about["method"] = result["method"] = name
    result.update(parameters=given[name], promise="proof", failure=0.0, arithmetic="real")


def another_promise(result: Raw, about: Raw, rng: random.Random) -> None:
    alpha = rng.choice((0.9, 1e-9, 0.001, 0.05))
    if rng.random() < 0.5:
        result.update(promise="proof", failure=0.0)
    else:
        result.update(promise=f"probability {1 - alpha:g}", failure=alpha)
    if rng.random() < 0.5:
        result["parameters"]["alpha"] = alpha


def another_noise(result: Raw, about: Raw, rng: random.Random) -> None:
    name, values = rng.choice(
        (
            ("sigma", (0.25, 0.5)),
            ("n0", (16, 32)),
            ("samples", (120, 200, 10**7)),
            ("seed", (0, 1)),
            ("enough", (None, 0.1)),
        )
    )
    result["parameters"][name] = rng.choice(values)


def another_dataset(result: Raw, about: Raw, rng: random.Random) -> None:
    about["dataset"] = result["dataset"]["name"] = rng.choice(("ImageNet-1k", "torch/mnist", "digits", MARK))


def another_split(result: Raw, about: Raw, rng: random.Random) -> None:
    about["split"] = result["dataset"]["split"] = rng.choice(("val", "train", "test", "all"))


def fewer_images(result: Raw, about: Raw, rng: random.Random) -> None:
    count = rng.choice((1, 2, 60, 10**6))
    about["limit"] = result["images"] = result["dataset"]["images"] = count
    result["clean"] = 1.0
    result["certified"] = dict.fromkeys(result["certified"], 1.0)


def another_mean(result: Raw, about: Raw, rng: random.Random) -> None:
    result["average_radius"] *= rng.choice((0.5, 1 + 1e-5, 1.1, 2))


CAREFUL = [
    _certify(forge)
    for forge in (
        *(another_count, another_radius, another_norm, another_method, another_promise, another_noise, another_dataset),
        *(another_split, fewer_images, another_mean),
    )
]


# ---- the oracle


def untrue(lab: Laboratory, number: int, entry: Raw, shown: str) -> str | None:
    """What of a sentence about this network is false; None where all of it is true or called measured."""
    command = entry["command"]
    if command in ("attack", "adapt", "constrain"):
        return None if "(measured" in shown else "not called measured"
    if MARK in shown:
        return "foreign text is shown as a fact"
    if command in ("lipschitz", "finetune") and (wrong := untrue_bound(shown, lab.proven(number))):
        return wrong
    if command == "lipschitz":
        return None
    return untrue_shares(lab, number, entry, shown)


def untrue_bound(shown: str, proven: Any) -> str | None:
    told = re.search(r"bound (10\^(?P<power>-?[\d.]+)|(?P<value>[\d.e+-]+)) \(proven\)", shown)
    if told is None:
        return None if "no bound" in shown else "no bound is read in it"
    log10 = float(told["power"]) if told["power"] else math.log10(float(told["value"]) or 1e-999)
    return None if proven.finite and log10 >= proven.log10() - SLACK else f"{told[0]}, and {proven} is proven"


FORM = re.compile(
    r"((?P<n>\d+) images? of (?P<name>.+) \((?P<split>\w+)\)|(?P<few>\d+) validation images?"
    r"|all validation images, their number is not stated): clean (?P<clean>[\d.]+) %, (and )?certified "
    r"(?P<shares>[^()]+?)(?P<box> \(radii linf\))? \((?P<promise>.*)\), "
    r"(average radius (?P<mean>[\d.e+-]+)|no bound|bound.*)"
)


def untrue_shares(lab: Laboratory, number: int, entry: Raw, shown: str) -> str | None:
    told = FORM.fullmatch(shown)
    if told is None:
        return "not of the form that the oracle reads"
    result, about = entry["result"], entry["parameters"]
    if entry["command"] == "finetune":
        steps = lab.networks[number].record.lineage
        how, split, limit, seed = json.dumps(["lipschitz", {}]), "val", about.get("images"), steps[-1].seed
    else:
        given = {name: value for name, value in result["parameters"].items() if name != "noise"}
        how = json.dumps([result["method"], given])
        split, limit, seed = about["split"], about["limit"], about["seed"]
    true = lab.truth(number, "digits", split, limit, seed, how)
    rows, count = true["rows"], len(true["rows"])
    named = told["n"] is not None
    if told["few"] is not None and int(told["few"]) != count:
        return "how many images"
    if named and (int(told["n"]), told["name"], told["split"]) != (
        count,
        true["dataset"]["name"],
        true["dataset"]["split"],
    ):
        return f"the images are {true['dataset']}"
    if abs(float(told["clean"]) - 100 * sum(right for right, _ in rows) / count) > 0.05 + 1e-9:  # one digit is shown
        return "clean"
    if (told["box"] is not None) != (true["norm"] == "linf"):
        return "norm"
    chance = re.search(r"probability ([\d.]+)", told["promise"])
    if (
        (float(chance[1]) > 1 - true["failure"] + 1e-15)
        if chance
        else (true["failure"] or "proven" not in told["promise"])
    ):
        return "promise"
    for share, radius in re.findall(r"([\d.]+) % at ([\d.e+-]+)", told["shares"]):
        held = sum(right and (float(radius) == 0 or found * (1 + SLACK) > float(radius)) for right, found in rows)
        if float(share) > 100 * held / count + 1e-9:
            return f"{share} % at {radius}: they are {held} of {count}"
    if told["mean"] is not None:
        finite = [found if right else 0.0 for right, found in rows if not right or found < math.inf]
        if float(told["mean"]) > sum(finite) / len(finite) * (1 + SLACK):
            return "mean radius"
    return None


def unmarked(lab: Laboratory, number: int, entry: Raw, told: Raw) -> str | None:
    """What of the JSON of a verified entry is false, and not among what is called the author's word."""
    if not told["understood"] or set(told["authors_word"]) != set(AUTHORS_WORD[entry["command"]]):
        return "it is verified and not understood"
    if entry["command"] != "certify":
        return None
    result, about = told["result"], told["parameters"]
    given = {name: value for name, value in result["parameters"].items() if name != "noise"}
    how = json.dumps([result["method"], given])
    true = lab.truth(number, "digits", about["split"], about["limit"], about["seed"], how)
    names = ("promise", "failure", "arithmetic", "parameters", "dataset")
    return next((name for name in names if result[name] != true[name]), None)


def raw_of(checkpoint: Checkpoint) -> Raw:
    """The record as JSON."""
    found: Raw = json.loads(checkpoint.record.to_json())
    return found


class Verifier:
    """The real verification, which certifies and proves the same thing once."""

    def __init__(self, lab: Laboratory) -> None:
        self.known = lab.known

    def claims(self, checkpoint: Checkpoint) -> list[Claim]:
        certify_again = _certifier(checkpoint, Asked(None, None, None, True, Machine(batch_size=64)), Heard())
        record = checkpoint.record

        def remembered(request: Request) -> Again:
            key = f"{checkpoint.digest} {record.dataset!r} {record.class_names!r} {request!r}"
            if key not in self.known:
                try:
                    self.known[key] = certify_again(request)
                except CertvitError as failure:
                    self.known[key] = failure
            found = self.known[key]
            if isinstance(found, CertvitError):
                raise found
            return found

        return check(checkpoint, remembered, measured=False)


def campaign(count: int, seed: int, lab: Laboratory, tell: Callable[[str], None] = lambda line: None) -> Raw:
    """What became of `count` edited records."""
    rng, verifier, outcomes, wrong = random.Random(seed), Verifier(lab), collections.Counter[str](), list[str]()
    proofs = {checkpoint.digest: lab.proven(number) for number, checkpoint in enumerate(lab.networks)}
    real = verification.prove_checkpoint
    assert [real(checkpoint).upper for checkpoint in lab.networks] == list(proofs.values())

    class Known:
        def __init__(self, upper: Any) -> None:
            self.upper = upper

    verification.prove_checkpoint = lambda checkpoint, *_: Known(proofs[checkpoint.digest])  # type: ignore[assignment]
    try:
        for position in range(count):
            own = random.Random(rng.random())
            number = own.randrange(len(lab.networks))
            raw = raw_of(lab.networks[number])
            try:
                for _ in range(own.choice((1, 1, 1, 2, 3))):
                    edit(raw, lab, own)
            except (KeyError, TypeError, IndexError, ValueError, OverflowError, AttributeError, ZeroDivisionError):
                pass  # a second edit does not fit what the first one left: what was edited so far is judged
            try:
                outcome, lies = judge(lab, number, raw, verifier, drawn=own.random() < 0.02)
            except Exception:  # every one is a finding
                outcome, lies = "bug", [traceback.format_exc(limit=-3)]
            outcomes[outcome] += 1
            wrong += [f"{position}: {lie}" for lie in lies]
            if position % 1000 == 999:
                tell(f"{position + 1} edits, {dict(outcomes)}, {len(wrong)} findings")
    finally:
        verification.prove_checkpoint = real
    return {"edits": count, "outcomes": dict(sorted(outcomes.items())), "findings": wrong}


def judge(lab: Laboratory, number: int, raw: Raw, verifier: Verifier, drawn: bool) -> tuple[str, list[str]]:
    """How an edited record ends, and every figure that is shown although it is false. drawn: the page, too."""
    try:
        record = Record.from_json(json.dumps(raw))
    except CertvitError:
        return "refused at the door", []
    network = lab.networks[number]
    checkpoint = Checkpoint(network.tensors, record)
    assert checkpoint.digest == network.digest
    claims, heard = verifier.claims(checkpoint), Heard()
    view.show(Path("m"), checkpoint, heard)
    view.compare([(Path("m"), checkpoint), (Path("other"), lab.networks[1 - number])], heard)
    page = pages.log_page([(Path("m"), checkpoint)], [claims])
    lies = (
        ["a flood"]
        if max(map(len, (*heard.lines, *(c for t in page.tables for r in t.rows for c in r)))) > LONGEST
        else []
    )
    if drawn:
        render(page)
    found = statuses(claims, len(record.evidence))
    shown = {row[1] for table in page.tables if table.title.startswith("Evidence") for row in table.rows}
    marked = False
    for position, (entry, status) in enumerate(zip(record.evidence, found, strict=True)):
        about, told = raw["evidence"][position], view.sentence(entry)
        if entry.digest != checkpoint.digest:
            continue
        if entry.command not in COMMANDS and (told != view.NOT_UNDERSTOOD or command_of(entry) != "unknown"):
            lies.append(f"{about['command']!a} is repeated")
        if status == "verified":
            told_json = as_json(entry, checkpoint.digest)
            lies += [
                f"{lie} in: {told} ({json.dumps(about)[:1500]})" for lie in (untrue(lab, number, about, told),) if lie
            ]
            lies += [
                f"JSON: {lie} ({json.dumps(about)[:1500]})" for lie in (unmarked(lab, number, about, told_json),) if lie
            ]
        elif about["command"] in ("attack", "adapt", "constrain") and told != view.NOT_UNDERSTOOD:
            marked = True
            lies += [f"{told}: not called measured" for _ in range("(measured" not in told)]
        refuted = {view.sentence(e) for e, s in zip(record.evidence, found, strict=True) if s == "refuted"}
        good = {view.sentence(e) for e, s in zip(record.evidence, found, strict=True) if s != "refuted"}
        lies += [f"refuted, and on the page: {text}" for text in shown & refuted - good - {view.NOT_UNDERSTOOD}]
    if any(claim.status == "refuted" for claim in claims):
        return "refuted", lies
    if verdict(claims):
        return "not verified", lies
    return ("true, or the author's word" if marked else "true"), lies


def made(folder: Path) -> tuple[Path, Path]:
    """A plain network and one with a useful bound, made by the command line."""
    tiny = [
        word for pair in ("embed_dim=16", "depth=1", "num_heads=2", "patch_size=4") for word in ("--arch-arg", pair)
    ]
    names = ("init", "plain", "adapted", "constrained", "certified")
    init, plain, adapted, constrained, certified = (folder / f"{name}.made.safetensors" for name in names)
    run("init", "certvit_vit_digits", *tiny, "-o", init)
    run("finetune", init, "--dataset", "digits", "--loss", "ce", "--epochs", 4, "--lr", 5e-3, "-o", plain)
    parts = ("--norm", "fold", "--activation", "maxmin", "--head", "32,32", "--epochs", 1, "--limit", 300)
    run("adapt", plain, "--goal", "certify", *parts, "-o", adapted)
    run("constrain", adapted, "--beta", 0.01, "--limit", 100, "-o", constrained)
    learn = ("--loss", "margin", "--epsilon", 0.3, "--optimiser", "stiefel", "--lr", 0.01, "--epochs", 4)
    run("finetune", constrained, *learn, "-o", certified)
    return plain, certified


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        laboratory = Laboratory(Path(name), *made(Path(name)))
        score = campaign(asked.count, asked.seed, laboratory, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(score, indent=1))
    sys.exit(bool(score["findings"]))
