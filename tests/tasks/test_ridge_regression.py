"""Ridge regression: distributions, known solutions, prompts, random access, streams, errors."""

import doctest
import itertools
import pickle

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks import ridge_regression
from hf_sparsecoding.tasks.ridge_regression import (
    SPLITS,
    STEP_SIZES,
    RidgeRegression,
    loss,
    parameter_prompts,
    query_prompts,
)
from hf_sparsecoding.tasks.streams import CHUNK


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(ridge_regression)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("prior_mean", [0.0, 2.0])
def test_distributions(prior_mean):
    """Means and variances of 8,000 problems; the query's value has variance 1 given the prior's mean."""
    task = RidgeRegression(num_features=4, num_examples=3, noise=0.5, prior_mean=prior_mean)
    inputs, targets, query, weights = problems = task.generate(8000, "test", seed=0)
    noise = targets - np.einsum("ned,nd->ne", inputs, weights)
    for values, mean, deviation in (
        (inputs, 0, 1),
        (query, 0, 1),
        (weights, prior_mean / 2, 1 / 2),
        (noise, 0, 0.5),
    ):
        assert values.mean() == pytest.approx(mean, abs=0.02)
        assert values.std() == pytest.approx(deviation, rel=0.02)
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.04
    assert loss(problems, np.full_like(weights, prior_mean / 2)) == pytest.approx(1, rel=0.05)
    assert loss(problems, weights) == 0


@pytest.mark.parametrize(("examples", "features", "prior_mean"), [(7, 3, 0.0), (2, 5, 0.0), (7, 3, 1.5), (1, 1, -1)])
def test_ridge_weights_minimise_the_penalised_squares(examples, features, prior_mean):
    """As least squares with sqrt(lambda) I as further examples of the prior's mean, problem by problem."""
    task = RidgeRegression(features, examples, prior_mean=prior_mean, penalty=0.7)
    problems = task.generate(6, "train", seed=1)
    mean = np.full(features, prior_mean / features**0.5)
    for inputs, targets, found in zip(*problems[:2], task.ridge_weights(problems), strict=True):
        rows = np.concatenate([inputs, 0.7**0.5 * np.eye(features)])
        values = np.concatenate([targets, 0.7**0.5 * mean])
        np.testing.assert_allclose(found, np.linalg.lstsq(rows, values)[0], rtol=0, atol=1e-12)


def test_descent_by_hand_and_its_limit():
    task = RidgeRegression(num_features=3, num_examples=6, prior_mean=1.0, penalty=0.4)
    problems = task.generate(4, "test", seed=0)
    for inputs, targets, found in zip(*problems[:2], task.descent_weights(problems, 3, 0.05), strict=True):
        weights = mean = np.full(3, 3**-0.5)
        for _ in range(3):
            weights = weights - 0.05 * (inputs.T @ (inputs @ weights - targets) + 0.4 * (weights - mean))
        np.testing.assert_allclose(found, weights, rtol=0, atol=1e-12)
    limit = task.descent_weights(problems, 3000, 0.05)
    np.testing.assert_allclose(limit, task.ridge_weights(problems), rtol=0, atol=1e-10)


@pytest.mark.parametrize("prior_mean", [0.0, 2.0])
def test_the_default_penalty_is_the_best(prior_mean):
    options = {"num_features": 5, "num_examples": 8, "noise": 0.6, "prior_mean": prior_mean}
    task = RidgeRegression(**options)
    assert task.penalty == pytest.approx(5 * 0.36)
    problems = task.generate(4000, "test", seed=0)
    best = loss(problems, task.ridge_weights(problems))
    for factor in (0.5, 2):
        other = RidgeRegression(**options, penalty=factor * task.penalty)
        assert loss(problems, other.ridge_weights(problems)) > best
    assert best < loss(problems, task.descent_weights(problems, 2, task.tuned_step_size(problems, 2)))


def test_the_tuned_step_size_is_the_best_of_those_tried():
    task = RidgeRegression()
    problems = task.generate(300, "train", seed=0)
    sizes = STEP_SIZES / (16 + task.penalty)
    losses = [loss(problems, task.descent_weights(problems, 2, size)) for size in sizes]
    best = int(np.argmin(losses))
    assert 0 < best < len(sizes) - 1, "the best lies inside the range"
    assert task.tuned_step_size(problems, 2) == sizes[best]


