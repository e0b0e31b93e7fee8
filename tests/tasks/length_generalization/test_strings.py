"""Copy, reversal, pattern matching and parity with a scratchpad: every token and id, and that answers are unique."""

import doctest
from functools import partial

import numpy as np
import pytest

from hf_sparsecoding.tasks.length_generalization import Copy, PatternMatching, Reversal, ScratchpadParity, strings

from .oracle import Solution, check_checker, check_examples, rows


def test_the_examples_in_the_docstrings():
    failed, tried = doctest.testmod(strings)
    assert tried > 0
    assert failed == 0


def solve_copy(prompt: list[str]) -> Solution:
    string, ids = prompt[:-1], [1 + place for place in range(len(prompt) - 1)]
    assert prompt[-1] == "="
    return len(string), string, [*ids, 0], ids


def solve_reversal(prompt: list[str]) -> Solution:
    length, response, ids = len(prompt) - 1, [], []
    assert prompt[-1] == "="
    for place in range(length - 1, -1, -1):
        response.append(prompt[place])
        ids.append(place)
    return length, response, list(range(length + 1)), ids


def solve_find(prompt: list[str], echo: bool = True) -> Solution:
    string, key = prompt[:-2], prompt[-1]
    assert prompt[-2] == "?"
    places = [place for place, symbol in enumerate(string) if symbol == key]
    assert len(places) == 1  # so the answer is unique
    assert places[0] < len(string) - 1  # and there is one
    read = [places[0], places[0] + 1] if echo else [places[0] + 1]
    prompt_ids = [*range(1, len(string) + 1), 0, 0]
    return len(string), [string[place] for place in read], prompt_ids, [place + 1 for place in read]


def solve_count(prompt: list[str], most: int = 9) -> Solution:
    string, key = prompt[:-2], prompt[-1]
    assert prompt[-2] == "?"
    response, ids = [], []
    for place, symbol in enumerate(string):
        if symbol == key:
            response.append(str(len(response) + 1))
            ids.append(place + 1)
    assert 1 <= len(response) <= most
    return len(string), response, [*range(1, len(string) + 1), 0, 0], ids


def solve_parity(prompt: list[str]) -> Solution:
    response, ids, ones = [], [], 0
    assert prompt[-1] == "="
    for place, bit in enumerate(prompt[:-1]):
        assert bit in ("0", "1", "2", "3")
        if bit in ("2", "3"):
            ones += int(bit) - 2
            response.append(("even", "odd")[ones % 2])
            ids.append(place + 1)
    assert response
    return len(prompt) - 1, response, [*range(1, len(prompt)), 0], ids


TASKS = [
    (Copy(), solve_copy),
    (Copy(symbols=26, train_lengths=(1, 1), positions="absolute", max_position=50), solve_copy),
    (Reversal(symbols=2), solve_reversal),
    (Reversal(train_lengths=[4, 7], test_lengths=[30], max_position=31), solve_reversal),
    (PatternMatching(), solve_find),
    (PatternMatching(echo_key=False, symbols=2), partial(solve_find, echo=False)),
    (PatternMatching(positions="absolute", symbols=20), solve_find),
    (PatternMatching(variant="count", train_lengths=(1, 10)), solve_count),
    (PatternMatching(variant="count", max_count=3, symbols=2), partial(solve_count, most=3)),
    (ScratchpadParity(), solve_parity),
    (ScratchpadParity(marked_share=0.05), solve_parity),
    (ScratchpadParity(marked_share=1), solve_parity),
    (ScratchpadParity(positions="absolute", max_position=41), solve_parity),
    (Copy(couple_ends=True), solve_copy),
    (Reversal(couple_ends=True), solve_reversal),
    (PatternMatching(couple_ends=True), solve_find),
    (PatternMatching(couple_ends=True, variant="count"), solve_count),
    (ScratchpadParity(couple_ends=True), solve_parity),
    (ScratchpadParity(cyclic=True), solve_parity),
    (PatternMatching(cyclic=True, couple_ends=True), solve_find),
    (Copy(positions="absolute", max_position=41, cyclic=True), solve_copy),
]


@pytest.mark.parametrize("split", ["train", "test", "ood"])
@pytest.mark.parametrize(("task", "solve"), TASKS, ids=[repr(task) for task, _ in TASKS])
def test_tokens_and_ids(task, solve, split):
    found = check_examples(task, task.examples(5, 700, split, seed=3), solve)
    shortest, longest = task.train_lengths
    expected = set(range(shortest, longest + 1)) if split != "ood" else set(task.test_lengths)
    assert {length for length, _ in found} == expected


@pytest.mark.parametrize("length", [2, 13, 31])
@pytest.mark.parametrize(
    ("task", "solve"),
    [
        (Copy(), solve_copy),
        (Reversal(), solve_reversal),
        (PatternMatching(), solve_find),
        (PatternMatching(variant="count"), solve_count),
        (ScratchpadParity(), solve_parity),
    ],
    ids=lambda value: type(value).__name__,
)
def test_starts_make_use_of_all_ids(task, solve, length):
    examples = task.examples_of_length(length, 0, 500, "test", seed=0)
    assert check_examples(task, examples, solve) == {(length, start) for start in range(1, 33 - length)}
    assert set(examples["position_ids"].ravel()) == set(range(33))
    with pytest.raises(ValueError, match="length 32 takes 33 coupled position ids, got max_position=32"):
        task.examples_of_length(32, 0, 1, "test", seed=0)


