"""The answer in sentences, and what to do next: from what was measured, and from nothing else."""

import math
import shlex

from certcli.audit.gates import AuditFindings
from certcli.audit.plan import AuditPlan, Typed
from certcli.certify.method_choice import HOPELESS
from certcli.evaluation.intervals import FEW, counted, interval_of_few, part_of
from certcli.evaluation.threat import (
    attacked_radius,
    confidence,
    power_of_ten,
    proven_radius,
    radius_key,
    rounded_up,
)
from certcli.images.labelled import OWN
from certcli.report.document import CertifiedShares

CORRECT = "correct images"
PHOTOGRAPH = 224
"""Pixels a side from which on an image is of ImageNet's size."""
UNET = "256x256_diffusion_uncond.pt"
DENOISER = (
    "Without any training, behind one step of a diffusion model, Carlini et al. (2023) certified "
    "71.1, 54.3 and 38.1 % of ImageNet at l2 0.5, 1 and 1.5 (their figures, not ours) with two "
    f"downloads: {UNET} (2.2 GB, MIT, openaipublic.blob.core.windows.net/diffusion/jul-2021) and a "
    "BEiT-L (1.2 GB, Apache 2.0, timm's beit_large_patch16_512); the first alone serves this network, on a GPU."
)
"""For who may not retrain; the sizes are those of 553 and 305 million numbers in float32."""
PENALTY = 0.2
"""Weight of the enclosure penalty that small networks are advised."""
LITTLE_ATTENTION = 0.01
"""Largest weight of an attention branch below which the answer says that attention hardly takes
part."""


def verdict_sentences(findings: AuditFindings, plan: AuditPlan) -> list[str]:
    """Return proofs, certificates by noise, attacks and gaps, a sentence or two each."""
    sentences = [_proof(findings, plan), *_patch_sentences(findings)]
    sentences += [_smoothed(shares) for shares in findings.certificates if shares.failure > 0]
    if (attack := findings.attack) is not None:
        names = ", then ".join(attack.attacks)
        at = list(attack.fooled)[-1]
        correct = attack.clean.hits
        noun = "images" if findings.own else CORRECT
        if correct:
            sentences.append(
                f"Under attack, {names} fooled {part_of(attack.fooled[at], correct, noun)} at l2 {attacked_radius(at)}."
            )
        else:
            none = _none_of(attack.clean.images, "images")
            sentences.append(f"Nothing to attack: {none} is classified correctly.")
    elif findings.clean is not None and not findings.own:
        right = counted(findings.clean.hits, findings.clean.images, proven=False)
        sentences.append(f"Correct without any attack: {right}. It was not attacked.")
    if (tried := findings.patch_attack) is not None and tried.clean.hits:
        noun = "images" if findings.own else CORRECT
        fooled = part_of(tried.clean.hits - tried.robust.hits, tried.clean.hits, noun)
        sentences.append(
            f"Without masks, a patch of {_patch_sides(tried.patch)} pixels fooled {fooled}."
        )
    weight = findings.attention_weight
    if weight is not None and weight < LITTLE_ATTENTION:
        sentences.append(
            f"Attention hardly takes part: its largest weight in a residual sum is "
            f"{rounded_up(weight, 2)} (a plain network has 1)."
        )
    if _wants_denoiser(findings, plan):
        sentences.append(DENOISER)
    if findings.own:
        sentences.append(
            "The images have no labels: shares are of the network's own answers, and its accuracy is not measured."
        )
    if findings.dataset is None:
        sentences.append(
            "Images decide accuracy, certified shares and attacks: a folder with one subfolder for each class, or the "
            "name of a dataset."
        )
    return sentences


def _wants_denoiser(findings: AuditFindings, plan: AuditPlan) -> bool:
    """Whether a published diffusion model fits the images, and is the only way to useful radii
    without training: no proof certifies an image, and none stands before the network. Without a GPU
    it takes minutes an image.
    """
    channels, *sides = findings.input
    fits = channels == 3 and min(sides) >= PHOTOGRAPH and not any(side % 32 for side in sides)
    tried = findings.dataset is not None and plan.tries("smoothing") and findings.failing is None
    if not (fits and tried and findings.gpu and plan.denoiser is None):
        return False
    return best_proof(findings, plan) is None


