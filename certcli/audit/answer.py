"""The answer in words, a published network beside it, and what to do next: by what was measured."""

import math
import shlex
from collections.abc import Sequence

from certcli.audit.gates import AuditFindings
from certcli.audit.plan import AuditPlan, Typed
from certcli.certify.method_choice import HOPELESS
from certcli.evaluation.intervals import FEW, counted, interval_of_few, number_of, part_of
from certcli.evaluation.threat import (
    attacked_radius,
    confidence,
    power_of_ten,
    proven_radius,
    radius_key,
    rounded_up,
)
from certcli.images import datasets, labelled
from certcli.report.document import CertifiedShares
from certcli.report.shares import DENOISER, nearest_published, published_sentence

CORRECT = "correct images"
PENALTY = 0.2
"""Weight of the enclosure penalty that small networks are advised."""
LITTLE_ATTENTION = 0.01
"""Weight of attention branches, at most, from which on they hardly take part."""


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
    if best_proof(findings, plan) is None and plan.suits_denoiser(findings):
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
    if right == 0:
        return f"Correct images among those tried: {_none_of(shares.clean.images, 'images')}."
    source = "By it" if shares.method == "lipschitz" else "Image by image"
    noun = "images tried" if shares.dataset.split == labelled.OWN else "correct images tried"
    return f"{source}, {_none_of(right, noun)} is certified at {proven_radius(radius)}."


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
    short = {item.stage for item in findings.skipped if item.for_time}
    short &= {"bound", "clean", "attack", "smoothing"}
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


FAINT = 1.0
"""Grey levels of 255, root mean square over all pixel values: the smallest step of an 8-bit image. The answer speaks of the
largest radius below it, else of the largest one."""


