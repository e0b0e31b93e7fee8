"""Addition and multiplication: every digit and id by the schoolbook, carries, lengths, corner cases."""

import doctest

import numpy as np
import pytest

from hf_sparsecoding.tasks.length_generalization import Addition, Multiplication, arithmetic
from hf_sparsecoding.tasks.length_generalization.arithmetic import carried, written

from .oracle import Solution, check_checker, check_examples


def test_the_examples_in_the_docstrings():
    failed, tried = doctest.testmod(arithmetic)
    assert tried > 0
    assert failed == 0


def solve(prompt: list[str]) -> Solution:
    """By hand, column by column; an id is 1 + the exponent of the digit's weight."""
    operator = next(place for place, name in enumerate(prompt) if name in "+*")
    first, second = prompt[:operator], prompt[operator + 1 : -1]
    assert prompt[-1] == "="
    columns = [0] * (len(first) + (1 if prompt[operator] == "+" else len(second)))
    if prompt[operator] == "+":
        assert len(first) == len(second)
        for digits in (first, second):
            for exponent, digit in enumerate(reversed(digits)):
                columns[exponent] += int(digit)
    else:
        for i, a in enumerate(reversed(first)):
            for j, b in enumerate(reversed(second)):
                columns[i + j] += int(a) * int(b)
    response, carry = [], 0
    for column in columns:
        total = column + carry
        response.append(str(total % 10))
        carry = total // 10
    assert carry == 0
    down = [list(range(len(digits), 0, -1)) for digits in (first, second)]
    return len(first), response, [*down[0], 0, *down[1], 0], list(range(1, len(columns) + 1))


def solve_padded(prompt: list[str]) -> Solution:
    """The zeros in front taken away and their ids put back."""
    operator = prompt.index("+")
    assert prompt[0] == prompt[operator + 1] == "0"
    length, response, prompt_ids, ids = solve([*prompt[1:operator], "+", *prompt[operator + 2 :]])
    return length, response, [length + 1, *prompt_ids[: length + 1], length + 1, *prompt_ids[length + 1 :]], ids


TASKS = [
    Addition(),
    Addition(couple_ends=True, train_lengths=(1, 6)),
    Addition(couple_ends=True, positions="absolute", max_position=70),
    Multiplication(factor_digits=2, couple_ends=True),
    Addition(train_lengths=(1, 1), max_position=22),
    Addition(train_lengths=(7, 13), max_position=42, positions="absolute", test_lengths=(3,)),
    Multiplication(),
    Multiplication(factor_digits=2, train_lengths=[3, 9], test_lengths=[1, 15]),
    Multiplication(factor_digits=2, positions="absolute", max_position=50),
]


@pytest.mark.parametrize("split", ["train", "test", "ood"])
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_digits_and_ids(task, split):
    found = check_examples(task, task.examples(5, 1200, split, seed=3), solve)
    shortest, longest = task.train_lengths
    expected = set(range(shortest, longest + 1)) if split != "ood" else set(task.test_lengths)
    assert {length for length, _ in found} == expected


@pytest.mark.parametrize("positions", ["coupled", "absolute"])
@pytest.mark.parametrize("couple_ends", [False, True])
def test_padded_operands(couple_ends, positions):
    task = Addition(pad_operands=True, couple_ends=couple_ends, positions=positions, max_position=70)
    assert len(check_examples(task, task.examples(0, 1200, "train", seed=0), solve_padded)) > 400
    check_checker(task, task.examples(0, 50, "ood", seed=0))


@pytest.mark.parametrize("length", [1, 2, 20])
@pytest.mark.parametrize("task", [Addition(), Multiplication(), Multiplication(factor_digits=2)], ids=repr)
def test_starts_make_use_of_all_ids(task, length):
    examples = task.examples_of_length(length, 0, 1500, "test", seed=0)
    last = 32 - length - (1 if isinstance(task, Addition) else task.factor_digits)
    assert check_examples(task, examples, solve) == {(length, start) for start in range(1, last + 1)}
    assert set(examples["position_ids"].ravel()) == set(range(33))


