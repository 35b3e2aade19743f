"""Certificates of evidence and reports, made again by their method, on the images named."""

import json
import os
from dataclasses import replace

from certcli.certify.methods import certify, options_of, prepare
from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared.groups import BatchDevice, Evaluation
from certcli.cli.shared.output import Sink
from certcli.cli.verify.options import VerifyScope
from certcli.evaluation.image_doubts import right_of
from certcli.images.labelled import Images
from certcli.models.build import load_double
from certcli.system.errors import DataError, NoBoundError
from certcli.verification.evidence import Certified, Certify, Recertified, Request

WITHOUT_BOUND = {"promise": "proof", "failure": 0.0, "arithmetic": "real", "parameters": {}}


def certify_again(
    checkpoint: Checkpoint, scope: VerifyScope, data: Evaluation, machine: BatchDevice, sink: Sink
) -> Certify:
    """Return a function that certifies the images of an entry again, all or a sample."""

    def recertify(request: Request) -> Recertified:
        named = Evaluation(dataset=data.dataset, data_dir=data.data_dir, split=request.split)
        named = replace(named, limit=request.limit, seed=request.seed)
        images = named.images(checkpoint.record, sink)
        if request.digest is not None and images.digest != request.digest:
            raise DataError("these are other images than those of the evidence: name its --dataset")
        chosen = _chosen(images, scope.sample, sink)
        batch = machine.batch_size
        result = Recertified([], len(images), images.name, images.split, images.ahead is None)
        values = {**request.options, "batch_size": batch, "denoiser_file": scope.denoiser}
        settings = options_of(request.method, values)
        device = machine.pick_for(getattr(settings, "arithmetic", None))
        try:
            certifier = prepare(request.method, checkpoint, device, settings)
        except NoBoundError:
            if request.method != "lipschitz":
                raise
            correct = right_of(load_double(checkpoint, device), chosen, batch)
            return replace(result, rows=[(right, 0.0) for right in correct], stated=WITHOUT_BOUND)
        certifier.kept_back = 0.0
        rows: list[tuple[bool, Certified]] = []
        with sink.progress("certify again", total=len(chosen)) as bar:
            for certificates in certify(certifier, chosen, batch):
                rows += [(one.correct, one.held) for one in certificates]
                bar.advance(len(certificates))
        names = ("promise", "failure", "arithmetic", "norm", "domain")
        fields = {name: getattr(certifier, name) for name in names}
        statement = {**certifier.about, **fields, "parameters": dict(certifier.parameters)}
        return replace(result, rows=rows, stated=json.loads(json.dumps(statement)))

    return recertify


def _chosen(images: Images, sample: int | None, sink: Sink) -> Images:
    """Return a sample that the file's author cannot have predicted; all images without one."""
    if sample is None or sample >= len(images):
        return images
    seed = int.from_bytes(os.urandom(4), "little")
    sink.note(f"a sample of {sample} of {len(images)} images, drawn with seed {seed}")
    return images.limit(sample, seed)