def headline(findings: AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
    """Return the answer, after what training saw of the images. size: (c, height, width)."""
    return " ".join(
        text if text[-1] in ".?" else f"{text}."
        for text in (*findings.seen, _answer_sentence(findings, plan, size))
    )


def _answer_sentence(findings: AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
    if findings.failing is not None:
        return f"Nothing can be said about robustness yet: {findings.failing}"
    if findings.dataset is None:
        return "No images were judged: accuracy, certified shares and attacks are not known"
    if findings.clean is None:
        return "The time was too short to judge one image"
    proof = best_proof(findings, plan)
    smallest = radius_key(plan.least)
    parts = [_attack_clause(findings, size), *_other_classifiers(findings)]
    if proof is not None:
        share = proof.certified[smallest]
        parts.insert(
            0,
            f"proven: {part_of(share.hits, share.images)} keep their class under every change "
            f"of the pixels of l2 length at most {proven_radius(smallest)}",
        )
    elif findings.patched is None or not any(
        share.hits for share in findings.patched.certified.values()
    ):
        is_proven = findings.bound is not None or any(
            shares.failure == 0 for shares in findings.certificates
        )
        nothing = "nothing useful was proven about it as it is"
        parts.insert(
            1, nothing if is_proven else "the time was too short to prove anything about it"
        )
    text = "; ".join(filter(None, parts))
    text = f"{text[:1].upper()}{text[1:]}"
    return f"{_basis_clause(findings)}{text}"


def _basis_clause(findings: AuditFindings) -> str:
    """Return what the answer rests on, where the images have no labels or come with certvit."""
    if not findings.own or findings.dataset is None or findings.clean is None:
        return ""
    which = number_of(findings.dataset.images)
    if findings.dataset.name == datasets.PHOTOGRAPHS:
        which = f"{findings.dataset.images} photographs that come with certvit"
    return f"A first answer, about the network's own answers on {which}: "


def points(findings: AuditFindings, plan: AuditPlan, size: Sequence[int]) -> list[str]:
    """Return three lines: what attacks did, what is proven, what else holds. None: stopped."""
    if findings.failing is not None or findings.dataset is None or findings.clean is None:
        return []
    attacked = _attack_clause(findings, size).replace("this network can be fooled by", "fooled by")
    lines = [
        f"Attacked: {attacked}.",
        f"Proven: {_proof_clause(findings, plan)}.",
    ]
    others = _other_classifiers(findings)
    if others:
        lines.append(f"{others[0][:1].upper()}{others[0][1:]}.")
    elif not findings.own:
        right = counted(findings.clean.hits, findings.clean.images, proven=False)
        lines.append(f"Without any change: {right} are classified correctly.")
    return lines


def _proof_clause(findings: AuditFindings, plan: AuditPlan) -> str:
    proof = best_proof(findings, plan)
    smallest = radius_key(plan.least)
    if proof is None:
        bound = findings.bound
        if bound is None or bound.log10_upper is None:
            return "nothing useful"
        return f"nothing useful, the bound is {magnitude(bound.log10_upper, bound.upper_text)}"
    share = proof.certified[smallest]
    return f"{part_of(share.hits, share.images)} keep their class whatever the change, up to l2 {proven_radius(smallest)}"


def _attack_clause(findings: AuditFindings, size: Sequence[int]) -> str:
    """Return what attacks found at one radius (`FAINT`): its norm, and what of it a pixel takes."""
    attack = findings.attack
    noun = "images" if findings.own else CORRECT
    if attack is None or not attack.clean.hits:
        return "it was not attacked"
    faint = [at for at in attack.fooled if float(at) > 0 and grey_levels(float(at), size) < FAINT]
    at = (faint or list(attack.fooled))[-1]
    fooled = attack.fooled[at]
    correct = attack.clean.hits
    names = ", ".join(attack.attacks)
    if not fooled:
        none = f"none of {correct} {noun}{interval_of_few(0, correct)}"
        return (
            f"under attack, {names} fooled {none} at l2 {attacked_radius(at)}, which proves nothing"
        )
    average = f"{grey_levels(float(at), size):.2g} of 255 levels a pixel on average"
    largest = attack.largest.get(at)
    single = "" if largest is None else f", single pixels up to {math.ceil(255 * largest)}"
    change = f"changes of l2 length {attacked_radius(at)} ({average}{single})"
    filed = attack.fooled_8bit.get(at)
    count = "all" if filed == fooled else filed or "none"
    files = "" if filed is None else f" ({count} also as 8-bit files)"
    return f"this network can be fooled by {change}: {part_of(fooled, correct, noun)}{files}"


def _other_classifiers(findings: AuditFindings) -> list[str]:
    """Return what holds about other classifiers: with noise, and behind masks."""
    parts = []
    if findings.patched is not None:
        parts += [
            f"behind masks, no {size.replace('x', ' x ')} patch changes the class of {part_of(part.hits, part.images)}"
            for size, part in findings.patched.certified.items()
            if part.hits
        ]
    for shares in findings.certificates:
        if shares.failure > 0:
            at = max(shares.certified, key=float)
            part = part_of(shares.certified[at].hits, shares.certified[at].images)
            sure = confidence(shares.failure, 100)
            parts.append(
                f"deployed with smoothing (a majority vote over noisy copies), {part} are certified at l2 "
                f"{proven_radius(at)}; each certificate is right with probability {sure} %"
            )
    return parts


def grey_levels(radius: float, size: Sequence[int]) -> float:
    """Return the root mean square, of 255 levels a pixel value, of a change of this l2 length."""
    return 255 * radius / math.sqrt(math.prod(size))


def scale(findings: AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
    """Return how large the radii are; nothing where the audit stopped before them."""
    if findings.stopped:
        return ""
    radii = [radius for radius in plan.certified_radii if radius > 0] or [plan.least]
    *others, last = (f"l2 {radius:g} is {grey_levels(radius, size):.2g}" for radius in radii)
    levels = f"{', '.join(others)} and {last}" if others else last
    pixels = " x ".join(str(side) for side in size)
    return (
        f"How large is that? Over all {pixels} pixel values, {levels} of 255 grey levels on average "
        "(root mean square); single ones may change by more."
    )


def published_reference(findings: AuditFindings, size: Sequence[int]) -> str:
    """Return the figures of a published network, if one sees such images."""
    published = None if findings.stopped else nearest_published(size)
    return "" if published is None else f"For comparison, {published_sentence(published)}"
