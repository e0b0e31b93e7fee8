"""What all tasks of length generalisation do alike: numbering, streams, splits, padding, texts, errors."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks.length_generalization import (
    BOS,
    EOS,
    IGNORED,
    PAD,
    Addition,
    Copy,
    Multiplication,
    PatternMatching,
    PlantedCorrelations,
    Reversal,
    ScratchpadParity,
)
from hf_sparsecoding.tasks.length_generalization.coupling import random_places
from hf_sparsecoding.tasks.streams import CHUNK, SPLITS

from .oracle import response_of, rows


TASKS = [
    Addition(),
    Multiplication(factor_digits=2),
    Copy(),
    Reversal(),
    PatternMatching(),
    PatternMatching(variant="count"),
    ScratchpadParity(),
    PlantedCorrelations(),
]
FILLING = {"inputs": PAD, "position_ids": 0, "labels": IGNORED, "position_labels": IGNORED}
every_task = pytest.mark.parametrize("task", TASKS, ids=repr)


def padded(examples: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    return {
        name: np.pad(array, [(0, 0), (0, size - array.shape[1])], constant_values=FILLING[name])
        if name in FILLING
        else array
        for name, array in examples.items()
    }


@every_task
def test_examples_are_numbered(task):
    """Any part of the sequence is the same however it is asked for, apart from its padding."""
    whole = task.examples(0, 3 * CHUNK, "train", seed=2)
    size = whole["inputs"].shape[1]
    for start, count in [(0, 5), (CHUNK - 3, 7), (CHUNK, CHUNK), (2 * CHUNK - 1, 2)]:
        part = padded(task.examples(start, count, "train", seed=2), size)
        for name, array in part.items():
            assert np.array_equal(array, whole[name][start : start + count])
    assert not np.array_equal(task.examples(0, 50, "train", seed=3)["length"], whole["length"][:50])


@every_task
def test_one_example_has_no_padding_and_none_has_no_rows(task):
    one, none = (task.examples(7, count, "test", seed=0) for count in (1, 0))
    assert one["inputs"][0, 0] == BOS
    assert one["inputs"][0, -1] == EOS
    assert all(len(array) == 0 for array in none.values())


@every_task
def test_examples_of_one_length(task):
    """They have one prompt size; any part of them is the same however it is asked for."""
    whole = task.examples_of_length(9, 0, 300, "test", seed=0)
    assert set(whole["length"]) == {9}
    assert len(set(whole["response_start"])) == 1
    part = padded(task.examples_of_length(9, 250, 20, "test", seed=0), whole["inputs"].shape[1])
    for name, array in part.items():
        assert np.array_equal(array, whole[name][250:270])
    other = task.examples_of_length(9, 0, 300, "train", seed=0)
    assert not np.array_equal(other["inputs"][:50, :9], whole["inputs"][:50, :9])


@every_task
def test_lengths_are_uniform(task):
    lengths = task.examples(0, 3000, "train", seed=0)["length"]
    shortest, longest = task.train_lengths
    counts = np.bincount(lengths)[shortest:]
    assert len(counts) == longest - shortest + 1
    assert (np.abs(counts - counts.mean()) < 5 * counts.mean() ** 0.5).all()
    assert abs(np.corrcoef(lengths, np.arange(3000) % CHUNK)[0, 1]) < 0.08  # and in no order
    assert set(task.examples(0, 300, "ood", seed=0)["length"]) == set(task.test_lengths)


@every_task
def test_splits_and_seeds_have_streams_of_their_own(task):
    drawn = [
        set(map(bytes, task.examples_of_length(20, 0, 500, split, seed)["inputs"][:, 1:23]))
        for split in SPLITS
        for seed in (0, 1)
    ]
    assert min(map(len, drawn)) > 490
    for one, other in itertools.combinations(drawn, 2):
        assert len(one & other) <= 5  # of 2^20 strings or more, some of them marked


@every_task
def test_dataset_and_stream_hold_the_same_problems(task):
    examples, dataset = task.examples(0, 300, "train", seed=0), task.dataset(300, "train", seed=0)
    stream = task.stream("train", seed=0, shards=1)
    assert dataset.features == stream.features
    size = examples["inputs"].shape[1]
    for row, streamed, expected in zip(dataset, stream.take(300), rows(examples), strict=True):
        assert row == streamed
        assert row["inputs"][-1] == EOS
        assert PAD not in row["inputs"]
        for name, value in row.items():
            filled = value + [FILLING[name]] * (size - len(value)) if name in FILLING else value
            assert np.array_equal(filled, expected[name])


def test_shards_do_not_overlap():
    task = Copy(train_lengths=(8, 10))
    for rank in range(2):
        part = split_dataset_by_node(task.stream("train", seed=0, shards=2), rank=rank, world_size=2)
        streamed = [row["inputs"] for row in part.take(CHUNK + 3)]
        expected = []
        for start in (rank * CHUNK, (2 + rank) * CHUNK):
            expected += [row[row != PAD].tolist() for row in task.examples(start, CHUNK, "train", 0)["inputs"]]
        assert streamed == expected[: CHUNK + 3]


@every_task
def test_texts(task):
    assert task.vocabulary[:3] == ("<pad>", "<bos>", "<eos>")
    assert len(set(task.vocabulary)) == len(task.vocabulary)
    tokens = set()
    for row in rows(task.examples(0, 400, "train", seed=0)):
        inputs = row["inputs"].tolist()
        tokens |= set(inputs)
        prompt, response = task.decode(inputs[: row["response_start"]]), task.decode(row["labels"].tolist())
        assert task.decode(inputs) == task.separator.join([prompt, response])
    assert tokens == set(range(len(task.vocabulary)))  # all are used


@every_task
def test_tensors_and_dataset_rows_are_checked_too(task):
    rows_of_dataset = task.dataset(20, "test", seed=0)
    for row, arrays in zip(rows_of_dataset, rows(task.examples(0, 20, "test", seed=0)), strict=True):
        right = response_of(arrays)
        assert task.is_correct(torch.tensor(right), row)
        assert task.is_correct(right, {name: torch.as_tensor(value) for name, value in arrays.items()})


@every_task
def test_task_can_be_pickled(task):
    copy = pickle.loads(pickle.dumps(task))
    assert copy == task
    assert np.array_equal(
        copy.examples(0, 5, "test", 0)["position_ids"], task.examples(0, 5, "test", 0)["position_ids"]
    )


def test_lists_are_as_good_as_tuples():
    assert Addition(train_lengths=[1, 5], test_lengths=[9]) == Addition(train_lengths=(1, 5), test_lengths=(9,))
    assert Copy() != Reversal()


def test_random_places():
    counts = np.array([0, 1, 3, 5] * 2000)
    places = random_places(counts, 5, 5, np.random.default_rng(0))
    for row, count in zip(places.tolist(), counts, strict=True):
        assert row[count:] == [5] * (5 - count)
        assert row[:count] == sorted(set(row[:count]))
        assert all(place < 5 for place in row[:count])
    triples = np.unique(places[counts == 3, :3], axis=0, return_counts=True)[1]
    assert len(triples) == 10
    assert triples == pytest.approx(200, rel=0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Addition(train_lengths=(0, 5)), "lengths must be at least 1 for this task, got 0"),
        (lambda: Addition(train_lengths=5), "train_lengths must be a list of whole numbers, got 5"),
        (
            lambda: Addition(train_lengths=[1.0, 6.0]),
            r"train_lengths must be a list of whole numbers, got \[1.0, 6.0\]",
        ),
        (lambda: Addition(test_lengths=["12"]), r"test_lengths must be a list of whole numbers, got \['12'\]"),
        (lambda: Addition(train_lengths=(6, 5)), r"train_lengths must be \(shortest, longest\), got \(6, 5\)"),
        (lambda: Addition(train_lengths=(1, 2, 3)), r"\(shortest, longest\), got \(1, 2, 3\)"),
        (lambda: Addition(test_lengths=()), "test_lengths must name at least one length"),
        (lambda: Addition(test_lengths=(5, -1)), "lengths must be at least 1 for this task, got -1"),
        (lambda: Addition(positions="rotary"), r"positions must be one of .*, got 'rotary'"),
        (lambda: Addition(train_lengths=(1, 50)), "length 50 takes 52 coupled position ids, got max_position=32"),
        (lambda: Addition().examples_of_length(0, 0, 1, "test", 0), "lengths must be at least 1 for this task, got 0"),
        (lambda: Addition().examples(0, 1, "dev", 0), r"split must be one of .*, got 'dev'"),
        (lambda: Addition().examples(-1, 1, "test", 0), "must be >= 0, got 1 and -1"),
        (lambda: Addition().examples(0, 1, "test", -2), "seed must be >= 0, got -2"),
        (lambda: Addition().stream("test", 0, shards=0), "shards must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
