"""Planted correlations: every token, id and label, the laws they are drawn from, other functions than parity."""

import doctest
import itertools

import numpy as np
import pytest

from hf_sparsecoding.tasks.length_generalization import PlantedCorrelations, planted

from .oracle import Solution, check_checker, check_examples


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(planted)
    assert tried > 0
    assert failed == 0


def solve(prompt: list[str], k: int, fillers: int = 2, label=lambda values: sum(values) % 2) -> Solution:
    assert prompt[-1] == "="
    values, ids = [], []
    for name in prompt[:-1]:
        if int(name) >= fillers:
            values.append(int(name) - fillers)
        ids.append(len(values) if int(name) >= fillers else 0)
    assert len(values) == k
    return len(prompt) - 1, [f"y{label(values)}"], [*ids, 0], [0]


def test_parity_is_that_of_the_threes():
    """Apart from the oracle above: the spelling of sparse parity."""
    task = PlantedCorrelations(k=6)
    for row in task.dataset(300, "test", seed=0):
        prompt, response = task.decode(row["inputs"]).split(" = ")
        tokens = prompt.split(" ")
        assert tokens.count("2") + tokens.count("3") == 6
        assert response == f"y{tokens.count('3') % 2}"


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_sparse_parity(k):
    task = PlantedCorrelations(k=k)
    found = check_examples(task, task.examples(3, 400, "train", seed=1), lambda prompt: solve(prompt, k))
    assert {length for length, _ in found} == set(range(20, 51))
    for length in (k, 400):
        examples = task.examples_of_length(length, 0, 150, "test", seed=1)
        check_examples(task, examples, lambda prompt: solve(prompt, k))
        assert examples["inputs"].shape == (150, length + 4)


def test_starts_make_use_of_all_ids():
    for positions, ids in (("coupled", 5), ("absolute", 22)):
        task = PlantedCorrelations(train_lengths=(20, 20), test_lengths=(20,), max_position=30, positions=positions)
        examples = task.examples(0, 600, "train", seed=0)
        found = check_examples(task, examples, lambda prompt: solve(prompt, 4))
        assert {start for _, start in found} == set(range(1, 32 - ids))
        assert set(examples["position_ids"].ravel()) == set(range(31))


def test_marginals_of_sparse_parity():
    """Fillers, planted values, their places and labels are uniform; no k - 1 planted values tell the label."""
    n, length, k = 12_000, 10, 4
    task = PlantedCorrelations(k=k, train_lengths=(length, length))
    tokens = task.examples(0, n, "train", seed=0)["inputs"][:, 1:] - 3
    string, labels = tokens[:, :length], tokens[:, length + 1] - 5
    marked = string >= 2
    values = string[marked].reshape(n, k) - 2
    assert labels.mean() == pytest.approx(0.5, abs=0.02)
    assert string[~marked].mean() == pytest.approx(0.5, abs=0.01)
    assert values.mean(axis=0) == pytest.approx(0.5, abs=0.02)
    assert marked.mean(axis=0) == pytest.approx(k / length, abs=0.02)
    pairs = [(marked[:, i] & marked[:, j]).mean() for i, j in itertools.combinations(range(length), 2)]
    assert np.array(pairs) == pytest.approx(k * (k - 1) / length / (length - 1), abs=0.02)
    for left_out in range(k):
        partial = np.delete(values, left_out, axis=1).sum(axis=1) % 2
        assert np.mean(partial == labels) == pytest.approx(0.5, abs=0.02)


def test_a_random_function():
    """Each label as often, another function for another seed, the same at every length and in every split."""
    task = PlantedCorrelations(k=3, values=4, labels=3, rule="random", filler=(1.0,), rule_seed=7)
    other = PlantedCorrelations(k=3, values=4, labels=3, rule="random", filler=(1.0,), rule_seed=8)
    assert sorted(np.bincount(task._table).tolist()) == [21, 21, 22]
    assert not np.array_equal(task._table, other._table)
    seen = {}
    for split, length in (("train", 3), ("test", 17), ("ood", 60)):
        for row in task.examples_of_length(length, 0, 600, split, seed=0)["inputs"]:
            prompt, response = task.decode(row).split(" = ")
            values = tuple(token for token in prompt.split(" ") if token != "0")
            assert seen.setdefault(values, response) == response
    assert len(seen) == 64


