"""Compositional images: rules, splits, random access, model inputs, streams, ambiguity."""

import doctest
import itertools
import pickle

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from hf_sparsecoding.tasks import compositional_images
from hf_sparsecoding.tasks.compositional_images import (
    GLYPHS,
    LEVELS,
    SYMMETRIES,
    CompositionalImages,
    apply_rule,
    rule_name,
)
from hf_sparsecoding.tasks.streams import CHUNK, SPLITS


MOVES = {  # where each symmetry puts pixel (row, column); e is the last row or column
    "identity": lambda r, c, e: (r, c),
    "rotate_90": lambda r, c, e: (e - c, r),
    "rotate_180": lambda r, c, e: (e - r, e - c),
    "rotate_270": lambda r, c, e: (c, e - r),
    "transpose": lambda r, c, e: (c, r),
    "flip_up_down": lambda r, c, e: (e - r, c),
    "transpose_other_diagonal": lambda r, c, e: (e - c, e - r),
    "flip_left_right": lambda r, c, e: (r, e - c),
}


def moved(image: np.ndarray, shift: np.ndarray, symmetry: str) -> np.ndarray:
    """The rule, pixel by pixel; the shift is in pixels."""
    size, result = len(image), np.empty_like(image)
    for row, column in itertools.product(range(size), repeat=2):
        shifted = (row + shift[0]) % size, (column + shift[1]) % size
        result[MOVES[symmetry](*shifted, size - 1)] = image[row, column]
    return result


def rules_of(task: CompositionalImages, split: str, n: int = 1500) -> set[tuple[int, ...]]:
    problems = task.generate(n, split, seed=0)
    return set(map(tuple, np.column_stack([problems.shifts, problems.symmetries]).tolist()))


def test_the_example_in_the_docstring():
    failed, tried = doctest.testmod(compositional_images)
    assert tried > 0
    assert failed == 0


def test_a_rule_by_hand():
    image = np.arange(9).reshape(3, 3)
    assert apply_rule(image, np.array([1, 0]), 0).tolist() == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
    quarter_turn = SYMMETRIES.index("rotate_90")
    assert apply_rule(image, np.array([0, 0]), quarter_turn).tolist() == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]
    assert apply_rule(image, np.array([1, 0]), quarter_turn).tolist() == [[8, 2, 5], [7, 1, 4], [6, 0, 3]]
    assert rule_name(np.array([1, 2]), quarter_turn) == "shift_1_2+rotate_90"


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_rules_move_pixels_where_they_should(symmetry):
    image = np.arange(36).reshape(6, 6)
    shift = np.array([2, 4])
    assert np.array_equal(apply_rule(image, shift, SYMMETRIES.index(symmetry)), moved(image, shift, symmetry))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "task", [CompositionalImages(), CompositionalImages(cells=2, cell_size=8, pairs=1)], ids=["default", "large cells"]
)
def test_outputs_follow_the_rule(task, split):
    problems = task.generate(12, split, seed=3)
    assert problems.inputs.shape == problems.outputs.shape == (12, task.pairs + 1, task.size, task.size)
    for inputs, outputs, shift, symmetry in zip(*problems, strict=True):
        for image, expected in zip(inputs, outputs, strict=True):
            assert np.array_equal(moved(image, shift * task.cell_size, SYMMETRIES[symmetry]), expected)


@pytest.mark.parametrize(("shapes", "cell_size"), [((2, 3), 4), ((1, 1), 8), ((8, 8), 4)])
def test_inputs_are_distinct_glyphs_with_distinct_levels(shapes, cell_size):
    task = CompositionalImages(shapes=shapes, cell_size=cell_size)
    inputs = task.generate(50, "train", seed=0).inputs.reshape(-1, 3, cell_size, 3, cell_size).swapaxes(2, 3)
    counts = set()
    for image in inputs.reshape(-1, 9, cell_size, cell_size):
        drawn = [cell for cell in image if cell.any()]
        counts.add(len(drawn))
        levels = [cell.max() for cell in drawn]
        scale = cell_size // 4
        glyphs = ["/".join("".join(".#"[int(x > 0)] for x in row) for row in c[::scale, ::scale]) for c in drawn]
        assert all(set(np.unique(cell)) == {0, level} for cell, level in zip(drawn, levels, strict=True))
        assert len(set(levels)) == len(set(glyphs)) == len(drawn)
        assert set(levels) <= set(LEVELS)
        assert set(glyphs) <= set(GLYPHS)
    assert counts == set(range(shapes[0], shapes[1] + 1))


