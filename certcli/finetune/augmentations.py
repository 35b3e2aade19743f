"""The names of augmentations, as `--augment` takes them. Importing this file imports no torch."""

import re
from re import Match

from certcli.system.errors import UsageError

AUGMENTATIONS = ("crop", "flip", "shift", "warp")
"""Those without numbers."""
CUTOUT = re.compile(r"cutout:([1-9][0-9]?)x([1-9][0-9]{0,4})")
"""Number of squares, and their side in pixels."""
BANDS = re.compile(r"bands:([1-9][0-9]{0,3})")
"""Number of visible columns of cells: of tokens, where these can be dropped."""
SQUARES = re.compile(r"cutout-(random|greedy):([12])x([1-9][0-9]{0,4})")
"""The choice of places; then as CUTOUT. Four squares could hide a whole image, and a certificate
hides two."""
JITTER = re.compile(r"color-jitter:([0-9.]+(?:x[0-9.]+){0,3})")
"""Reach of brightness, contrast, saturation, hue; one number stands for the first three, as in
timm."""
NUMBERED = (CUTOUT, BANDS, SQUARES, JITTER)
MOST_HUE = 0.5
"""Of a full turn: as far as hues can differ."""


def jitter_reach(match: Match[str]) -> tuple[float, float, float, float]:
    """Return the reach of brightness, contrast, saturation and hue; UsageError for other
    numbers."""
    try:
        reach = [float(number) for number in match[1].split("x")]
    except ValueError as failure:
        raise UsageError(f"'{match[0]}' holds no numbers", "color-jitter:0.4") from failure
    if len(reach) == 1:
        reach = reach * 3
    brightness, contrast, saturation, hue = (*reach, 0.0, 0.0)[:4]
    if max(brightness, contrast, saturation) > 1 or hue > MOST_HUE:
        raise UsageError(
            f"'{match[0]}': brightness, contrast and saturation change by 1 at most, hue by 0.5",
            "color-jitter:0.4 or color-jitter:0.4x0.4x0.4x0.1",
        )
    if not any((brightness, contrast, saturation, hue)):
        raise UsageError(f"'{match[0]}' changes nothing", "color-jitter:0.4")
    return brightness, contrast, saturation, hue


def require_known_augmentations(names: tuple[str, ...]) -> None:
    """Raise UsageError for a name that is no augmentation, or whose numbers have no meaning."""
    for name in names:
        match = JITTER.fullmatch(name)
        if match is not None:
            jitter_reach(match)
        elif name not in AUGMENTATIONS and not any(kind.fullmatch(name) for kind in NUMBERED):
            examples = "cutout:2x128,bands:3,cutout-greedy:2x96,color-jitter:0.4"
            raise UsageError(
                f"unknown augmentation '{name}'", f"any of: {','.join(AUGMENTATIONS)},{examples}"
            )
