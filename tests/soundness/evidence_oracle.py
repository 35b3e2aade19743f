"""The oracle of the evidence fuzzer: the truth about two networks, computed from their weights and
images.
"""

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from certcli.certify.methods import certify_images, options_of_method, prepare_method
from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared.groups import BatchDevice, Evaluation
from certcli.cli.shared.output import Sink
from certcli.cli.verify.command import VerifyScope
from certcli.cli.verify.run import certify_again
from certcli.evaluation.evidence import Claim
from certcli.evaluation.evidence_schema import UNVERIFIED_FIELDS
from certcli.evaluation.record_lines import describe_images
from certcli.lipschitz.network import prove_checkpoint
from certcli.system.errors import CertvitError
from certcli.verification.evidence import Recertified, Request, check_record_evidence
from certcli.verification.report import SLACK
from tests.helpers.commands import certvit
from tests.soundness.edits import MARK, Raw


class Screen(Sink):
    """The lines that a person would see."""

    def __init__(self) -> None:
        super().__init__(as_json=True, quiet=True)
        self.lines: list[str] = []

    def text(self, line: str = "") -> None:
        self.lines.append(line)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **_: Any
    ) -> None:
        self.lines += [title, *("  ".join(row) for row in rows)]


def raw_of(checkpoint: Checkpoint) -> Raw:
    """Return the record as JSON."""
    table: Raw = json.loads(checkpoint.record.to_json())
    return table


class Laboratory:
    """Two networks with honest evidence of every command and of every kind of certificate, and the
    truth about them.
    """

    def __init__(self, folder: Path, plain: Path, certified: Path) -> None:
        self.known: dict[str, Recertified | CertvitError] = {}
        digits = ("--dataset", "digits", "--limit")
        local = ("--method", "local", "--effort", "tokens")
        noise = (
            "--method",
            "smoothing",
            "--sigma",
            0.25,
            "--n0",
            16,
            "-n",
            120,
            "-e",
            0.1,
            "-e",
            0.3,
        )
        bound: tuple[object, ...] = ("lipschitz", "--limit", 2)
        commands: dict[Path, list[tuple[object, ...]]] = {
            plain: [
                bound,
                ("certify", *digits, 3, *local, "-e", "0.001", "-e", "0.02"),
                ("certify", *digits, 2, *local, "--norm", "linf", "--seed", 1),
                ("certify", *digits, 4, *noise),
                ("attack", *digits, 6, "-e", 0.2, "-a", "fgsm"),
            ],
            certified: [bound, ("certify", *digits, 30, "-e", 0.1, "-e", "26/255", "-e", 0.3)],
        }
        self.networks, self.entries = list[Checkpoint](), list[Raw]()
        for path, given in commands.items():
            for number, (command, *words) in enumerate(given):
                output = folder / f"{path.stem}.{number}.safetensors"
                certvit(command, path, *words, "-o", output, "-q")
                path = output
            checkpoint = Checkpoint.read(path)
            self.networks.append(checkpoint)
            for entry in raw_of(checkpoint)[
                "evidence"
            ]:  # an earlier network's entry, as if it were about this one
                if entry["digest"] == checkpoint.digest or entry["command"] in (
                    "adapt",
                    "constrain",
                ):
                    self.entries.append({**entry, "digest": checkpoint.digest})

    @functools.cache  # noqa: B019 (one laboratory a campaign)
    def proven(self, number: int) -> Any:
        """Return the proven bound of a network."""
        return prove_checkpoint(self.networks[number]).upper

    @functools.cache  # noqa: B019
    def truth(
        self, number: int, dataset: str, split: str, limit: int | None, seed: int, method: str
    ) -> Raw:
        """Return what certificates say of these images. method: its name and its options, as JSON."""
        checkpoint = self.networks[number]
        name, options = json.loads(method)
        data = Evaluation(dataset=dataset, split=split, limit=limit, seed=seed)
        images = data.images(checkpoint.record, Screen())
        certifier = prepare_method(
            name, checkpoint, torch.device("cpu"), options_of_method(name, options)
        )
        rows = [
            (row.correct, row.radius)
            for batch in certify_images(certifier, images, 64)
            for row in batch
        ]
        stated = {
            name: getattr(certifier, name) for name in ("promise", "failure", "arithmetic", "norm")
        }
        parameters = json.loads(json.dumps(dict(certifier.parameters)))
        return {
            **stated,
            "parameters": parameters,
            "dataset": describe_images(images),
            "rows": rows,
        }

    def truth_of(self, number: int, entry: Raw) -> Raw:
        """Return the truth about the images that an entry of `certify` or `finetune` names."""
        result = entry["result"]
        about = entry["parameters"]
        if entry["command"] == "finetune":
            seed = self.networks[number].record.lineage[-1].seed
            method = json.dumps(["lipschitz", {"arithmetic": result.get("arithmetic", "real")}])
            return self.truth(number, "digits", "val", about.get("images"), seed, method)
        options = {name: value for name, value in result["parameters"].items() if name != "noise"}
        options["arithmetic"] = result[
            "arithmetic"
        ]  # a claim about another arithmetic is another claim
        method = json.dumps([result["method"], options])
        return self.truth(number, "digits", about["split"], about["limit"], about["seed"], method)

    def claims(self, checkpoint: Checkpoint) -> list[Claim]:
        """Verify as `certvit verify` does; the same thing is certified once."""
        record = checkpoint.record
        certify_request = certify_again(
            checkpoint, VerifyScope(), Evaluation(), BatchDevice(batch_size=64), Screen()
        )

        def remembered(request: Request) -> Recertified:
            key = f"{checkpoint.digest} {record.dataset!r} {record.class_names!r} {request!r}"
            if key not in self.known:
                try:
                    self.known[key] = certify_request(request)
                except CertvitError as failure:
                    self.known[key] = failure
            found = self.known[key]
            if isinstance(found, CertvitError):
                raise found
            return found

        return check_record_evidence(checkpoint, remembered, measured=False)