@pytest.mark.parametrize("couple_ends", [False, True])
@pytest.mark.parametrize(("task", "solve"), [(Copy, solve_copy), (Reversal, solve_reversal)])
def test_cyclic_ids(task, solve, couple_ends):
    """Every id may be the first, also in the longest problem that fits, and all are as frequent."""
    task = task(couple_ends=couple_ends, cyclic=True)
    for length in (13, 31 - couple_ends):
        examples = task.examples_of_length(length, 0, 2000, "test", seed=0)
        check_examples(task, examples, solve)
        counts = np.bincount(examples["position_ids"].ravel(), minlength=33)[1:]
        assert counts == pytest.approx(counts.mean(), rel=0.1)
        assert set(examples["position_ids"][:, 1]) == set(range(1, 33))
    with pytest.raises(ValueError, match=f"length {32 - couple_ends} takes 33 coupled position ids"):
        task.examples_of_length(32 - couple_ends, 0, 1, "test", seed=0)


@pytest.mark.parametrize(("task", "solve"), [(Copy, solve_copy), (Reversal, solve_reversal)])
def test_starts_leave_room_for_the_ends(task, solve):
    task = task(couple_ends=True)
    examples = task.examples_of_length(13, 0, 500, "test", seed=0)
    starts = {start for _, start in check_examples(task, examples, solve)}
    assert len(starts) == 18  # of 32 ids a problem takes 15
    assert set(examples["position_ids"].ravel()) == set(range(1, 33))
    with pytest.raises(ValueError, match="length 31 takes 33 coupled position ids, got max_position=32"):
        task.examples_of_length(31, 0, 1, "test", seed=0)


def test_strings_are_uniform():
    task = Copy(symbols=5, train_lengths=(1, 6))
    tokens = task.examples(0, 10_000, "train", seed=0)["inputs"]
    counts = np.bincount(tokens.ravel(), minlength=9)[3:8]
    assert counts.sum() / 2 == pytest.approx(10_000 * 3.5, rel=0.02)  # mean length
    assert counts == pytest.approx(counts.mean(), rel=0.05)


def test_keys_and_their_places_are_uniform():
    task = PatternMatching(symbols=6)
    examples = task.examples_of_length(8, 0, 14_000, "train", seed=0)
    keys = examples["inputs"][:, 10]
    places = (examples["inputs"][:, 1:9] == keys[:, None]).argmax(axis=1)
    assert np.bincount(keys - 3) == pytest.approx(14_000 / 6, rel=0.1)
    assert np.bincount(places) == pytest.approx(14_000 / 7, rel=0.1)


def test_counts_and_their_places_are_uniform():
    task = PatternMatching(variant="count", max_count=4)
    examples = task.examples_of_length(6, 0, 12_000, "train", seed=0)
    found = examples["inputs"][:, 1:7] == examples["inputs"][:, [8]]
    assert np.bincount(found.sum(axis=1))[1:] == pytest.approx(3000, rel=0.1)
    assert found.sum(axis=0) == pytest.approx(12_000 * 2.5 / 6, rel=0.1)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_bits_are_uniform_and_marked_independently(share):
    task = ScratchpadParity(marked_share=share)
    bits = task.examples_of_length(8, 0, 8000, "train", seed=0)["inputs"][:, 1:9] - 3
    none = (1 - share) ** 8  # these get one mark nevertheless
    assert (bits >= 2).mean(axis=0) == pytest.approx(share + none / 8, abs=0.02)
    assert (bits % 2).mean(axis=0) == pytest.approx(0.5, abs=0.02)
    together = (bits[:, :1] >= 2) & (bits[:, 1:] >= 2)
    assert together.mean(axis=0) == pytest.approx(share**2, abs=0.02)


def test_final_parities_are_balanced():
    task = ScratchpadParity()
    odd = [row["labels"][row["labels"] >= 0][-2] == 9 for row in rows(task.examples(0, 4000, "train", seed=0))]
    assert np.mean(odd) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "task",
    [Copy(), Reversal(), PatternMatching(), PatternMatching(echo_key=False), PatternMatching(variant="count")],
    ids=repr,
)
def test_the_checker(task):
    check_checker(task, task.examples(0, 60, "train", seed=1))


def test_the_checker_of_parities():
    check_checker(ScratchpadParity(), ScratchpadParity().examples(0, 60, "train", seed=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Copy(symbols=1), "symbols must be between 2 and 26, got 1"),
        (lambda: Reversal(symbols=27), "symbols must be between 2 and 26, got 27"),
        (lambda: PatternMatching(variant="replace"), "variant must be one of .*, got 'replace'"),
        (lambda: PatternMatching(max_count=10), "max_count must be between 1 and 9, got 10"),
        (lambda: PatternMatching(train_lengths=(1, 5)), "lengths must be at least 2 for this task, got 1"),
        (lambda: ScratchpadParity(marked_share=0), "marked_share must be above 0 and at most 1, got 0"),
        (lambda: ScratchpadParity(marked_share=float("nan")), "marked_share must be above 0 and at most 1, got nan"),
    ],
)
def test_bad_options_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
