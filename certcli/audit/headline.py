"""The answer in one sentence, its change in words, and a published network beside it."""

import math
from collections.abc import Sequence

from certcli.audit import gates, summary_text
from certcli.audit.plan import AuditPlan
from certcli.evaluation.intervals import counted, interval_of_few, number_of, part_of
from certcli.evaluation.threat import attacked_radius, confidence, proven_radius, radius_key
from certcli.images.datasets import PHOTOGRAPHS
from certcli.report.shares import nearest_published

FAINT = 1.0
"""Grey levels of 255, root mean square over all pixel values: the smallest step of an 8-bit image. The answer speaks of the
largest radius below it, else of the largest one."""


def headline(findings: gates.AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
    """Return the answer, after what training saw of the images. size: (c, height, width)."""
    return " ".join(
        text if text[-1] in ".?" else f"{text}."
        for text in (*findings.seen, _answer_sentence(findings, plan, size))
    )


def _answer_sentence(findings: gates.AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
    if findings.failing is not None:
        return f"Nothing can be said about robustness yet: {findings.failing}"
    if findings.dataset is None:
        return "No images were judged: accuracy, certified shares and attacks are not known"
    if findings.clean is None:
        return "The time was too short to judge one image"
    proof = summary_text.best_proof(findings, plan)
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


def _basis_clause(findings: gates.AuditFindings) -> str:
    """Return what the answer rests on, where the images have no labels or come with certvit."""
    if not findings.own or findings.dataset is None or findings.clean is None:
        return ""
    shipped = findings.dataset.name == PHOTOGRAPHS
    count = findings.dataset.images
    which = f"{count} photographs that come with certvit" if shipped else number_of(count)
    first = "A first answer, about" if shipped else "About"
    return f"{first} the network's own answers on {which}: "


def points(findings: gates.AuditFindings, plan: AuditPlan, size: Sequence[int]) -> list[str]:
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


def _proof_clause(findings: gates.AuditFindings, plan: AuditPlan) -> str:
    proof = summary_text.best_proof(findings, plan)
    smallest = radius_key(plan.least)
    if proof is None:
        bound = findings.bound
        if bound is None or bound.log10_upper is None:
            return "nothing useful"
        return f"nothing useful, the bound is {summary_text.magnitude(bound.log10_upper, bound.upper_text)}"
    share = proof.certified[smallest]
    return f"{part_of(share.hits, share.images)} keep their class whatever the change, up to l2 {proven_radius(smallest)}"


def _attack_clause(findings: gates.AuditFindings, size: Sequence[int]) -> str:
    """Return what attacks found at one radius (`FAINT`): its norm, and what of it a pixel takes."""
    attack = findings.attack
    noun = "images" if findings.own else summary_text.CORRECT
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


def _other_classifiers(findings: gates.AuditFindings) -> list[str]:
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


def scale(findings: gates.AuditFindings, plan: AuditPlan, size: Sequence[int]) -> str:
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


def published_reference(findings: gates.AuditFindings, size: Sequence[int]) -> str:
    """Return the figures of a published network; nothing where none sees such images."""
    published = None if findings.stopped else nearest_published(size)
    return "" if published is None else f"For comparison, {published.sentence}"
