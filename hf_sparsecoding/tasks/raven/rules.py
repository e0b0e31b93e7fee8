"""The rules of a component: which there are, where they may start, and the rows they draw.

A row is what one attribute shows in the three panels of a row: three levels, or for Position three sets of slots.
Source: Zhang et al., RAVEN, CVPR 2019, sec. 3.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from .attributes import Component, Range


KINDS = ("constant", "progression", "arithmetic", "distribute_three")
PARAMETERS = {
    "constant": (0,),
    "progression": (-2, -1, 1, 2),  # the step from panel to panel
    "arithmetic": (-1, 1),  # difference or sum
    "distribute_three": (0,),
}
# Per group, in the order of `Problem.rules`, the (kind, attribute) pairs that it draws from.
GROUPS = (
    (("constant", "number/position"), *product(KINDS[1:], ("number", "position"))),
    (("constant", "type"), ("progression", "type"), ("distribute_three", "type")),
    tuple(product(KINDS, ("size",))),
    tuple(product(KINDS, ("color",))),
)

Levels = tuple[int, int, int]
Slots = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Rule(NamedTuple):
    """kind: one of `KINDS`; value: the parameter, one of `PARAMETERS[kind]`."""

    kind: str
    attribute: str
    value: int = 0

    def __str__(self) -> str:
        parameter = f" {self.value:+d}" if self.kind == "progression" else ""
        if self.kind == "arithmetic":
            parameter = " +" if self.value > 0 else " -"
        return f"{self.attribute} {self.kind.replace('_', ' ')}{parameter}"


def draw_rules(component: Component, rng: np.random.Generator) -> tuple[Rule, Rule, Rule, Rule]:
    """One rule per group, uniformly over the kinds and then over the parameters.

    Groups do not share a range, so redrawing one group until it can start is the same as redrawing all rules.
    """
    return tuple(draw_rule(group, component, rng) for group in GROUPS)


def draw_rule(group: tuple[tuple[str, str], ...], component: Component, rng: np.random.Generator) -> Rule:
    while True:
        kind, attribute = group[rng.integers(len(group))]
        rule = Rule(kind, attribute, PARAMETERS[kind][rng.integers(len(PARAMETERS[kind]))])
        low, high = start_range(rule, component)
        if low <= high:
            return rule


def start_range(rule: Rule, component: Component) -> Range:
    """Levels that the first panel of a row may have, so that no later panel leaves the component's range.

    For Position these are levels of Number. A full grid stays the same under every shift, so it is left out there.
    """
    low, high = level_range(rule.attribute, component)
    if rule.kind == "progression":
        if rule.attribute == "position":
            return low, high - 1
        return low + 2 * max(-rule.value, 0), high - 2 * max(rule.value, 0)
    if rule.kind == "arithmetic":
        return (low, high - low - 1) if rule.value > 0 else (2 * low + 1, high)
    if rule.kind == "distribute_three":
        if rule.attribute == "position":
            return low, high - 1
        return (low, high) if high - low >= 2 else (low, low - 1)
    return low, high


def level_range(attribute: str, component: Component) -> Range:
    return component.number if attribute in ("position", "number/position") else getattr(component, attribute)


def draw_levels(rule: Rule, component: Component, rng: np.random.Generator) -> list[Levels]:
    """Three rows of levels under any rule but those on Position."""
    low, high = start_range(rule, component)
    if rule.kind == "distribute_three":
        return shifted_rows(tuple((low + rng.permutation(high - low + 1)[:3]).tolist()), rng)
    rows = []
    for row in range(3):
        first = int(rng.integers(low, high + 1))
        if rule.kind == "arithmetic":
            # A second colour of level 0 changes nothing: twice in a row it would pass for a constant colour.
            unseen = rule.attribute == "color" and row == 1 and rows[0][1] == 0
            rows.append(draw_sum(rule, first, component, unseen, rng))
        else:
            rows.append((first, first + rule.value, first + 2 * rule.value))
    return rows


def draw_sum(rule: Rule, first: int, component: Component, unseen: bool, rng: np.random.Generator) -> Levels:
    """A row under Arithmetic. Number and Size count from one: their level 0 stands for 1."""
    low, high = getattr(component, rule.attribute)
    one = 0 if rule.attribute == "color" else 1
    highest = high - first - one if rule.value > 0 else first - low - one
    second = int(rng.integers(max(low, 1) if unseen else low, highest + 1))
    return first, second, first + rule.value * (second + one)


def shifted_rows(row: tuple, rng: np.random.Generator) -> list[tuple]:
    """Distribute-Three: the first row and its two cyclic shifts in random order."""
    a, b, c = row
    rows = [row, (b, c, a), (c, a, b)]
    return rows if rng.integers(2) else [rows[0], rows[2], rows[1]]


def draw_slots(rule: Rule, component: Component, rng: np.random.Generator) -> list[Slots]:
    """Three rows of occupied slots, sorted, under a rule on Number, on Position or on neither (constant).

    Under a rule on Number the slots of a row's panels are nested: a panel with more entities shows all slots of a
    panel with fewer.
    """
    total = len(component.slots)
    if rule.attribute != "position":
        rows = []
        for levels in draw_levels(rule, component, rng):
            order = rng.permutation(total)
            rows.append(tuple(tuple(sorted(order[: level + 1].tolist())) for level in levels))
        return rows
    low, high = start_range(rule, component)
    if rule.kind == "distribute_three":
        number = int(rng.integers(low, high + 1)) + 1
        sets: list[tuple[int, ...]] = []
        while len(sets) < 3:
            slots = draw_set(total, number, rng)
            if slots not in sets:
                sets.append(slots)
        return shifted_rows(tuple(sets), rng)
    rows = []
    for _ in range(3):
        first = draw_set(total, int(rng.integers(low, high + 1)) + 1, rng)
        if rule.kind == "progression":
            rows.append(tuple(shift(first, step * rule.value, total) for step in range(3)))
        else:
            rows.append(draw_set_arithmetic(first, rule.value, total, rng))
    return rows


def draw_set(total: int, number: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(sorted(rng.permutation(total)[:number].tolist()))


def shift(slots: tuple[int, ...], step: int, total: int) -> tuple[int, ...]:
    return tuple(sorted((slot + step) % total for slot in slots))


def draw_set_arithmetic(first: tuple[int, ...], sign: int, total: int, rng: np.random.Generator) -> Slots:
    """Union (sign 1): the second set is no subset of the first; difference (-1): no superset of it.

    The second set's number is uniform from one to one less than all slots.
    """
    while True:
        second = draw_set(total, int(rng.integers(1, total)), rng)
        new, left = set(second) - set(first), set(first) - set(second)
        if sign > 0 and new:
            return first, second, tuple(sorted({*first, *second}))
        if sign < 0 and left:
            return first, second, tuple(sorted(left))
