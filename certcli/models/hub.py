"""The hub of published weights: a quick test first, since its library retries for a minute."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from certcli.checkpoint.tensor_files import INDEX, shards_of_index
from certcli.models.converters.transformers_config import PIXELS
from certcli.system.errors import CheckpointError, one_line, raise_if

DIFFUSERS = "diffusion_pytorch_model.safetensors"
"""The weights of a network of diffusers."""
SECONDS = 5.0
"""Seconds to wait for a connection."""


def host() -> str:
    return urlsplit(constants.ENDPOINT).hostname or "huggingface.co"


def reachable() -> bool:
    """Tell whether the hub accepts a connection; True behind a proxy, as the library uses it."""
    if any(map(os.environ.get, ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))):
        return True
    with suppress(OSError), socket.create_connection((host(), 443), timeout=SECONDS):
        return True
    return False


@contextmanager
def cache_if_unreachable() -> Iterator[str]:
    """Let the library read only its cache without a network; yield the reason, else ""."""
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
    with _fetching(name, "config.json and model.safetensors") as fetch:
        fetch("config.json")
        with suppress(EntryNotFoundError):  # only transformers' repositories have it
            fetch(PIXELS)
        try:
            return fetch("model.safetensors")
        except EntryNotFoundError:
            path = fetch(INDEX)
            for part in shards_of_index(path):
                fetch(part.name)
            return path


def fetched_diffusers(name: str) -> Path:
    """Fetch a hub repository's UNet and schedule; return their folder; name as for `fetched`."""

    def first(fetch: Callable[[str], Path], folder: str, file: str) -> str:
        """Fetch a file in the folder or beside it, and return where it lay."""
        try:
            fetch(f"{folder}/{file}")
        except EntryNotFoundError:
            fetch(file)
            return ""
        return f"{folder}/"

    with _fetching(name, f"config.json, {DIFFUSERS} and scheduler_config.json") as fetch:
        with suppress(EntryNotFoundError):
            fetch("model_index.json")
        place = first(fetch, "unet", "config.json")
        first(fetch, "scheduler", "scheduler_config.json")
        weights = fetch(f"{place}{DIFFUSERS}")
    return weights.parent.parent if place else weights.parent


@contextmanager
def _fetching(name: str, needs: str) -> Iterator[Callable[[str], Path]]:
    """Yield what fetches a file of a repository; CheckpointError for what the library raises."""
    repository, _, revision = name.partition("@")
    message = "hf-hub: names no repository"
    raise_if(not repository, CheckpointError, message, "hf-hub:OWNER/NAME")

    def fetch(file: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision or None))

    with cache_if_unreachable() as offline:
        try:
            yield fetch
        except CheckpointError:
            raise
        except Exception as failure:  # every network and hub library has its own exceptions
            raise CheckpointError(
                f"cannot fetch '{one_line(name)}' from the hub ({offline or hub_failure_reason(failure)})",
                f"check the name and the network; the repository needs {needs}",
            ) from failure


def hub_failure_reason(failure: Exception) -> str:
    """Return type and first line of an error of a library."""
    return f"{type(failure).__name__}: {one_line(failure)[:120]}"
