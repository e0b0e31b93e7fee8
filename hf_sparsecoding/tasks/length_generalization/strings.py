"""Strings to copy, to reverse and to search, and parities with a scratchpad. Sources: arXiv 2405.20671, 2502.16792.

n problems of L = `length` symbols, S tokens of prompt and response, R tokens of the longest response.
"""

from dataclasses import dataclass
from string import ascii_lowercase
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from .coupling import PAD, SPECIAL, SequenceTask, Sizes, random_places


FIRST = len(SPECIAL)  # token id of the first symbol
VARIANTS = ("find", "count")


@dataclass(frozen=True)
class StringTask(SequenceTask):
    """What tasks on strings of letters share.

    Args:
        symbols: Number of letters.
    """

    symbols: int = 10

    def __post_init__(self):
        if not 2 <= self.symbols <= len(ascii_lowercase):
            raise ValueError(f"symbols must be between 2 and {len(ascii_lowercase)}, got {self.symbols}")
        super().__post_init__()

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*SPECIAL, *ascii_lowercase[: self.symbols], "=")

    def _sizes(self, length: int) -> Sizes:
        return Sizes(prompt=length + 1, response=length, ids=length + 1)

    def _string(self, length: int, n: int, rng: np.random.Generator) -> Int[np.ndarray, "n L+1"]:
        """Uniform symbols, and '='."""
        tokens = np.full((n, length + 1), FIRST + self.symbols)
        tokens[:, :length] = rng.integers(FIRST, FIRST + self.symbols, size=(n, length))
        return tokens


@dataclass(frozen=True)
class Copy(StringTask):
    """A string, to be written again.

    The symbols have the ids s + 1 to s + L, in the response as in the prompt; '=' has s.

    >>> task = Copy()
    >>> example = task.dataset(1, "test", seed=0)[0]
    >>> task.decode(example["inputs"])
    'hggf=hggf'
    >>> example["position_ids"]
    [0, 26, 27, 28, 29, 25, 26, 27, 28, 29, 0]

    Options: see `StringTask` and `SequenceTask`.
    """

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens, places = self._string(length, n, rng), np.arange(1, length + 1)
        return np.concatenate([tokens, tokens[:, :-1]], axis=1), np.concatenate([places, [0], places])

    def _answer(self, prompt: list[str]) -> list[str]:
        return prompt[:-1]


@dataclass(frozen=True)
class Reversal(StringTask):
    """A string, to be written backwards.

    The symbols have the ids s to s + L - 1, '=' has s + L, and the response goes back from s + L - 1 to s.

    >>> task = Reversal()
    >>> example = task.dataset(1, "test", seed=0)[0]
    >>> task.decode(example["inputs"])
    'hggf=fggh'
    >>> example["position_ids"]
    [0, 25, 26, 27, 28, 29, 28, 27, 26, 25, 0]

    Options: see `StringTask` and `SequenceTask`.
    """

    def _end(self, length: int) -> int:
        return -1  # it goes backwards

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens, places = self._string(length, n, rng), np.arange(length + 1)
        return np.concatenate([tokens, tokens[:, -2::-1]], axis=1), np.concatenate([places, places[-2::-1]])

    def _answer(self, prompt: list[str]) -> list[str]:
        return list(reversed(prompt[:-1]))


