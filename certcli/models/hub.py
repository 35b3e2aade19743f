"""The hub of published weights: a quick test of the connection, since its library retries for a minute."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

SECONDS = 5.0
"""Seconds to wait for a connection."""


def host() -> str:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname or "huggingface.co"


def reachable() -> bool:
    """Tell whether the hub's host accepts a connection; True behind a proxy, which the library uses."""
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
    """Let the hub's library read only its cache where there is no network; yield the reason, "" with a network."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or reachable():
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"no network: {host()} cannot be reached, and it is not in the cache here"
    finally:
        constants.HF_HUB_OFFLINE = False
