"""What the tasks of length generalisation share: sequences of all lengths, their position ids, their targets.

Sources: position coupling, arXiv 2405.20671; predicted position ids, arXiv 2502.16792.

n problems of one length, S tokens of their prompts and longest response; T tokens of the longest sequence of a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from jaxtyping import Int

from ..streams import CHUNK, numbered, sharded


SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(len(SPECIAL))
IGNORED = -100  # label of the tokens that are not trained on
POSITIONS = ("coupled", "absolute")
COLUMNS = Features(
    {
        "inputs": List(Value("int64")),
        "position_ids": List(Value("int64")),
        "labels": List(Value("int64")),
        "position_labels": List(Value("int64")),
        "response_start": Value("int64"),
        "length": Value("int64"),
    }
)


class Sizes(NamedTuple):
    """Of the problems of one length, BOS and EOS not counted.

    prompt: Tokens of the prompt.
    response: Tokens of the longest response.
    ids: How many coupled ids there are: the start s uses s to s + ids - 1.
    """

    prompt: int
    response: int
    ids: int


@dataclass(frozen=True)
class SequenceTask(ABC):
    """A prompt and its response as one sequence, BOS prompt response EOS, with a position id for every token.

    "coupled" ids follow the structure of the task: tokens that belong together share an id, counted from a start s.
    "absolute" ids are s, s + 1, s + 2, ... over prompt and response, for comparison. Either way s is drawn anew for
    every problem, in all splits, uniformly from those with which no id exceeds `max_position`: so problems of any
    length train all ids. Padding has id 0, and so have BOS and EOS.

    That the response is over, a model then has to see from an id that no token of the prompt has. With `couple_ends`
    it finds BOS there: BOS and EOS share the coupled id that would come next.

    Splits: "train" and "test" draw the length uniformly from `train_lengths`, "ood" from `test_lengths`, and then a
    problem of that length. Splits, seeds and shards have random streams of their own; but there are only few problems
    of a small length, 100 sums of one digit, and "test" meets them again.

    Args:
        train_lengths: Shortest and longest problem to train on.
        test_lengths: Lengths to evaluate on, one by one with `examples_of_length`; they must fit as well.
        max_position: Greatest position id.
        positions: "coupled" or "absolute".
        couple_ends: Give BOS and EOS a coupled id too. No effect on "absolute" ids.
        cyclic: Let 1 follow `max_position`, so that s may be any id and all ids are trained alike. Without it, those
            near either end rarely belong to a symbol of the prompt in training, and often in long problems.
    """

    train_lengths: tuple[int, int] = (1, 10)
    test_lengths: tuple[int, ...] = (10, 15, 20)
    max_position: int = 32
    positions: str = "coupled"
    couple_ends: bool = False
    cyclic: bool = False

    separator: ClassVar[str] = ""  # between the tokens of a text

    def __post_init__(self):
        for name in ("train_lengths", "test_lengths"):
            lengths = getattr(self, name)
            if not isinstance(lengths, Sequence) or not all(type(length) is int for length in lengths):
                raise ValueError(f"{name} must be a list of whole numbers, got {lengths!r}")
            object.__setattr__(self, name, tuple(lengths))
        if len(self.train_lengths) != 2 or self.train_lengths[0] > self.train_lengths[1]:
            raise ValueError(f"train_lengths must be (shortest, longest), got {self.train_lengths}")
        if not self.test_lengths:
            raise ValueError("test_lengths must name at least one length, got ()")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {self.positions!r}")
        for length in self.train_lengths + self.test_lengths:
            self._check_length(length)

    def _check_length(self, length: int) -> None:
        if length < self.shortest:
            raise ValueError(f"lengths must be at least {self.shortest} for this task, got {length}")
        needed = self._ids(length)
        if needed > self.max_position:
            raise ValueError(
                f"length {length} takes {needed} {self.positions} position ids, got max_position={self.max_position}; "
                f"raise it to at least {needed} or leave out this length"
            )

    @property
    def shortest(self) -> int:
        """Length of the shortest problem there is."""
        return 1

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """Names of the tokens; `SPECIAL` come first."""

    @abstractmethod
    def _sizes(self, length: int) -> Sizes: ...

    @abstractmethod
    def _draw(
        self, length: int, n: int, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, "n S"], Int[np.ndarray, "... S"]]:
        """Tokens of prompts and responses, padded at their end, and their coupled ids for s = 0, [n, S] or [S]."""

    @abstractmethod
    def _answer(self, prompt: list[str]) -> list[str]:
        """The response to a prompt, both as names of tokens: in plain Python and from nothing but the prompt."""

    def _end(self, length: int) -> int:
        """The id, for s = 0, that the structure would give to what follows the response: here the one after all."""
        return self._sizes(length).ids

    def _ids(self, length: int) -> int:
        sizes = self._sizes(length)
        if self.positions == "absolute":
            return sizes.prompt + sizes.response
        return sizes.ids + self.couple_ends

    def examples(self, start: int, count: int, split: str, seed: int) -> dict[str, Int[np.ndarray, "count ..."]]:
        """Problems `start` to `start + count - 1` of a split, padded on the right to the longest of them.

        Returns:
            `inputs` [count, T]: token ids of the whole sequence, from BOS to EOS and padding.
            `position_ids` [count, T].
            `labels` [count, T]: at each token the next one, where that is part of the response or its EOS; else -100.
            `position_labels` [count, T]: at the same tokens the next position id, EOS's included; else -100.
            `response_start` [count]: index of the first token of the response; the prompt, with BOS, ends before it.
            `length` [count]: length of the problem.
        """
        return self._examples(self._lengths(split), start, count, split, seed)

    def examples_of_length(
        self, length: int, start: int, count: int, split: str, seed: int
    ) -> dict[str, Int[np.ndarray, "count ..."]]:
        """`examples` of a single length, any that fits: all prompts have the same size, so that responses can be
        decoded together. The split only chooses the random stream."""
        self._check_length(length)
        return self._examples((length,), start, count, split, seed)

    def _lengths(self, split: str) -> Sequence[int]:
        return self.test_lengths if split == "ood" else range(self.train_lengths[0], self.train_lengths[1] + 1)

    def _examples(self, lengths: Sequence[int], start: int, count: int, split: str, seed: int) -> dict:
        tokens, ids, starts, length = numbered(partial(self._draw_mixed, lengths), start, count, split, seed)
        size = (tokens != PAD).sum(axis=1).max(initial=1)
        tokens, ids = tokens[:, :size], ids[:, :size]
        target = (np.arange(1, size) >= starts[:, None]) & (tokens[:, 1:] != PAD)
        labels, position_labels = np.full((2, *tokens.shape), IGNORED)
        labels[:, :-1][target], position_labels[:, :-1][target] = tokens[:, 1:][target], ids[:, 1:][target]
        return dict(zip(COLUMNS, (tokens, ids, labels, position_labels, starts, length), strict=True))

    def _draw_mixed(self, lengths: Sequence[int], n: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """(tokens, position ids, response starts, lengths) of problems whose lengths are drawn from `lengths`."""
        length = np.sort(np.array(lengths)[rng.integers(len(lengths), size=n)])
        longest = self._sizes(max(lengths))
        tokens, ids = np.full((2, n, longest.prompt + longest.response + 2), PAD)
        prompts, needed, ends = np.empty((3, n, 1), dtype=np.int64)
        tokens[:, 0] = BOS
        for one, count in zip(*np.unique(length, return_counts=True), strict=True):
            rows = slice(*np.searchsorted(length, [one, one + 1]))
            drawn, offsets = self._draw(int(one), int(count), rng)
            places = slice(1, 1 + drawn.shape[1])
            tokens[rows, places] = drawn
            ids[rows, places] = offsets if self.positions == "coupled" else np.arange(drawn.shape[1])
            prompts[rows], needed[rows], ends[rows] = self._sizes(one).prompt, self._ids(one), self._end(one)
        sizes = (tokens != PAD).sum(axis=1, keepdims=True)
        np.put_along_axis(tokens, sizes, EOS, axis=1)
        coupled_ends = self.couple_ends and self.positions == "coupled"
        if coupled_ends:
            ids[:, :1] = ends
            np.put_along_axis(ids, sizes, ends, axis=1)
        ids = np.where(tokens > (PAD if coupled_ends else EOS), self._started(ids, needed, rng), 0)
        order = rng.permutation(n)
        return tokens[order], ids[order], 1 + prompts[order, 0], length[order]

    def _started(
        self, ids: Int[np.ndarray, "n S"], needed: Int[np.ndarray, "n 1"], rng: np.random.Generator
    ) -> Int[np.ndarray, "n S"]:
        """Ids for s = 0 moved to a random start; `needed`: how many there are from the lowest on."""
        if self.cyclic:
            return 1 + (ids + rng.integers(self.max_position, size=(len(ids), 1))) % self.max_position
        return ids - ids.min(axis=1, keepdims=True) + rng.integers(1, self.max_position - needed + 2)

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """The first `n` problems, with the columns of `examples` but without padding."""
        return Dataset.from_dict(_unpadded(self.examples(0, n, split, seed)), features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`; see `streams.sharded`."""
        return sharded(partial(self._chunk, split=split, seed=seed), split, seed, shards, COLUMNS)

    def _chunk(self, start: int, split: str, seed: int) -> dict[str, list]:
        return _unpadded(self.examples(start, CHUNK, split, seed))

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text, without BOS, EOS, padding and what `labels` leave out."""
        names = self.vocabulary
        return self.separator.join(names[token] for token in tokens if token >= len(SPECIAL))

    def is_correct(self, response: Sequence[int], example: Mapping[str, Sequence[int] | int]) -> bool:
        """Are the tokens that were generated after a prompt the right response, and then EOS?

        The right response is worked out from the prompt, apart from the code that draws problems. What comes after EOS
        does not count.

        Args:
            response: Token ids.
            example: One row of `examples`, of which `inputs` and `response_start` are read.
        """
        names = self.vocabulary
        prompt = [names[token] for token in example["inputs"][1 : example["response_start"]]]
        expected = [*(names.index(name) for name in self._answer(prompt)), EOS]
        # as numbers: a model may have more outputs than the vocabulary has names
        return [int(token) for token in response[: len(expected)]] == expected


def random_places(
    counts: Int[np.ndarray, " n"], length: int, most: int, rng: np.random.Generator
) -> Int[np.ndarray, "n most"]:
    """`counts` distinct places from 0 to length - 1 for each problem, in ascending order, filled up with `length`."""
    places = rng.random((len(counts), length)).argsort(axis=1)[:, :most]
    return np.sort(np.where(np.arange(most) < counts[:, None], places, length), axis=1)


def _unpadded(examples: dict[str, np.ndarray]) -> dict[str, list]:
    """Columns of a data set."""
    sizes = (examples["inputs"] != PAD).sum(axis=1).tolist()
    columns = {name: array.tolist() for name, array in examples.items()}
    for name in ("inputs", "position_ids", "labels", "position_labels"):
        columns[name] = [row[:size] for row, size in zip(columns[name], sizes, strict=True)]
    return columns
