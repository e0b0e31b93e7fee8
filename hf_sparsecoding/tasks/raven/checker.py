"""Checks problems by the attributes of their panels, and solves them, with no code shared with the generator.

A row shows three values per attribute: Number counts entities, Position is the set of slots, and Type, Size and Color
are levels, or None for a panel that mixes levels.
"""

from dataclasses import dataclass
from itertools import pairwise, product

from .attributes import CONFIGURATIONS, Component, Entities, Panel
from .generator import Problem
from .rules import Rule


Value = int | frozenset | None
LEVELS = ("type", "size", "color")
PLACEMENTS = (
    Rule("constant", "number/position"),
    *(Rule("progression", name, step) for name in ("number", "position") for step in (-2, -1, 1, 2)),
    *(Rule("arithmetic", name, sign) for name in ("number", "position") for sign in (-1, 1)),
    Rule("distribute_three", "number"),
    Rule("distribute_three", "position"),
)
LEVEL_RULES = tuple(
    Rule(kind, name, value)
    for name in LEVELS
    for kind, value in (
        ("constant", 0),
        *(("progression", step) for step in (-2, -1, 1, 2)),
        ("arithmetic", -1),
        ("arithmetic", 1),
        ("distribute_three", 0),
    )
    if (kind, name) != ("arithmetic", "type")
)


def value_of(attribute: str, entities: Entities) -> Value:
    if attribute == "number":
        return len(entities)
    if attribute in ("position", "number/position"):
        return frozenset(entity.slot for entity in entities)
    levels = {getattr(entity, attribute) for entity in entities}
    return levels.pop() if len(levels) == 1 else None


def in_range(attribute: str, value: Value, component: Component) -> bool:
    if value is None:
        return False
    if attribute in ("position", "number/position"):
        return bool(value)
    low, high = (1, len(component.slots)) if attribute == "number" else getattr(component, attribute)
    return low <= value <= high


def third(rule: Rule, a: Value, b: Value, component: Component) -> Value:
    """Value of the third panel that the first two ask for under a rule, None if they break it.

    Not for Distribute-Three, which goes by all rows.
    """
    if a is None or b is None:
        return None
    if rule.kind == "constant":
        return a if a == b else None
    if rule.kind == "progression":
        if rule.attribute == "position":
            places = len(component.slots)
            steps = [frozenset((slot + step * rule.value) % places for slot in a) for step in (1, 2)]
            return steps[1] if steps[0] == b else None
        return b + rule.value if b - a == rule.value else None
    if rule.attribute == "position":
        return (a | b if not b <= a else None) if rule.value > 0 else (a - b or None)
    return a + rule.value * (b + 1 if rule.attribute == "size" else b)


def predict(rule: Rule, rows: list[tuple[Value, ...]], component: Component) -> Value:
    """Value of the ninth panel by a rule that fits the first two rows and the known part of the third, else None."""
    (a, b, c), second, (d, e) = rows
    if rule.kind == "distribute_three":
        if None in (a, b, c) or len({a, b, c}) < 3:
            return None
        by_last = {(b, c, a): (c, a, b), (c, a, b): (b, c, a)}
        left = by_last.get(second)
        return left[2] if left and left[:2] == (d, e) else None
    for row in ((a, b, c), second):
        if row[2] is None or third(rule, *row[:2], component) != row[2]:
            return None
    if rule.kind == "arithmetic" and rule.attribute == "color" and b == second[1] == 0:
        return None  # the generator never hides the second colour twice
    value = third(rule, d, e, component)
    return value if in_range(rule.attribute, value, component) else None


def keeps(attribute: str, placement: Rule, first: Entities, other: Entities, panels: int, places: int) -> bool:
    """Constant for attributes that a panel may mix: `other`, `panels` panels after `first` in a row, has its levels.

    The levels of the panel with fewer entities are found in the other one, and a slot occupied in both keeps its
    level; under Progression on Position the levels move along with the slots.
    """
    levels = {entity.slot: getattr(entity, attribute) for entity in first}
    if placement.kind == "progression" and placement.attribute == "position":
        levels = {(slot + panels * placement.value) % places: level for slot, level in levels.items()}
    others = {entity.slot: getattr(entity, attribute) for entity in other}
    few, many = sorted((list(levels.values()), list(others.values())), key=len)
    enough = all(few.count(level) <= many.count(level) for level in set(few))
    return enough and all(levels[slot] == others[slot] for slot in levels.keys() & others.keys())


def violations(problem: Problem, answer: Panel | None = None) -> list[str]:
    """What breaks the problem's own rules, with `answer` in place of the ninth panel if one is given."""
    panels = [*problem.panels[:8], problem.answer if answer is None else answer]
    found = []
    for index, component in enumerate(CONFIGURATIONS[problem.configuration].components):
        cells = [panel[index] for panel in panels]
        found += [f"{component.name}: {text}" for text in range_violations(component, cells)]
        if problem.uniform[index] and any(value_of(name, cell) is None for name in LEVELS for cell in cells):
            found.append(f"{component.name}: mixed levels although uniform")
        placement = problem.rules[index][0]
        for rule in problem.rules[index]:
            if not obeys(rule, placement, cells, component):
                found.append(f"{component.name}: {rule}")
    return found


