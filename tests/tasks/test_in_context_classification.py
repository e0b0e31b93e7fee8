"""In-context classification: classes, labels, items, positions, test sets, streams."""

import doctest
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks import in_context_classification
from hf_sparsecoding.tasks.in_context_classification import SPLITS, InContextClassification, class_vectors
from hf_sparsecoding.tasks.streams import CHUNK


def small(**changes) -> InContextClassification:
    values = {"classes": 12, "labels": 6, "pairs": 4, "content_size": 8, "max_pairs": 6, "burstiness": 2}
    return InContextClassification(**{**values, **changes})


def content(task, inputs):
    """(items, labels) of a batch, without their positions."""
    vectors = inputs[..., task.positions :]
    return vectors[:, ::2], vectors[:, 1::2]


def assert_frequencies(counts, expected):
    """Counts of independent draws are within five standard deviations."""
    total = sum(counts)
    expected = np.asarray(expected)
    deviation = np.sqrt(total * expected * (1 - expected))
    assert (np.abs(np.asarray(counts) - total * expected) < 5 * deviation + 1e-9).all()


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(in_context_classification)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.75])
def test_frequencies_fall_with_the_rank(alpha):
    """In prompts of independent draws, and in bursty ones with one class."""
    task = small(zipf_exponent=alpha, burstiness=4)
    expected = np.array([rank**-alpha for rank in range(1, 13)])
    expected /= expected.sum()
    np.testing.assert_allclose(task.frequencies, expected)
    independent = task.generate(4000, "iw", seed=1).classes
    assert_frequencies(np.bincount(independent.ravel(), minlength=12), expected)
    bursty = task.generate(8000, "train", seed=1).classes
    assert (bursty == bursty[:, :1]).all()
    assert_frequencies(np.bincount(bursty[:, 0], minlength=12), expected)


def test_bursty_prompts_are_draws_without_a_repeated_label():
    task = small(zipf_exponent=1.0)
    classes = task.generate(8000, "train", seed=0).classes
    by_label = task.frequencies.reshape(-1, 6).sum(0)  # of the labels
    pairs = Counter(tuple(sorted(set(row % 6))) for row in classes)
    both = list(combinations(range(6), 2))
    expected = [
        by_label[i] * by_label[j] / (1 - by_label[i]) + by_label[j] * by_label[i] / (1 - by_label[j]) for i, j in both
    ]
    assert sum(expected) == pytest.approx(1)
    assert_frequencies([pairs[pair] for pair in both], expected)
    # within a label, classes have their frequencies
    of_label_0 = np.array([next(k for k in row if k % 6 == 0) for row in classes if (row % 6 == 0).any()])
    assert_frequencies([(of_label_0 == 0).sum(), (of_label_0 == 6).sum()], task.frequencies[[0, 6]] / by_label[0])


@pytest.mark.parametrize("split", ["train", "ic", "ic2"])
@pytest.mark.parametrize("burstiness", [1, 2, 4])
def test_labels_are_balanced_and_the_target_is_in_the_context(split, burstiness):
    _, labels, classes = small(burstiness=burstiness).generate(3000, split, seed=0)
    for row, names in zip(labels, classes, strict=True):
        assert set(Counter(row[:-1]).values()) == {burstiness}
        assert set(Counter(names[:-1]).values()) == {burstiness}
        assert names[-1] in names[:-1]
    # wherever an item is, it is as often of the target's class
    same = (classes[:, :-1] == classes[:, -1:]).sum(0)
    assert_frequencies(same, np.full(4, 1 / 4))


def test_answers_follow_from_the_context():
    for split in ("train", "ic", "ic2"):
        _, labels, classes = small().generate(500, split, seed=2)
        for row, names in zip(labels, classes, strict=True):
            known = dict(zip(names[:-1], row[:-1], strict=True))
            assert known[names[-1]] == row[-1]


