"""The answer in words, and what to do next: plain sentences from what was measured, and from nothing else."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from certcli.audit.gates import FailOn
from certcli.audit.run import AUTO, HOPELESS, Asked, Results
from certcli.evaluation.radii import attacked_radius, confidence, proven_percent, proven_radius, radius_key
from certcli.report.document import Certified, Share

FEW = 30
"""Images below which a share is hardly one: the sentence says so."""


@dataclass(frozen=True)
class Typed:
    """What was typed that names the network (hints: further words that reading it needs) and its images."""

    source: str
    hints: Sequence[str] = ()
    dataset: str | None = None
    data_dir: str | None = None
    split: str | None = None

    def network(self) -> list[str]:
        return [self.source, *self.hints]

    def images(self, judged: bool = True) -> list[str]:
        """judged: of a command that judges a network by them, and knows of splits."""
        found = [] if self.dataset is None else ["--dataset", self.dataset]
        found += [] if self.data_dir is None else ["--data-dir", self.data_dir]
        return found + (["--split", self.split] if self.split is not None and judged else [])

    def travelling(self) -> "Typed":
        """For documents that others read: what is a path here without its folders."""

        def shown(typed: str) -> str:
            return Path(typed).resolve().name if Path(typed).exists() else typed

        dataset, folder = (None if name is None else shown(name) for name in (self.dataset, self.data_dir))
        return replace(self, source=shown(self.source), dataset=dataset, data_dir=folder)


def share(found: Share) -> str:
    """ "26 of 50 images (52 %, interval 37 to 66)" """
    low, high = found.interval
    return (
        f"{found.hits} of {found.images} images ({proven_percent(found.share, 0)}, 95 % interval "
        f"{100 * low:.0f} to {100 * high:.0f})"
    )


def verdict(results: Results, asked: Asked) -> list[str]:
    """What is proven, what holds with probability, what attacks found, what is not known: one sentence or two each."""
    told = [_proof(results, asked)]
    told += _patched(results)
    told += [_smoothed(found, asked) for found in results.certificates if found.failure > 0]
    if (attack := results.attack) is not None:
        names = ", then ".join(name.upper() for name in attack.attacks)
        at = list(attack.fooled)[-1]
        correct = attack.clean.hits
        few = " Few images: a rough answer." if attack.clean.images < FEW else ""
        told.append(f"{names} fooled {attack.fooled[at]} of {correct} correct images at l2 {attacked_radius(at)}.{few}")
        if correct == 0:
            told[-1] = f"Nothing to attack: none of {attack.clean.images} images is classified correctly."
    elif results.clean is not None:
        told.append(f"Correct without any attack: {share(results.clean)}. It was not attacked.")
    if results.dataset is None:
        told.append("Without labelled images nothing can be said about accuracy, certified shares or attacks.")
    return told


def _patched(results: Results) -> list[str]:
    """What no patch changes, for each size: of the classifier behind masks, which is another one."""
    found = results.patched
    if found is None:
        return []
    way = found.procedure.replace("-", " ")
    return [
        f"Proven: with {way} no {size.replace('x', ' x ')} patch changes the answer for {kept.hits} of {kept.images} images"
        f" ({proven_percent(kept.share, 0)}; without a patch it is right on {found.clean.hits})."
        + (" Few images: a rough answer." if kept.images < FEW else "")
        for size, kept in found.certified.items()
    ]


def _proof(results: Results, asked: Asked) -> str:
    bound = results.bound
    proofs = [found for found in results.certificates if found.failure == 0]
    held = [found for found in proofs if found.certified[radius_key(asked.least)].hits > 0]
    if held:
        best = max(held, key=lambda found: found.certified[radius_key(asked.least)].share)
        at = radius_key(asked.least)
        few = " Few images: a rough answer." if best.clean.images < FEW else ""
        way = f"the global bound is {bound.upper_text}" if best.method == "lipschitz" and bound else "image by image"
        kept = f"{share(best.certified[at])} keep their class, whatever is done to them ({way})"
        told = f"Proven at l2 {proven_radius(at)}: {kept}.{few}"
        if best.method != "lipschitz" and bound is not None and bound.upper_finite:
            driven = f" ({bound.drivers})" if bound.drivers else ""
            told += f" The global bound proves nothing: {_size(bound.log10_upper, bound.upper_text)}{driven}."
        return told
    if bound is None:
        return "The global bound was not finished in its time: whether there is a usable proof is not known."
    if not bound.upper_finite:
        return f"No proof: the network has no finite global bound ({bound.why})."
    large = _size(bound.log10_upper, bound.upper_text)
    driven = f" ({bound.drivers})" if bound.drivers else ""
    told = f"the global bound is {large}{driven}"
    if proofs:
        return f"No usable proof: {told}. {_none(proofs[-1], asked.least)}"
    if results.dataset is None and bound.log10_upper is not None:
        usable = "A" if bound.log10_upper < HOPELESS else "No usable proof: a"
        apart = _margin(bound.log10_upper, asked.least)
        return f"{usable} certificate at l2 {proven_radius(asked.least)} needs logits {apart} apart: {told}."
    return f"No usable proof: {told}."


def _none(found: Certified, radius: float) -> str:
    """That proofs certify no image, and of how many."""
    right = found.clean.hits
    if right == 0:
        return f"None of the {found.clean.images} images tried is classified correctly."
    way = "By it" if found.method == "lipschitz" else "Image by image"
    if right == 1:
        return f"{way}, the one correct image tried is not certified at {proven_radius(radius)}."
    return f"{way}, none of the {right} correct images tried is certified at {proven_radius(radius)}."


def _size(log10: float | None, text: str) -> str:
    return text if log10 is None or log10 < 5 else f"10^{log10:.0f}"


def _margin(log10: float, radius: float) -> str:
    need = log10 + math.log10(radius)
    return f"{10**need:.2g}" if need < 5 else f"10^{need:.0f}"


def _smoothed(found: Certified, asked: Asked) -> str:
    at = max(found.certified, key=float)
    reached = found.certified[at]
    few = ", few images" if reached.images < FEW else ""
    sigma = found.parameters["sigma"]
    return (
        f"Smoothing at sigma {sigma:g} certifies {share(reached)} at l2 {proven_radius(at)}, each with probability "
        f"{confidence(found.failure, 100)} %{few}: a statement about the smoothed network."
    )


def next_steps(results: Results, asked: Asked, typed: Typed, budget: float) -> list[str]:
    """Commands that lead on, the most useful first; at most three."""
    ckpt = shlex.join(typed.network())
    images, training = ("".join(f" {shlex.quote(word)}" for word in typed.images(judged)) for judged in (True, False))
    found: list[str] = []
    if results.dataset is None:
        return [f"certvit audit {ckpt} --dataset FOLDER"]
    short = {item.stage for item in results.skipped if item.for_time} & {"bound", "clean", "attack", "smoothing"}
    seen = [part.clean.images for part in (*results.certificates, results.attack) if part is not None]
    if short or min(seen, default=0) < min(FEW, results.dataset.images):
        found.append(f"certvit audit {ckpt}{images} --time-budget {5 * budget:.0f}s")
    smoothed = [item for item in results.certificates if item.failure > 0]
    proven = [
        item for item in results.certificates if item.failure == 0 and any(s.hits for s in item.certified.values())
    ]
    radius = radius_key(asked.least)
    if proven:
        found.append(
            f"certvit certify {ckpt}{images} --method {proven[0].method} -e {radius} --records certified.jsonl"
        )
        found.append(f"certvit attack {ckpt}{images} --only-certified certified.jsonl -a margin-pgd")
    elif smoothed and any(item.share for item in smoothed[0].certified.values()):
        sigma = f"{smoothed[0].parameters['sigma']:g}"
        fast = " --precision bf16" if results.precision == "bf16" else ""
        found.append(f"certvit certify {ckpt}{images} --method smoothing --sigma {sigma} -e {radius} --limit 500{fast}")
        found.append(f"certvit finetune {ckpt}{training} --loss ce --noise {2 * float(sigma):g}")
    elif results.changed:  # its parts have small constants: training against the bound is what they are for
        found.append(f"certvit finetune {ckpt}{training} --loss margin -e {radius_key(asked.radii[-1])}")
        found.append(f"certvit constrain {ckpt}")
    else:
        noise = f"{2 * asked.least:g}"
        found.append(f"certvit finetune {ckpt}{training} --loss ce --noise {noise}")
        found.append(f"certvit adapt {ckpt}")
    return found[:3]


def reproduce(
    asked: Asked,
    precision: str,
    gates: Sequence[FailOn],
    typed: Typed,
    limit: int | None,
    budget: float,
) -> str:
    """The command that asks the same, in the precision that it ran in. How many images fit depends on the machine."""
    words = ["certvit", "audit", *typed.network(), *typed.images()]
    for radius in asked.attacked:
        words += ["-e", radius_key(radius)]
    for attack in asked.attacks:
        words += ["-a", attack]
    for method in asked.methods:
        words += ["--method", method]
    for patch in asked.patches:
        words += ["--patch", patch]
    words += [] if asked.sigma is None else ["--sigma", f"{asked.sigma:g}"]
    words += [] if limit is None else ["--limit", str(limit)]
    words += ["--seed", str(asked.seed), "--time-budget", f"{budget:g}s"]
    words += ["--precision", precision] if precision != "float32" or asked.precision != AUTO else []
    for gate in gates:
        words += ["--fail-on", gate.text]
    return shlex.join(words)
