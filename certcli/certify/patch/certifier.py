"""--method patch: a defended classifier, one record an image of what no patch changes, what attacks
climb, and the classes of images, by a network or by the defence.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certifier, RecheckSettings
from certcli.certify.options import VOTING, Patches
from certcli.certify.patch.double_masking import DoubleMasking, Procedure, Voting
from certcli.certify.patch.passes import NONE, MaskedPasses, seen
from certcli.checkpoint.file import Checkpoint
from certcli.engine.trace import example_of
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate, PatchCertificate, counts_of_votes
from certcli.evaluation.threat import Defence, Patch
from certcli.images.labelled import sent
from certcli.models import build
from certcli.models.pixels import AUTO, PIXELS, PixelModel, seen_part
from certcli.system.errors import UsageError

METHOD = "patch"
ROWS = {"cpu": 8, "cuda": 128}
"""Passes in a batch, always: a CPU gains nothing by more."""
AT_ONCE = 16
"""Images that share batches."""


class PatchCertifier(Certifier):
    """The procedure over the network's passes. The promise is about this classifier as it is
    executed, not about the bare
    network: no real arithmetic and no slack, since a pass that sees nothing of a patch has the same
        input with it.
    """

    method = METHOD
    certificate = PatchCertificate
    norm = "patch"
    at_once = AT_ONCE

    def __init__(
        self, procedure: Procedure, passes: MaskedPasses, patches: Sequence[Patch]
    ) -> None:
        self.procedure, self.passes, self.patches = procedure, passes, tuple(patches)
        part = passes.part
        weight = next(part.parameters())
        self.arithmetic = "float64" if weight.dtype == torch.float64 else "float32"
        hidden = "tokens are dropped" if part.hides == "tokens" else "hidden pixels are grey"
        self.title = f"{procedure.title}; {hidden}"
        self.statement = (
            f"certificates: of the defended classifier as it is executed here ({self.arithmetic}), against any pixels within "
            f"the patch at any place; {passes.determinism.told(passes.rows)}"
        )
        if part.why:
            self.remark = f"{part.why}; hidden pixels are grey"

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {
            "procedure": self.procedure.name,
            "patches": [str(patch) for patch in self.patches],
            **self.procedure.settings,
            "hide": self.passes.part.hides,
            "cell": list(self.passes.part.grid.cell),
            "rows": self.passes.rows,
        }

    @property
    def about(self) -> Mapping[str, Any]:
        checked = self.passes.determinism
        return {
            "passes": len(self.procedure.views),
            "determinism": {
                "difference": checked.difference,
                "margin": checked.margin,
                "compared": checked.passes,
            },
        }

    def batch(  # type: ignore[override]
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchCertificate]:
        started = time.perf_counter()
        outcomes = self.procedure.certify(self.passes, pixels.float(), labels)
        seconds = round((time.perf_counter() - started) / max(1, len(outcomes)), 3)
        return [
            PatchCertificate(
                index,
                label,
                None if one.prediction == NONE else one.prediction,
                seconds=seconds,
                proven=tuple(str(patch) for patch in one.proven),
                votes=one.votes,
                counts=counts_of_votes(one.votes),
            )
            for index, label, one in zip(indices, labels, outcomes, strict=True)
        ]

    def predict(self, pixels: Tensor) -> list[int | None]:
        """Defended classifier: pixels (b, c, h, w) in [0, 1] -> classes; None for NaN."""
        classes = [one.prediction for one in self.procedure.predict(self.passes, pixels.float())]
        return [None if top == NONE else top for top in classes]

    @property
    def attacked(self) -> nn.Module:
        return self.passes.part.model

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """The passes are made again."""
        certificates = self.batch(
            [claim.index for claim in claims], pixels, [claim.label for claim in claims]
        )
        return [
            _compare_votes(claim, certificate)
            for claim, certificate in zip(claims, certificates, strict=True)
        ]

    def stands(
        self, claims: Sequence[Certificate], nearby: Tensor, doubt: RecheckSettings
    ) -> list[bool]:
        return [
            top == claim.prediction for top, claim in zip(self.predict(nearby), claims, strict=True)
        ]


def _compare_votes(claim: Certificate, recomputed: Certificate) -> Claim:
    assert isinstance(claim, PatchCertificate)
    assert isinstance(recomputed, PatchCertificate)
    if claim.prediction != recomputed.prediction:
        return claim.checked(
            "refuted",
            f"class {claim.prediction} is stated, the defended network says {recomputed.prediction}",
        )
    if claim.votes != recomputed.votes:
        return claim.checked("refuted", "the passes vote otherwise than is stated")
    unproven = [patch for patch in claim.proven if patch not in recomputed.proven]
    if unproven:
        return claim.checked("refuted", f"{', '.join(unproven)} is stated and not proven again")
    return claim.checked("verified", "the passes, made again, prove what is stated")


def prepare_patch(checkpoint: Checkpoint, device: torch.device, options: Patches) -> PatchCertifier:
    """Return the certifier behind a procedure; UsageError: options that mean nothing for it."""
    options.sizes(checkpoint.record.input.size[1:])  # refuses before the network is built
    return defended(build.load(checkpoint, device), options)


def defended(model: PixelModel, options: Patches) -> PatchCertifier:
    """Return the certifier of this network behind the procedure."""
    size = model.input_size
    device = next(model.parameters()).device
    patches = tuple(sorted(set(options.sizes(size[1:]))))
    name, number = options.decided_by
    part = seen_part(model, options.hide, options.cell, fine=name != VOTING)
    procedure: Procedure
    if name == VOTING:
        with torch.no_grad():
            classes = model(example_of(model, size)).shape[1]
        procedure = Voting(part.grid, patches, options.bands, number, classes)
    else:
        try:
            procedure = DoubleMasking(part.grid, patches, number)
        except UsageError as reason:
            if options.hide != AUTO or part.hides == PIXELS:
                raise
            part = seen_part(model, PIXELS, options.cell)  # where tokens are few
            part.why = reason.message
            procedure = DoubleMasking(part.grid, patches, number)
    rows = options.rows or ROWS.get(device.type, ROWS["cpu"])
    return PatchCertifier(procedure, MaskedPasses(part, procedure.views, rows), patches)


_MOST = 32
"""Passes that are put together, evenly chosen: each costs a gradient a step."""


class TouchedPasses(nn.Module):
    """log of the mean softmax over views that see the patch here: what has to change together.

    Of double masking those of the first round, whose majority a patch must turn.
    """

    def __init__(self, certifier: PatchCertifier, patch: Patch, corner: tuple[int, int]) -> None:
        super().__init__()
        self.part = certifier.passes.part
        procedure = certifier.procedure
        views = (
            procedure.views[: procedure.count]
            if isinstance(procedure, DoubleMasking)
            else procedure.views
        )
        (down, across), (top, column) = self.part.grid.cell, corner
        block = (
            (top // down, (top + patch.height - 1) // down + 1),
            (column // across, (column + patch.width - 1) // across + 1),
        )
        touched = views[seen(views, [block]).flatten()]
        self.views = touched[:: max(1, -(-len(touched) // _MOST))]
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        views = self.views.to(pixels.device)
        count = len(pixels)
        kinds = self.part.alike(views)
        shares: list[Tensor] = []
        for kind in kinds.unique().tolist():
            some = views[kinds == kind]
            logits = self.part(pixels.repeat_interleave(len(some), 0), some.repeat(count, 1, 1))
            shares.append(logits.softmax(dim=1).unflatten(0, (count, len(some))).sum(dim=1))
        return (torch.stack(shares).sum(dim=0) / len(views)).clamp_min(1e-30).log()


MOST_LIKELY = 5
"""Classes that are listed of each image, where nobody says how many."""


@dataclass(frozen=True)
class ClassProbability:
    """A class, and its softmax probability: the network's own word, which proves nothing."""

    prediction: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a network, or a defence, says of an image.

    Args:
        prediction: the class, None where the network gives NaN.
        proven: the patches that cannot change it, as spelled.
        top: the most likely classes, the most likely first; a defence has votes and none of them.
    """

    prediction: int | None
    proven: tuple[str, ...] = ()
    top: tuple[ClassProbability, ...] = ()


class Predictor:
    """Images in, predictions out. options: of the defence, as its method of `certify` takes them.

    at_once: images that are best given together.
    """

    at_once = AT_ONCE

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        defence: Defence = "none",
        options: Patches | None = None,
        top: int = MOST_LIKELY,
    ) -> None:
        if top < 1:
            raise UsageError(f"top is {top}: at least one class must be listed", "5, or 1")
        self._top = min(top, checkpoint.record.classes)
        self.defended: PatchCertifier | None = None
        if defence == METHOD:
            self.defended = prepare_patch(checkpoint, device, options or Patches())
        else:
            self._model = build.load(checkpoint, device)
            self._device = device

    @torch.no_grad()
    def __call__(self, pixels: Tensor, prove: bool = False) -> list[Prediction]:
        """Predict pixels (b, c, h, w) in [0, 1]. prove: also whether a patch can change it."""
        if self.defended is None:
            return [self._likely(row) for row in self._model(sent(pixels, self._device))]
        predictions = self.defended.predict(pixels)
        if not prove:
            return [Prediction(top) for top in predictions]
        rows = self.defended.certificates(
            range(len(predictions)), pixels, [-1 if top is None else top for top in predictions]
        )
        proven = [row.proven if isinstance(row, PatchCertificate) else () for row in rows]
        return [Prediction(top, its) for top, its in zip(predictions, proven, strict=True)]

    def _likely(self, logits: Tensor) -> Prediction:
        """Return the most likely classes: logits (k,)."""
        if not bool(torch.isfinite(logits).all()):
            return Prediction(None)
        top = logits.double().softmax(0).topk(self._top)
        choices = map(ClassProbability, top.indices.tolist(), top.values.tolist())
        return Prediction(int(logits.argmax()), top=tuple(choices))