def test_in_weights_targets_do_not_depend_on_the_context():
    _, labels, classes = small().generate(8000, "iw", seed=0)
    assert (labels == classes % 6).all()
    shared = (classes[:, :-1] == classes[:, -1:]).mean()
    assert shared == pytest.approx(1 / 12, abs=0.01)
    # labels are not balanced here
    assert max(max(Counter(row).values()) for row in labels[:200]) > 2


def test_labels_of_ic2_are_shifted_in_the_context_and_the_answer():
    task = small(noise=0.0)
    examples = task.examples(0, 300, "ic2", seed=3)
    sequences = task.generate(300, "ic2", seed=3)
    assert (sequences.classes < 12).all()
    assert (sequences.labels == (sequences.classes + 1) % 6).all()
    np.testing.assert_array_equal(examples["labels"], sequences.labels[:, -1])
    np.testing.assert_array_equal(examples["context_labels"], sequences.labels[:, :-1])
    expected = [row[-1] in row[:-1] for row in sequences.classes.tolist()]
    assert examples["shown"].tolist() == expected
    means, label_vectors = class_vectors(12, 6, 8, 3)
    items, labels = content(task, examples["inputs"])
    np.testing.assert_allclose(items, means[sequences.classes], rtol=1e-6)
    np.testing.assert_array_equal(labels, label_vectors[(sequences.classes[:, :-1] + 1) % 6])


def test_items_are_noisy_copies_of_the_means():
    task = small(noise=0.5, content_size=32)
    inputs, _, classes = task.generate(2000, "train", seed=0)
    items, _ = content(task, inputs)
    eta = (items * 1.25**0.5 - class_vectors(12, 6, 32, 0)[0][classes]) / 0.5
    assert np.square(eta).sum(-1).mean() == pytest.approx(1, abs=0.01)
    assert eta.mean() == pytest.approx(0, abs=1e-3)
    assert np.square(class_vectors(1000, 500, 32, 0)[0]).sum(-1).mean() == pytest.approx(1, abs=0.05)


def test_novel_classes_are_drawn_for_each_sequence():
    task = small(noise=0.0, content_size=32)
    inputs, labels, classes = task.generate(400, "ic", seed=0)
    items, _ = content(task, inputs)
    assert (classes >= 12).all()
    for vectors, names in zip(items, classes, strict=True):
        equal = (vectors[:, None] == vectors).all(-1)
        np.testing.assert_array_equal(equal, names[:, None] == names)
    assert len({tuple(vectors[0]) for vectors in items}) == 400
    similar = np.abs(items[:, 0] @ class_vectors(12, 6, 32, 0)[0].T).max()
    assert similar < 0.9 * np.square(items[:, 0]).sum(-1).max()
    assert_frequencies(np.bincount(labels[:, -1], minlength=6), np.full(6, 1 / 6))


def test_shares_of_bursty_and_novel_prompts():
    task = small(classes=600, bursty_share=0.25, novel_share=0.4)
    _, _, classes = task.generate(4000, "train", seed=0)
    novel = classes[:, 0] >= 600
    bursty = [set(Counter(row[:-1]).values()) == {2} for row in classes[~novel]]
    assert_frequencies([novel.sum(), (~novel).sum()], [0.4, 0.6])
    # independent draws from 600 classes look bursty in less than one of 10,000 prompts
    assert_frequencies([sum(bursty), len(bursty) - sum(bursty)], [0.25, 0.75])
    for split, all_novel in (("iw", False), ("ic", True), ("ic2", False)):
        assert ((task.generate(300, split, seed=0).classes >= 600) == all_novel).all()


def test_positions_follow_each_other_from_a_uniform_start():
    task = small()
    assert task.positions == 13
    positions = task.generate(4000, "train", seed=0).inputs[..., :13]
    assert set(np.unique(positions)) == {0, 1}
    assert (positions.sum(-1) == 1).all()
    places = positions.argmax(-1)
    assert (np.diff(places, axis=1) == 1).all()
    assert_frequencies(np.bincount(places[:, 0], minlength=5), np.full(5, 1 / 5))


