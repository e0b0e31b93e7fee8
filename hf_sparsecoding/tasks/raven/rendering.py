"""Panels as pictures: 160 x 160 grey values, black and grey ink on white.

Source: Zhang et al., RAVEN, CVPR 2019.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Float64, UInt8
from PIL import Image, ImageDraw, ImageFont

from .attributes import ANGLES, COLORS, CONFIGURATIONS, SIZES, TYPES, Entity, Panel


SIDE = 160
LINE = 2  # width of an outline in pixels
UNFILLED = COLORS[0]
GAP = 8  # pixels between the panels of a picture


def render(panel: Panel, configuration: str) -> Image.Image:
    """A panel in grey; components and, within them, slots that come later cover those before."""
    image = Image.new("L", (SIDE, SIDE), 255)
    components, divider = CONFIGURATIONS[configuration]
    for component, entities in zip(components, panel, strict=True):
        for entity in entities:
            row, column, height, width = component.slots[entity.slot]
            shape, mask = draw_entity(*appearance(entity, min(height, width)))
            half = shape.width // 2
            image.paste(shape, (int(SIDE * column) - half, int(SIDE * row) - half), mask)
    if divider == "vertical":
        image.paste(0, (SIDE // 2, 0, SIDE // 2 + 1, SIDE))
    elif divider == "horizontal":
        image.paste(0, (0, SIDE // 2, SIDE, SIDE // 2 + 1))
    return image


def render_all(panels: Sequence[Panel], configuration: str) -> UInt8[np.ndarray, "panels 160 160"]:
    images = np.empty((len(panels), SIDE, SIDE), dtype=np.uint8)
    for image, panel in zip(images, panels, strict=True):
        image[:] = render(panel, configuration)
    return images


def appearance(entity: Entity, side: float) -> tuple[str, int, int, int]:
    """Shape, radius in pixels, grey and angle of an entity in a slot whose shorter side is `side` panels."""
    name = TYPES[entity.type - 1]
    radius = int(side * SIDE / 2 * SIZES[entity.size])
    # No circle is turned: it would look the same up to the rounding of pixels.
    return name, radius, COLORS[entity.color], 0 if name == "circle" else ANGLES[entity.angle]


@lru_cache(maxsize=8192)
def draw_entity(name: str, radius: int, grey: int, angle: int) -> tuple[Image.Image, Image.Image]:
    """An entity about the middle pixel of a small picture, and its mask: 255 where it covers what lies below.

    Few distinct entities exist; all of them take less than 50 MB.
    """
    inside, mask = draw_masks(name, radius, grey != UNFILLED, angle)
    return inside.point([round(share * grey / 255) for share in range(256)]), mask


@lru_cache(maxsize=2048)
def draw_masks(name: str, radius: int, filled: bool, angle: int) -> tuple[Image.Image, Image.Image]:
    """255 in the filling, and 255 where the entity covers what lies below. An unfilled one covers with its outline.

    The filling is 0 outside of the shape as it is on the outline: the turned edge then mixes black, and not white,
    with what lies below.
    """
    depth = depths(name, radius)
    inside = (depth >= LINE) & filled
    mask = (depth >= 0) & ((depth < LINE) | filled)
    images = (Image.fromarray(np.where(shown, np.uint8(255), np.uint8(0))) for shown in (inside, mask))
    return tuple(image.rotate(angle, Image.Resampling.BILINEAR) for image in images)


@lru_cache(maxsize=64)
def depths(name: str, radius: int) -> Float64[np.ndarray, "side side"]:
    """How deep each pixel lies below the edge of a shape about the middle pixel, polygons with a corner at the top."""
    half = radius + LINE
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    if name == "circle":
        return radius - np.hypot(x, y)
    corners = TYPES.index(name) + 3
    turns = 2 * np.pi * (np.arange(corners) + 0.5) / corners  # from the top to the middle of each side
    reach = np.sin(turns)[:, None, None] * x - np.cos(turns)[:, None, None] * y  # [corners, side, side]
    return np.round(radius * np.cos(np.pi / corners) - reach.max(axis=0), 6)


def ink(images: UInt8[np.ndarray, "*batch 160 160"], size: int = SIDE) -> Float32[np.ndarray, "*batch {size} {size}"]:
    """1 - grey / 255, averaged over boxes of (160 / size) x (160 / size) pixels."""
    check_size(size)
    box = SIDE // size
    if box == 1:
        return np.divide(255 - images, 255, dtype=np.float32)
    rows = (255 - images).reshape(*images.shape[:-2], size, box, SIDE).sum(axis=-2, dtype=np.float32)
    sums = rows.reshape(*rows.shape[:-1], size, box).sum(axis=-1)  # whole numbers below 2^24: exact
    return sums / np.float32(255 * box * box)


def check_size(size: int) -> None:
    if type(size) is not int or not (1 <= size <= SIDE and SIDE % size == 0):
        raise ValueError(f"size must divide {SIDE}, such as 20, 32, 40, 80 or 160, got {size}")


def draw_picture(contexts: Sequence[np.ndarray], choices: Sequence[np.ndarray]) -> Image.Image:
    """The 3 x 3 matrix with a question mark in the answer's place, below it the choices in two rows of four."""
    step = SIDE + GAP
    picture = Image.new("L", (4 * step + GAP, 5 * step + 4 * GAP), 200)
    question = Image.new("L", (SIDE, SIDE), 255)
    font = ImageFont.load_default(size=SIDE // 2)
    ImageDraw.Draw(question).text((SIDE // 2, SIDE // 2), "?", fill=0, font=font, anchor="mm")
    for index, image in enumerate([*map(Image.fromarray, contexts), question]):
        picture.paste(image, (GAP + step // 2 + index % 3 * step, GAP + index // 3 * step))
    for index, image in enumerate(map(Image.fromarray, choices)):
        picture.paste(image, (GAP + index % 4 * step, 4 * GAP + (3 + index // 4) * step))
    return picture
