"""Addition, and multiplication by a short factor, with reversed answers. Source: arXiv 2405.20671.

n problems, S tokens of prompt and response, D digits.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from .coupling import SPECIAL, SequenceTask, Sizes


DIGITS = tuple("0123456789")
ZERO = len(SPECIAL)  # token id of the digit 0
OPERATOR = ZERO + len(DIGITS)
EQUALS = OPERATOR + 1


@dataclass(frozen=True)
class Addition(SequenceTask):
    """Sums of two numbers of `length` digits, zeros in front included; the response has one digit more, reversed.

    All digits of the operands are uniform. The digit of weight 10^i has the id s + 1 + i in both operands and in the
    response; '+' and '=' have s.

    >>> task = Addition()
    >>> example = task.dataset(11, "test", seed=0)[10]
    >>> task.decode(example["inputs"])
    '060+942=2001'
    >>> example["position_ids"]
    [0, 20, 19, 18, 17, 20, 19, 18, 17, 18, 19, 20, 21, 0]
    >>> task.decode(example["labels"])  # of the response only
    '2001'

    >>> task = Addition(pad_operands=True, couple_ends=True)
    >>> example = task.dataset(11, "test", seed=0)[10]
    >>> task.decode(example["inputs"])
    '0060+0942=2001'
    >>> example["position_ids"]
    [21, 20, 19, 18, 17, 16, 20, 19, 18, 17, 16, 17, 18, 19, 20, 21]

    Args:
        pad_operands: Write one more zero in front of both operands, so that they are as long as the response and its
            last digit, the carry, has digits of its id as well.

    Other options: see `SequenceTask`.
    """

    pad_operands: bool = False

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*SPECIAL, *DIGITS, "+", "=")

    def _sizes(self, length: int) -> Sizes:
        prompt = 2 * (length + self.pad_operands) + 2
        return Sizes(prompt=prompt, response=length + 1, ids=length + 2)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        operands = rng.integers(10, size=(2, n, length))
        sums = np.zeros((n, length + 1), dtype=np.int64)
        sums[:, :length] = operands.sum(axis=0)[:, ::-1]
        if self.pad_operands:
            operands = np.pad(operands, ((0, 0), (0, 0), (1, 0)))
        return written(*operands, carried(sums))

    def _answer(self, prompt: list[str]) -> list[str]:
        first, second = "".join(prompt).removesuffix("=").split("+")
        digits = len(first) + 1 - self.pad_operands
        return list(str(int(first) + int(second)).zfill(digits)[::-1])


@dataclass(frozen=True)
class Multiplication(SequenceTask):
    """Products of a number of `length` digits and one of `factor_digits`, the response reversed, with zeros in front.

    All digits of the factors are uniform; the response has `length + factor_digits` digits. As in addition, the digit
    of weight 10^i has the id s + 1 + i in both factors and in the response; '*' and '=' have s. So the digits that a
    digit of the response depends on, apart from the carry, are the short factor and those digits of the long one that
    have its own id or, with two factor digits, the id before.

    >>> task = Multiplication(factor_digits=2)
    >>> example = task.dataset(10, "test", seed=0)[9]
    >>> task.decode(example["inputs"])
    '648*64=27414'
    >>> example["position_ids"]
    [0, 14, 13, 12, 11, 13, 12, 11, 12, 13, 14, 15, 16, 0]

    Args:
        factor_digits: Digits of the second factor, 1 or 2.

    Other options: see `SequenceTask`.
    """

    factor_digits: int = 1

    def __post_init__(self):
        if self.factor_digits not in (1, 2):
            raise ValueError(f"factor_digits must be 1 or 2, got {self.factor_digits}")
        super().__post_init__()

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*SPECIAL, *DIGITS, "*", "=")

    def _sizes(self, length: int) -> Sizes:
        digits = length + self.factor_digits
        return Sizes(prompt=digits + 2, response=digits, ids=digits + 1)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        first = rng.integers(10, size=(n, length))
        second = rng.integers(10, size=(n, self.factor_digits))
        sums = np.zeros((n, length + self.factor_digits), dtype=np.int64)
        for weight in range(self.factor_digits):
            sums[:, weight : weight + length] += first[:, ::-1] * second[:, [-1 - weight]]
        return written(first, second, carried(sums))

    def _answer(self, prompt: list[str]) -> list[str]:
        first, second = "".join(prompt).removesuffix("=").split("*")
        return list(str(int(first) * int(second)).zfill(len(first) + len(second))[::-1])


def carried(sums: Int[np.ndarray, "n D"]) -> Int[np.ndarray, "n D"]:
    """Digits of numbers that are given by the sum in each column, units first; the last column must hold what is
    carried into it."""
    digits, carry = np.empty_like(sums), 0
    for column in range(sums.shape[1]):
        carry, digits[:, column] = np.divmod(sums[:, column] + carry, 10)
    return digits


def written(
    first: Int[np.ndarray, "n D1"], second: Int[np.ndarray, "n D2"], answer: Int[np.ndarray, "n D3"]
) -> tuple[Int[np.ndarray, "n S"], Int[np.ndarray, " S"]]:
    """Tokens and coupled ids (for s = 0) of two operands, highest digit first, and the answer, units first."""
    one = np.ones((len(first), 1), dtype=np.int64)
    tokens = np.concatenate([ZERO + first, OPERATOR * one, ZERO + second, EQUALS * one, ZERO + answer], axis=1)
    up = [np.arange(1, digits.shape[1] + 1) for digits in (first, second, answer)]
    return tokens, np.concatenate([up[0][::-1], [0], up[1][::-1], [0], up[2]])