@pytest.mark.parametrize("split", SPLITS)
def test_any_part_of_a_stream_can_be_drawn(split):
    task = small(bursty_share=0.5, novel_share=0.5)
    whole = task.examples(0, 2 * CHUNK, split, seed=5)
    part = task.examples(CHUNK - 3, 7, split, seed=5)
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name][CHUNK - 3 : CHUNK + 4])
    assert (part["inputs"].dtype, part["labels"].dtype) == (np.float32, np.int64)
    other = task.examples(CHUNK - 3, 7, split, seed=6)
    assert not np.array_equal(other["inputs"], part["inputs"])


def test_splits_share_the_classes_and_no_randomness():
    """All splits see the same class means, with other noise."""
    task = small(classes=6, noise=0.3)
    seen = set()
    for split in ("train", "iw", "ic2"):
        inputs, _, classes = task.generate(600, split, seed=0)
        items, _ = content(task, inputs)
        mean = items[classes == 0].mean(0) * 1.09**0.5
        np.testing.assert_allclose(mean, class_vectors(6, 6, 8, 0)[0][0], atol=0.04)
        rows = set(map(tuple, items.reshape(-1, 8)))
        assert len(rows) == 600 * 5
        assert not rows & seen
        seen |= rows
    starts = [task.generate(100, split, seed=0).inputs[:, 0, :13].argmax(-1) for split in SPLITS]
    assert all(not np.array_equal(one, other) for one, other in combinations(starts, 2))


def test_data_sets():
    task = small()
    rows = task.dataset(5, "ic", seed=0)
    examples = task.examples(0, 5, "ic", seed=0)
    assert rows.column_names == ["inputs", "labels", "context_labels", "shown"]
    for name, array in examples.items():
        np.testing.assert_array_equal(np.array(rows[name], dtype=array.dtype), array)


def test_shards_do_not_overlap():
    stream = small().stream("train", seed=0, shards=4)
    parts = [split_dataset_by_node(stream, rank=rank, world_size=2) for rank in (0, 1)]
    items = [[tuple(row["inputs"][0]) for row in part.take(2 * CHUNK)] for part in parts]
    assert len({*items[0], *items[1]}) == 4 * CHUNK


def test_text():
    task = small()
    sequences = task.generate(1, "train", seed=0)._replace(
        classes=np.array([[11, 3, 11, 3, 3]]), labels=np.array([[5, 3, 5, 3, 3]])
    )
    assert task.text(sequences, 0) == "11:5 3:3 11:5 3:3 3:[3]"
    novel = sequences._replace(classes=np.array([[12 + 5, 18 + 3, 12 + 5, 18 + 3, 18 + 3]]))
    assert task.text(novel, 0) == "a:5 b:3 a:5 b:3 b:[3]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 13}, r"classes must be a multiple of labels \(6\), got 13"),
        ({"pairs": 0}, "pairs must be at least 1, got 0"),
        ({"max_pairs": 3}, r"max_pairs must be at least pairs \(4\), got 3"),
        ({"noise": -0.1}, "noise must be at least 0 and finite, got -0.1"),
        ({"noise": float("inf")}, "noise must be at least 0 and finite, got inf"),
        ({"zipf_exponent": 400}, "zipf_exponent must be so small that all of .* classes occur, got 400"),
        ({"zipf_exponent": float("nan")}, "zipf_exponent must be at least 0 and finite, got nan"),
        ({"novel_share": 1.5}, "novel_share must be between 0 and 1, got 1.5"),
        ({"burstiness": 3}, r"burstiness must be a divisor of pairs \(4\), got 3"),
        ({"burstiness": 0}, "for prompts that are not bursty set bursty_share to 0"),
        ({"labels": 3, "burstiness": 1}, "the 4 classes of a bursty prompt need different labels, got labels=3"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small().generate(1, "test", 0), r"split must be one of .*, got 'test'"),
        (lambda: small().generate(1, "iw", -1), "seed must be >= 0, got -1"),
        (lambda: small().stream("train", 0, shards=0), "shards must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