def range_violations(component: Component, cells: list[Entities]) -> list[str]:
    found = []
    for number, entities in enumerate(cells):
        slots = [entity.slot for entity in entities]
        if not slots or slots != sorted(set(slots)) or slots[-1] >= len(component.slots):
            found.append(f"slots {slots} of panel {number}")
        for entity, name in product(entities, LEVELS):
            low, high = getattr(component, name)
            if not low <= getattr(entity, name) <= high:
                found.append(f"{name} {getattr(entity, name)} of panel {number} outside {low} to {high}")
    return found


def obeys(rule: Rule, placement: Rule, cells: list[Entities], component: Component) -> bool:
    """Do all nine panels follow the rule?"""
    if rule.kind == "constant" and rule.attribute in LEVELS:
        return is_kept(rule.attribute, placement, cells, component)
    asked = predict(rule, context_rows(rule.attribute, cells[:8]), component)
    nested = rule.attribute != "number" or are_nested(cells)
    return asked is not None and nested and asked == value_of(rule.attribute, cells[8])


def are_nested(cells: list[Entities]) -> bool:
    """Under a rule on Number a panel shows all slots of those panels of its row that have fewer; the last row may be
    short."""
    slots = [{entity.slot for entity in cell} for cell in cells]
    rows = [sorted(slots[start : start + 3], key=len) for start in (0, 3, 6)]
    return all(small <= large for row in rows for small, large in pairwise(row))


def is_kept(attribute: str, placement: Rule, cells: list[Entities], component: Component) -> bool:
    """Constant over three rows; the last one may be short."""
    places = len(component.slots)
    return all(
        keeps(attribute, placement, cells[index - index % 3], cell, index % 3, places)
        for index, cell in enumerate(cells)
        if index % 3
    )


@dataclass(frozen=True)
class Explanation:
    """One rule on Number or Position that fits a component's contexts, with the value it asks of the answer, and the
    rules on Type, Size and Color that fit along with it; a Constant over mixed panels asks for None."""

    placement: Rule
    value: Value
    levels: dict[str, dict[Rule, Value]]


@dataclass(frozen=True)
class Solution:
    """What the eight contexts say about the answer, per component: every explanation that fits."""

    configuration: str
    contexts: tuple[Panel, ...]
    explanations: tuple[tuple[Explanation, ...], ...]

    @property
    def ambiguous(self) -> bool:
        """Do two explanations of a component contradict each other in any attribute?"""
        return any(contradict(one, two) for part in self.explanations for one, two in product(part, repeat=2))

    def accepts(self, answer: Panel) -> bool:
        """Is the panel an answer by some explanation of every component?"""
        components = CONFIGURATIONS[self.configuration].components
        return all(
            any(self._fits(explanation, index, component, answer[index]) for explanation in self.explanations[index])
            for index, component in enumerate(components)
        )

    def _fits(self, explanation: Explanation, index: int, component: Component, entities: Entities) -> bool:
        placement = explanation.placement
        if value_of(placement.attribute, entities) != explanation.value:
            return False
        cells = [panel[index] for panel in self.contexts]
        if placement.attribute == "number" and not are_nested([*cells, entities]):
            return False
        first, places = cells[6], len(component.slots)
        return all(
            any(
                keeps(name, placement, first, entities, 2, places)
                if rule.kind == "constant"
                else value_of(name, entities) == value
                for rule, value in rules.items()
            )
            for name, rules in explanation.levels.items()
        )


def contradict(one: Explanation, two: Explanation) -> bool:
    asked = ({*one.levels[name].values(), *two.levels[name].values()} for name in LEVELS)
    return one.value != two.value or any(len(values) > 1 for values in asked)


def solve(problem: Problem) -> Solution:
    """Infer the rules from the eight context panels alone; the rest of the problem is not read."""
    contexts = problem.panels[:8]
    components = CONFIGURATIONS[problem.configuration].components
    explanations = tuple(
        tuple(explain([panel[index] for panel in contexts], component)) for index, component in enumerate(components)
    )
    return Solution(problem.configuration, contexts, explanations)


def explain(cells: list[Entities], component: Component) -> list[Explanation]:
    """Every explanation of a component's eight context panels."""
    found = []
    rows = {name: context_rows(name, cells) for name in ("number", "position", "number/position", *LEVELS)}
    changing = {
        rule: predict(rule, rows[rule.attribute], component) for rule in LEVEL_RULES if rule.kind != "constant"
    }
    for placement in PLACEMENTS:
        value = predict(placement, rows[placement.attribute], component)
        if value is None or (placement.attribute == "number" and not are_nested(cells)):
            continue
        levels = {}
        for name in LEVELS:
            levels[name] = {
                rule: level for rule, level in changing.items() if rule.attribute == name and level is not None
            }
            if is_kept(name, placement, cells, component):
                levels[name][Rule("constant", name)] = value_of(name, cells[6])
        if all(levels.values()):
            found.append(Explanation(placement, value, levels))
    return found


def context_rows(attribute: str, cells: list[Entities]) -> list[tuple[Value, ...]]:
    values = [value_of(attribute, cell) for cell in cells]
    return [tuple(values[:3]), tuple(values[3:6]), tuple(values[6:8])]
