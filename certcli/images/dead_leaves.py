"""Shapes that fall on an image and occlude each other.

The rows of all shapes are cut first and painted in order, so that a pixel is blended once, with
its last shape: this takes half the time of blending each shape in turn.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_CORNERS = 7


def drop_leaves(image: Array, bank: Array, random: np.random.Generator) -> None:
    """Draw ellipses and polygons on the image, the large ones first; radii follow a power law.

    Args:
        image: (c, h, w) float32, drawn on.
        bank: textures, (n, c, h, w) float32.
    """
    channels, height, width = image.shape
    side = min(height, width)
    radii = np.sort(random.pareto(1.2, int(random.integers(20, 200))) + 0.3)[::-1] * (side / 24)
    radii = np.minimum(radii, 0.55 * side)
    leaves = [_leaf(radius, image.shape, len(bank), random) for radius in radii.tolist()]
    numbers = np.array([numbers for numbers, _, _ in leaves])
    x, y, angle, flat, textures = numbers[:, :5].T
    colour, share = numbers[:, 5:].astype(np.float32).T
    tints = np.array([tint for _, tint, _ in leaves])
    turns = np.array([sides for _, _, sides in leaves])

    start, stop = _leaf_rows(
        x.astype(np.float32), y.astype(np.float32), radii, angle, flat, turns, (height, width)
    )
    owners = np.full(height * width, -1)
    visible = start < stop
    number, row = np.nonzero(visible)
    starts = row * width + start[visible]
    stops = row * width + stop[visible]
    for leaf, begin, end in zip(number.tolist(), starts.tolist(), stops.tolist(), strict=True):
        owners[begin:end] = leaf

    places = np.flatnonzero(owners >= 0)
    owner = owners[places]
    grey = tints.mean(1, keepdims=True)
    tints = grey + colour[:, None] * (tints - grey)  # most things are nearly grey
    tints *= share[:, None]
    rest = (1 - share).take(owner)
    plane = (textures.astype(int) * bank[0].size).take(owner) + places
    for channel, pixels in enumerate(image.reshape(channels, -1)):
        texture = bank.take(plane + channel * pixels.size)
        pixels[places] = tints[:, channel].take(owner) + rest * texture


def _leaf(
    radius: float, shape: tuple[int, ...], textures: int, random: np.random.Generator
) -> tuple[list[float], Array, list[float]]:
    """Draw the numbers, the tint and the angles of the sides of a leaf; an ellipse has none
    (NaN)."""
    channels, height, width = shape
    x = random.uniform(-0.08, 1.08) * width
    y = random.uniform(-0.08, 1.08) * height
    angle = random.uniform(0.0, 2.0 * np.pi)
    tint = random.random(channels, dtype=np.float32)
    colour = random.random()
    share = random.uniform(0.2, 0.8)
    flat = random.uniform(0.4, 1.0)
    corners = int(random.integers(3, 8)) if random.random() < 0.5 else 0
    texture = int(random.integers(textures))
    is_outside = int(x + radius) + 2 <= 0 or int(x - radius) >= width
    is_outside |= int(y + radius) + 2 <= 0 or int(y - radius) >= height
    turns = [] if is_outside or not corners else random.uniform(0.0, 2.0 * np.pi, corners).tolist()
    turns += [turns[0] if turns else np.nan] * (_MOST_CORNERS - len(turns))
    return [x, y, angle, flat, texture, colour, share], tint, turns


def _leaf_rows(
    x: Array,
    y: Array,
    radius: Array,
    angle: Array,
    flat: Array,
    turns: Array,
    size: tuple[int, int],
) -> tuple[Array, Array]:
    """Return the first column of each leaf in each row, and the one behind its last: (n, h)."""
    height, width = size
    down = (np.arange(height, dtype=np.float32) - y[:, None]) / radius[:, None]
    is_polygon = ~np.isnan(turns[:, 0])
    # |(along, aside / short)| <= 1, a square form of (across, down); polygons lie in a disc
    short = np.where(is_polygon, 1.0, flat)
    turned = np.cos(angle)
    tilted = np.sin(angle)
    square = (turned**2 + (tilted / short) ** 2)[:, None]
    mixed = (turned * tilted * (1 - short**-2))[:, None] * down
    rest = (tilted**2 + (turned / short) ** 2)[:, None] * down**2 - 1
    room = mixed**2 - square * rest
    half = np.sqrt(np.maximum(room, 0.0))
    smallest = (-mixed - half) / square
    largest = (-mixed + half) / square
    # cos across + sin down <= flat at each side
    normals = (turns[is_polygon] + angle[is_polygon, None])[..., None]
    limits = flat[is_polygon, None, None] - np.sin(normals) * down[is_polygon, None]
    limits /= np.cos(normals)
    ahead = np.cos(normals) > 0
    limit = np.where(ahead, limits, np.inf).min(1)
    largest[is_polygon] = np.minimum(largest[is_polygon], limit)
    limit = np.where(ahead, -np.inf, limits).max(1)
    smallest[is_polygon] = np.maximum(smallest[is_polygon], limit)
    start = np.ceil(x[:, None] + radius[:, None] * smallest).clip(0, width)
    stop = np.floor(x[:, None] + radius[:, None] * largest).clip(-1, width - 1) + 1
    stop[room < 0] = 0
    return start.astype(int), stop.astype(int)