SHARE = r"(?:[\d.]+ %|\d+ of \d+ \(95 % interval \d+ to \d+ %\))"
SENTENCE = re.compile(
    r"((?P<n>\d+) images? of (?P<name>.+) \((?P<split>\w+)\)|(?P<few>\d+) validation images?"
    rf"|all validation images, their number is not stated): clean (?P<clean>{SHARE}), (and )?certified "
    rf"(?P<shares>{SHARE} at \S+?(, {SHARE} at \S+?)*)(?P<box> \(radii linf\))? \((?P<promise>.*)\), "
    r"(average radius (?P<mean>[\d.e+-]+)|no bound|bound.*)"
)


def untrue(lab: Laboratory, number: int, entry: Raw, shown: str) -> str | None:
    """Return the false part of a sentence about this network; None where all of it is true or
    called measured.
    """
    command = entry["command"]
    if command in ("attack", "adapt", "constrain"):
        return None if "(measured" in shown else "not called measured"
    if MARK in shown:
        return "foreign text is shown as a fact"
    wrong = (
        _untrue_bound(shown, lab.proven(number)) if command in ("lipschitz", "finetune") else None
    )
    if wrong or command == "lipschitz":
        return wrong
    return _untrue_shares(lab.truth_of(number, entry), shown)


def _untrue_bound(shown: str, proven: Any) -> str | None:
    found = re.search(r"bound (10\^(?P<power>-?[\d.]+)|(?P<value>[\d.e+-]+)) \(proven\)", shown)
    if found is None:
        return None if "no bound" in shown else "no bound is read in it"
    log10 = float(found["power"]) if found["power"] else math.log10(float(found["value"]) or 1e-999)
    return (
        None
        if proven.finite and log10 >= proven.log10() - SLACK
        else f"{found[0]}, and {proven} is proven"
    )


def _untrue_shares(truth: Raw, shown: str) -> str | None:
    part = SENTENCE.fullmatch(shown)
    if part is None:
        return "not of the form that the oracle reads"
    rows = truth["rows"]
    count = len(truth["rows"])
    images = truth["dataset"]
    if part["few"] is not None and int(part["few"]) != count:
        return "the number of images"
    if part["n"] is not None and (int(part["n"]), part["name"], part["split"]) != (
        count, images["name"], images["split"],
    ):  # fmt: skip
        return f"the images are {images}"
    if (
        abs(_percent(part["clean"], count) - 100 * sum(right for right, _ in rows) / count)
        > 0.05 + 1e-9
    ):
        return "clean"  # one digit is shown
    if (part["box"] is not None) != (truth["norm"] == "linf"):
        return "norm"
    chance = re.search(r"probability ([\d.]+)", part["promise"])
    if (
        float(chance[1]) > 1 - truth["failure"] + 1e-15
        if chance
        else truth["failure"] or "proven" not in part["promise"]
    ):
        return "promise"
    for share, radius in re.findall(rf"({SHARE}) at ([\d.e+-]+)", part["shares"]):
        energy = sum(
            right and (float(radius) == 0 or found * (1 + SLACK) > float(radius))
            for right, found in rows
        )
        if _percent(share, count) > 100 * energy / count + 1e-9:
            return f"{share} at {radius}: they are {energy} of {count}"
    if part["mean"] is not None:
        finite = [found if right else 0.0 for right, found in rows if not right or found < math.inf]
        if float(part["mean"]) > sum(finite) / len(finite) * (1 + SLACK):
            return "mean radius"
    return None


def _percent(share: str, count: int) -> float:
    """Return a shown share in percent; infinite where its number of images or its interval is
    false.
    """
    few = re.fullmatch(r"(\d+) of (\d+) \(95 % interval (\d+) to (\d+) %\)", share)
    if few is None:
        return float(share.removesuffix(" %"))
    hits, images, low, high = map(int, few.groups())
    if images != count or hits > images:
        return math.inf
    exact = binomtest(hits, images).proportion_ci(0.95, "exact")
    below, above = 100 * exact.low - low, high - 100 * exact.high
    outward = min(below, above) >= -1e-6 and max(below, above) < 1  # shown without digits
    return 100 * hits / images if outward else math.inf


def unmarked(lab: Laboratory, number: int, entry: Raw, document: Raw) -> str | None:
    """Return the false part of a verified entry's JSON that is not called the author's word."""
    if not document["understood"] or set(document["authors_word"]) != set(
        UNVERIFIED_FIELDS[entry["command"]]
    ):
        return "it is verified and not understood"
    if entry["command"] != "certify":
        return None
    truth = lab.truth_of(number, {**document, "command": "certify"})
    names = ("promise", "failure", "arithmetic", "parameters", "dataset")
    return next((name for name in names if document["result"][name] != truth[name]), None)
