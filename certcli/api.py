"""certvit for Python: a dozen functions, each what a command does, on the same core. Documented in docs/api.md.

A checkpoint is a path, a timm or `hf-hub:` name, or what `load` returned. Images are a tensor (n, c, h, w) with pixels in
[0, 1] and labels (n,), or the name of a dataset, or what `images` returned. Radii are pixel l2. Errors are CertvitError.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.attack.campaign import stages_of
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.summary import RobustAccuracy, curve
from certcli.audit import gates as audit_gates
from certcli.audit import run as audit_run
from certcli.audit.clock import Clock
from certcli.audit.compose import compose
from certcli.audit.words import Typed
from certcli.certify.certificate import Certificate, CertifiedAccuracy, certified_accuracy
from certcli.certify.methods import certify as run_certifier
from certcli.certify.methods import options_of, prepare
from certcli.certify.patch.options import Patches
from certcli.certify.predicting import Prediction, Predictor
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.evaluation.region import growing
from certcli.evaluation.threat import Patch, Threat
from certcli.images import datasets
from certcli.images.calibration import calibration_images
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Estimate
from certcli.lipschitz.measured.estimate import measure
from certcli.lipschitz.network import NetworkBound, prove_checkpoint
from certcli.models import build
from certcli.models.assumptions import Reading
from certcli.models.build import PixelModel
from certcli.models.hints import Hints
from certcli.models.open import Opened, read
from certcli.report.document import Audit
from certcli.system.errors import DataError

FUNCTIONS = (
    "load", "save", "history", "network", "images", "bound", "slope", "certify", "shares", "predict", "attack", "audit",
)  # fmt: skip
"""What is documented, and kept."""

Network = str | Path | Checkpoint
Data = Tensor | str | Images
Labels = Tensor | Sequence[int] | None


def load(source: Network, **hints: Any) -> Checkpoint:
    """A checkpoint from a file, a folder, a timm or `hf-hub:` name. hints: arch, arch_args, mean, std of a foreign file."""
    return source if isinstance(source, Checkpoint) else read(str(source), Hints(**hints)).checkpoint


def save(checkpoint: Checkpoint, path: str | Path, *, force: bool = False) -> None:
    """Write it, atomically; an existing file only with force."""
    checkpoint.write(Path(path), force)


def history(source: Network) -> Record:
    """What it says about itself: architecture, input, surgery, lineage, evidence. Told by the file, not verified."""
    return load(source).record


def network(source: Network, *, double: bool = False, device: str = "cpu") -> PixelModel:
    """The network as a module in eval mode: pixels in [0, 1] -> logits; normalisation is its first layer."""
    return (build.load_double if double else build.load)(load(source), torch.device(device))


def images(
    source: Network,
    dataset: str,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    data_dir: Any = None,
) -> Images:
    """Labelled images of a dataset in the size that the network takes, with labels that mean its classes."""
    record = load(source).record
    folder = None if data_dir is None else Path(data_dir)
    found = datasets.require_classes(
        datasets.load(dataset, record.input, split, folder), record.classes, record.class_names
    )
    return found.limit(limit, seed)


def bound(source: Network, *, device: str = "cpu") -> NetworkBound:
    """The proven bound |f(x) - f(y)| <= upper |x - y| for images in [0, 1]; `upper` is a Real that only rounds up."""
    return prove_checkpoint(load(source), torch.device(device))


def slope(source: Network, given: Data, *, iterations: int = 20, seed: int = 0, batch_size: int = 8) -> Estimate:
    """The steepest slope found at these images: measured, below the bound."""
    model = network(source)
    unused = [0] * len(given) if isinstance(given, Tensor) else None
    chosen = _images(load(source), given, unused)
    found = list(measure(model, (pixels for _, pixels, _ in chosen.batches(batch_size)), iterations, seed))
    return found[-1]


def certify(
    source: Network,
    given: Data,
    labels: Labels = None,
    *,
    method: str = "lipschitz",
    device: str = "cpu",
    batch_size: int = 128,
    **options: Any,
) -> list[Certificate]:
    """One certificate an image. method: lipschitz, local, smoothing (options: sigma, n0, ...), patch (patches, ...)."""
    checkpoint = load(source)
    certifier = prepare(
        method, checkpoint, torch.device(device), options_of(method, {**options, "batch_size": batch_size})
    )
    chosen = _images(checkpoint, given, labels)
    return [row for rows in run_certifier(certifier, chosen, batch_size) for row in rows]


def shares(certificates: Sequence[Certificate], threats: Sequence[float | Patch | Threat]) -> CertifiedAccuracy:
    """Certified accuracy against each `Threat`, with 95 % intervals; a number is a radius in l2."""
    return certified_accuracy(certificates, [Threat.of(threat) for threat in threats])


def predict(
    source: Network, pixels: Tensor, *, defence: str = "none", prove: bool = False, device: str = "cpu", **options: Any
) -> list[Prediction]:
    """The class of each image (n, c, h, w). defence: "patch" is the classifier of `certify` with the method and options.

    prove: also which patches cannot change it.
    """
    checkpoint = load(source)
    predictor = Predictor(checkpoint, torch.device(device), defence, Patches.of(options))
    chosen = _images(checkpoint, pixels, [0] * len(pixels))
    return [one for _, part, _ in chosen.batches(predictor.at_once) for one in predictor(part, prove)]


def attack(
    source: Network,
    given: Data,
    labels: Labels = None,
    *,
    radii: Sequence[float] = (0.5,),
    attacks: Sequence[str] = ("pgd",),
    norm: str = "l2",
    device: str = "cpu",
    batch_size: int = 128,
    **settings: Any,
) -> tuple[RobustAccuracy, ...]:
    """What the attacks leave at each radius, ascending. settings: steps, restarts, seed, ... of an attack."""
    checkpoint = load(source)
    chosen = AttackSettings(**settings)
    (stage,) = stages_of(attacks, None, norm, radii, chosen)
    stage = stage.with_draws(chosen.seed, checkpoint.record.classes, chosen.precision)
    model = network(checkpoint, device=device)
    where = next(model.parameters()).device
    batches = ((i, pixels.to(where), y) for i, pixels, y in _images(checkpoint, given, labels).batches(batch_size))
    return curve(attack_images(model, batches, stage.plan, growing(stage.norm, stage.radii), chosen))


def audit(
    source: Network,
    given: Data | None = None,
    labels: Labels = None,
    *,
    seconds: float = 120.0,
    fail_on: Sequence[str] = (),
    device: str = "cpu",
    **asked: Any,
) -> Audit:
    """What `certvit audit` finds, in words and figures, within `seconds`. asked: fields of `audit.run.Asked`.

    Gates are judged, not enforced: see `gate.passed`. Outside of the main thread a stage ends between its batches only.
    """
    opened = Opened(source, Reading(())) if isinstance(source, Checkpoint) else read(str(source))
    checkpoint = opened.checkpoint
    gates = [audit_gates.parse(text) for text in fail_on]
    wanted = audit_gates.widened(audit_run.Asked(**asked), gates)
    chosen = None if given is None else _images(checkpoint, given, labels).in_turn(wanted.seed)
    clock = Clock(seconds)

    def calibration() -> Images:
        return calibration_images(checkpoint.record, 8, wanted.seed, None, None)

    results = audit_run.run(checkpoint, chosen, calibration, wanted, torch.device(device), clock)
    name = "checkpoint" if isinstance(source, Checkpoint) else str(source)
    typed = Typed(name, dataset=given if isinstance(given, str) else None)
    return compose(opened, results, wanted, gates, clock, typed=typed, limit=None)


def _images(checkpoint: Checkpoint, given: Data, labels: Labels) -> Images:
    """Tensors, a name, or Images, as Images. DataError when they do not fit the network."""
    if isinstance(given, Images):
        return given
    if isinstance(given, str):
        return images(checkpoint, given)
    size, classes = checkpoint.record.input.size, checkpoint.record.classes
    pixels = given.detach().cpu().float()
    if pixels.dim() != 4 or tuple(pixels.shape[1:]) != tuple(size) or not len(pixels):
        raise DataError(f"images of shape {tuple(given.shape)} do not fit a network of {size}", "(n, c, h, w), n > 0")
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise DataError("pixels must lie in [0, 1]", "divide by 255; the network normalises them itself")
    if labels is None:
        raise DataError("images without labels", "give the labels (n,) beside them: only correct images are certified")
    found = torch.as_tensor(labels).long().cpu()
    if found.shape != (len(pixels),) or not bool(((found >= 0) & (found < classes)).all()):
        raise DataError(f"labels of shape {tuple(found.shape)} do not fit {len(pixels)} images and {classes} classes")
    names = checkpoint.record.class_names or tuple(str(number) for number in range(classes))
    return Images("tensors", "given", names, found, torch.arange(len(found)), lambda positions: pixels[list(positions)])
