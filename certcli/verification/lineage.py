"""A checkpoint's lineage: its contradictions, and what other files tell of its steps."""

from collections.abc import Iterator, Mapping, Sequence

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import MEAN, LineageStep
from certcli.evaluation.claim import Claim, Status
from certcli.models.build import with_network
from certcli.models.mean import mean_of
from certcli.system.errors import CertvitError


def check_lineage(checkpoint: Checkpoint) -> Iterator[Claim]:
    """Yield each contradiction of a file's steps; that they happened, no file can prove."""
    record = checkpoint.record
    commands = [step.command for step in record.lineage]
    statement = " -> ".join(commands) or "no step"

    def refuted(why: str) -> Claim:
        return Claim(statement, "refuted", why, entry="lineage")

    if record.surgery and "adapt" not in commands:
        yield refuted("the network has replaced modules, and no step `adapt`")
    fresh = [entry for entry in record.evidence if entry.digest == checkpoint.digest]
    trained = any(entry.command == "finetune" for entry in fresh)
    if trained and commands[-1:] != ["finetune"]:
        yield refuted("there is a result of `finetune`, and it is not the last step")
    late = _late_beginning(commands)
    if late is not None:
        yield refuted(f"step {late + 1} is `init`, which only begins")
    why = "stated by the file; give the earlier files too, to compare"
    yield Claim(statement, "unverified", why, asked=False, entry="lineage")


def _late_beginning(commands: Sequence[str]) -> int | None:
    """Return the first `init` that does not begin. Before a mean each of its members begins."""
    joined = len(commands) - commands[::-1].index(MEAN) if MEAN in commands else 0
    for number in range(max(1, joined), len(commands)):
        if commands[number] == "init":
            return number
    return None


def compare_lineages(checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Claim]]:
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
        for number, origin in _origins(steps):
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


def remake_means(checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Claim]]:
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
    arch: str, step: LineageStep, members: Mapping[str, Checkpoint], digest: str | None
) -> tuple[bool, str]:
    """Return whether the mean of the members has this digest, and what it is."""
    try:
        opened = {name: with_network(member) for name, member in members.items()}  # each once
        mirror = step.parameters.get("mirror", False)
        mean = mean_of(arch, [opened[name] for name in _members(step)], mirror)
    except CertvitError as failure:
        return False, f"refused: {failure.message}"
    if mean.digest == digest:
        return True, "the same, bit for bit"
    return False, f"network {mean.digest[:16]}, not that of this step"


def _step(number: int, statement: str, same: bool, why: str) -> Claim:
    status: Status = "verified" if same else "refuted"
    return Claim(statement, status, why, asked=False, entry=f"lineage, step {number + 1}")


def _origins(steps: Sequence[LineageStep]) -> Iterator[tuple[int, str]]:
    """Yield (number, digest) of each step's parent, and of each member of a mean."""
    for number, step in enumerate(steps):
        for digest in dict.fromkeys([step.parent or "", *_members(step)]):
            yield number, digest


def _members(step: LineageStep) -> list[str]:
    digests = step.parameters.get("members") if step.command == MEAN else None
    if not isinstance(digests, list | tuple):
        return []
    return [digest for digest in digests if isinstance(digest, str)]
