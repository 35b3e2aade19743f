"""The audit itself: stage after stage within one time budget."""

import contextlib
from collections.abc import Callable

import torch

from certcli.audit import judging, proving
from certcli.audit.clock import Clock, OutOfTime, StageTime
from certcli.audit.findings import CLEAN, AuditFindings
from certcli.audit.plan import AUTO, AuditPlan
from certcli.audit.stages import Stages
from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.functions import Classifier
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.choices import Precision
from certcli.evaluation.image_doubts import (
    better_statistics,
    chance_doubt,
    order_doubt,
    permutation_doubt,
)
from certcli.evaluation.verdicts import FEWEST, Sample
from certcli.images.labelled import Images
from certcli.lipschitz.network import NetworkBound
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.residual import attention_weight
from certcli.report.document import Share
from certcli.system.errors import DataError, UsageError
from certcli.system.memory import free_bytes

LARGE = 1_000_000
"""Parameters from which on smoothing and attacks run in bfloat16, where the machine multiplies matrices in it."""
COPIED = 0.25
"""Share of the free memory that a copy of the network in bfloat16 may take."""
READ_OTHERWISE = 100
"""Images on which other readings of the same tensors are tried, for a file that certvit did not write."""
CLASSIFIED = 32
"""Images at a time for clean accuracy: on a slow machine a larger batch would take its whole time."""


def run(
    checkpoint: Checkpoint,
    images: Images | None,
    calibration: Callable[[], Images],
    plan: AuditPlan,
    device: torch.device,
    clock: Clock,
    tell: Callable[[str], None] = lambda stage: None,
) -> AuditFindings:
    """Return the results of all stages.

    Of several processes (`clock.team`) each judges a part of the images; the leader's results are
    whole.

    Args:
        images: labelled images, class by class in turn; None when there are none.
        calibration: makes images for the slope where there are no others.
    """
    team = clock.team
    if len(set(team.everyone(checkpoint.digest if team.several else ""))) > 1:
        raise DataError(
            "the processes did not read the same network",
            "leave the file alone while it is audited",
        )
    findings = AuditFindings(changed=bool(checkpoint.record.surgery))
    # once: the stages share it, and its copies in other dtypes
    model = build.load(checkpoint, device)
    denoiser = None
    if plan.denoiser is not None:  # before the work: a file that is refused costs no time
        denoiser = read_denoiser(plan.denoiser, model.input_size[0]).at(plan.noise)
        denoiser.require_size(model.input_size)
    findings.input = model.input_size
    tell("proven bound")
    proven = _prove(model, checkpoint.record.classes, clock, findings)
    findings.parameters = sum(weight.numel() for weight in model.parameters())
    findings.attention_weight = attention_weight(model)
    tell("slope")
    if images is not None or plan.precision != AUTO:
        findings.precision = team.agree(lambda: _precision(plan, model, findings.parameters))
    part = clock.part(0.1)
    findings.slope = proving.slope(
        model, images if images is not None else calibration(), plan.seed, part, team
    )
    if findings.slope is None:
        findings.skip("slope", f"no image was finished in {part}", True)
    if images is None:
        findings.skip(
            "images", "no labelled images were given: accuracy, certificates and attacks need them"
        )
        return findings
    tell("clean accuracy")
    image_seconds = _classify(checkpoint, model, images, plan, clock, findings)
    if findings.clean is None:
        return findings
    findings.failing = team.agree(lambda: findings.failing)
    if findings.failing and not plan.methods:
        few = findings.clean.images < min(FEWEST, len(images))  # more may say otherwise
        findings.skip("certificates and attacks", f"they would say little: {findings.failing}", few)
        return findings
    Stages(
        checkpoint, model, images, plan, device, clock, findings, tell, image_seconds, denoiser
    ).run(proven)
    return findings


def _precision(plan: AuditPlan, model: PixelModel, parameters: int) -> Precision:
    """Return the plan's precision; for "auto" bf16 where it is faster and the network runs in it."""
    if plan.precision != AUTO:
        return plan.precision
    device = next(model.parameters()).device
    if parameters < LARGE or not build.multiplies_bf16(device):
        return "float32"
    if device.type == "cpu" and 2 * parameters > COPIED * free_bytes():  # float32 stays in its file
        return "float32"
    grey = torch.full((1, *model.input_size), 0.5, device=device)
    try:
        with torch.no_grad():
            logits = Classifier(model, "bf16")(grey)
    except UsageError:
        return "float32"
    return "bf16" if bool(torch.isfinite(logits).all()) else "float32"


def _prove(
    model: PixelModel, classes: int, clock: Clock, findings: AuditFindings
) -> tuple[PixelModel, NetworkBound] | None:
    """Return the float64 network and its bound; None: out of time, or not the leader."""
    part = clock.part(0.4)
    if not clock.team.leads:  # it proves; the others measure slopes
        return None
    try:
        double = build.converted(model, torch.float64)
        findings.bound, proven = proving.bound(double, classes, part)
    except OutOfTime:
        findings.skip(
            "bound", f"its proof was not finished in {part}: it is unknown, not infinite", True
        )
        return None
    return double, proven


def _classify(
    checkpoint: Checkpoint,
    model: PixelModel,
    images: Images,
    plan: AuditPlan,
    clock: Clock,
    findings: AuditFindings,
) -> float:
    """Measure clean accuracy, ask how the file is read, and return seconds an image."""
    findings.dataset, findings.images, findings.sample = (
        judging.dataset_of(images),
        images,
        images.fetch([0])[0],
    )
    gated = any(gate.quantity == CLEAN for gate in plan.gates)
    part = clock.part(0.6 if gated else 0.2)
    predictions, seconds = judging.predictions(
        model, images, min(plan.batch_size, CLASSIFIED), part, clock.team
    )
    if not predictions:
        findings.skip("clean", f"no batch of images was classified in {part}", True)
        return seconds
    labels = images.labels.tolist()
    indices = images.indices.tolist()
    right = [a == b for a, b in zip(predictions, labels)]
    findings.clean = Share.of(sum(right), len(predictions))
    findings.samples[(CLEAN, "")] = Sample(right, len(images))
    if len(predictions) < len(images):
        findings.skip(
            "clean, further images",
            f"{len(predictions)} of {len(images)} images fitted into {part}",
            True,
        )
    for index, label, prediction in zip(indices, labels, predictions):
        findings.row(index, label)["prediction"] = prediction
    chance = chance_doubt(sum(right), len(right), checkpoint.record.classes)
    permuted = None
    if not images.unlabelled and len(images.classes) == checkpoint.record.classes:
        permuted = permutation_doubt(images, predictions, checkpoint.record.classes)
    findings.doubts += filter(None, [permuted])
    # a file of certvit is read as it was trained
    if permuted is None and checkpoint.record.foreign and clock.team.leads:
        # about chance, no stage follows that would need the time
        share = 0.1 if chance is None else 0.5
        with contextlib.suppress(OutOfTime), StageTime(share * clock.left).ended():
            if (order := order_doubt(model, images, right[:READ_OTHERWISE])) is not None:
                findings.doubts.append(order)
            else:
                for better, options in better_statistics(model, images, right[:READ_OTHERWISE]):
                    findings.doubts = [better]
                    findings.statistics = options
    findings.failing = next(filter(None, [*findings.doubts, chance]), None)
    return seconds
