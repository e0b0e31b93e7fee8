"""Eight choices by attribute bisection: three attributes are changed or not, which gives 2 x 2 x 2 panels.

Every value of a changed attribute is then shown by four choices, so the choices alone do not give the answer away.
Source: Hu et al., Stratified Rule-Aware Network for Abstract Visual Reasoning (I-RAVEN), AAAI 2021.
"""

from itertools import product

import numpy as np

from .attributes import ANGLES, Component, Entities, Entity, Panel
from .rules import Rule, draw_set


ATTRIBUTES = ("type", "size", "color")
CHANGED = 3  # attributes that choices differ in


def draw_choices(
    answer: Panel,
    components: tuple[Component, ...],
    rules: tuple[tuple[Rule, Rule, Rule, Rule], ...],
    uniform: tuple[bool, ...],
    rng: np.random.Generator,
) -> tuple[tuple[Panel, ...], int]:
    """Eight distinct panels in random order, and the index of the answer among them."""
    changeable = [
        (index, attribute)
        for index, component in enumerate(components)
        for attribute in ("slots", *ATTRIBUTES)
        if has_other_levels(component, attribute)
    ]
    changed = [changeable[index] for index in rng.permutation(len(changeable))[:CHANGED]]
    variants = [
        Variants(answer[index], component, rules[index], uniform[index], rng)
        for index, component in enumerate(components)
    ]
    candidates = []
    for bits in product((0, 1), repeat=CHANGED):
        chosen = {change for change, bit in zip(changed, bits, strict=True) if bit}
        candidates.append(
            tuple(
                variant.entities({attribute for component, attribute in chosen if component == index})
                for index, variant in enumerate(variants)
            )
        )
    order = rng.permutation(len(candidates)).tolist()  # candidate 0 is the answer
    return tuple(candidates[index] for index in order), order.index(0)


def has_other_levels(component: Component, attribute: str) -> bool:
    low, high = component.number if attribute == "slots" else getattr(component, attribute)
    return high > low


class Variants:
    """A component of the answer with a second version of its slots, types, sizes and colors.

    Attributes with one value per panel get another value. Others get another level for every entity, drawn as in a
    first panel, such that the collection of levels differs too.
    """

    def __init__(
        self,
        answer: Entities,
        component: Component,
        rules: tuple[Rule, Rule, Rule, Rule],
        uniform: bool,
        rng: np.random.Generator,
    ):
        total = len(component.slots)
        own = {entity.slot: entity for entity in answer}
        self.slots = (tuple(own), change_slots(tuple(own), rules[0], total, rng) if total > 1 else tuple(own))
        self.angles = [
            own[slot].angle if slot in own else angle
            for slot, angle in enumerate(rng.integers(len(ANGLES), size=total).tolist())
        ]
        self.levels = {}
        for attribute, rule in zip(ATTRIBUTES, rules[1:], strict=True):
            low, high = getattr(component, attribute)
            if uniform or rule.kind != "constant":
                value = getattr(answer[0], attribute)
                values, others = [value] * total, [other_level(value, low, high, rng)] * total
            else:
                fresh = rng.integers(low, high + 1, size=total).tolist()
                values = [getattr(own[slot], attribute) if slot in own else fresh[slot] for slot in range(total)]
                others = change_all(values, tuple(own), low, high, rng)
            self.levels[attribute] = (values, others)

    def entities(self, changed: set[str]) -> Entities:
        """The component with the given ones of "slots", "type", "size" and "color" in their second version."""
        tables = [self.levels[attribute][attribute in changed] for attribute in ATTRIBUTES]
        return tuple(
            Entity(slot, *(table[slot] for table in tables), self.angles[slot])
            for slot in self.slots["slots" in changed]
        )


def other_level(level: int, low: int, high: int, rng: np.random.Generator) -> int:
    """A level of the range other than the given one, if there is one."""
    if low == high:
        return level
    other = int(rng.integers(low, high))
    return other + (other >= level)


def change_all(levels: list[int], shown: tuple[int, ...], low: int, high: int, rng: np.random.Generator) -> list[int]:
    """Another level for every slot, so that the slots shown do not hold the old levels in another order."""
    while True:
        others = [other_level(level, low, high, rng) for level in levels]
        old, new = sorted(levels[slot] for slot in shown), sorted(others[slot] for slot in shown)
        if old != new or low == high:
            return others


def change_slots(slots: tuple[int, ...], rule: Rule, total: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Other slots that break the rule: as many elsewhere if Position is under a rule, another number if Number is, and
    one or the other if both are constant. A full grid can only change its number."""
    by_position = rule.attribute == "position" or (rule.attribute == "number/position" and rng.integers(2))
    if by_position and len(slots) < total:
        while (other := draw_set(total, len(slots), rng)) == slots:
            pass
        return other
    number = other_level(len(slots), 1, total, rng)
    inside = rng.permutation(slots).tolist()
    outside = rng.permutation([slot for slot in range(total) if slot not in slots]).tolist()
    return tuple(sorted(int(slot) for slot in (inside + outside)[:number]))
