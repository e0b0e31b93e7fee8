"""What models and people get: arrays, data sets, streams, pictures, and errors that say what to do."""

import doctest
import itertools
import pickle

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from hf_sparsecoding.tasks.raven import CONFIGURATIONS, Raven, task
from hf_sparsecoding.tasks.raven.rendering import ink, render


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(task)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_examples_are_the_problems(configuration):
    raven = Raven(configuration, size=80)
    examples = raven.examples(3, 4, "validation", seed=1)
    inputs, labels = examples["inputs"], examples["labels"]
    assert (inputs.shape, labels.shape) == ((4, 9, 80, 80), (4, 1, 80, 80))
    assert inputs.dtype == labels.dtype == np.float32
    assert not inputs[:, 8].any()
    for row, problem in enumerate(raven.generate(4, "validation", seed=1, start=3)):
        images = np.stack([np.asarray(render(panel, configuration)) for panel in problem.panels])
        assert np.array_equal(inputs[row, :8], ink(images[:8], 80))
        assert np.array_equal(labels[row, 0], ink(images[8], 80))
        assert labels[row].max() > 0.2


def test_examples_are_random_access():
    raven = Raven("grid_3x3", size=40)
    whole = raven.examples(0, 4, "train", seed=0)
    halves = [raven.examples(start, 2, "train", seed=0) for start in (0, 2)]
    other = raven.examples(0, 4, "test", seed=0)
    for name in ("inputs", "labels"):
        assert np.array_equal(whole[name], np.concatenate([half[name] for half in halves]))
        assert not np.array_equal(whole[name], other[name])
    assert raven.examples(5, 0, "train", seed=0)["inputs"].shape == (0, 9, 40, 40)


def test_dataset():
    raven = Raven("out_in_grid")
    dataset = raven.dataset(3, "test", seed=0)
    assert dataset.column_names == ["panels", "choices", "target", "rules"]
    for row, problem in zip(dataset, raven.generate(3, "test", seed=0), strict=True):
        images = np.stack([np.asarray(image) for image in row["panels"] + row["choices"]])
        assert np.array_equal(images, raven.images(problem))
        assert row["target"] == problem.target
        assert np.array_equal(images[8 + row["target"]], np.asarray(render(problem.answer, "out_in_grid")))
        assert row["rules"] == problem.describe()
        assert row["rules"].startswith("out: number/position constant, type ")
        assert "\nin: " in row["rules"]


def test_dataset_of_small_images():
    raven = Raven("center", size=20)
    row = raven.dataset(1, "train", seed=0, start=4)[0]
    examples = raven.examples(4, 1, "train", seed=0)
    assert row["panels"][0].size == (20, 20)
    shown = np.stack([np.asarray(image) for image in [*row["panels"], row["choices"][row["target"]]]])
    exact = np.concatenate([examples["inputs"][0, :8], examples["labels"][0]])
    np.testing.assert_allclose(1 - shown / 255, exact, atol=0.51 / 255)


def test_streams_have_shards_without_overlap():
    raven = Raven("left_right", size=20)
    expected = [problem.describe() for problem in raven.generate(40, "train", seed=0)]
    stream = raven.stream("train", seed=0, shards=4)
    assert stream.num_shards == 4
    first, row = stream.take(2)
    same = raven.dataset(1, "train", seed=0, start=4)[0]
    assert first["rules"] == expected[0]
    assert (row["target"], row["rules"]) == (same["target"], same["rules"])
    for name in ("panels", "choices"):
        assert all(np.array_equal(*map(np.asarray, pair)) for pair in zip(row[name], same[name], strict=True))
    assert len(set(expected)) == 40
    nodes = [split_dataset_by_node(stream, rank=rank, world_size=2) for rank in range(2)]
    seen = [[row["rules"] for row in node.take(10)] for node in nodes]
    shards = [expected[shard::4] for shard in range(4)]
    assert all(rows in shards for rows in seen)
    assert not set(seen[0]) & set(seen[1])
    workers = list(itertools.islice(DataLoader(stream, batch_size=None, num_workers=2), 8))
    assert len({row["rules"] for row in workers}) == 8


def test_picture():
    raven = Raven("up_down")
    picture = np.asarray(raven.picture(seed=2, split="train", index=5))
    images = raven.images(raven.generate(1, "train", seed=2, start=5)[0])
    assert np.array_equal(picture[8:168, 92:252], images[0])
    assert np.array_equal(picture[704:864, 512:672], images[15])


def test_a_task_can_be_pickled():
    raven = Raven("center", size=40)
    assert pickle.loads(pickle.dumps(raven)) == raven


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Raven("centre"), "configuration must be one of .*'center'.* got 'centre'"),
        (lambda: Raven(size=50), "size must divide 160, such as 20, 32, 40, 80 or 160, got 50"),
        (lambda: Raven(size=80.0), "size must divide 160.* got 80.0"),
        (lambda: Raven(size=0), "size must divide 160.* got 0"),
        (lambda: Raven().generate(-1, "train", 0), "number of problems must be >= 0, got -1"),
        (lambda: Raven().generate(0, "val", 0), "split must be one of .*'validation'.* got 'val'"),
        (lambda: Raven().examples(0, 1, "train", -1), "seed must be >= 0, got -1"),
        (lambda: Raven().examples(-2, 1, "train", 0), "must be >= 0, got -2"),
        (lambda: Raven().stream("train", 0, shards=0), "shards must be at least 1, got 0"),
        (lambda: Raven().stream("ood", 0), "split must be one of .* got 'ood'"),
        (lambda: Raven().dataset(1, "dev", 0), "split must be one of .* got 'dev'"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