def _patch_sides(patch: str) -> str:
    return patch.replace("x", " x ")


def _patch_sentences(findings: AuditFindings) -> list[str]:
    """Return what no patch of each size changes: about the classifier behind masks."""
    patched = findings.patched
    if patched is None:
        return []
    name = patched.procedure.replace("-", " ")
    right = part_of(patched.clean.hits, patched.clean.images)
    gives = "it gives the network's own answer" if findings.own else "it is right"
    return [
        f"Proven: with {name} no {_patch_sides(size)} patch changes the answer for "
        f"{counted(part.hits, part.images)}; without a patch {gives} on {right}."
        for size, part in patched.certified.items()
    ]


def best_proof(findings: AuditFindings, plan: AuditPlan) -> CertifiedShares | None:
    """Return the proofs that certify most at the smallest radius; None: no image."""
    at = radius_key(plan.least)
    candidates = [
        shares
        for shares in findings.certificates
        if shares.failure == 0 and shares.certified[at].hits > 0
    ]
    return max(candidates, key=lambda shares: shares.certified[at].share, default=None)


def _proof(findings: AuditFindings, plan: AuditPlan) -> str:
    bound = findings.bound
    best = best_proof(findings, plan)
    radius = radius_key(plan.least)
    driven = f" ({bound.drivers})" if bound is not None and bound.drivers else ""
    large = "" if bound is None else f"{magnitude(bound.log10_upper, bound.upper_text)}{driven}"
    if best is not None:
        by_bound = best.method == "lipschitz" and bound is not None
        source = (
            f"the global bound is {bound.upper_text}" if by_bound and bound else "image by image"
        )
        certified = best.certified[radius]
        sentence = f"Proven at l2 {proven_radius(radius)}: {counted(certified.hits, certified.images)} ({source})."
        return sentence if by_bound or bound is None or not bound.upper_finite else (
            f"{sentence} The global bound proves nothing: {large}."
        )  # fmt: skip
    if bound is None:
        return "The global bound was not finished in its time: whether there is a usable proof is not known."
    if not bound.upper_finite:
        return f"No proof: the network has no finite global bound ({bound.why})."
    proofs = [shares for shares in findings.certificates if shares.failure == 0]
    if proofs:
        return f"No usable proof: the global bound is {large}. {_none(proofs[-1], plan.least)}"
    if findings.dataset is None and bound.log10_upper is not None:
        usable = "A" if bound.log10_upper < HOPELESS else "No usable proof: a"
        need = bound.log10_upper + math.log10(plan.least)
        margin = rounded_up(10**need, 2) if need < 5 else power_of_ten(need)
        return f"{usable} certificate at l2 {proven_radius(radius)} needs logits {margin} apart: the global bound is {large}."
    return f"No usable proof: the global bound is {large}."


def _none(shares: CertifiedShares, radius: float) -> str:
    """Return that proofs certify no image, and of how many."""
    right = shares.clean.hits
    correct = "" if shares.dataset.split == OWN else "correct "
    if right == 0:
        return f"Correct images among those tried: {_none_of(shares.clean.images, 'images')}."
    source = "By it" if shares.method == "lipschitz" else "Image by image"
    if right == 1:
        return f"{source}, the one {correct}image tried is not certified at {proven_radius(radius)}{interval_of_few(0, 1)}."
    return f"{source}, {_none_of(right, f'{correct}images tried')} is certified at {proven_radius(radius)}."


def _none_of(images: int, noun: str) -> str:
    return f"none of {images} {noun}{interval_of_few(0, images)}"


def magnitude(log10: float | None, text: str) -> str:
    return text if log10 is None or log10 < 5 else power_of_ten(log10)


