"""certvit for Python: a dozen functions on the core of the commands. Documented in docs/api.md.

A network is an `nn.Module`, a path, a timm or `hf-hub:` name, or what `load` returned. Images are a
tensor or array (n, c, h, w) with pixels in [0, 1] beside labels (n,), batches of both (a list,
`DataLoader`, `Dataset` or generator), the name of a dataset, or what `images` returned. Radii are
in pixel units, a number or "8/255". Errors are CertvitError.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from certcli.api import arguments, data, errors
from certcli.api.door import speaks_python
from certcli.api.options import (
    AttackOptions,
    AuditOptions,
    CertifyOptions,
    PatchOptions,
    Radii,
    Radius,
    Words,
)
from certcli.api.results import (
    AsTyped,
    AttackCurve,
    AttackedAccuracy,
    AuditReport,
    Certificates,
    ProvenBound,
)
from certcli.attack.examples import collect
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.stages import stages_of
from certcli.attack.summary import curve
from certcli.audit import document_builder, gates
from certcli.audit import run as audit_run
from certcli.audit.clock import Clock
from certcli.audit.plan import AuditPlan, Typed, unmistakable
from certcli.certify import certificate, methods
from certcli.certify.around import Around, LocalBounds, local_bounds
from certcli.certify.logit_bounds import Bounding, LogitBounds, Neighbourhood, logit_bounds
from certcli.certify.methods import Method, options_of, prepare
from certcli.certify.patch.options import Patches
from certcli.certify.predictor import MOST_LIKELY, Prediction, Predictor
from certcli.certify.smoothing.options import Smoothing
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.evaluation import choices, perturbation
from certcli.evaluation.radii import Norm
from certcli.evaluation.threat import Patch, Threat
from certcli.images.calibration import calibration_images
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Estimate
from certcli.lipschitz.measured.estimate import measure
from certcli.lipschitz.network import prove_checkpoint
from certcli.models import build, in_memory, overrides
from certcli.models.build import OpenCheckpoint
from certcli.models.open import open_checkpoint, perturbed_at
from certcli.models.pixels import PixelModel
from certcli.models.weights import require_classifier, require_features
from certcli.system.errors import UsageError, plain

FUNCTIONS = (
    "load", "save", "history", "network", "images", "bound", "bounds", "slope", "certify", "shares", "predict", "attack",
    "audit",
)  # fmt: skip
"""The public functions, all of them documented."""

Network = nn.Module | ExportedProgram | str | Path | Checkpoint
Data = Any
"""A str, Images, or what `data.images_of` takes: arrays, tensors, loaders, data sets, generators."""
Labels = Any
"""None, or (n,) whole numbers: a tensor, an array or a sequence."""


@speaks_python
def load(
    source: Network,
    *,
    mean: in_memory.Statistics | None = None,
    std: in_memory.Statistics | None = None,
    input_size: tuple[int, int, int] | None = None,
    arch: str | None = None,
    arch_args: Mapping[str, Any] | None = None,
    as_stated: bool = False,
    weights: str | None = None,
    features: bool = False,
    image_size: int | None = None,
) -> OpenCheckpoint:
    """Open a network; its modules are built or copied once. Doubts on reading are warnings.

    Args:
        source: A module in memory, a file, a folder, a timm or `hf-hub:` name.
        mean, std: Pixel statistics, one value or one a channel, where the source has none.
        input_size: (c, h, w), for a module without a timm configuration.
        arch, arch_args: Name and arguments of the architecture, for a file without a record.
        as_stated: Believe `arch_args` and config.json where the tensors fit another network too.
        weights: "raw", "ema" or a key: the weights to read of a file that holds several.
        features: The network has no classifier; `bound` and `slope` are then those of its features.
        image_size: Side of the images, and of the pixels in which radii are measured, where it is
            not the network's own: its first layer resizes them.
    """
    about_files = {
        "arch": arch,
        "arch_args": arch_args,
        "as_stated": as_stated or None,
        "weights": weights,
    }
    about_modules = {
        "mean": mean,
        "std": std,
        "input_size": input_size,
        "features": features or None,
    }
    if isinstance(source, Checkpoint):
        errors.require_known(
            arguments.names_with_values(about_files | about_modules), (), "load of an open network"
        )
        return perturbed_at(build.with_network(source), image_size)
    if isinstance(source, ExportedProgram):
        source = source.module()
    if isinstance(source, nn.Module):
        errors.require_known(
            arguments.names_with_values(about_files), about_modules, "load of a module"
        )
        opened = in_memory.open_module(source, mean, std, input_size, features=features)
        return perturbed_at(opened, image_size)
    if input_size is not None:
        raise UsageError(
            "the input_size of a file is that of its architecture", "arch_args={'img_size': 224}"
        )
    hints = overrides.Hints(
        arch,
        arch_args or {},
        in_memory.statistics_per_channel(mean),
        in_memory.statistics_per_channel(std),
        as_stated,
        weights,
        features,
        image_size=image_size,
    )
    opened = open_checkpoint(str(source), hints)
    if features:
        require_features(opened, str(source))
    for doubt in opened.reading.doubts:
        warnings.warn(plain(errors.in_python(doubt)), stacklevel=3)
    return opened


@speaks_python
def save(checkpoint: Checkpoint, path: str | Path, *, force: bool = False) -> None:
    """Write a checkpoint atomically; replace an existing file only with `force`."""
    if checkpoint.record.arch.startswith(in_memory.PREFIX):
        raise UsageError(
            "a module in memory has no architecture that a file could name",
            "torch.save its state_dict, and load the file with arch=... if timm can build it",
        )
    checkpoint.write(Path(path), force)


@speaks_python
def history(source: Network) -> Record:
    """Return the unverified record: architecture, input, surgery, lineage, evidence."""
    return load(source).record


@speaks_python
def network(source: Network, *, double: bool = False, device: str = "cpu") -> PixelModel:
    """Return the network in eval mode, pixels in [0, 1] -> logits; its first layer normalises."""
    return (build.load_double if double else build.load)(load(source), torch.device(device))


@speaks_python
def images(
    source: Network,
    dataset: str,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Images:
    """Return images of a dataset in the network's input size, labelled where they can be."""
    return data.dataset_images(
        load(source).record, dataset, split, None if data_dir is None else Path(data_dir)
    ).limit(limit, seed)


