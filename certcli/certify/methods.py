"""Certificate methods by name, and the one loop that turns images into certificates.

An entry names a `prepare(checkpoint, device, options) -> Certifier`; `options` is the method's own
dataclass, with defaults.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_type_hints

import torch

from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.options import CertifierOptions
from certcli.certify.record_check import require_possible
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.record_lines import Run
from certcli.evaluation.records import RecordFile
from certcli.images.labelled import Images
from certcli.system.ambient import as_stated
from certcli.system.processes import ALONE, Team
from certcli.system.registry import Entry, Registry

METHODS = Registry(
    "method",
    Entry(
        "lipschitz",
        "certcli.certify.lipschitz:prepare_lipschitz",
        "one proven bound of the whole network, margins pair by pair",
        "Tsuzuku et al. 2018, Lipschitz-margin training",
    ),
    Entry(
        "box",
        "certcli.certify.box.certifier:prepare_box",
        "the same bound from a second image for each pair of classes, for pixels that end at 0 and 1, proven",
        "ours",
    ),
    Entry(
        "local",
        "certcli.certify.local:prepare_local",
        "small networks as they are: an enclosure of each image's neighbourhood, proven, seconds to minutes an image",
        "Bonaert et al. 2021, Fast and precise certification of transformers (zonotopes); second order: ours",
    ),
    Entry(
        "local-lip",
        "certcli.certify.chains.local_lip:prepare_local_lip",
        "chains of layers (ReLU, MaxMin): local norms without constant units, proven, a second an image",
        "Huang et al. 2021, Training certifiably robust neural networks with efficient local Lipschitz bounds",
    ),
    Entry(
        "bcp",
        "certcli.certify.chains.local_lip:prepare_bcp",
        "chains of layers (ReLU, MaxMin): a box and a ball through all layers, proven, faster than local-lip",
        "Lee, Lee & Park 2020, Lipschitz-certifiable training with a tight outer bound",
    ),
    Entry(
        "smoothing",
        "certcli.certify.smoothing.method:prepare_smoothing",
        "the network under Gaussian noise, any network, with probability 1 - alpha an image",
        "Cohen, Rosenfeld & Kolter 2019, Certified adversarial robustness via randomized smoothing",
    ),
    Entry(
        "patch",
        "certcli.certify.patch.certifier:prepare_patch",
        "any network behind masks, against every patch of a size at every place: proven, as it is executed",
        "Xiang et al. 2022, PatchCleanser (double masking); Levine & Feizi 2020 (voting over ablations)",
    ),
)

Method = Literal["lipschitz", "box", "local", "local-lip", "bcp", "smoothing", "patch"]
"""The names of METHODS, for types."""


def prepare_method(
    method: str,
    checkpoint: Checkpoint,
    device: torch.device,
    options: CertifierOptions | None = None,
) -> Certifier:
    """Return the method of that name, ready for the checkpoint, by its options or defaults.

    Raises:
        UsageError: there is no such method.
        NoBoundError: the method can say nothing about this network.
    """
    made_ready: Callable[..., Certifier] = METHODS.load(method)
    chosen = options_of_method(method, {}) if options is None else options
    with as_stated():
        return made_ready(checkpoint, device, chosen)


def options_of_method(method: str, values: Mapping[str, Any]) -> CertifierOptions:
    """Return the method's options from plain values: its `prepare_method` names their class."""
    kind: type[CertifierOptions] = get_type_hints(METHODS.load(method))["options"]
    return kind.of(values)


def certify_run(certifier: Certifier, checkpoint: Checkpoint, images: Images) -> Run:
    """Return the facts that decide the certificates: network, images, method and its parameters."""
    parameters = {
        "promise": certifier.promise,
        "arithmetic": certifier.arithmetic,
        "domain": certifier.domain,
    }
    return Run.of(
        "certify",
        checkpoint.digest,
        images,
        certifier.method,
        norm=certifier.norm,
        parameters={**parameters, **certifier.parameters},
    )


def certify_images(
    certifier: Certifier,
    images: Images,
    batch_size: int,
    file: RecordFile | None = None,
    team: Team = ALONE,
) -> Iterator[list[Certificate]]:
    """Yield certificates in the images' order, by batch; what `file` holds is read.

    A batch is one process's, whole: a network's last digits depend on how many images it is given.
    Only the leader is handed certificates.
    """
    step = certifier.at_once or batch_size

    def cached(positions: list[int]) -> list[Certificate] | None:
        earlier = (
            file.take([(index,) for index in images.indices[positions].tolist()])
            if file is not None
            else None
        )
        if earlier is None:
            return None
        claims = [certifier.certificate.from_json(row) for row in earlier]
        require_possible(claims, certifier, str(file.path if file is not None else ""))
        return claims

    def find(positions: list[int]) -> list[Certificate]:
        indices = images.indices[positions].tolist()
        labels = images.labels[positions].tolist()
        pixels = images.fetch(positions)
        # the next piece, if each process takes one in turn
        images.expect_at(positions[0] + team.size * step, step)
        return certifier.certificates(indices, pixels, labels)

    def pack(rows: list[Certificate]) -> list[dict[str, Any]]:
        return [row.to_json() for row in rows]

    def unpack(rows: list[dict[str, Any]]) -> list[Certificate]:
        return [certifier.certificate.from_json(row) for row in rows]

    batches = [
        list(range(start, min(start + step, len(images)))) for start in range(0, len(images), step)
    ]
    for new, rows in team.deal(batches, find, cached, pack, unpack):
        if new and file is not None:
            file.write(pack(rows))
        yield rows
