"""Edits of honest evidence by the thousand: `python -m tests.soundness.evidence_fuzz --count
10000`.

Either all that `log` shows of an entry is true, or `certvit verify` refutes it or leaves it
unchecked, or the entry is called measured. The oracle computes the truth from the network and its
images.
"""

import contextlib
import copy
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.cli.log import run
from certcli.evaluation.evidence import command_of, evidence_document, statuses, unverified_reasons
from certcli.evaluation.evidence_schema import COMMANDS
from certcli.system.errors import CertvitError
from certcli.verification import evidence as verification
from tests.helpers.workshop import Workshop
from tests.soundness.edits import MARK, VALUES, Case, Raw, edit, run_edits
from tests.soundness.evidence_oracle import Laboratory, Screen, raw_of, unmarked, untrue

LONGEST = 30_000
"""Characters that evidence may take on a screen: it holds 256 radii at most."""


def another_count(result: Raw, about: Raw, rng: random.Random) -> None:
    images = result["images"]
    step = rng.choice((-1, 1, 2))
    if rng.random() < 0.5:
        result["clean"] = (round(result["clean"] * images) + step) / images
    for key, share in result["certified"].items():
        result["certified"][key] = min(result["clean"], (round(share * images) + step) / images)


def another_radius(result: Raw, about: Raw, rng: random.Random) -> None:
    key = rng.choice(list(result["certified"]))
    other = rng.choice(
        (f"{float(key) * 2:g}", repr(float(key) * 1.01), f"{float(key) / 2:g}", f"0{key}")
    )
    result["certified"][other] = result["certified"].pop(key)


def another_norm(result: Raw, about: Raw, rng: random.Random) -> None:
    result["parameters"]["norm"] = "linf" if result["parameters"].get("norm") == "l2" else "l2"


def another_method(result: Raw, about: Raw, rng: random.Random) -> None:
    local = {"effort": "tokens", "norm": "l2", "symbols": 1, "steps": 4}
    name, parameters = rng.choice((("lipschitz", {}), ("bcp", {}), ("local", local)))
    about["method"] = result["method"] = name
    result.update(parameters=parameters, promise="proof", failure=0.0, arithmetic="real")


def another_promise(result: Raw, about: Raw, rng: random.Random) -> None:
    alpha = rng.choice((0.9, 1e-9, 0.001, 0.05))
    result.update(promise=f"probability {1 - alpha:g}", failure=alpha)
    if rng.random() < 0.5:
        result.update(promise="proof", failure=0.0)
    if rng.random() < 0.5:
        result["parameters"]["alpha"] = alpha


def another_noise(result: Raw, about: Raw, rng: random.Random) -> None:
    options = {
        "sigma": (0.25, 0.5), "n0": (16, 32), "samples": (120, 200, 10**7), "seed": (0, 1), "enough": (None, 0.1),
    }  # fmt: skip
    name = rng.choice(list(options))
    result["parameters"][name] = rng.choice(options[name])


def another_dataset(result: Raw, about: Raw, rng: random.Random) -> None:
    about["dataset"] = result["dataset"]["name"] = rng.choice(
        ("ImageNet-1k", "torch/mnist", "digits", MARK)
    )


def another_split(result: Raw, about: Raw, rng: random.Random) -> None:
    about["split"] = result["dataset"]["split"] = rng.choice(("val", "train", "test", "all"))


def fewer_images(result: Raw, about: Raw, rng: random.Random) -> None:
    about["limit"] = result["images"] = result["dataset"]["images"] = rng.choice((1, 2, 60, 10**6))
    result.update(clean=1.0, certified=dict.fromkeys(result["certified"], 1.0))


def another_mean(result: Raw, about: Raw, rng: random.Random) -> None:
    result["average_radius"] *= rng.choice((0.5, 1 + 1e-5, 1.1, 2))


FORGERIES: tuple[Callable[[Raw, Raw, random.Random], None], ...] = (
    *(
        another_count,
        another_radius,
        another_norm,
        another_method,
        another_promise,
        another_noise,
        another_dataset,
    ),
    *(another_split, fewer_images, another_mean),
)
"""What a careful forger does to an entry of `certify`: every field that is compared fits the lie."""


