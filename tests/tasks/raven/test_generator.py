"""Thousands of problems of every configuration: rules, ranges, what moves along a row, choices, solver."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hf_sparsecoding.tasks.raven import CONFIGURATIONS, SPLITS, Entity, Problem, Raven, Rule, solve, violations
from hf_sparsecoding.tasks.raven.checker import value_of
from hf_sparsecoding.tasks.raven.generator import trace


N = 300
LEVELS = ("type", "size", "color")
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


@cache
def problems(configuration: str) -> list[Problem]:
    return Raven(configuration).generate(N, "train", seed=7)


def rows_of(problem: Problem, component: int = 0) -> list[list[tuple[Entity, ...]]]:
    cells = [panel[component] for panel in problem.panels]
    return [cells[start : start + 3] for start in (0, 3, 6)]


@every_configuration
def test_problems_obey_their_rules(configuration):
    for problem in problems(configuration):
        assert violations(problem) == []


@every_configuration
def test_one_choice_obeys_the_rules(configuration):
    targets = Counter()
    for problem in problems(configuration):
        assert len(set(problem.choices)) == 8
        assert problem.choices[problem.target] == problem.answer
        obeying = [index for index, choice in enumerate(problem.choices) if not violations(problem, choice)]
        assert obeying == [problem.target]
        targets[problem.target] += 1
    assert all(abs(targets[index] / N - 1 / 8) < 0.08 for index in range(8))


@every_configuration
def test_choices_stay_in_range(configuration):
    components = CONFIGURATIONS[configuration].components
    for problem in problems(configuration):
        for choice in problem.choices:
            for component, entities in zip(components, choice, strict=True):
                slots = [entity.slot for entity in entities]
                assert slots
                assert slots == sorted(set(slots) & set(range(len(component.slots))))
                for name in LEVELS:
                    low, high = getattr(component, name)
                    assert all(low <= getattr(entity, name) <= high for entity in entities)


@every_configuration
def test_the_solver_finds_the_answer(configuration):
    ambiguous = 0
    for problem in problems(configuration):
        # All but the contexts is hidden from the solver.
        blank = replace(problem, panels=(*problem.panels[:8], None), rules=(), uniform=(), choices=(), target=-1)
        solution = solve(blank)
        assert solution.accepts(problem.answer)
        accepted = sum(solution.accepts(choice) for choice in problem.choices)
        assert accepted == 1 or solution.ambiguous
        ambiguous += solution.ambiguous
    assert ambiguous / N < 0.1


def test_an_ambiguous_problem():
    """Sizes 1, 2, 3 are both a progression and a sum; a third row 2, 3, ? decides for the progression."""

    def panels(sizes):
        return tuple(((Entity(0, 1, size - 1, 5, 3),),) for size in sizes)

    rules = ((Rule("constant", "number/position"), Rule("constant", "type"), Rule("progression", "size", 1)),)
    problem = Problem("center", panels((1, 2, 3, 1, 2, 3, 1, 2, 3)), rules, (False,), (), 0)
    solution = solve(problem)
    assert not solution.ambiguous  # 1, 2, ? asks for 3 either way
    assert solution.explanations[0][0].levels["size"] == {
        Rule("progression", "size", 1): 2,
        Rule("arithmetic", "size", 1): 2,
    }
    solution = solve(replace(problem, panels=panels((1, 2, 3, 1, 2, 3, 2, 3, 4))))
    assert solution.ambiguous  # 4 or 2 + 3 = 5
    assert [solution.accepts(panel) for panel in panels((3, 4, 5, 6))] == [False, True, True, False]


@every_configuration
def test_the_checker_notices_a_changed_panel(configuration):
    rng = np.random.default_rng(0)
    low, high = CONFIGURATIONS[configuration].components[-1].color
    for problem in problems(configuration)[:100]:
        index = int(rng.integers(9))
        *others, entities = problem.panels[index]
        changed = tuple(e._replace(color=low + (e.color - low + 3) % (high - low + 1)) for e in entities)
        panels = list(problem.panels)
        panels[index] = (*others, changed)
        assert any("color" in text for text in violations(replace(problem, panels=tuple(panels))))
    panels[4] = (*others, (Entity(0, 6, 0, 0, 0),))
    assert any("type 6 of panel 4" in text for text in violations(replace(problem, panels=tuple(panels))))


def test_a_vote_over_the_choices_is_blind():
    """The choice whose attributes most others share is the answer no more often than by chance."""
    rng = np.random.default_rng(0)
    hits = []
    for configuration in CONFIGURATIONS:
        for problem in problems(configuration):
            features = [
                [
                    value
                    for entities in choice
                    for value in (
                        tuple(e.slot for e in entities),
                        *(frozenset(getattr(e, name) for e in entities) for name in LEVELS),
                    )
                ]
                for choice in problem.choices
            ]
            votes = np.array(
                [[column.count(value) for value in column] for column in map(list, zip(*features, strict=True))]
            )
            score = votes.sum(axis=0) + rng.random(8)
            hits.append(score.argmax() == problem.target)
    assert abs(np.mean(hits) - 1 / 8) < 4 * np.sqrt(1 / 8 * 7 / 8 / len(hits))


@every_configuration
def test_rules_force_one_value_and_a_quarter_is_uniform(configuration):
    for problem in problems(configuration):
        for index, rules in enumerate(problem.rules):
            for rule in rules[1:]:
                if rule.kind != "constant" or problem.uniform[index]:
                    assert all(value_of(rule.attribute, panel[index]) is not None for panel in problem.panels)
    shares = np.mean([problem.uniform for problem in problems(configuration)], axis=0)
    assert np.abs(shares - 0.25).max() < 0.1


@pytest.mark.parametrize("configuration", ["center", "left_right", "up_down", "out_in_center"])
def test_single_entities_keep_their_angle(configuration):
    for problem in problems(configuration):
        for component in range(len(problem.rules)):
            for row in rows_of(problem, component):
                assert len({panel[0].angle for panel in row}) == 1
    angles = Counter(problem.panels[0][0][0].angle for problem in problems(configuration))
    assert set(angles) == set(range(8))


def test_entities_along_the_rows_of_a_grid():
    seen = set()
    for problem in problems("grid_3x3"):
        rule = problem.rules[0][0]
        seen.add((rule.kind, rule.attribute))
        for first, second, third in rows_of(problem):
            a, b, c = ({entity.slot: entity.angle for entity in panel} for panel in (first, second, third))
            if rule.attribute == "number/position":
                assert a == b == c
            elif rule.attribute == "number":
                assert all(x[slot] == y[slot] for x, y in ((a, b), (a, c), (b, c)) for slot in x.keys() & y.keys())
                assert all(x.keys() <= y.keys() or y.keys() <= x.keys() for x, y in ((a, b), (a, c), (b, c)))
            elif rule.kind == "progression":
                assert b == {(slot + rule.value) % 9: angle for slot, angle in a.items()}
                assert c == {(slot + 2 * rule.value) % 9: angle for slot, angle in a.items()}
            elif rule.kind == "distribute_three":
                assert sorted(a.values()) == sorted(b.values()) == sorted(c.values())
                assert all(a[slot] == x[slot] for x in (b, c) for slot in a.keys() & x.keys())
            else:
                assert c == ({**b, **a} if rule.value > 0 else {slot: a[slot] for slot in a.keys() - b.keys()})
    assert len(seen) == 7


def test_where_entities_go():
    assert trace(Rule("progression", "position", 1), ((0, 3), (0, 1), (1, 2)), 4)[1] == {1: 0, 0: 3}
    assert trace(Rule("distribute_three", "position"), ((0, 1, 5), (1, 2, 3), (2, 3, 4)), 9) == [
        {0: 0, 1: 1, 5: 5},
        {1: 1, 2: 0, 3: 5},  # 1 stays, 0 and 5 take the new slots in order
        {2: 0, 3: 1, 4: 5},
    ]
    union = trace(Rule("arithmetic", "position", 1), ((0, 1), (1, 2, 3), (0, 1, 2, 3)), 9)
    assert union[1:] == [{1: 1, 2: 0, 3: 3}, {0: 0, 1: 1, 2: 0, 3: 3}]


def test_streams_are_pure_and_disjoint():
    task = Raven("grid_2x2")
    assert task.generate(10, "test", seed=3) == task.generate(10, "test", seed=3)
    assert task.generate(6, "train", 0) == task.generate(2, "train", 0) + task.generate(4, "train", 0, start=2)
    assert task.generate(0, "train", 0) == []
    streams = [task.generate(100, split, seed) for split in SPLITS for seed in (0, 1)]
    panels = [{problem.panels for problem in stream} for stream in streams]
    assert len(set.union(*panels)) == sum(map(len, panels)) == 600
    rules = [[p.rules for p in Raven(name).generate(50, "train", 0)] for name in ("left_right", "up_down")]
    assert rules[0] != rules[1]  # configurations too draw from streams of their own
