"""S-RAVEN as text: rules, splits, determinism, text layout, streams, ambiguity."""

import doctest
import itertools
import pickle

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks import s_raven_text
from hf_sparsecoding.tasks.s_raven_text import RULES, SRavenText
from hf_sparsecoding.tasks.streams import SPLITS


def rows_of(task: SRavenText, rule: str, split: str, n: int = 2000) -> set[tuple[int, ...]]:
    """Rows (distribute three: sets) that a rule shows in a split."""
    grid, rules = task.generate(n, split, seed=0)
    rows = grid.transpose(0, 3, 1, 2)[rules == RULES.index(rule)].reshape(-1, 3)
    if rule == "distribute_three":
        rows = np.sort(rows, axis=-1)
    return set(map(tuple, rows.tolist()))


def row_follows(rule: str, row: np.ndarray, base: int) -> bool:
    a, b, c = (int(value) for value in row)
    steps = {"plus_1": 1, "plus_2": 2, "minus_1": -1, "minus_2": -2}
    if rule == "constant":
        return a == b == c
    if rule.startswith("progression_"):
        step = steps[rule.removeprefix("progression_")]
        return (b - a - step) % base == 0 and (c - b - step) % base == 0
    if rule == "addition":
        return (a + b - c) % base == 0
    if rule == "subtraction":
        return (a - b - c) % base == 0
    return len({a, b, c}) == 3


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(s_raven_text)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("base", [4, 8, 10])
def test_every_row_follows_its_rule(base, split):
    grid, rules = SRavenText(features=3, base=base, rows=4).generate(100, split, seed=3)
    assert grid.shape == (100, 4, 3, 3)
    assert rules.shape == (100, 3)
    assert set(rules.ravel()) == set(range(8))
    assert grid.min() >= 0
    assert grid.max() < base
    for problem, names in zip(grid, rules, strict=True):
        for feature, rule in enumerate(names):
            rows = problem[:, :, feature]
            assert all(row_follows(RULES[rule], row, base) for row in rows)
            if RULES[rule] == "distribute_three":
                assert len({frozenset(row) for row in rows.tolist()}) == 1


@pytest.mark.parametrize("rule", RULES)
def test_ood_rows_are_held_out(rule):
    task = SRavenText(rules=(rule,))
    train, test, ood = (rows_of(task, rule, split) for split in SPLITS)
    parameters = {"addition": 64, "subtraction": 64, "distribute_three": 56}.get(rule, 8)
    assert train == test
    assert not train & ood
    assert len(train | ood) == parameters
    assert len(ood) == parameters / 4


def test_split_seed_and_share_choose_the_held_out_rows():
    rule = "addition"
    first, second = (rows_of(SRavenText(rules=(rule,), split_seed=seed), rule, "ood") for seed in (0, 1))
    assert first != second
    assert len(rows_of(SRavenText(rules=(rule,), held_out_share=0.5), rule, "ood", n=4000)) == 32