@dataclass(frozen=True)
class PatternMatching(StringTask):
    """A string and a key: which symbol followed the key ("find"), or how often does it occur ("count").

    The symbols have the ids s + 1 to s + L, '?' and the key after it have s; a token of the response has the id of the
    place it was read from.

    "find": the key occurs once in the string, not as its last symbol. The response is the key, at the place where it
    was found, and the symbol that follows: first the place is looked up by its content, then the next one by its id.

    >>> task = PatternMatching()
    >>> example = task.dataset(1, "test", seed=0)[0]
    >>> task.decode(example["inputs"])
    'idbac?aac'
    >>> example["position_ids"]
    [0, 6, 7, 8, 9, 10, 5, 5, 9, 10, 0]

    "count": the number of occurrences is uniform from 1 to `max_count` (or to L), their places are random. The
    response counts them one by one, each at its place, and ends with their number.

    >>> task = PatternMatching(variant="count")
    >>> example = task.dataset(6, "test", seed=0)[5]
    >>> task.decode(example["inputs"])
    'fgiedfccej?f12'
    >>> example["position_ids"]
    [0, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 8, 8, 9, 14, 0]

    Args:
        variant: "find" or "count".
        echo_key: "find" writes the key before the symbol that follows; False leaves that symbol alone.
        max_count: Most occurrences to "count", 1 to 9, at any length.

    Other options: see `StringTask` and `SequenceTask`.
    """

    train_lengths: tuple[int, int] = (2, 10)
    variant: str = "find"
    echo_key: bool = True
    max_count: int = 9

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {VARIANTS}, got {self.variant!r}")
        if not 1 <= self.max_count <= 9:
            raise ValueError(f"max_count must be between 1 and 9, got {self.max_count}")
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return 2 if self.variant == "find" else 1

    @property
    def vocabulary(self) -> tuple[str, ...]:
        numbers = range(1, self.max_count + 1) if self.variant == "count" else ()
        return (*SPECIAL, *ascii_lowercase[: self.symbols], "?", *map(str, numbers))

    def _sizes(self, length: int) -> Sizes:
        response = 1 + self.echo_key if self.variant == "find" else min(self.max_count, length)
        return Sizes(prompt=length + 2, response=response, ids=length + 1)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        query = FIRST + self.symbols
        key = rng.integers(FIRST, query, size=(n, 1))
        others = rng.integers(FIRST, query - 1, size=(n, length + 1))  # and one to drop
        others += others >= key
        if self.variant == "find":
            found = rng.integers(length - 1, size=(n, 1))
            np.put_along_axis(others, found, key, axis=1)
            places = found + ([0, 1] if self.echo_key else [1])
            response = np.take_along_axis(others, places, axis=1)
        else:
            most = min(self.max_count, length)
            places = random_places(rng.integers(1, most + 1, size=n), length, most, rng)
            np.put_along_axis(others, places, key, axis=1)
            response = np.where(places < length, query + np.arange(1, most + 1), PAD)
        tokens = np.concatenate([others[:, :length], np.full((n, 1), query), key, response], axis=1)
        prompt_ids = np.broadcast_to([*range(1, length + 1), 0, 0], (n, length + 2))
        return tokens, np.concatenate([prompt_ids, places + 1], axis=1)

    def _answer(self, prompt: list[str]) -> list[str]:
        *string, _, key = prompt
        if self.variant == "count":
            return [str(number) for number in range(1, string.count(key) + 1)]
        place = string.index(key)
        return string[place : place + 2] if self.echo_key else [string[place + 1]]


@dataclass(frozen=True)
class ScratchpadParity(SequenceTask):
    """Bits, some of them marked: at each marked bit the parity of those up to it is written, the last is the answer.

    0 and 1 are unmarked bits, 2 and 3 the marked 0 and 1, as in `PlantedCorrelations`. All bits are uniform and marked
    independently, at least one of them. They have the ids s + 1 to s + L, '=' has s, and a parity has the id of its
    bit.

    >>> task = ScratchpadParity()
    >>> example = task.dataset(5, "test", seed=0)[4]
    >>> task.decode(example["inputs"])
    '3 0 1 2 3 0 0 0 3 = odd odd even odd'
    >>> example["position_ids"]
    [0, 14, 15, 16, 17, 18, 19, 20, 21, 22, 13, 14, 17, 18, 22, 0]

    Args:
        marked_share: Expected share of marked bits, above 0 and at most 1.

    Other options: see `SequenceTask`.
    """

    marked_share: float = 0.5

    separator: ClassVar[str] = " "

    def __post_init__(self):
        if not 0 < self.marked_share <= 1:
            raise ValueError(f"marked_share must be above 0 and at most 1, got {self.marked_share}")
        super().__post_init__()

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*SPECIAL, *"0123", "=", "even", "odd")

    def _sizes(self, length: int) -> Sizes:
        return Sizes(prompt=length + 1, response=length, ids=length + 1)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        counts = np.maximum(1, rng.binomial(length, self.marked_share, size=n))
        places = random_places(counts, length, length, rng)
        bits = rng.integers(2, size=(n, length + 1))  # and one to mark in vain
        marked = np.take_along_axis(bits, places, axis=1)
        np.put_along_axis(bits, places, marked + 2, axis=1)
        equals = FIRST + 4
        parities = np.where(places < length, equals + 1 + marked.cumsum(axis=1) % 2, PAD)
        tokens = np.concatenate([FIRST + bits[:, :length], np.full((n, 1), equals), parities], axis=1)
        prompt_ids = np.broadcast_to([*range(1, length + 1), 0], (n, length + 1))
        return tokens, np.concatenate([prompt_ids, places + 1], axis=1)

    def _answer(self, prompt: list[str]) -> list[str]:
        odd, written = False, []
        for name in prompt[:-1]:
            if name in "23":
                odd ^= name == "3"
                written.append("odd" if odd else "even")
        return written