def test_no_glyph_has_a_symmetry_or_resembles_another():
    glyphs = [np.array([[int(pixel == "#") for pixel in row] for row in glyph.split("/")]) for glyph in GLYPHS]
    still = np.array([0, 0])
    for first, second in itertools.product(range(len(glyphs)), repeat=2):
        turned = [apply_rule(glyphs[second], still, symmetry) for symmetry in range(8)]
        distances = [int((glyphs[first] != image).sum()) for image in turned]
        if first == second:
            assert min(distances[1:]) >= 2
        else:
            assert min(distances) >= 3


def test_ood_rules_are_held_out():
    train, test, ood = (rules_of(CompositionalImages(), split) for split in SPLITS)
    assert train == test
    assert not train & ood
    assert (len(train), len(ood)) == (54, 18)
    assert len({rule[:2] for rule in train}) == 9
    assert {rule[2] for rule in train} == set(range(8))


@pytest.mark.parametrize(("rules", "kept", "held_out"), [("shift", 7, 2), ("symmetry", 6, 2)])
def test_one_part_alone(rules, kept, held_out):
    train, ood = (rules_of(CompositionalImages(rules=rules), split, n=500) for split in ("train", "ood"))
    assert (len(train), len(ood), len(train & ood)) == (kept, held_out, 0)
    still = {rule[2] if rules == "shift" else rule[:2] for rule in train | ood}
    assert still == ({0} if rules == "shift" else {(0, 0)})


def test_split_seed_and_share_choose_the_held_out_rules():
    first, second = (rules_of(CompositionalImages(split_seed=seed), "ood") for seed in (0, 1))
    assert first != second
    assert len(rules_of(CompositionalImages(held_out_share=0.5), "ood")) == 36


def test_random_access():
    task = CompositionalImages()
    every = task.generate(3 * CHUNK, "train", seed=5)
    for n, start in ((5, 250), (0, 300), (1, 255), (1, 256), (CHUNK, CHUNK), (300, 200)):
        part = task.generate(n, "train", seed=5, start=start)
        for whole, piece in zip(every, part, strict=True):
            assert np.array_equal(whole[start : start + n], piece)


def test_same_arguments_same_problems_and_disjoint_streams():
    task = CompositionalImages()
    seen = {}
    for split, seed in itertools.product(SPLITS, (0, 1)):
        first, again = (task.generate(500, split, seed).inputs for _ in range(2))
        assert np.array_equal(first, again)
        seen[split, seed] = {problem.tobytes() for problem in first}
        assert len(seen[split, seed]) == 500
    assert len(set.union(*seen.values())) == 6 * 500


def test_task_can_be_pickled():
    task = CompositionalImages(shapes=[1, 2])
    assert np.array_equal(
        pickle.loads(pickle.dumps(task)).generate(5, "ood", 0).outputs, task.generate(5, "ood", 0)[1]
    )
    assert task == CompositionalImages(shapes=(1, 2))


def test_examples_for_a_model():
    task = CompositionalImages(pairs=2)
    problems = task.generate(20, "test", seed=1)
    example = task.examples(7, 4, "test", seed=1)
    assert example["inputs"].shape == (4, 6, 12, 12)
    assert example["labels"].shape == (4, 1, 12, 12)
    assert example["inputs"].dtype == example["labels"].dtype == np.float32
    for pair in range(3):
        assert np.array_equal(np.rint(example["inputs"][:, 2 * pair] * 255), problems.inputs[7:11, pair])
    for pair in range(2):
        assert np.array_equal(np.rint(example["inputs"][:, 2 * pair + 1] * 255), problems.outputs[7:11, pair])
    assert not example["inputs"][:, -1].any()
    assert np.array_equal(np.rint(example["labels"][:, 0] * 255), problems.outputs[7:11, -1])
    assert set(np.unique(example["labels"])) <= {0, *(np.float32(level) / np.float32(255) for level in LEVELS)}


def test_dataset_columns():
    task = CompositionalImages()
    data = task.dataset(6, "ood", seed=4)
    problems = task.generate(6, "ood", seed=4)
    assert data.column_names == ["inputs", "outputs", "rule"]
    for name in ("inputs", "outputs"):
        images = np.array([[np.asarray(image) for image in row] for row in data[name]])
        assert images.dtype == np.uint8
        assert np.array_equal(images, getattr(problems, name))
    assert data[3]["rule"] == rule_name(problems.shifts[3], int(problems.symmetries[3]))
    assert len(task.dataset(0, "train", seed=0)) == len(task.examples(0, 0, "train", seed=0)["inputs"]) == 0


def test_shards_have_the_chunks_of_the_split():
    """Shard 1 of 2: the second and the fourth chunk."""
    task = CompositionalImages(pairs=1)
    problems = task.generate(4 * CHUNK, "train", seed=0).inputs
    shard = split_dataset_by_node(task.stream("train", seed=0, shards=2), rank=1, world_size=2)
    streamed = list(itertools.islice(shard, CHUNK + 10))
    images = np.array([[np.asarray(image) for image in problem["inputs"]] for problem in streamed])
    assert np.array_equal(images[:CHUNK], problems[CHUNK : 2 * CHUNK])
    assert np.array_equal(images[CHUNK:], problems[3 * CHUNK : 3 * CHUNK + 10])


