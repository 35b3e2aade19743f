"""Estimate how many box symbols fit into memory, before any allocation."""

import ctypes

import torch

from certcli.enclosure.zonotopes.domain import LocalNetwork
from certcli.system.memory import free_bytes

_COPIES = 5
"""Arrays of the largest kind that are alive at once, temporaries of one operation included (measured: 4)."""

_SYMBOLS_OF_WIDTH = 4
"""Symbols of one token, over the most entries that a token has anywhere."""


def available(device: torch.device) -> float:
    """Return the bytes that may be used: 60 % of the free memory of the device or the machine."""
    if device.type == "cuda":
        return 0.6 * torch.cuda.mem_get_info(device)[0]
    return 0.6 * free_bytes()


def keep_pages() -> None:
    """Let glibc keep the memory of freed arrays, where there is a glibc.

    A walk frees and allocates the same gigabyte hundreds of times; new pages from the system took a
    fifth of the time.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
        tune(-4, 0)  # M_MMAP_MAX: no array has a mapping of its own
        tune(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError, TypeError):
        return


def affordable(
    network: LocalNetwork, squares_up_to: int, symbols: int, budget: float
) -> int | None:
    """Return `symbols`, or the fewer that fit, 0; None where the image's own do not fit.

    A residual sum keeps at least a symbol an entry. On the way through a block every nonlinear
    result brings its own.
    """
    pixels, stream, largest, fresh = network.sizes()
    numbers = network.numbers
    squares = numbers * (numbers + 1) // 2 if numbers <= squares_up_to else 0
    room = budget / (8 * _COPIES * largest) - pixels - squares - fresh
    count = min(symbols, int(room))
    if count >= min(symbols, stream) and room >= stream:
        return max(count, stream)
    return 0 if room + fresh >= 0 else None


def fits_by_fibres(network: LocalNetwork, budget: float) -> bool:
    """Tell whether columns for the image and for the symbols of one token each fit."""
    pixels, _, largest, _ = network.sizes()
    return 8 * _COPIES * largest * (pixels + _SYMBOLS_OF_WIDTH * network.widest) <= budget
