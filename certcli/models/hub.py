"""The hub of published weights: a quick test of the connection, since its library retries for a
minute.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from certcli.checkpoint.shards import INDEX, named
from certcli.models.converters.transformers_config import PIXELS
from certcli.system.errors import CheckpointError, one_line

SECONDS = 5.0
"""Seconds to wait for a connection."""


def host() -> str:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname or "huggingface.co"


def reachable() -> bool:
    """Tell whether the hub's host accepts a connection; True behind a proxy, which the library
    uses.
    """
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True
    try:
        with socket.create_connection((host(), 443), timeout=SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def cache_if_unreachable() -> Iterator[str]:
    """Let the hub's library read only its cache where there is no network; yield the reason, ""
    with a network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or reachable():
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"no network: {host()} cannot be reached, and it is not in the cache here"
    finally:
        constants.HF_HUB_OFFLINE = False


def fetched(name: str) -> Path:
    """Fetch configs and weights of a hub's repository, and return the file of weights; timm would
    also unpickle files.

    Args:
        name: OWNER/REPOSITORY, or OWNER/REPOSITORY@REVISION.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = name.partition("@")

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(repository, file, revision=revision or None))

    with cache_if_unreachable() as offline:
        try:
            fetch("config.json")
            with suppress(EntryNotFoundError):  # only transformers' repositories have it
                fetch(PIXELS)
            try:
                path = fetch("model.safetensors")
            except EntryNotFoundError:
                path = fetch(INDEX)
                for part in named(path):
                    fetch(part.name)
        except CheckpointError:
            raise
        except Exception as failure:  # every network and hub library has its own exceptions
            raise CheckpointError(
                f"cannot fetch '{one_line(name)}' from the hub ({offline or reason_of(failure)})",
                "check the name and the network; the repository needs config.json and model.safetensors",
            ) from failure
    return path


def reason_of(failure: Exception) -> str:
    """Return type and first line of an error of a library."""
    return f"{type(failure).__name__}: {one_line(failure)[:120]}"