def _smoothed(shares: CertifiedShares) -> str:
    at = max(shares.certified, key=float)
    reached = shares.certified[at]
    sigma = shares.parameters["sigma"]
    certified = counted(reached.hits, reached.images)
    return (
        f"Smoothing at sigma {sigma:g} certifies {certified} at l2 {proven_radius(at)}, each with probability "
        f"{confidence(shares.failure, 100)} %: a statement about the smoothed network."
    )


def next_steps(findings: AuditFindings, plan: AuditPlan, typed: Typed) -> list[str]:
    """Commands that lead on, the most useful first; at most three."""
    ckpt = shlex.join(typed.network)
    images, training = (
        "".join(f" {shlex.quote(word)}" for word in typed.images(judged))
        for judged in (True, False)
    )
    commands: list[str] = []
    longer = f"certvit audit {ckpt}{images} --time-budget {5 * plan.budget:.0f}s"
    if findings.dataset is None or findings.own:
        return [f"certvit audit {ckpt} {typed.labelled}"]
    if findings.failing in findings.doubts and not findings.statistics:  # it says its cause
        return [f"certvit audit {ckpt} --dataset FOLDER"]
    if findings.failing is not None:
        network = shlex.join(typed.without("--mean", "--std"))
        better = shlex.join(findings.statistics)
        return [
            f"certvit audit {network}"
            + (f"{images} {better}" if better else " --dataset FOLDER --mean M --std S")
        ]
    if findings.clean is None:  # nothing was judged: nothing else can be advised
        return [longer]
    short = {item.stage for item in findings.skipped if item.for_time} & {
        "bound",
        "clean",
        "attack",
        "smoothing",
    }
    counts = [
        one.clean.images for one in (*findings.certificates, findings.attack) if one is not None
    ]
    if short or min(counts, default=0) < min(FEW, findings.dataset.images):
        commands.append(longer)
    smoothed = [item for item in findings.certificates if item.failure > 0]
    proven = [
        item
        for item in findings.certificates
        if item.failure == 0 and any(s.hits for s in item.certified.values())
    ]
    radius = radius_key(plan.least)
    is_small = not findings.changed and any(
        item.method == "local" for item in findings.certificates
    )
    enclosed = (
        f"certvit finetune {ckpt}{training} --loss ce --adversarial pgd --attack-norm l2 "
        f"--attack-steps 2 -e {2 * plan.least:g} --enclosure-penalty {PENALTY:g} --lr 2e-3 --epochs 30 "
        "-o enclosed.safetensors"
    )
    if proven:
        commands.append(
            f"certvit certify {ckpt}{images} --method {proven[0].method} -e {radius} --records certified.jsonl"
        )
        commands.append(
            f"certvit attack {ckpt}{images} --only-certified certified.jsonl -a margin-pgd"
        )
    elif smoothed and any(item.share for item in smoothed[0].certified.values()):
        sigma = f"{smoothed[0].parameters['sigma']:g}"
        fast = " --precision bf16" if findings.precision == "bf16" else ""
        commands.append(
            f"certvit certify {ckpt}{images} --method smoothing --sigma {sigma} -e {radius} --limit 500{fast}"
        )
        if is_small:
            commands.append(enclosed)
        commands.append(f"certvit finetune {ckpt}{training} --loss ce --noise {2 * float(sigma):g}")
    elif (
        findings.changed
    ):  # its parts have small constants: training against the bound is what they are for
        commands.append(
            f"certvit finetune {ckpt}{training} --loss margin -e {radius_key(plan.certified_radii[-1])}"
        )
        commands.append(f"certvit constrain {ckpt}")
    else:
        noise = f"{2 * plan.least:g}"
        if is_small:
            commands.append(enclosed)
        commands.append(f"certvit finetune {ckpt}{training} --loss ce --noise {noise}")
        if findings.attention_weight is not None:  # else there is no attention to replace
            commands.append(f"certvit adapt {ckpt}")
    return commands[:3]
