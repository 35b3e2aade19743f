"""A `certvit lipschitz --json` report and its checkpoint: every leaf proven again by weights; and
what a checkpoint's lineage says, its contradictions, and what other files tell of its steps.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec import UNSET

from certcli.checkpoint import file, schema
from certcli.checkpoint.record import MEAN, LineageStep
from certcli.evaluation import evidence, threat
from certcli.lipschitz.bound import FEATURES, LOGITS
from certcli.lipschitz.network import NetworkBound, prove_checkpoint
from certcli.lipschitz.numerics.real import ZERO, Real
from certcli.models import build, in_memory
from certcli.system.errors import CertvitError
from certcli.verification.documents import WEIGHTS, theorems, verify_laws

SLACK = 1e-6
"""Relative: how far a stated number may lie below the one proven again. A norm is proven from a
power iteration and a residual, whose last digits differ between BLAS libraries, thread counts and
devices by some 1e-12; 1e-6 is far above that, and far below what a forged number would have to
gain.
"""


SHAPES = "layers' shapes"
"""Fields of the layers of a report that nothing recomputes."""


def verify_report(
    report: schema.ReportFields,
    checkpoint: file.Checkpoint,
    unread: str,
    device: torch.device | str = "cpu",
) -> list[evidence.Claim]:
    """Return the claims of a report: its laws and headline, and its leaves, root and layers, proven
    again. unread: its other fields.
    """
    laws = verify_laws(report)
    if any(claim.status == "refuted" for claim in laws):
        return laws
    problems = [
        evidence.Claim(WEIGHTS, "refuted", problem)
        for problem in check_weights(report, checkpoint, device)
    ]
    why = f"{theorems(report)} theorems are proven again"
    weights = problems or [evidence.Claim(WEIGHTS, "verified", why)]
    return [
        laws[0],
        *weights,
        evidence.Claim(unread, "unverified", "the author's word", asked=False),
    ]


def check_weights(
    report: schema.ReportFields, checkpoint: file.Checkpoint, device: torch.device | str = "cpu"
) -> Iterator[str]:
    """Yield statements that do not follow from these weights: the engine proves all again."""
    record = checkpoint.record
    if report.checkpoint != checkpoint.digest:
        yield f"the report is about network {report.checkpoint[:16]}, this is {checkpoint.digest[:16]}"
        return
    if (report.arch, report.input) != (record.arch, record.input.size):
        yield f"the report is about {report.arch} on {report.input}, this is {record.arch} on {record.input.size}"
    if report.function not in (record.function(), UNSET):
        yield "the report's function (architecture, arguments, input, surgery) is not this network's"
    if report.bound_of != (outputs := LOGITS if record.classes else FEATURES):
        yield f"the report is about {report.bound_of}, and this network ends in {outputs}"
        return
    network_bound = prove_checkpoint(checkpoint, device)
    upper = network_bound.upper
    if isinstance(report.lower, float) and upper * (1 + SLACK) < Real(report.lower):
        yield f"the measured slope {threat.rounded_down(report.lower, 6)} is above what is proven, {upper}"
    rows = network_bound.bound.to_json()
    if len(rows) != len(report.proof):
        yield f"the report's proof has {len(report.proof)} steps, that of these weights {len(rows)}"
        return
    for number, (claimed, proven) in enumerate(zip(report.proof, rows, strict=True)):
        where = f"node {number} ({proven['path']})"
        names = ("path", "kind", "law", "parts", "why")
        different = next(
            (name for name in names if getattr(claimed, name) not in (proven[name], UNSET)), None
        )
        if different is not None:
            yield f"{where}: {different} is {getattr(claimed, different)!a}, of these weights {proven[different]!a}"
        elif states_less(Real.from_json(list(claimed.value)), Real.from_json(proven["value"])):
            lower = Real.from_json(list(claimed.value))
            proven_value = Real.from_json(proven["value"])
            yield f"{where}: {lower.log10():.9f} is stated (log10), {proven_value.log10():.9f} is proven"
    if report.why not in (network_bound.bound.why, UNSET):
        yield f"the headline's why is {report.why!a}, of these weights {network_bound.bound.why!a}"
    yield from _check_layers(report.layers, network_bound)


def _check_layers(layers: list[schema.LayerFields], bound: NetworkBound) -> Iterator[str]:
    if [layer.path for layer in layers] != [charge.path for charge in bound.charges]:
        yield "the report's layers are not those that these weights have"
        return
    for layer, charge in zip(layers, bound.charges, strict=True):
        for claimed, proven in (
            (layer.log10_upper, charge.constant),
            (layer.log10_cumulative, charge.cumulative),
        ):
            if below_log10(claimed, proven) or (
                claimed is None and proven.finite and proven > ZERO
            ):
                yield f"layer {layer.path}: 10^{claimed} is stated, 10^{proven.log10():.9f} is proven"
        if isinstance(layer.upper, float) and states_less(Real(layer.upper), charge.constant):
            yield f"layer {layer.path}: {layer.upper} is stated, {charge.constant} is proven"
        words = (layer.kind, layer.law, layer.why, layer.upper_finite)
        proven_words = (charge.kind, charge.law, charge.why, charge.constant.finite)
        if any(one not in (other, UNSET) for one, other in zip(words, proven_words, strict=True)):
            yield f"layer {layer.path}: its kind, law, why or upper_finite is not that of these weights"
        if isinstance(layer.upper_text, str) and below_text(layer.upper_text, charge.constant):
            yield f"layer {layer.path}: '{layer.upper_text[:40]!a}' is stated, {charge.constant} is proven"


def states_less(claimed: Real, proven: Real) -> bool:
    """Tell whether a stated bound lies below the proven one by more than SLACK."""
    return claimed * (1 + SLACK) < proven


def below_text(text: str, proven: Real) -> bool:
    """Return it for bounds in words ("1.23e+968"), rounded up; also what is no number."""
    mantissa, _, exponent = text.partition("e")
    if text == "inf":
        return False
    try:
        claimed = Real(float(mantissa)).log10() + int(exponent or 0)
    except (ValueError, OverflowError):
        return text != str(proven)
    return below_log10(claimed, proven)


def below_log10(claimed: float | None, proven: Real) -> bool:
    """Return the same for a logarithm; None stands for a bound that is 0 or infinite."""
    if claimed is None:
        return False
    # log10(1 + SLACK) > SLACK / 3
    return not proven.finite or (proven > ZERO and claimed < proven.log10() - SLACK / 3)


def check_lineage(checkpoint: file.Checkpoint) -> Iterator[evidence.Claim]:
    """Yield each contradiction of a file's steps; that they happened, no file can prove."""
    record = checkpoint.record
    commands = [step.command for step in record.lineage]
    statement = " -> ".join(commands) or "no step"

    def refuted(why: str) -> evidence.Claim:
        return evidence.Claim(statement, "refuted", why, entry="lineage")

    if record.surgery and "adapt" not in commands:
        yield refuted("the network has replaced modules, and no step `adapt`")
    fresh = [entry for entry in record.evidence if entry.digest == checkpoint.digest]
    trained = any(entry.command == "finetune" for entry in fresh)
    if trained and commands[-1:] != ["finetune"]:
        yield refuted("there is a result of `finetune`, and it is not the last step")
    # before a mean each of its members begins
    joined = len(commands) - commands[::-1].index(MEAN) if MEAN in commands else 1
    if "init" in commands[joined:]:
        late = commands.index("init", joined)
        yield refuted(f"step {late + 1} is `init`, which only begins")
    why = "stated by the file; give the earlier files too, to compare"
    yield evidence.Claim(statement, "unverified", why, asked=False, entry="lineage")


