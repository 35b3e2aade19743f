"""What `constrain` and `adapt`'s fit are worth: chains of commands at an equal number of gradient steps, over seeds.

    python benchmarks/worth.py [--parts demo gentle none few all] [--seeds 0 1 2] [--out DIR]

Each part begins with one network a seed, trained as anyone would on the embedded digits, and compares chains that
differ in the steps named. Each step is the command as a user types it, with the seed; the certified training is the same
in every chain of a part, and its length was not chosen by what comes out. Printed are means over the seeds with the least
and the largest value: accuracy and certified share on the 396 test images, the proven bound, and the CPU seconds of all
commands after the first network.

demo    the chain of `make demo`, 20 epochs of orthogonal training: with and without the fit, with and without
        `constrain`, and the same parts around random weights.
gentle  the same network after the fit, trained by AdamW at a low rate, which keeps the matrices that it is given.
none    a MaxMin network without attention, norms and residuals; no labels and no training after it.
few     the same network, then certified training on 100 labelled images by AdamW at a low rate.
all     the same network, then certified training on all images: by AdamW, and by orthogonal steps.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from certcli.cli.main import app

PLAIN = "finetune --dataset digits --loss ce --epochs 15 --lr 2e-3 --noise 0.1"
ADAPT = "adapt --dataset digits --goal certify --limit 2000 --norm fold --activation maxmin --head 128,128"
SURGERY = f"{ADAPT} --epochs -1"
CONSTRAIN = "constrain --dataset digits --limit 2000 --beta 0.01"
MARGIN = "finetune --dataset digits --loss margin --epochs 20"
ORTHOGONAL = f"{MARGIN} --optimiser stiefel --lr 0.01"
GENTLE = f"{MARGIN} --optimiser adamw --lr 3e-4"
FEW = f"{GENTLE} --limit 100 --validation-limit 50"

Chain = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """radius: of the training and of the certificates. chains: name -> commands; those that start with `init` begin there."""

    arch: str
    radius: float
    chains: dict[str, Chain]


def _vit(train: str) -> dict[str, Chain]:
    return {
        "surgery from the weights alone": (SURGERY, train),
        "surgery, constrain": (SURGERY, CONSTRAIN, train),
        "fit": (ADAPT, train),
        "fit, constrain": (ADAPT, CONSTRAIN, train),
        "random weights": ("init", SURGERY, train),
    }


def _mixer(*train: str) -> dict[str, Chain]:
    return {
        "as it is": train,
        "constrain": (CONSTRAIN, *train),
        "constrain --keep 0.9": (f"{CONSTRAIN} --keep 0.9", *train),
    }


PARTS = {
    "demo": Part("certvit_vit_digits", 0.5, _vit(ORTHOGONAL)),
    "gentle": Part("certvit_vit_digits", 0.5, {k: v for k, v in _vit(GENTLE).items() if k.startswith("fit")}),
    "none": Part("certvit_lip_digits", 0.25, _mixer()),
    "few": Part("certvit_lip_digits", 0.25, _mixer(FEW)),
    "all": Part(
        "certvit_lip_digits",
        0.25,
        {f"{name}, {how}": chain for how, train in (("AdamW", GENTLE), ("orthogonal", ORTHOGONAL))
         for name, chain in _mixer(train).items() if "0.9" not in name},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    clean: float
    certified: float
    log10_bound: float
    seconds: float


def certvit(words: Sequence[str]) -> tuple[str, float]:
    """(standard output, CPU seconds) of one command, in this process: imports are not counted. It fails loudly."""
    before = time.process_time()
    done = CliRunner().invoke(app, list(words), catch_exceptions=False, standalone_mode=False)
    if done.exit_code:
        raise SystemExit(f"certvit {' '.join(words)}: {done.output}")
    return done.stdout, time.process_time() - before


def step(command: str, source: Path, target: Path, part: Part, seed: int) -> float:
    """One step of a chain; its CPU seconds."""
    verb, *options = command.split()
    if "--loss margin" in command:
        options += ["--epsilon", str(part.radius)]
    words = [verb, str(source), *options, "--seed", str(seed), "-o", str(target), "--force", "--quiet"]
    return certvit(words)[1]


def first(arch: str, seed: int, folder: Path) -> tuple[Path, Path]:
    """(random weights, the network trained as anyone would): made once."""
    start, plain = folder / f"{arch}.{seed}.init.safetensors", folder / f"{arch}.{seed}.plain.safetensors"
    if not plain.exists():
        certvit(["init", arch, "--seed", str(seed), "-o", str(start), "--force", "--quiet"])
        certvit(
            ["finetune", str(start), *PLAIN.split()[1:], "--seed", str(seed), "-o", str(plain), "--force", "--quiet"]
        )
    return start, plain


def run(part: Part, chain: Chain, seed: int, folder: Path) -> Outcome:
    start, current = first(part.arch, seed, folder)
    seconds = 0.0
    if chain[:1] == ("init",):
        current, chain = start, chain[1:]
    for number, command in enumerate(chain):
        target = folder / f"step{number}.safetensors"
        seconds += step(command, current, target, part, seed)
        current = target
    words = [
        "certify",
        str(current),
        "--dataset",
        "digits",
        "--split",
        "test",
        "-e",
        str(part.radius),
        "--json",
        "--quiet",
    ]
    report = json.loads(certvit([*words, "-o", str(folder / "judged.safetensors"), "--force"])[0])
    certified = report["certified"][str(part.radius)]
    return Outcome(report["clean"], certified, report["bound"]["log10_upper"], seconds)


def cell(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """\"96.4 (95.7 to 97.1)\": the mean, the least and the largest."""
    middle, low, high = (format(scale * each, form) for each in (statistics.mean(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("worth-output"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.parts:
        part = PARTS[name]
        print(f"\n{name}, {part.arch}, l2 radius {part.radius}, seeds {arguments.seeds}\n")
        print(
            f"| chain | clean % | certified % at {part.radius} | log10 bound | CPU s |\n|---|---|---|---|---|",
            flush=True,
        )
        for title, chain in part.chains.items():
            found = [run(part, chain, seed, arguments.out) for seed in arguments.seeds]
            columns = (
                cell([each.clean for each in found], ".1f", 100),
                cell([each.certified for each in found], ".1f", 100),
                cell([each.log10_bound for each in found], ".2f"),
                format(statistics.mean(each.seconds for each in found), ".0f"),
            )
            print(f"| {title} | {' | '.join(columns)} |", flush=True)
    for leftover in (*arguments.out.glob("step*"), *arguments.out.glob("judged*")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


if __name__ == "__main__":
    main()
