"""certvit for Python: a dozen functions on the core of the commands. Documented in docs/api.md.

A network is an `nn.Module`, a path, a timm or `hf-hub:` name, or what `load` returned. Images are a
tensor or array (n, c, h, w) with pixels in [0, 1] beside labels (n,), batches of both (a list,
`DataLoader`, `Dataset` or generator), the name of a dataset, or what `images` returned. Radii are
in pixel units, a number or "8/255". Errors are CertvitError.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Unpack, overload

import torch
from torch import Tensor

from certcli.api import arguments, door, results
from certcli.api.networks import (
    Data,
    Labels,
    Network,
    history,
    images,
    judged_images,
    load,
    network,
    open_classifier,
    save,
)
from certcli.api.options import (
    AttackOptions,
    AuditOptions,
    CertifyOptions,
    PatchOptions,
    Radii,
    Radius,
    Words,
)
from certcli.attack.findings import collect
from certcli.attack.run import robust_curve
from certcli.attack.settings import AttackSettings
from certcli.attack.stages import Campaign, stages_of, tasks_of
from certcli.audit import document_builder, gates
from certcli.audit import run as audit_run
from certcli.audit.plan import AuditPlan, Clock, Typed, unmistakable
from certcli.certify import certificate, methods
from certcli.certify.around import Around, LocalBounds, local_bounds
from certcli.certify.logit_bounds import Bounding, LogitBounds, Neighbourhood, logit_bounds
from certcli.certify.options import Patches, Smoothing
from certcli.certify.patch.certifier import MOST_LIKELY, Prediction, Predictor
from certcli.evaluation.threat import Defence, Norm, Patch, Threat
from certcli.images.calibration import calibration_images
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Estimate
from certcli.lipschitz.estimate import measure
from certcli.lipschitz.network import prove_checkpoint
from certcli.models.build import OpenCheckpoint
from certcli.system.errors import UsageError

__all__ = (  # noqa: RUF022 (in the order of the page)
    "load", "save", "history", "network", "images", "bound", "bounds", "slope", "certify", "shares", "predict", "attack",
    "audit", "adapt", "constrain", "finetune",
)  # fmt: skip
FUNCTIONS = __all__
"""The public functions, all of them documented."""


@door.speaks_python
def bound(source: Network, *, device: str = "cpu") -> results.ProvenBound:
    """Prove |f(x) - f(y)| <= upper |x - y| for images in [0, 1]; `upper` only rounds up."""
    return results.ProvenBound(**vars(prove_checkpoint(load(source), torch.device(device))))


@door.speaks_python
def slope(
    source: Network, images: Data, *, iterations: int = 20, seed: int = 0, batch_size: int = 8
) -> Estimate:
    """Measure the steepest slope at these images: a lower limit of every bound."""
    checkpoint = load(source)
    batches = judged_images(checkpoint, images, None, labelled=False).batches(batch_size)
    pixels = (part for _, part, _ in batches)
    return list(measure(network(checkpoint), pixels, iterations, seed))[-1]


@overload
def bounds(
    source: Network,
    images: Data,
    radii: Radius,
    labels: Labels = None,
    *,
    norm: Norm = "l2",
    method: Bounding = "best",
    device: str = "cpu",
) -> LogitBounds: ...
@overload
def bounds(
    source: Network, images: Data, *, around: Radius, norm: Norm = "l2", device: str = "cpu"
) -> LocalBounds: ...
@door.speaks_python
def bounds(
    source: Network,
    images: Data,
    radii: Radius | None = None,
    labels: Labels = None,
    *,
    around: Radius | None = None,
    norm: Norm = "l2",
    method: Bounding = "best",
    device: str = "cpu",
) -> LogitBounds | LocalBounds:
    """Prove bounds of logits and margins at all images of [0, 1] within a radius, as tensors.

    Args:
        radii: One radius.
        labels: Classes i of the margins z_i - z_j; the predicted ones where None.
        around: In place of radii: the radius within which the slopes of margins and logits are
            bounded, |m(y) - m(z)| <= upper |y - z| for all y and z there.
        norm: Of the radius, l2 or linf.
        method: "local" (zonotopes around each image), "lipschitz" (the global bound), or "best":
            the tighter of both, entry by entry.
    """
    if (radii is None) is (around is None):
        raise UsageError("bounds of logits within radii, or of slopes with around: one of them")
    checkpoint = open_classifier(source)
    pixels, answers = judged_images(checkpoint, images, labels, labelled=False).tensors()
    if around is not None:
        if labels is not None or method != "best":
            raise UsageError("around bounds the predictions' margins: without labels and method")
        return local_bounds(checkpoint, pixels, Around(around, norm), torch.device(device))  # type: ignore[arg-type]
    classes = None if labels is None else answers
    near = Neighbourhood(0.0 if radii is None else arguments.one_radius(radii), norm, method)
    return logit_bounds(checkpoint, pixels, classes, near, torch.device(device))


@door.speaks_python
def certify(
    source: Network,
    images: Data,
    labels: Labels = None,
    *,
    method: methods.Method = "lipschitz",
    denoiser: Any = None,
    device: str = "cpu",
    batch_size: int = 128,
    **options: Unpack[CertifyOptions],
) -> results.Certificates:
    """Return one certificate an image.

    Args:
        denoiser: Of smoothing, before the network: a module from noisy pixels (b, c, h, w) to
            pixels, told the noise where its forward has a parameter `sigma`; diffusers'
            (unet, scheduler) or a pipeline with both; or a path as `--denoiser` takes it.
        options: Of the method.
    """
    checkpoint = open_classifier(source)
    kind = type(methods.options_of_method(method, {}))
    chosen = kind.of(arguments.read_options(kind, CertifyOptions, options, method))
    if isinstance(chosen, Smoothing):
        chosen = replace(chosen, batch_size=batch_size)
    if denoiser is not None:
        if not isinstance(chosen, Smoothing):
            raise UsageError(f"method {method} has no denoiser", "method='smoothing'")
        name = "denoiser_file" if isinstance(denoiser, Path) else "denoiser_module"
        chosen = replace(chosen, **{name: denoiser})
    batches = methods.certify_images(
        methods.prepare_method(method, checkpoint, torch.device(device), chosen),
        judged_images(checkpoint, images, labels),
        batch_size,
    )
    return results.Certificates(row for rows in batches for row in rows)


@door.speaks_python
def shares(
    certificates: Sequence[certificate.Certificate],
    radii: Radius | Patch | Threat | Sequence[Radius | Patch | Threat],
) -> certificate.CertifiedAccuracy:
    """Return certified accuracy and 95 % interval at each radius (l2), `Threat` or `Patch`."""
    threats = arguments.threats(radii)
    summary = certificate.certified_accuracy(
        arguments.certificates(certificates), list(threats.values())
    )
    names = {threat.key: name for name, threat in threats.items()}
    return replace(
        summary,
        certified=results.AsTyped(summary.certified.items(), names),
        intervals=results.AsTyped(summary.intervals.items(), names),
    )


@door.speaks_python
def predict(
    source: Network,
    images: Data,
    *,
    defence: Defence = "none",
    prove: bool = False,
    top: int = MOST_LIKELY,
    device: str = "cpu",
    **options: Unpack[PatchOptions],
) -> list[Prediction]:
    """Return the class of each image (n, c, h, w), and the most likely ones (`top`).

    Args:
        defence: "patch" for the classifier of `certify(method="patch")`, with the same options.
        prove: Also return the patches that cannot change the class.
        top: The number of most likely classes; a defence lists none.
    """
    checkpoint = open_classifier(source)
    patches = Patches(**arguments.read_options(Patches, PatchOptions, options, "predict"))
    predictor = Predictor(checkpoint, torch.device(device), defence, patches, top)
    chosen = judged_images(checkpoint, images, None, labelled=False)
    return [
        one for _, part, _ in chosen.batches(predictor.at_once) for one in predictor(part, prove)
    ]


@door.speaks_python
def attack(
    source: Network,
    images: Data,
    labels: Labels = None,
    *,
    radii: Radii = (0.5,),
    attacks: Words = ("pgd",),
    norm: Norm = "l2",
    device: str = "cpu",
    batch_size: int = 128,
    return_examples: bool = False,
    **settings: Unpack[AttackOptions],
) -> results.AttackCurve:
    """Return the accuracy that the attacks leave at each radius, ascending.

    Args:
        return_examples: Each result has `examples`: images that fell, at their smallest radius.
        settings: Of the attacks.
    """
    checkpoint = open_classifier(source)
    chosen = AttackSettings(
        **arguments.read_options(AttackSettings, AttackOptions, settings, "attack")
    )
    model = network(checkpoint, device=device)
    stages = [
        stage.ready(model, checkpoint.record, chosen)
        for stage in stages_of(attacks, None, norm, arguments.read_radii("radii", radii), chosen)
    ]
    tasks = tasks_of(stages, judged_images(checkpoint, images, labels))
    campaign = Campaign(model, tasks, chosen, batch_size, keep_images=return_examples)
    records = [row for _, rows in campaign.run() for row in rows]
    size = checkpoint.record.input.size

    def examples(radius: float) -> dict[str, Tensor] | None:
        fallen = (record for record in records if record.fell and record.epsilon <= radius)
        return collect(fallen, size) if return_examples else None

    return results.AttackCurve(
        results.AttackedAccuracy(**vars(one), examples=examples(one.epsilon))
        for one in robust_curve(records)
    )


@door.speaks_python
def audit(
    source: Network,
    images: Data | None = None,
    labels: Labels = None,
    *,
    seconds: float = 120.0,
    fail_on: Words = (),
    device: str = "cpu",
    **settings: Unpack[AuditOptions],
) -> results.AuditReport:
    """Return the findings of `certvit audit` within `seconds`, in words and figures.

    Gates are judged, not enforced: see `gate.passed`. Outside the main thread a stage ends between
    its batches only.

    Args:
        fail_on: Gates, such as "certified@0.25<0.4".
        settings: Of the audit.
    """
    checkpoint = open_classifier(source)
    plan = AuditPlan(
        gates=tuple(gates.parse_gate(text) for text in fail_on),
        budget=seconds,
        **arguments.read_options(AuditPlan, AuditOptions, settings, "audit"),
    )
    judged = None if images is None else judged_images(checkpoint, images, labels)
    judged = None if judged is None else judged.limit(plan.limit, plan.seed).in_turn(plan.seed)
    clock = Clock(plan.budget)
    where = torch.device(device)

    def calibration() -> Images:
        return calibration_images(checkpoint.record, 8, plan.seed, None, None)

    with torch.set_grad_enabled(torch.is_grad_enabled()):  # a stage may end within a no_grad
        findings = audit_run.run(checkpoint, judged, calibration, plan, where, clock)
    # what is in memory has no name that a command could take: its reader fills it in
    name = unmistakable(str(source)) if isinstance(source, str | Path) else "FILE"
    named = images if isinstance(images, str) else None if images is None else "FOLDER"
    report = document_builder.compose(
        checkpoint, findings, plan, clock, Typed(name, dataset=named), where
    )
    report.network.name = report.network.name if name != "FILE" else "checkpoint"
    return results.AuditReport(**{name: getattr(report, name) for name in report.__struct_fields__})


def _function_of_command(name: str, effect: str) -> Callable[..., OpenCheckpoint]:
    """Return the command as a function, which writes a network and opens it: effect, its docstring."""

    def change(
        source: Network,
        path: str | Path,
        *,
        force: bool = False,
        **options: Annotated[Any, name],
    ) -> OpenCheckpoint:
        with TemporaryDirectory() as folder:
            file = source
            if not isinstance(source, str | Path):
                file = Path(folder, "source.safetensors")
                save(load(source), file)
            door.run_command(name, str(file), Path(path), force, options)
        return load(path)

    change.__name__ = name
    change.__doc__ = effect
    return door.speaks_python(change)


adapt = _function_of_command(
    "adapt", "Replace layers by Lipschitz layers, and write the network: as `certvit adapt`."
)
constrain = _function_of_command(
    "constrain", "Lower each layer's norm, and write the network: as `certvit constrain`."
)
finetune = _function_of_command(
    "finetune", "Train, and write the best epoch: as `certvit finetune`."
)