def compare_lineages(
    checkpoints: Mapping[str, file.Checkpoint],
) -> Iterator[tuple[str, evidence.Claim]]:
    """Yield (file, claim) for each step whose parent, or member of a mean, is one of the other
    files.

    The parent's own lineage must be all that comes before the step, or with it, where the step
    leaves the digest as it was. A member's must be a part of what comes before the mean; at a step
    of its own it must end there.
    """
    by_digest = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    for name, checkpoint in checkpoints.items():
        steps = checkpoint.record.lineage
        means = [number for number, step in enumerate(steps) if step.command == MEAN]
        joined = means[0] if means else -1  # a mean is no member
        origins = [
            (number, digest)
            for number, step in enumerate(steps)
            for digest in dict.fromkeys([step.parent or "", *_members(step)])
        ]
        for number, origin in origins:
            parent = by_digest.get(origin, name)
            if parent == name:
                continue
            lineage = checkpoints[parent].record.lineage
            same = _steps_agree(steps, lineage, number, joined)
            contradiction = f"its parent is {parent}, whose own lineage is another"
            why = f"{parent} tells the same steps" if same else contradiction
            yield name, _step(number, "what came before", same, why)


def _steps_agree(
    steps: Sequence[LineageStep], lineage: Sequence[LineageStep], number: int, joined: int
) -> bool:
    """Tell whether a parent's steps are these before `number`. joined: of the first mean."""
    if number == joined:
        before = steps[:number]
        return any(lineage == before[start : start + len(lineage)] for start in range(number))
    ends = (number, number + 1)  # `init` names itself: its parent has the digest of its result
    if number < joined:
        return any(lineage == steps[max(0, end - len(lineage)) : end] for end in ends)
    return any(lineage == steps[:end] for end in ends)


