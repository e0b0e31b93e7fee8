"""S-RAVEN: rules, combinations, random access, streams, ambiguity by brute force."""

import doctest
import itertools
from math import comb

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks import s_raven
from hf_sparsecoding.tasks.s_raven import RULES, UNKNOWN, SRaven, draw_rows
from hf_sparsecoding.tasks.streams import CHUNK, SPLITS, shard_starts

from .test_s_raven_text import row_follows


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(s_raven)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize(("features", "held_out"), [(4, 82), (3, 30), (1, 2)])
def test_a_quarter_of_the_combinations_is_held_out(features, held_out):
    kept, ood = SRaven(features=features).combinations
    assert len(ood) == held_out
    assert len(kept) + len(ood) == comb(len(RULES) + features - 1, features)
    assert not set(map(tuple, kept)) & set(map(tuple, ood))
    assert (np.diff(kept, axis=1) >= 0).all()


@pytest.mark.parametrize(("features", "low", "high"), [(1, 0.5, 1), (2, 0, 0.01)])
def test_only_with_one_feature_do_problems_repeat(features, low, high):
    task = SRaven(features=features)
    trained = {grid.tobytes() for grid in task.generate(128_000, "train", seed=0).grid}
    repeated = [grid.tobytes() in trained for grid in task.generate(2_000, "test", seed=0).grid]
    assert low <= np.mean(repeated) <= high


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("values", [5, 8, 11])
def test_every_row_follows_its_rule(values, split):
    task = SRaven(features=3, values=values, permute_features=False)
    grid, rules = task.generate(600, split, seed=3)
    assert grid.shape == (600, 3, 3, 3)
    assert set(rules.ravel()) == set(range(8))
    assert grid.min() == 0
    assert grid.max() == values - 1
    known = set(map(tuple, task.combinations[split == "ood"]))
    for problem, names in zip(grid, rules, strict=True):
        assert tuple(names) in known
        for feature, rule in enumerate(names):
            rows = problem[:, :, feature]
            assert all(row_follows(RULES[rule], row, values) for row in rows)
            if RULES[rule] == "distribute_three":
                assert len({frozenset(row) for row in rows.tolist()}) == 1


@pytest.mark.parametrize("permute_features", [False, True])
def test_the_labels_follow_their_rules(permute_features):
    """Some feature of the first panels and one of the second complete each label's rule, in all rows."""
    task = SRaven(features=3, permute_features=permute_features)
    grid, rules = task.generate(300, "train", seed=2, start=100)
    of_labels = task.label_rules(300, "train", seed=2, start=100)
    assert (np.sort(of_labels, axis=1) == rules).all()
    assert (of_labels == rules).all() != permute_features
    for problem, names in zip(grid, of_labels, strict=True):
        for place, rule in enumerate(names):
            pairs = itertools.product(range(3), repeat=2) if permute_features else [(place, place)]
            assert any(
                all(row_follows(RULES[rule], (row[0, one], row[1, two], row[2, place]), 8) for row in problem)
                for one, two in pairs
            )


def test_all_free_values_are_uniform():
    """Every pair of addition, every start of a progression, every order of distribute three occurs as often."""
    n = 16_000
    rng = np.random.default_rng(0)
    grid = draw_rows(np.tile([1, 5, 7], (n, 1)), 4, rng)
    starts = np.bincount(grid[..., 0, 0].ravel(), minlength=4)
    pairs = np.bincount((4 * grid[..., 0, 1] + grid[..., 1, 1]).ravel(), minlength=16)
    orders = np.unique(grid[:, 0, :, 2], axis=0, return_counts=True)[1]
    assert len(orders) == 4 * 3 * 2
    for counts in (starts, pairs, orders):
        expected = counts.sum() / len(counts)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < 3 * len(counts) + 10


def test_the_permutation_is_one_per_column_and_the_same_in_all_rows():
    """Undoing some permutation per column makes all features follow their rules; columns differ."""
    task = SRaven(features=3)
    grid, rules = task.generate(40, "train", seed=1)
    orders = list(itertools.permutations(range(3)))
    identical = 0
    for problem, names in zip(grid, rules, strict=True):
        fitting = []
        for columns in itertools.product(orders, repeat=3):
            undone = np.stack([problem[:, i][:, list(order)] for i, order in enumerate(columns)], axis=1)
            if all(
                all(row_follows(RULES[rule], row, 8) for row in undone[:, :, feature])
                and (
                    RULES[rule] != "distribute_three"
                    or len({frozenset(r) for r in undone[:, :, feature].tolist()}) == 1
                )
                for feature, rule in enumerate(names)
            ):
                fitting.append(columns)
        assert fitting
        identical += any(first == second == third for first, second, third in fitting)
    assert identical < 20