@speaks_python
def bound(source: Network, *, device: str = "cpu") -> ProvenBound:
    """Prove |f(x) - f(y)| <= upper |x - y| for images in [0, 1]; `upper` only rounds up."""
    return ProvenBound(**vars(prove_checkpoint(load(source), torch.device(device))))


@speaks_python
def slope(
    source: Network, images: Data, *, iterations: int = 20, seed: int = 0, batch_size: int = 8
) -> Estimate:
    """Measure the steepest slope at these images: a lower limit of every bound."""
    checkpoint = load(source)
    batches = _judged(checkpoint, images, None, labelled=False).batches(batch_size)
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
@speaks_python
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
    checkpoint = _classifier(source)
    pixels, answers = _judged(checkpoint, images, labels, labelled=False).tensors()
    if around is not None:
        if labels is not None or method != "best":
            raise UsageError("around bounds the predictions' margins: without labels and method")
        return local_bounds(checkpoint, pixels, Around(around, norm), torch.device(device))  # type: ignore[arg-type]
    classes = None if labels is None else answers
    near = Neighbourhood(0.0 if radii is None else arguments.one_radius(radii), norm, method)
    return logit_bounds(checkpoint, pixels, classes, near, torch.device(device))


@speaks_python
def certify(
    source: Network,
    images: Data,
    labels: Labels = None,
    *,
    method: Method = "lipschitz",
    denoiser: Any = None,
    device: str = "cpu",
    batch_size: int = 128,
    **options: Unpack[CertifyOptions],
) -> Certificates:
    """Return one certificate an image.

    Args:
        denoiser: Of smoothing, before the network: a module from noisy pixels (b, c, h, w) to
            pixels, told the noise where its forward has a parameter `sigma`; diffusers'
            (unet, scheduler) or a pipeline with both; or a path as `--denoiser` takes it.
        options: Of the method.
    """
    checkpoint = _classifier(source)
    kind = type(options_of(method, {}))
    chosen = kind.of(arguments.options(kind, CertifyOptions, options, method))
    if isinstance(chosen, Smoothing):
        chosen = replace(chosen, batch_size=batch_size)
    if denoiser is not None:
        if not isinstance(chosen, Smoothing):
            raise UsageError(f"method {method} has no denoiser", "method='smoothing'")
        name = "denoiser_file" if isinstance(denoiser, Path) else "denoiser_module"
        chosen = replace(chosen, **{name: denoiser})
    batches = methods.certify(
        prepare(method, checkpoint, torch.device(device), chosen),
        _judged(checkpoint, images, labels),
        batch_size,
    )
    return Certificates(row for rows in batches for row in rows)


