"""Sequences, ids and labels once more, in plain Python and one token at a time."""

from collections.abc import Callable

import numpy as np

from hf_sparsecoding.tasks.length_generalization import Reversal, SequenceTask


Solution = tuple[int, list[str], list[int], list[int]]  # length, response, ids of prompt and response for start 0


def check_examples(
    task: SequenceTask, examples: dict[str, np.ndarray], solve: Callable[[list[str]], Solution]
) -> set[tuple[int, int]]:
    """Every number of every example against `solve(prompt)`; the (length, start) that occur."""
    size = examples["inputs"].shape[1]
    assert {array.dtype for array in examples.values()} == {np.dtype("int64")}
    found, longest = set(), 0
    columns = {name: array.tolist() for name, array in examples.items()}
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        names = [task.vocabulary[token] for token in row["inputs"]]
        first, end = row["response_start"], names.index("<eos>")
        length, response, prompt_ids, response_ids = solve(names[1:first])
        assert row["length"] == length
        assert names == ["<bos>", *names[1:first], *response, "<eos>"] + ["<pad>"] * (size - end - 1)
        offsets = prompt_ids + response_ids if task.positions == "coupled" else list(range(end - 1))
        start = row["position_ids"][1] - offsets[0]
        ids = [start + offset for offset in offsets]
        ends = []
        if task.couple_ends and task.positions == "coupled":
            ends = 2 * [min(ids) - 1 if isinstance(task, Reversal) else max(ids) + 1]
        if task.cyclic:
            ids, ends = ([(one - 1) % task.max_position + 1 for one in some] for some in (ids, ends))
        outer = ends[0] if ends else 0
        assert row["position_ids"] == [outer, *ids, outer] + [0] * (size - end - 1)
        assert min(ids + ends) >= 1
        assert max(ids + ends) <= task.max_position
        for place in range(size):
            trained = first - 1 <= place < end
            assert row["labels"][place] == (row["inputs"][place + 1] if trained else -100)
            assert row["position_labels"][place] == (row["position_ids"][place + 1] if trained else -100)
        found.add((length, start))
        longest = max(longest, end + 1)
    assert longest == size  # no more padding than needed
    return found


def rows(examples: dict[str, np.ndarray]) -> list[dict]:
    return [{name: array[row] for name, array in examples.items()} for row in range(len(examples["length"]))]


def response_of(row: dict) -> list[int]:
    """The right response with its EOS."""
    return [token for token in row["labels"].tolist() if token != -100]


def check_checker(task: SequenceTask, examples: dict[str, np.ndarray]) -> None:
    """`is_correct` takes the right response, and no other."""
    for row in rows(examples):
        right = response_of(row)
        assert task.is_correct(right, row)
        assert task.is_correct([*right, 3, 4], row)
        assert not task.is_correct(right[:-1], row)
        assert not task.is_correct([], row)
        assert not task.is_correct([right[0] - len(task.vocabulary), *right[1:]], row)
        assert not task.is_correct([len(task.vocabulary), *right[1:]], row)  # models may have more outputs
        assert not task.is_correct([*right[:-1], right[-2], right[-1]], row)
        for place in range(len(right)):
            other = 3 + (right[place] - 2) % (len(task.vocabulary) - 3)
            assert not task.is_correct([*right[:place], other, *right[place + 1 :]], row)