def test_the_longest_length_that_fits():
    assert (Addition(max_position=22).examples(0, 300, "ood", 0)["position_ids"] == 22).any()
    with pytest.raises(ValueError, match="length 20 takes 22 coupled position ids, got max_position=21; raise it"):
        Addition(max_position=21)
    with pytest.raises(ValueError, match="length 20 takes 63 absolute position ids, got max_position=62"):
        Addition(max_position=62, positions="absolute")
    with pytest.raises(ValueError, match="length 31 takes 33 coupled position ids, got max_position=32"):
        Addition().examples_of_length(31, 0, 1, "test", seed=0)
    with pytest.raises(ValueError, match="length 20 takes 23 coupled position ids, got max_position=22"):
        Addition(max_position=22, couple_ends=True)
    assert (Addition(max_position=23, couple_ends=True).examples(0, 300, "ood", 0)["position_ids"] == 23).any()
    assert Addition(max_position=202).examples_of_length(200, 0, 1, "test", seed=0)["inputs"].shape == (1, 605)


@pytest.mark.parametrize(
    ("first", "second", "response"),
    [
        ("999", "001", "0001"),
        ("999999", "999999", "8999991"),
        ("000", "000", "0000"),
        ("9", "9", "81"),
        ("0", "0", "00"),
        ("0999", "0001", "00010"),
        ("5445", "4555", "00001"),
    ],
)
def test_carries_of_sums(first, second, response):
    a, b = (np.array([list(map(int, digits))]) for digits in (first, second))
    sums = np.concatenate([a + b, [[0]]], axis=1)
    sums[:, :-1] = sums[:, :-1][:, ::-1]
    tokens, _ = written(a, b, carried(sums))
    task = Addition()
    assert task.decode(tokens[0]) == f"{first}+{second}={response}"
    assert task.is_correct([*tokens[0, -len(response) :], 2], example(task, f"{first}+{second}="))


@pytest.mark.parametrize(
    ("prompt", "response"),
    [("999*9=", "1998"), ("99*99=", "1089"), ("000*9=", "0000"), ("9*09=", "180"), ("1*1=", "10")],
)
def test_corner_cases_of_products(prompt, response):
    task = Multiplication()
    codes = [task.vocabulary.index(name) for name in response]
    assert task.is_correct([*codes, 2], example(task, prompt))
    assert not task.is_correct([*codes[:-1], 2], example(task, prompt))
    assert solve(list(prompt))[1] == list(response)


def example(task: Addition | Multiplication, prompt: str) -> dict:
    tokens = [1, *(task.vocabulary.index(name) for name in prompt)]
    return {"inputs": tokens, "response_start": len(tokens)}


@pytest.mark.parametrize("factor_digits", [1, 2])
def test_all_products_of_one_digit_occur(factor_digits):
    task = Multiplication(factor_digits=factor_digits)
    examples = task.examples_of_length(1, 0, 20_000, "train", seed=0)
    prompts = {task.decode(row) for row in examples["inputs"][:, : 4 + factor_digits]}
    width = factor_digits + 1
    assert prompts == {
        f"{a}*{b:0{factor_digits}}={str(a * b).zfill(width)[::-1]}"[: 3 + factor_digits]
        for a in range(10)
        for b in range(10**factor_digits)
    }


@pytest.mark.parametrize("task", [Addition(), Multiplication(factor_digits=2)], ids=repr)
def test_the_checker(task):
    check_checker(task, task.examples(0, 60, "train", seed=1))


def test_a_large_sum_is_checked_with_whole_numbers():
    task = Addition(max_position=202)
    check_checker(task, task.examples_of_length(200, 0, 2, "test", seed=0))


def test_factor_digits_are_checked():
    with pytest.raises(ValueError, match="factor_digits must be 1 or 2, got 3"):
        Multiplication(factor_digits=3)
