"""The rules: rows they draw, ranges they leave alone, and the checker on hand-written rows."""

from collections import Counter

import numpy as np
import pytest

from hf_sparsecoding.tasks.raven.attributes import CONFIGURATIONS, Component
from hf_sparsecoding.tasks.raven.checker import predict
from hf_sparsecoding.tasks.raven.rules import (
    GROUPS,
    PARAMETERS,
    Rule,
    draw_levels,
    draw_rules,
    draw_slots,
    start_range,
)


CENTER = CONFIGURATIONS["center"].components[0]
FOUR = CONFIGURATIONS["grid_2x2"].components[0]
NINE = CONFIGURATIONS["grid_3x3"].components[0]
OUT, IN_FOUR = CONFIGURATIONS["out_in_grid"].components
COMPONENTS = {"center": CENTER, "2x2": FOUR, "3x3": NINE, "out": OUT, "in 2x2": IN_FOUR}


# Two full rows, the known part of the third row and what it asks for; sets of slots are written as strings.
EXAMPLES = [
    (("constant", "size"), ("222", "444", "00"), "0"),
    (("constant", "number/position"), (["03"] * 3, ["1"] * 3, ["012"] * 2), "012"),
    (("progression", "type", 1), ("123", "345", "23"), "4"),
    (("progression", "color", -2), ("420", "975", "86"), "4"),
    (("progression", "color", -2), ("420", "974", "86"), None),
    (("progression", "type", 2), ("135", "135", "24"), None),  # type 6 leaves the range
    (("progression", "number", 2), ("135", "357", "57"), "9"),
    (("progression", "position", 1), (["0", "1", "2"], ["38", "04", "15"], ["67", "78"]), "08"),
    (("progression", "position", -2), (["0", "7", "5"], ["12", "08", "67"], ["345", "123"]), "018"),
    (("arithmetic", "number", 1), ("112", "235", "45"), "9"),
    (("arithmetic", "number", -1), ("211", "945", "83"), "5"),
    (("arithmetic", "size", 1), ("001", "124", "14"), None),  # sizes 2 + 5 = 7 leave the range
    (("arithmetic", "size", 1), ("001", "124", "13"), "5"),
    (("arithmetic", "size", -1), ("100", "522", "40"), "3"),
    (("arithmetic", "color", 1), ("404", "123", "45"), "9"),
    (("arithmetic", "color", 1), ("404", "202", "45"), None),  # both second colors hidden
    (("arithmetic", "color", -1), ("440", "954", "61"), "5"),
    (("arithmetic", "position", 1), (["01", "12", "012"], ["8", "7", "78"], ["0", "345"]), "0345"),
    (("arithmetic", "position", 1), (["01", "1", "01"], ["8", "7", "78"], ["0", "345"]), None),  # second set a subset
    (("arithmetic", "position", -1), (["01", "12", "02"], ["345", "4", "35"], ["07", "8"]), None),
    (("arithmetic", "position", -1), (["01", "12", "0"], ["345", "4", "35"], ["07", "8"]), "07"),
    (("distribute_three", "type"), ("135", "351", "51"), "3"),
    (("distribute_three", "type"), ("135", "513", "35"), "1"),
    (("distribute_three", "type"), ("135", "513", "53"), None),  # an order that no shift gives
    (("distribute_three", "type"), ("135", "135", "35"), None),  # the first row again
    (("distribute_three", "position"), (["01", "23", "45"], ["23", "45", "01"], ["45", "01"]), "23"),
]


@pytest.mark.parametrize(("rule", "rows", "answer"), EXAMPLES)
def test_hand_written_rows(rule, rows, answer):
    rule = Rule(*rule)
    as_value = (lambda text: frozenset(map(int, text))) if "position" in rule.attribute else int
    rows = [tuple(map(as_value, row)) for row in rows]
    assert predict(rule, rows, NINE) == (None if answer is None else as_value(answer))