def test_stream_is_like_the_dataset():
    task = CompositionalImages()
    streamed, stored = list(task.stream("test", seed=3, shards=1).take(4)), task.dataset(4, "test", seed=3)
    for problem, expected in zip(streamed, stored, strict=True):
        assert problem["rule"] == expected["rule"]
        for name in ("inputs", "outputs"):
            for image, other in zip(problem[name], expected[name], strict=True):
                assert image.mode == other.mode == "L"
                assert image.tobytes() == other.tobytes()


@pytest.mark.parametrize("shards", [4, 5])
def test_stream_gives_processes_different_problems(shards):
    """With as many shards as processes (or a multiple) by shards; otherwise by taking turns."""
    stream = CompositionalImages(pairs=1).stream("train", seed=0, shards=shards)
    seen = []
    for rank in range(2):
        part = split_dataset_by_node(stream, rank=rank, world_size=2)
        problems = itertools.islice(part, 100)
        seen.append({b"".join(image.tobytes() for image in problem["inputs"]) for problem in problems})
    assert len(seen[0]) == len(seen[1]) == 100
    assert not seen[0] & seen[1]


def test_picture():
    picture = CompositionalImages().picture(seed=2, split="ood")
    pixels = np.asarray(picture)[::8, ::8]  # every pixel is a block of 8 x 8
    assert picture.size == (8 * (4 * 14 + 4), 8 * (2 * 14 + 2))
    assert np.array_equal(np.asarray(picture), pixels.repeat(8, axis=0).repeat(8, axis=1))
    problem = CompositionalImages().generate(1, "ood", seed=2)
    assert np.array_equal(pixels[2:14, 2:14], problem.inputs[0, 0])
    assert np.array_equal(pixels[16:28, 46:58], problem.outputs[0, 3])


def test_glyphs_without_symmetry_leave_no_doubt():
    for rules, pairs in itertools.product(("both", "shift", "symmetry"), (1, 3)):
        task = CompositionalImages(rules=rules, pairs=pairs, shapes=(1, 2))
        assert [task.ambiguous_share(256, split, seed=0) for split in SPLITS] == [0, 0, 0]


def test_ambiguous_share_equals_brute_force(monkeypatch):
    """With glyphs that have symmetries of their own, so that several rules fit the context."""
    monkeypatch.setattr(compositional_images, "GLYPHS", ("####/####/####/####", ".##./.##./.##./.##.", GLYPHS[0]))
    task = CompositionalImages(pairs=1, cells=2, shapes=(1, 2))
    problems = task.generate(40, "test", seed=1)
    rules = list(itertools.product(range(2), range(2), SYMMETRIES))
    ambiguous = 0
    for inputs, outputs in zip(*problems[:2], strict=True):
        answers = set()
        for down, right, symmetry in rules:
            context, target = (moved(image, np.array([down, right]) * 4, symmetry) for image in inputs)
            if np.array_equal(context, outputs[0]):
                answers.add(target.tobytes())
        assert outputs[1].tobytes() in answers
        ambiguous += len(answers) > 1
    assert 0 < ambiguous < 40
    assert task.ambiguous_share(40, "test", seed=1) == pytest.approx(ambiguous / 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": 0}, "pairs must be at least 1, got 0"),
        ({"cells": 1}, "cells must be at least 2, got 1"),
        ({"cell_size": 6}, "cell_size must be a multiple of 4, got 6"),
        ({"shapes": (0, 2)}, r"1 <= fewest <= most <= 8, got \(0, 2\)"),
        ({"shapes": (3, 2)}, r"got \(3, 2\)"),
        ({"shapes": (2, 5), "cells": 2}, r"most <= 4, got \(2, 5\)"),
        ({"rules": "colour"}, "rules must be one of .*, got 'colour'"),
        ({"held_out_share": 1.0}, "held_out_share must be between 0 and 1, both excluded, got 1.0"),
        ({"held_out_share": 0.9}, "every shift and every symmetry must occur in training, got held_out_share=0.9"),
    ],
)
def test_bad_settings_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        CompositionalImages(**arguments)


def test_bad_draws_are_rejected(monkeypatch):
    task = CompositionalImages()
    with pytest.raises(ValueError, match="split must be one of"):
        task.generate(1, "validation", seed=0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        task.stream("train", seed=-1)
    with pytest.raises(ValueError, match="n and start must be >= 0, got -1 and 0"):
        task.generate(-1, "train", seed=0)
    with pytest.raises(ValueError, match="n and start must be >= 0, got 1 and -2"):
        task.examples(-2, 1, "train", seed=0)
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        task.stream("train", seed=0, shards=0)