def test_prompts_by_hand():
    task = RidgeRegression(num_features=1, num_examples=2)
    problems = task.generate(1, "test", seed=0)
    (a, b), (y, z), x = problems.inputs[0, :, 0], problems.targets[0], problems.query[0, 0]
    assert query_prompts(problems)[0].tolist() == [[a, y], [b, z], [x, 0]]
    rows = [[a, y, 0, 0], [b, z, 0, 0], [0, 0, 0.5, -1]]
    assert parameter_prompts(problems, 0.5)[0].tolist() == rows
    assert parameter_prompts(problems, np.array([[0.5]]), zero_rows=True)[0].tolist() == rows + 4 * [[0, 0, 0, 0]]


def test_examples_for_a_model():
    task = RidgeRegression(num_features=3, num_examples=5)
    problems = task.generate(20, "test", seed=1)
    example = task.examples(7, 4, "test", seed=1)
    assert example["inputs"].dtype == example["labels"].dtype == np.float32
    assert example["inputs"].shape == (4, 6, 4)
    assert np.array_equal(example["inputs"], query_prompts(problems)[7:11].astype(np.float32))
    for label, query, weights in zip(example["labels"], problems.query[7:], problems.weights[7:], strict=False):
        assert label == pytest.approx(query @ weights)


def test_random_access():
    task = RidgeRegression(num_features=2, num_examples=3)
    every = task.generate(3 * CHUNK, "train", seed=5)
    for n, start in ((5, 250), (0, 300), (1, 255), (1, 256), (CHUNK, CHUNK), (300, 200)):
        part = task.generate(n, "train", seed=5, start=start)
        for whole, piece in zip(every, part, strict=True):
            assert np.array_equal(whole[start : start + n], piece)


def test_same_arguments_same_problems_and_disjoint_streams():
    task = pickle.loads(pickle.dumps(RidgeRegression(num_features=2, num_examples=3)))
    seen = set()
    for split, seed in itertools.product(SPLITS, (0, 1)):
        first, again = (task.generate(50, split, seed).inputs for _ in range(2))
        assert np.array_equal(first, again)
        seen |= set(first.ravel())
    assert len(seen) == 4 * 50 * 6


def test_dataset_and_stream():
    task = RidgeRegression(num_features=2, num_examples=3)
    example = task.examples(0, 6, "test", seed=4)
    for rows in (task.dataset(6, "test", seed=4), list(task.stream("test", seed=4, shards=1).take(6))):
        assert np.array_equal(np.array([row["inputs"] for row in rows], dtype=np.float32), example["inputs"])
        assert np.array_equal(np.array([row["labels"] for row in rows], dtype=np.float32), example["labels"])
    assert len(task.dataset(0, "train", seed=0)) == 0
    shard = split_dataset_by_node(task.stream("train", seed=0, shards=2), rank=1, world_size=2)
    labels = np.array([row["labels"] for row in itertools.islice(shard, CHUNK + 1)], dtype=np.float32)
    assert np.array_equal(labels[:CHUNK], task.examples(CHUNK, CHUNK, "train", seed=0)["labels"])
    assert labels[CHUNK] == task.examples(3 * CHUNK, 1, "train", seed=0)["labels"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be at least 1, got 0"),
        ({"num_examples": -2}, "num_examples must be at least 1, got -2"),
        ({"noise": -0.1}, "noise must be >= 0 and finite, got -0.1"),
        ({"noise": float("nan")}, "noise must be >= 0 and finite, got nan"),
        ({"noise": float("inf")}, "noise must be >= 0 and finite, got inf"),
        ({"prior_mean": float("nan")}, "prior_mean must be finite, got nan"),
        ({"penalty": -1.0}, "penalty must be >= 0 and finite, got -1.0"),
        ({"noise": 0, "num_examples": 3}, r"above 0 with fewer examples \(3\) than features \(4\)"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        RidgeRegression(**options)


def test_unknown_splits():
    with pytest.raises(ValueError, match=r"split must be one of \('train', 'test'\), got 'ood'"):
        RidgeRegression().examples(0, 1, "ood", seed=0)