@pytest.mark.parametrize("as_table", [False, True])
def test_a_function_of_ones_own(as_table):
    """Is the first planted value greater than the last? It depends on their order."""

    def greater(values: np.ndarray) -> np.ndarray:
        return values[:, 0] > values[:, -1]

    table = [int(first > last) for first, _, last in itertools.product(range(5), repeat=3)]
    task = PlantedCorrelations(k=3, values=5, rule=table if as_table else greater, filler=(0.2, 0.3, 0.5))

    def solution(prompt: list[str]) -> Solution:
        return solve(prompt, 3, fillers=3, label=lambda values: int(values[0] > values[2]))

    check_examples(task, task.examples(0, 500, "test", seed=0), solution)
    check_checker(task, task.examples(0, 50, "test", seed=1))


def test_a_sum_with_more_labels():
    task = PlantedCorrelations(k=4, values=3, labels=5)
    label = lambda values: sum(values) % 5  # noqa: E731
    check_examples(task, task.examples(0, 500, "test", seed=0), lambda prompt: solve(prompt, 4, label=label))


def test_laws_of_fillers_and_planted_tokens():
    law = np.array([4, 0, 1, 3]) / 8  # of (0, 0), (0, 1), (1, 0), (1, 1)
    task = PlantedCorrelations(k=2, filler=(0.7, 0.1, 0.2), token_law=law.tolist(), train_lengths=(6, 12))
    examples = task.examples(0, 8000, "train", seed=0)
    tokens = examples["inputs"] - 3
    prompt = np.arange(tokens.shape[1]) <= examples["length"][:, None]
    fillers = tokens[prompt & (tokens >= 0) & (tokens < 3)]
    assert np.bincount(fillers) / len(fillers) == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    pairs = tokens[prompt & (tokens >= 3) & (tokens < 5)].reshape(8000, 2) - 3
    assert np.bincount(2 * pairs[:, 0] + pairs[:, 1], minlength=4) / 8000 == pytest.approx(law, abs=0.02)


@pytest.mark.parametrize("k", [2, 7])
def test_the_checker(k):
    task = PlantedCorrelations(k=k)
    check_checker(task, task.examples(0, 60, "train", seed=1))
    random = PlantedCorrelations(k=k, rule="random", labels=3)
    check_checker(random, random.examples(0, 60, "train", seed=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"values": 1}, "values must be at least 2, got 1"),
        ({"labels": 1}, "labels must be at least 2, got 1"),
        ({"k": 17}, r"values\^k must be at most 65536, got 2\^17; lower one of them"),
        ({"k": 5, "train_lengths": (4, 9)}, "lengths must be at least 5 for this task, got 4"),
        ({"filler": ()}, r"filler must be probabilities that sum to 1, got \(\)"),
        ({"filler": 0.5}, "filler must be a list of probabilities, got 0.5"),
        ({"token_law": ["0.5", "0.5"]}, r"token_law must be a list of probabilities, got \['0.5', '0.5'\]"),
        ({"filler": (0.5, 0.4)}, r"filler must be probabilities that sum to 1, got \(0.5, 0.4\)"),
        ({"filler": (1.5, -0.5)}, "filler must be probabilities"),
        ({"k": 1, "token_law": (float("nan"), 1.0)}, "token_law must be probabilities"),
        ({"k": 2, "token_law": (0.5, 0.5)}, r"token_law must have values\^k = 4 entries, got \(0.5, 0.5\)"),
        ({"rule": 3}, "rule must be one of .*, a table or a function, got 3"),
        ({"rule": "random", "rule_seed": -1}, "rule_seed must be at least 0, got -1"),
        ({"rule": "product"}, "rule must be one of .*, a table or a function, got 'product'"),
        ({"k": 1, "rule": (0, 1, 1)}, r"rule must give values\^k = 2 labels from 0 to 1, got shape \(3,\)"),
        ({"k": 1, "rule": (0, 2)}, r"labels from 0 to 1, got shape \(2,\) with values \[0 2\]"),
        ({"k": 1, "rule": lambda values: values[:, 0] / 2}, r"with values \[0.  0.5\]"),
        ({"max_position": 4}, "length 20 takes 5 coupled position ids, got max_position=4"),
        ({"positions": "absolute"}, "length 50 takes 52 absolute position ids, got max_position=32"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PlantedCorrelations(**options)
