"""Proofs that are made once, for tests of what a file says of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from certcli.certify import methods
from certcli.checkpoint.file import Checkpoint
from certcli.lipschitz import network
from certcli.verification import report as reports


@contextmanager
def proofs_made_once(certificates: bool = True) -> Iterator[None]:
    """Prove each network once: what tests edit are files about it. certificates: also certify the
    same images by it once.
    """
    prepared = methods.prepare_method
    certified = methods.certify_images
    proven = network.prove_checkpoint
    known: dict[Any, Any] = {}

    def prove(checkpoint: Checkpoint, device: Any) -> Any:
        key = checkpoint.digest
        known[key] = known.get(key) or proven(checkpoint, device)
        return known[key]

    def prepare(method: str, checkpoint: Checkpoint, device: Any, options: Any = None) -> Any:
        key = method, checkpoint.digest, repr(options)
        known[key] = known.get(key) or prepared(method, checkpoint, device, options)
        return known[key]

    def certify(certifier: Any, images: Any, *rest: Any, **others: Any) -> Any:
        if len(rest) > 1 or others:
            return certified(certifier, images, *rest, **others)
        key = id(certifier), images.digest
        known[key] = known.get(key) or list(certified(certifier, images, *rest))
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "prove_checkpoint", prove)
        patch.setattr(reports, "prove_checkpoint", prove)
        patch.setattr(methods, "prepare_method", prepare)
        if certificates:
            patch.setattr(methods, "certify_images", certify)
        yield
