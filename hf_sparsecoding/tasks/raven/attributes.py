"""What a RAVEN panel is made of: attributes and their levels, entities, components and the seven configurations.

Source: Zhang et al., RAVEN, CVPR 2019, sec. 3. Everything here is a level; `rendering` knows pixels.
"""

from typing import NamedTuple


TYPES = ("triangle", "square", "pentagon", "hexagon", "circle")  # of levels 1 to 5
SIZES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # radius over half the slot's shorter side
COLORS = (255, 224, 196, 168, 140, 112, 84, 56, 28, 0)  # grey; 255 is unfilled
ANGLES = (-135, -90, -45, 0, 45, 90, 135, 180)  # degrees, counterclockwise; under no rule

Range = tuple[int, int]  # lowest and highest level, both included


class Entity(NamedTuple):
    """One shape of a panel; all fields but the slot are levels."""

    slot: int
    type: int
    size: int
    color: int
    angle: int


Entities = tuple[Entity, ...]  # one component of a panel, in the order of the slots
Panel = tuple[Entities, ...]  # one entry per component of the configuration


class Component(NamedTuple):
    """A part of every panel that follows rules of its own.

    slots: (row, column, height, width) of each place for an entity, in units of the panel.
    """

    name: str
    slots: tuple[tuple[float, float, float, float], ...]
    type: Range = (1, 5)
    size: Range = (0, 5)
    color: Range = (0, 9)

    @property
    def number(self) -> Range:
        """Level of the number of entities, which is one less than the number."""
        return 0, len(self.slots) - 1


class Configuration(NamedTuple):
    """divider: "vertical" or "horizontal" for a line through the middle of the panel."""

    components: tuple[Component, ...]
    divider: str | None = None


def grid(places: tuple[float, ...], side: float) -> tuple[tuple[float, float, float, float], ...]:
    """Square slots at all pairs of places, row by row."""
    return tuple((row, column, side, side) for row in places for column in places)


WHOLE = ((0.5, 0.5, 1.0, 1.0),)
OUT = Component("out", WHOLE, size=(3, 5), color=(0, 0))
CONFIGURATIONS = {
    "center": Configuration((Component("center", WHOLE),)),
    "left_right": Configuration(
        (Component("left", ((0.5, 0.25, 0.5, 0.5),)), Component("right", ((0.5, 0.75, 0.5, 0.5),))), "vertical"
    ),
    "up_down": Configuration(
        (Component("up", ((0.25, 0.5, 0.5, 0.5),)), Component("down", ((0.75, 0.5, 0.5, 0.5),))), "horizontal"
    ),
    "grid_2x2": Configuration((Component("grid", grid((0.25, 0.75), 0.5)),)),
    "grid_3x3": Configuration((Component("grid", grid((0.16, 0.5, 0.83), 0.33)),)),
    "out_in_center": Configuration((OUT, Component("in", ((0.5, 0.5, 0.33, 0.33),)))),
    "out_in_grid": Configuration((OUT, Component("in", grid((0.42, 0.58), 0.15), size=(2, 5)))),
}
