"""The audit itself: first whether labels and network fit, then what tells most for its time."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from certcli.audit import attacking, gates, judging, schedule
from certcli.audit.plan import AUTO, AuditPlan, Clock, EndsAfter, OutOfTime
from certcli.audit.stages import Stages, awaited
from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.noise import Classifier
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import image_doubts, intervals, threat
from certcli.images.labelled import Images
from certcli.models import build, pixels
from certcli.nn.blocks import attention_weight
from certcli.system import errors, memory

LARGE = 1_000_000
"""Parameters from which on smoothing and attacks run in bfloat16, where the machine multiplies
matrices in it."""
COPIED = 0.25
"""Share of the free memory that a copy of the network in bfloat16 may take."""
READ_OTHERWISE = 100
"""Images on which other readings of the same tensors are tried, for a file that certvit did not
write."""
CLASSIFIED = 32
"""Images at a time for clean accuracy: on a slow machine a larger batch would take its whole
time."""
SURE = 2 / 3
"""Share of right answers from which on labels and reading of the network are not asked about."""
NEXT_TO_NOTHING = 0.05
"""Of the time left, that further images are classified for before all other work; and of the budget, for which images
are read beyond the time of preparations."""
ANSWER = 60.0
"""Forward passes that the first attacked image and the bound take, about."""


def run(
    checkpoint: Checkpoint,
    images: Images | None,
    calibration: Callable[[], Images],
    plan: AuditPlan,
    device: torch.device,
    clock: Clock,
    tell: Callable[[str], None] = lambda stage: None,
) -> gates.AuditFindings:
    """Return the results of all stages.

    Of several processes (`clock.team`) each judges a part of the images; the leader's results are
    whole.

    Args:
        images: labelled images, class by class in turn; None when there are none.
        calibration: makes images for the slope where there are no others.
    """
    team = clock.team
    if len(set(team.everyone(checkpoint.digest if team.several else ""))) > 1:
        raise errors.DataError(
            "the processes did not read the same network",
            "leave the file alone while it is audited",
        )
    # once: the stages share it, and its copies in other dtypes
    model = build.load(checkpoint, device)
    findings = gates.AuditFindings(
        parameters=sum(weight.numel() for weight in model.parameters()),
        input=model.input_size,
        changed=bool(checkpoint.record.surgery),
        gpu=torch.cuda.is_available(),
        attention_weight=attention_weight(model),
    )
    denoiser = None
    if plan.denoiser is not None:  # before the work: a file that is refused costs no time
        denoiser = read_denoiser(plan.denoiser, model.input_size[0]).at(plan.noise)
        denoiser.require_size(model.input_size)
    clock.on_cpu = device.type == "cpu"
    forward, _ = _pass_seconds(model, model, clock)
    passing = forward
    if images is not None or plan.precision != AUTO:
        precision, seconds = team.agree(lambda: _precision(plan, model, clock))
        findings.precision = precision
        passing = seconds or forward
    clean = None
    if images is not None:
        tell(judging.Classifying.doing)
        images = _read_in_time(images, clock)
        clean = _classify_first(checkpoint, model, images, plan, clock, findings, forward)
    proving = judging.Proving(model, checkpoint.record.classes, forward, team)
    measured = calibration() if images is None else images
    stages: list[schedule.Stage] = [
        proving,
        judging.Measuring(model, measured, plan.seed, forward, team),
    ]
    if images is None or clean is None:
        findings.skip(
            "images", "no labelled images were given: accuracy, certificates and attacks need them"
        )
    elif clean.count and findings.failing and not plan.methods:
        few = clean.count < min(intervals.FEWEST, len(images))  # more may say otherwise
        findings.skip("certificates and attacks", f"they would say little: {findings.failing}", few)
    elif clean.count:
        judged = Stages(
            checkpoint, model, images, plan, device, findings, proving, forward, passing, team,
            denoiser,
        )  # fmt: skip
        stages += [clean, *judged.all()]
    schedule.run_stages(stages, clock, partial(awaited, plan, model.input_size), tell)
    for stage in stages:
        if isinstance(stage, attacking.Attacking):
            findings.exhibits = stage.exhibits()  # of all processes
    if team.leads:
        for stage in dict.fromkeys([*stages, *([] if clean is None else [clean])]):
            stage.write_down(findings)
    return findings


def _read_in_time(images: Images, clock: Clock) -> Images:
    """Return the first images, in turn, that are read within the time of preparations; of several
    processes, which read them together before, all.
    """
    if clock.team.several:
        return images
    began = clock.spent
    rows: list[tuple[int, str, str]] = []
    for start in range(0, len(images), CLASSIFIED):
        rows += images.digests_at(range(start, min(start + CLASSIFIED, len(images))))
        if clock.pressed and clock.spent - began > NEXT_TO_NOTHING * clock.budget:
            break
    return images.select(range(len(rows))).with_digests(rows)


@torch.no_grad()
def _pass_seconds(forward: nn.Module, model: pixels.PixelModel, clock: Clock) -> tuple[float, bool]:
    """Return the seconds of work of a forward pass of a grey image, and whether its logits are finite.

    Of the second pass, which loads nothing; of an image alone, as smoothing runs networks whose rows
    of a batch are not proven apart.
    """
    grey = torch.full((1, *model.input_size), 0.5, device=next(model.parameters()).device)
    for _ in range(2):
        began = clock.now
        finite = bool(torch.isfinite(forward(grey)).all())
    return clock.computed(began), finite


def _precision(
    plan: AuditPlan, model: pixels.PixelModel, clock: Clock
) -> tuple[threat.Precision, float]:
    """Return the precision, and the seconds of a pass in it; 0 where nobody measured them.

    That of the plan; for "auto" bf16 where it is faster and the network runs in it.
    """
    if plan.precision != AUTO:
        return plan.precision, 0.0
    device = next(model.parameters()).device
    parameters = sum(weight.numel() for weight in model.parameters())
    if parameters < LARGE or not build.multiplies_bf16(device):
        return "float32", 0.0
    if (
        device.type == "cpu" and 2 * parameters > COPIED * memory.free_bytes()
    ):  # float32 stays in its file
        return "float32", 0.0
    try:
        seconds, finite = _pass_seconds(Classifier(model, "bf16"), model, clock)
    except errors.UsageError:
        return "float32", 0.0
    return ("bf16", seconds) if finite else ("float32", 0.0)


def _classify_first(
    checkpoint: Checkpoint,
    model: pixels.PixelModel,
    images: Images,
    plan: AuditPlan,
    clock: Clock,
    findings: gates.AuditFindings,
    forward: float,
) -> judging.Classifying:
    """Classify the first images, and ask whether labels and network fit each other.

    Further ones follow at once where that costs next to nothing, or few answers are right: then it
    is not known yet whether the rest is worth its time. Neither takes the time of a first answer.

    forward: seconds of work of a forward pass of an image.
    """

    def spare() -> float:
        return max(0.0, clock.left - schedule.CAREFUL * ANSWER * forward * clock.pace)

    findings.dataset, findings.images, findings.sample = (
        judging.dataset_of(images),
        images,
        images.fetch([0])[0],
    )
    clean = judging.Classifying(model, images, min(plan.batch_size, CLASSIFIED), clock.team)

    def goes_on() -> bool:
        unsure = sum(clean.right) < SURE * clean.count
        share = 0.5 if unsure else NEXT_TO_NOTHING
        return not clean.tries or schedule.CAREFUL * clean.price * clock.pace <= share * spare()

    while clean.rest and not clean.broken and clock.team.agree(goes_on):
        clean.go(clock, clock.team.agree(lambda: clock.left if clean.tries else clock.owed))
    right = clean.right
    chance = (
        image_doubts.chance_doubt(sum(right), len(right), checkpoint.record.classes)
        if right
        else None
    )
    permuted = None
    if right and not images.unlabelled and len(images.classes) == checkpoint.record.classes:
        permuted = image_doubts.permutation_doubt(images, clean.rows, checkpoint.record.classes)
    findings.doubts += filter(None, [permuted])
    # a file of certvit is read as it was trained
    if right and permuted is None and checkpoint.record.foreign and clock.team.leads:
        # about chance, no stage follows that would need the time
        share = 0.1 if chance is None else 0.5
        with contextlib.suppress(OutOfTime), EndsAfter(share * spare()):
            for better, options in image_doubts.better_statistics(
                model, images, right[:READ_OTHERWISE]
            ):
                findings.doubts = [better]
                findings.statistics = options
    failing = next(filter(None, [*findings.doubts, chance]), None)
    findings.failing = clock.team.agree(lambda: failing)
    return clean