def remake_means(
    checkpoints: Mapping[str, file.Checkpoint],
) -> Iterator[tuple[str, evidence.Claim]]:
    """Yield (file, claim) for each mean whose members are all among the files: made again, it must
    be the same network.

    A later step's parent is the mean. Networks are the same where their digests are, so each bit of
    the tensors counts.
    """
    by_digest = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    for name, checkpoint in checkpoints.items():
        steps = checkpoint.record.lineage
        for number, step in enumerate(steps):
            digests = _members(step)
            if not digests or set(digests) - by_digest.keys():
                continue
            mean = next((later.parent for later in steps[number + 1 :]), checkpoint.digest)
            names = ", ".join(by_digest[digest] for digest in dict.fromkeys(digests))
            opened = {digest: checkpoints[by_digest[digest]] for digest in digests}
            same, outcome = _remake(checkpoint.record.arch, step, opened, mean)
            yield (
                name,
                _step(number, "the mean", same, f"the mean of {names}, made again, is {outcome}"),
            )


def _remake(
    arch: str, step: LineageStep, members: Mapping[str, file.Checkpoint], digest: str | None
) -> tuple[bool, str]:
    """Return whether the mean of the members has this digest, and what it is."""
    try:
        opened = {name: build.with_network(member) for name, member in members.items()}  # each once
        mirror = step.parameters.get("mirror", False)
        mean = in_memory.mean_of(arch, [opened[name] for name in _members(step)], mirror)
    except CertvitError as failure:
        return False, f"refused: {failure.message}"
    if mean.digest == digest:
        return True, "the same, bit for bit"
    return False, f"network {mean.digest[:16]}, not that of this step"


def _step(number: int, statement: str, same: bool, why: str) -> evidence.Claim:
    status: evidence.Status = "verified" if same else "refuted"
    return evidence.Claim(statement, status, why, asked=False, entry=f"lineage, step {number + 1}")


def _members(step: LineageStep) -> list[str]:
    digests = step.parameters.get("members") if step.command == MEAN else None
    if not isinstance(digests, list | tuple):
        return []
    return [digest for digest in digests if isinstance(digest, str)]