@pytest.mark.parametrize(
    ("rule", "component", "expected"),
    [
        (("progression", "type", 2), CENTER, (1, 1)),
        (("progression", "size", -1), CENTER, (2, 5)),
        (("progression", "number", 1), FOUR, (0, 1)),
        (("progression", "number", -2), NINE, (4, 8)),
        (("progression", "position", 2), FOUR, (0, 2)),
        (("arithmetic", "number", 1), FOUR, (0, 2)),
        (("arithmetic", "number", -1), FOUR, (1, 3)),
        (("arithmetic", "size", 1), IN_FOUR, (2, 2)),
        (("arithmetic", "size", -1), IN_FOUR, (5, 5)),
        (("arithmetic", "color", 1), CENTER, (0, 8)),
        (("arithmetic", "color", -1), CENTER, (1, 9)),
        (("distribute_three", "size"), OUT, (3, 5)),
        (("constant", "color"), OUT, (0, 0)),
    ],
)
def test_start_ranges(rule, component, expected):
    assert start_range(Rule(*rule), component) == expected


@pytest.mark.parametrize(
    ("rule", "component"),
    [
        (("progression", "number", 2), FOUR),
        (("progression", "size", 2), OUT),
        (("arithmetic", "size", 1), OUT),
        (("arithmetic", "color", 1), OUT),
        (("arithmetic", "color", -1), OUT),
        (("distribute_three", "color"), OUT),
        (("distribute_three", "number"), CENTER),
        (("arithmetic", "position", 1), CENTER),
        (("arithmetic", "position", -1), CENTER),
        (("progression", "position", 1), CENTER),
    ],
)
def test_rules_that_cannot_start(rule, component):
    low, high = start_range(Rule(*rule), component)
    assert low > high
    rng = np.random.default_rng(0)
    assert not any(Rule(*rule) in draw_rules(component, rng) for _ in range(200))


def all_rules(component: Component) -> list[Rule]:
    rules = [Rule(*pair, value) for group in GROUPS for pair in group for value in PARAMETERS[pair[0]]]
    return [rule for rule in rules if start_range(rule, component)[0] <= start_range(rule, component)[1]]


@pytest.mark.parametrize("name", COMPONENTS)
def test_rows_follow_their_rule_within_the_range(name):
    component = COMPONENTS[name]
    rng = np.random.default_rng(0)
    for rule in all_rules(component):
        in_slots = "position" in rule.attribute or rule.attribute == "number"
        low, high = component.number if in_slots else getattr(component, rule.attribute)
        seen = set()
        for _ in range(150):
            if in_slots:
                rows = [tuple(map(frozenset, row)) for row in draw_slots(rule, component, rng)]
                levels = [len(slots) - 1 for row in rows for slots in row]
                assert all(slot in range(len(component.slots)) for row in rows for slots in row for slot in slots)
                if rule.attribute == "number":
                    rows = [tuple(map(len, row)) for row in rows]
            else:
                rows = draw_levels(rule, component, rng)
                levels = [level for row in rows for level in row]
            assert low <= min(levels)
            assert max(levels) <= high
            seen |= set(levels)
            assert predict(rule, [rows[0], rows[1], rows[2][:2]], component) == rows[2][2]
        if rule.kind in ("constant", "distribute_three") and rule.attribute != "position":
            assert seen == set(range(low, high + 1))


def test_numbers_nest_their_slots():
    rng = np.random.default_rng(0)
    for rule in (Rule("progression", "number", -1), Rule("distribute_three", "number")):
        for row in draw_slots(rule, NINE, rng):
            small, middle, large = sorted(map(set, row), key=len)
            assert small < middle < large


def test_shares_of_the_rules():
    rng = np.random.default_rng(0)
    drawn = [draw_rules(NINE, rng) for _ in range(4000)]
    placements = Counter((rules[0].kind, rules[0].attribute) for rules in drawn)
    assert set(placements) == set(GROUPS[0])
    assert all(abs(share / 4000 - 1 / 7) < 0.03 for share in placements.values())
    kinds = Counter(rules[3].kind for rules in drawn)
    assert all(abs(kinds[kind] / 4000 - 1 / 4) < 0.03 for kind in PARAMETERS)
    steps = Counter(rules[3].value for rules in drawn if rules[3].kind == "progression")
    assert all(abs(steps[step] / steps.total() - 1 / 4) < 0.06 for step in (-2, -1, 1, 2))


def test_rules_in_words():
    assert str(Rule("progression", "type", -2)) == "type progression -2"
    assert str(Rule("arithmetic", "size", 1)) == "size arithmetic +"
    assert str(Rule("distribute_three", "position")) == "position distribute three"