def test_same_arguments_same_problems():
    task = SRavenText(features=2)
    for split in SPLITS:
        first, again, other = (task.generate(50, split, seed).grid for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
    train, test = (task.generate(50, split, seed=0) for split in ("train", "test"))
    assert not np.array_equal(train.rules, test.rules)


def test_no_problems():
    assert SRavenText().generate(0, "train", seed=0).grid.shape == (0, 3, 3, 1)
    assert len(SRavenText().dataset(0, "train", seed=0)) == 0


def test_distinct_rows():
    task = SRavenText(distinct_rows=True, held_out_share=0.4, rules=RULES[:7])
    for split in SPLITS:
        grid = task.generate(300, split, seed=0).grid[..., 0]
        assert all(len(np.unique(problem, axis=0)) == 3 for problem in grid)


def test_permuted_features_move_together():
    task = SRavenText(features=2, permute_features=True, rules=("constant",))
    grid = task.generate(200, "train", seed=0).grid
    straight = (grid[:, :, 0] == grid[:, :, 1]).all(axis=(1, 2))  # panels 1 and 2 in the same order, in all rows
    crossed = (grid[:, :, 0] == grid[:, :, 1, ::-1]).all(axis=(1, 2))
    assert (straight | crossed).all()
    assert 0.3 < crossed.mean() < 0.7


def test_text_layout():
    grid = np.array([[[[1, 2], [3, 4], [5, 6]], [[7, 0], [0, 7], [1, 1]]]])  # [1, 2, 3, 2]
    assert SRavenText(features=2, rows=2).write(grid) == (["12 34 56\n70 07 "], ["11"])
    task = SRavenText(features=2, rows=2, orientation="columns", feature_separator=",", prefix="Puzzle:\n")
    assert task.write(grid) == (["Puzzle:\n1,2 7,0\n3,4 0,7\n5,6 "], ["1,1"])
    task = SRavenText(features=2, rows=2, panel_separator="", alphabet="abcdefghijkl", base=12)
    assert task.write(grid) == (["bcdefg\nhaah"], ["bb"])


def test_dataset_columns():
    task = SRavenText(features=2)
    data = task.dataset(20, "ood", seed=4)
    assert data.column_names == ["prompt", "completion", "rule", "grid"]
    grid, rules = task.generate(20, "ood", seed=4)
    assert np.array_equal(np.array(data["grid"]), grid)
    assert data[3]["rule"] == "+".join(RULES[rule] for rule in rules[3])
    assert data[3]["completion"] == "".join(map(str, grid[3, -1, -1]))
    assert task.write(grid)[0] == list(data["prompt"])


def test_stream_is_endless_and_like_the_dataset():
    task = SRavenText()
    problems = list(task.stream("train", seed=0).take(600))
    assert len(problems) == 600
    assert set(problems[0]) == set(task.dataset(1, "train", seed=0).column_names)
    assert problems[:5] == list(task.stream("train", seed=0).take(5))
    assert problems[:5] != list(task.stream("train", seed=1).take(5))


@pytest.mark.parametrize("shards", [4, 5])
def test_stream_gives_processes_different_problems(shards):
    """With as many shards as processes (or a multiple) by shards; otherwise by taking turns."""
    stream = SRavenText(features=4).stream("train", seed=0, shards=shards)
    seen = []
    for rank in range(2):
        part = split_dataset_by_node(stream, rank=rank, world_size=2)
        seen.append({problem["prompt"] for problem in itertools.islice(part, 300)})
    assert len(seen[0]) > 290
    assert len(seen[1]) > 290
    assert not seen[0] & seen[1]


def test_task_can_be_pickled():
    task = SRavenText(features=2)
    assert np.array_equal(pickle.loads(pickle.dumps(task)).generate(5, "ood", 0).grid, task.generate(5, "ood", 0).grid)


def second_answers(task: SRavenText, grid: np.ndarray) -> set[tuple[int, ...]]:
    """Brute force over every last panel: those for which all features follow some rule over all rows."""
    answers = set()
    orders = list(itertools.permutations(range(task.features)))
    pairs = itertools.product(orders, repeat=2) if task.permute_features else [(orders[0], orders[0])]
    for (second, third), answer in itertools.product(
        list(pairs), itertools.product(range(task.base), repeat=task.features)
    ):
        full = grid.copy()
        full[-1, -1] = answer
        sequences = [full[:, [0, 1, 2], [i, second[i], third[i]]] for i in range(task.features)]
        if all(any(sequence_follows(rule, rows, task.base) for rule in RULES) for rows in sequences):
            answers.add(answer)
    return answers


def sequence_follows(rule: str, rows: np.ndarray, base: int) -> bool:
    same_set = rule != "distribute_three" or len({frozenset(row) for row in rows.tolist()}) == 1
    return same_set and all(row_follows(rule, row, base) for row in rows)


@pytest.mark.parametrize(
    "task",
    [SRavenText(), SRavenText(rows=2, base=5), SRavenText(features=2, base=4, permute_features=True)],
    ids=["default", "two rows", "permuted"],
)
def test_ambiguous_share_equals_brute_force(task):
    grid = task.generate(60, "test", seed=1).grid
    expected = np.mean([len(second_answers(task, problem)) > 1 for problem in grid])
    assert task.ambiguous_share(60, "test", seed=1) == pytest.approx(expected)


def test_ambiguity_falls_with_more_rows():
    shares = [SRavenText(rows=rows).ambiguous_share(2000, "test", seed=0) for rows in (2, 3, 5)]
    assert shares[0] > shares[1] > shares[2]
    assert shares[1] < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 0}, "features must be between 1 and 4, got 0"),
        ({"base": 3}, "base must be between 4 and 10, got 3"),
        ({"base": 11}, "base must be between 4 and 10, got 11; a longer alphabet"),
        ({"rows": 1}, "rows must be at least 2, got 1"),
        ({"split_seed": -1}, "split_seed must be at least 0, got -1"),
        ({"rules": ("multiplication",)}, "rules must be distinct names"),
        ({"rules": ()}, "rules must be distinct names"),
        ({"orientation": "diagonal"}, "orientation must be 'rows' or 'columns', got 'diagonal'"),
        ({"row_separator": ""}, "row_separator must not be empty"),
        ({"panel_separator": "0"}, "panel_separator must not hold a symbol of the alphabet, got '0'"),
        ({"alphabet": "0120"}, "alphabet must not repeat a character"),
        ({"held_out_share": 1.0}, "held_out_share must be between 0 and 1, both excluded, got 1.0"),
        ({"distinct_rows": True}, "distinct_rows needs rows <= 2"),
    ],
)
def test_bad_settings_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        SRavenText(**arguments)


def test_bad_draws_are_rejected():
    with pytest.raises(ValueError, match="split must be one of"):
        SRavenText().generate(1, "validation", seed=0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        SRavenText().stream("train", seed=-1)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        SRavenText().generate(-1, "train", seed=0)
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        SRavenText().stream("train", seed=0, shards=0)