def edit_record(record: Raw, lab: Laboratory, rng: random.Random) -> None:
    """Change one value of the evidence, forge an entry, or take one from elsewhere."""
    evidence: list[Raw] = record["evidence"]
    entry = rng.choice(evidence)
    kind = rng.random()
    forgeable = isinstance(entry["result"], dict) and isinstance(entry["parameters"], dict)
    if kind < 0.45 and entry["command"] == "certify" and forgeable:
        rng.choice(FORGERIES)(entry["result"], entry["parameters"], rng)
    elif kind < 0.9:
        edit(entry, rng, lab.entries)
    elif kind < 0.93:
        evidence.append(
            {**copy.deepcopy(rng.choice(lab.entries)), "digest": entry["digest"]}
        )  # of another network
    elif kind < 0.95:
        evidence.append(copy.deepcopy(entry))
        edit(evidence[-1], rng, lab.entries)
    elif kind < 0.97:
        other = rng.choice(evidence)
        name = rng.choice(("parameters", "result", "digest", "command"))
        entry[name], other[name] = other[name], entry[name]
    elif kind < 0.985 and record["lineage"]:
        edit(rng.choice(record["lineage"]), rng, lab.entries)
    else:
        record[rng.choice(("dataset", "class_names", "foreign"))] = copy.deepcopy(
            rng.choice(VALUES)
        )


def judge_record(lab: Laboratory, number: int, raw: Raw) -> tuple[str, list[str]]:
    """Return how an edited record ends, and every false figure that is shown."""
    try:
        record = Record.from_json(json.dumps(raw))
    except CertvitError:
        return "refused at the door", []
    network = lab.networks[number]
    checkpoint = Checkpoint(network.tensors, record)
    assert checkpoint.digest == network.digest
    claims = lab.claims(checkpoint)
    screen = Screen()
    run.show_checkpoint(Path("m"), checkpoint, screen)
    run.compare_evidence(
        [(Path("m"), checkpoint), (Path("other"), lab.networks[1 - number])], screen
    )
    lies = ["a flood"] if max(map(len, screen.lines)) > LONGEST else []
    found = statuses(claims, len(record.evidence))
    measured = False
    for entry, about, status in zip(record.evidence, raw["evidence"], found, strict=True):
        sentence = run.evidence_sentence(entry)
        if entry.digest != checkpoint.digest:
            continue
        if entry.command not in COMMANDS and (
            sentence != run.NOT_UNDERSTOOD or command_of(entry) != "unknown"
        ):
            lies.append(f"{about['command']!a} is repeated")
        if status == "verified":
            wrong = (
                untrue(lab, number, about, sentence),
                unmarked(lab, number, about, evidence_document(entry, checkpoint.digest)),
            )
            lies += [f"{lie} in: {sentence} ({json.dumps(about)[:1500]})" for lie in wrong if lie]
        elif (
            about["command"] in ("attack", "adapt", "constrain") and sentence != run.NOT_UNDERSTOOD
        ):
            measured = True
            lies += [f"{sentence}: not called measured"] * ("(measured" not in sentence)
    if any(claim.status == "refuted" for claim in claims):
        return "refuted", lies
    if unverified_reasons(claims):
        return "not verified", lies
    return ("true, or the author's word" if measured else "true"), lies


@contextlib.contextmanager
def edited_evidence(lab: Laboratory) -> Iterator[Case]:
    """Yield the case of a campaign: one edited record, verified and shown."""
    proofs = {
        checkpoint.digest: lab.proven(number) for number, checkpoint in enumerate(lab.networks)
    }

    def case(rng: random.Random) -> tuple[str, list[str]]:
        number = rng.randrange(len(lab.networks))
        raw = raw_of(lab.networks[number])
        unfit = (
            KeyError,
            TypeError,
            IndexError,
            ValueError,
            OverflowError,
            AttributeError,
            ZeroDivisionError,
        )
        with contextlib.suppress(*unfit):  # a second edit may not fit what the first one left
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                edit_record(raw, lab, rng)
        try:
            return judge_record(lab, number, raw)
        except CertvitError:  # only the door refuses
            return "bug", [traceback.format_exc(limit=-3)]

    def prove(checkpoint: Checkpoint, *_: object) -> SimpleNamespace:
        return SimpleNamespace(upper=proofs[checkpoint.digest])

    with mock.patch.object(verification, "prove_checkpoint", prove):
        yield case


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        made = Workshop(name)
        laboratory = Laboratory(
            Path(name), made / "plain.safetensors", made / "certified.safetensors"
        )
        sys.exit(run_edits(__doc__, edited_evidence(laboratory)))