@speaks_python
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
        certified=AsTyped(summary.certified.items(), names),
        intervals=AsTyped(summary.intervals.items(), names),
    )


@speaks_python
def predict(
    source: Network,
    images: Data,
    *,
    defence: choices.Defence = "none",
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
    checkpoint = _classifier(source)
    patches = Patches(**arguments.options(Patches, PatchOptions, options, "predict"))
    predictor = Predictor(checkpoint, torch.device(device), defence, patches, top)
    chosen = _judged(checkpoint, images, None, labelled=False)
    return [
        one for _, part, _ in chosen.batches(predictor.at_once) for one in predictor(part, prove)
    ]


@speaks_python
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
) -> AttackCurve:
    """Return the accuracy that the attacks leave at each radius, ascending.

    Args:
        return_examples: Each result has `examples`: images that fell, at their smallest radius.
        settings: Of the attacks.
    """
    checkpoint = _classifier(source)
    chosen = AttackSettings(**arguments.options(AttackSettings, AttackOptions, settings, "attack"))
    (stage,) = stages_of(attacks, None, norm, arguments.radii("radii", radii), chosen)
    stage = stage.with_draws(chosen.seed, checkpoint.record.classes, chosen.precision)
    model = network(checkpoint, device=device)
    where = torch.device(device)
    batches = (
        (i, pixels.to(where), y)
        for i, pixels, y in _judged(checkpoint, images, labels).batches(batch_size)
    )
    records = list(
        attack_images(
            model,
            batches,
            stage.plan,
            perturbation.growing(stage.norm, stage.radii),
            chosen,
            keep_images=return_examples,
        )
    )
    size = checkpoint.record.input.size

    def examples(radius: float) -> dict[str, Tensor] | None:
        fallen = (record for record in records if record.fell and record.epsilon <= radius)
        return collect(fallen, size) if return_examples else None

    return AttackCurve(
        AttackedAccuracy(**vars(one), examples=examples(one.epsilon)) for one in curve(records)
    )


@speaks_python
def audit(
    source: Network,
    images: Data | None = None,
    labels: Labels = None,
    *,
    seconds: float = 120.0,
    fail_on: Words = (),
    device: str = "cpu",
    **settings: Unpack[AuditOptions],
) -> AuditReport:
    """Return the findings of `certvit audit` within `seconds`, in words and figures.

    Gates are judged, not enforced: see `gate.passed`. Outside the main thread a stage ends between
    its batches only.

    Args:
        fail_on: Gates, such as "certified@0.25<0.4".
        settings: Of the audit.
    """
    checkpoint = _classifier(source)
    plan = AuditPlan(
        gates=tuple(gates.parse(text) for text in fail_on),
        budget=seconds,
        **arguments.options(AuditPlan, AuditOptions, settings, "audit"),
    )
    judged = None if images is None else _judged(checkpoint, images, labels)
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
    return AuditReport(**{name: getattr(report, name) for name in report.__struct_fields__})


def _classifier(source: Network) -> OpenCheckpoint:
    """Open a network; ArchitectureError where it ends in features."""
    checkpoint = load(source)
    require_classifier(checkpoint, "the network")
    return checkpoint


def _judged(
    checkpoint: OpenCheckpoint, images: Data, labels: Labels, *, labelled: bool = True
) -> Images:
    """Return the images; warn where the file's own program answers otherwise on them."""
    chosen = data.images_of(checkpoint.record, images, labels, labelled=labelled)
    for doubt in checkpoint.differences(pixels for _, pixels, _ in chosen.batches(32)):
        warnings.warn(plain(errors.in_python(doubt)), stacklevel=3)
    return chosen