def test_problems_are_numbered():
    """Any part of the sequence is the same however it is asked for."""
    task = SRaven()
    whole = task.generate(3 * CHUNK, "test", seed=2)
    for start, n in [(0, 5), (CHUNK - 3, 7), (CHUNK, CHUNK), (2 * CHUNK - 1, 2), (7, 0)]:
        part = task.generate(n, "test", seed=2, start=start)
        for array, expected in zip(part, whole, strict=True):
            assert np.array_equal(array, expected[start : start + n])
    assert not np.array_equal(task.generate(5, "test", seed=3).grid, whole.grid[:5])


def test_splits_and_seeds_have_streams_of_their_own():
    task = SRaven()
    drawn = [
        set(map(bytes, task.generate(2000, split, seed).grid.astype(np.int8)))
        for split in ("train", "test", "ood")
        for seed in (0, 1)
    ]
    for one, other in itertools.combinations(drawn, 2):
        assert len(one & other) <= 1  # 8^36 grids: the odd coincidence apart


def test_examples_hide_the_target():
    task = SRaven()
    problems, examples = task.generate(6, "ood", seed=0), task.examples(0, 6, "ood", seed=0)
    assert (examples["inputs"][:, -4:] == UNKNOWN).all()
    assert np.array_equal(examples["inputs"][:, :-4], problems.grid.reshape(6, 36)[:, :-4])
    assert np.array_equal(examples["labels"], problems.grid[:, 2, 2])


def test_dataset_and_stream_hold_the_same_problems():
    task = SRaven(features=2)
    dataset, stream = task.dataset(300, "train", seed=0), task.stream("train", seed=0, shards=1)
    assert dataset.features == stream.features
    for row, streamed in zip(dataset, stream, strict=False):
        assert row == streamed
    assert row["rules"] == [RULES[rule] for rule in task.generate(300, "train", 0).rules[-1]]


def test_shards_do_not_overlap():
    starts = [next(shard_starts([shard], total=4)) for shard in range(4)]
    assert starts == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]
    task, seen = SRaven(features=2), []
    for rank in range(2):
        part = split_dataset_by_node(task.stream("train", seed=0, shards=2), rank=rank, world_size=2)
        seen.append([row["inputs"] for row in part.take(2 * CHUNK)])
    first, second = (task.examples(start, CHUNK, "train", 0)["inputs"].tolist() for start in (0, CHUNK))
    assert seen[0][:CHUNK] == first
    assert seen[1][:CHUNK] == second
    assert seen[0][CHUNK:] == task.examples(2 * CHUNK, CHUNK, "train", 0)["inputs"].tolist()


def answers(problem: np.ndarray, rules: tuple[str, ...], values: int, permuted: bool) -> set[tuple[int, ...]]:
    """Every last panel that some choice of rules and matching explains, by trying them all."""
    features = problem.shape[-1]
    matchings = list(itertools.permutations(range(features))) if permuted else [tuple(range(features))]
    found = set()
    for second, third in itertools.product(matchings, repeat=2):
        options = []
        for i, j, k in zip(range(features), second, third, strict=True):
            a, b, c = problem[:, 0, i], problem[:, 1, j], problem[:, 2, k]
            possible = set()
            for value in range(values):
                rows = np.stack([a, b, np.append(c[:2], value)], axis=1)
                sets = len({frozenset(row) for row in rows.tolist()})
                for rule in rules:
                    if all(row_follows(rule, row, values) for row in rows) and (
                        rule != "distribute_three" or sets == 1
                    ):
                        possible.add((k, value))
            options.append(possible)
        for choice in itertools.product(*options):
            found.add(tuple(value for _, value in sorted(choice)))
    return found


@pytest.mark.parametrize("permuted", [False, True])
def test_ambiguity_by_brute_force(permuted):
    task = SRaven(features=2, values=5, permute_features=permuted)
    grid = task.generate(150, "train", seed=0).grid
    expected = [len(answers(problem, RULES, 5, permuted)) > 1 for problem in grid]
    assert task.ambiguous_share(150, "train", seed=0) == np.mean(expected)
    assert 0 < np.mean(expected) < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SRaven(features=0), "features must be between 1 and 8, got 0"),
        (lambda: SRaven(values=4), "values must be between 5 and 64 .*, got 4"),
        (lambda: SRaven(held_out_share=1), "both excluded, got 1"),
        (lambda: SRaven().generate(1, "dev", 0), r"split must be one of .*, got 'dev'"),
        (lambda: SRaven().generate(-1, "test", 0), "must be >= 0, got -1"),
        (lambda: SRaven().generate(1, "test", -2), "seed must be >= 0, got -2"),
        (lambda: SRaven().stream("test", 0, shards=0), "shards must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
