"""The hub of published weights: whether it can be reached, asked once and quickly; its library retries for a minute."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

SECONDS = 5.0
"""After which a hub that does not answer is none."""


def host() -> str:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname or "huggingface.co"


def reachable() -> bool:
    """Whether the hub's host takes a connection; taken for granted behind a proxy, which the library knows how to use."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        with socket.create_connection((host(), 443), timeout=SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def cache_if_unreachable() -> Iterator[str]:
    """Inside, the hub's library reads its cache alone where there is no network. Yields what to say then, else ""."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or reachable():
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"no network: {host()} cannot be reached, and it is not in the cache here"
    finally:
        constants.HF_HUB_OFFLINE = False
