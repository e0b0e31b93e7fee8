"""Draws problems: first the rules of each component, then its rows of panels, then the choices."""

from dataclasses import dataclass

import numpy as np

from .attributes import ANGLES, CONFIGURATIONS, Component, Entities, Entity, Panel
from .choices import draw_choices
from .rules import Rule, Slots, draw_levels, draw_rules, draw_slots


SPLITS = ("train", "validation", "test")
UNIFORM = 0.25  # probability that all entities of a component's panel share type, size and color


@dataclass(frozen=True)
class Problem:
    """A 3 x 3 matrix of panels, row by row, whose last panel is the answer.

    Args:
        configuration: One of `CONFIGURATIONS`.
        panels: The nine panels.
        rules: Per component the rules on Number or Position, Type, Size and Color.
        uniform: Per component, whether all entities of a panel share type, size and color.
        choices: Eight panels, one of which is the answer.
        target: Index of the answer among the choices.
    """

    configuration: str
    panels: tuple[Panel, ...]
    rules: tuple[tuple[Rule, Rule, Rule, Rule], ...]
    uniform: tuple[bool, ...]
    choices: tuple[Panel, ...]
    target: int

    @property
    def answer(self) -> Panel:
        return self.panels[8]

    def describe(self) -> str:
        """The rules in words, one line per component."""
        components = CONFIGURATIONS[self.configuration].components
        return "\n".join(
            f"{component.name}: {', '.join(map(str, rules))}"
            for component, rules in zip(components, self.rules, strict=True)
        )


def draw_problem(configuration: str, split: str, seed: int, index: int) -> Problem:
    """Problem number `index` of a split's stream."""
    components = CONFIGURATIONS[configuration].components
    rng = random_generator(configuration, split, seed, index)
    rules, uniform, panels = draw_matrix(configuration, rng)
    choices, target = draw_choices(panels[8], components, rules, uniform, rng)
    return Problem(configuration, panels, rules, uniform, choices, target)


def draw_panels(configuration: str, split: str, seed: int, index: int) -> tuple[Panel, ...]:
    """The nine panels of `draw_problem` without the time for its choices."""
    return draw_matrix(configuration, random_generator(configuration, split, seed, index))[2]


def draw_matrix(
    configuration: str, rng: np.random.Generator
) -> tuple[tuple[tuple[Rule, ...], ...], tuple[bool, ...], tuple[Panel, ...]]:
    """Rules and uniformity per component, and the nine panels."""
    components = CONFIGURATIONS[configuration].components
    rules, uniform, parts = zip(*[draw_component(component, rng) for component in components], strict=True)
    return rules, uniform, tuple(zip(*parts, strict=True))


def random_generator(configuration: str, split: str, seed: int, index: int) -> np.random.Generator:
    """An own random stream per problem."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    if index < 0:
        raise ValueError(f"index of a problem must be >= 0, got {index}")
    return np.random.default_rng([SPLITS.index(split), seed, index, list(CONFIGURATIONS).index(configuration)])


def draw_component(component: Component, rng: np.random.Generator) -> tuple[tuple[Rule, ...], bool, list[Entities]]:
    """Rules, uniformity and the nine panels of one component."""
    rules = draw_rules(component, rng)
    uniform = bool(rng.random() < UNIFORM)
    slots = draw_slots(rules[0], component, rng)
    levels = [draw_levels(rule, component, rng) for rule in rules[1:]]
    total = len(component.slots)
    panels = []
    for row in range(3):
        tables = [
            draw_table(rule, drawn[row], uniform, component, rng)
            for rule, drawn in zip(rules[1:], levels, strict=True)
        ]
        angles = rng.integers(len(ANGLES), size=total).tolist()
        for panel, owners in enumerate(trace(rules[0], slots[row], total)):
            panels.append(
                tuple(
                    Entity(slot, *(table[panel][owners[slot]] for table in tables), angles[owners[slot]])
                    for slot in slots[row][panel]
                )
            )
    return rules, uniform, panels


def draw_table(
    rule: Rule, levels: tuple[int, int, int], uniform: bool, component: Component, rng: np.random.Generator
) -> list[list[int]]:
    """Level of each of a row's entities in each of its three panels [3][entities]."""
    total = len(component.slots)
    if uniform or rule.kind != "constant":
        return [[level] * total for level in levels]
    low, high = getattr(component, rule.attribute)
    return [rng.integers(low, high + 1, size=total).tolist()] * 3


def trace(rule: Rule, row: Slots, total: int) -> list[dict[int, int]]:
    """Which entity of the row stands in a slot, for each of the three panels: slot -> entity.

    Entities of the first panel are called by their slot there. Under Progression on Position they move along. Else an
    entity stays where its slot stays occupied; under the other rules on Position those whose slots are left take
    the new slots, in order. New entities appear only where slots outnumber the entities of the first panel.
    """
    first, second, third = row
    if rule.attribute != "position":
        return [{slot: slot for slot in slots} for slots in row]
    if rule.kind == "progression":
        return [{(slot + step * rule.value) % total: slot for slot in first} for step in range(3)]
    owners = {slot: slot for slot in first}
    moved = move(first, second)
    if rule.kind == "distribute_three":
        return [owners, moved, move(first, third)]
    return [owners, moved, {slot: owners.get(slot, moved.get(slot)) for slot in third}]


def move(first: tuple[int, ...], slots: tuple[int, ...]) -> dict[int, int]:
    free = [slot for slot in first if slot not in slots]
    owners = {}
    for slot in slots:
        owners[slot] = slot if slot in first or not free else free.pop(0)
    return owners
