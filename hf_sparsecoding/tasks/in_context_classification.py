"""In-context classification: the label of an item, from memory or from the labelled items before it.

n sequences, K classes, L labels, N pairs of an item and its label, B burstiness, M = N / B classes in a bursty prompt,
T = 2 N + 1 tokens, P = 2 max_pairs + 1 positions, D numbers of content. Source: arXiv 2312.03002.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from jaxtyping import Bool, Float, Int

from .streams import CHUNK, numbered, sharded


SPLITS = ("train", "iw", "ic", "ic2")
COLUMNS = Features(
    {
        "inputs": List(List(Value("float32"))),
        "labels": Value("int64"),
        "context_labels": List(Value("int64")),
        "shown": Value("bool"),
    }
)


class Sequences(NamedTuple):
    """What `InContextClassification.generate` returns.

    inputs: tokens item, label, ..., item, label, target; each is its position (one-hot), then its content.
    labels: of the items; the last one is the answer.
    classes: of the items. Class number m of those that were drawn for this sequence alone is K + m L + its label.
    """

    inputs: Float[np.ndarray, "n T P+D"]
    labels: Int[np.ndarray, "n N+1"]
    classes: Int[np.ndarray, "n N+1"]


@dataclass(frozen=True)
class InContextClassification:
    """Pairs of an item and its label, and a target item whose label is asked for.

    An item is a noisy copy of its class's mean, x = (mu_k + noise eta) / sqrt(1 + noise^2). Means, label vectors and
    eta are normal with variance 1 / D. Class k has the label k mod L and the frequency P(k) ~ (k + 1)^-zipf_exponent.
    The sequence starts at a position that is uniform over those at which it fits.

    | prompt | classes of the context                                                      | target             |
    |--------|-----------------------------------------------------------------------------|--------------------|
    | bursty | N / B classes of different labels, drawn from P(k), each B times, shuffled  | one of them        |
    | novel  | the same with means drawn for this sequence alone and uniform labels        | one of them        |
    | other  | independent draws from P(k)                                                 | another such draw  |

    | split | prompts                                                                         | measures           |
    |-------|---------------------------------------------------------------------------------|--------------------|
    | train | novel with probability `novel_share`, of the rest `bursty_share` bursty         |                    |
    | iw    | other                                                                           | in-weights memory  |
    | ic    | novel                                                                           | in-context reading |
    | ic2   | bursty, all labels moved to the next one, in the context and in the answer      | in-context reading |

    In "bursty" and "novel" prompts every label of the context occurs B times, so that counting them tells nothing. In
    an "other" prompt the context may have the target's class by chance, often so where few classes are frequent.

    A novel prompt, with its classes as letters:

    >>> task = InContextClassification(pairs=4, burstiness=2)
    >>> print(task.text(task.generate(1, "ic", seed=0), 0))
    a:24 a:24 b:12 b:12 b:[12]

    The seed stands for a world: it decides class means and label vectors, which all splits share, as well as the
    sequences. Sequence number i depends on the options, the split, the seed and i only.
    """

    classes: int = field(default=1024, metadata={"help": "classes K, a multiple of labels"})
    labels: int = field(default=32, metadata={"help": "labels L"})
    pairs: int = field(default=8, metadata={"help": "pairs N of an item and its label before the target"})
    content_size: int = field(default=63, metadata={"help": "numbers D that describe an item or a label"})
    max_pairs: int = field(default=32, metadata={"help": "pairs that fit into the 2 max_pairs + 1 positions"})
    noise: float = field(default=0.1, metadata={"help": "epsilon, size of the noise within a class"})
    zipf_exponent: float = field(default=0.0, metadata={"help": "alpha of the class frequencies, rank^-alpha"})
    burstiness: int = field(default=1, metadata={"help": "B, how often each class of a bursty prompt occurs in it"})
    bursty_share: float = field(default=1.0, metadata={"help": "p_B, share of bursty prompts in training"})
    novel_share: float = field(default=0.0, metadata={"help": "p_C, share of prompts with novel classes in training"})

    def __post_init__(self):
        for name in ("classes", "labels", "pairs", "content_size", "max_pairs"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("noise", "zipf_exponent"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0 and finite")  # nan neither
        smallest = float(self.classes) ** -self.zipf_exponent
        self._require("zipf_exponent", smallest > 0, f"so small that all of {self.classes} classes occur")
        for name in ("bursty_share", "novel_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        self._require("classes", self.classes % self.labels == 0, f"a multiple of labels ({self.labels})")
        self._require("max_pairs", self.max_pairs >= self.pairs, f"at least pairs ({self.pairs})")
        if self.burstiness < 1 or self.pairs % self.burstiness:
            raise ValueError(
                f"burstiness must be a divisor of pairs ({self.pairs}), got {self.burstiness}; for prompts that are "
                "not bursty set bursty_share to 0"
            )
        if self.pairs // self.burstiness > self.labels:
            raise ValueError(
                f"the {self.pairs // self.burstiness} classes of a bursty prompt need different labels, got "
                f"labels={self.labels}; raise labels or burstiness"
            )

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def positions(self) -> int:
        """P."""
        return 2 * self.max_pairs + 1

    @property
    def frequencies(self) -> Float[np.ndarray, " K"]:
        """P(k)."""
        weights = np.arange(1, self.classes + 1) ** -float(self.zipf_exponent)
        return weights / weights.sum()

    @cached_property
    def _cumulative(self) -> Float[np.ndarray, "K+1"]:
        """Cumulative frequencies of the classes, sorted by label: those of label l are K / L neighbours."""
        by_label = self.frequencies.reshape(-1, self.labels).T.ravel()
        return np.concatenate([[0.0], by_label.cumsum()])

    def generate(self, n: int, split: str, seed: int, start: int = 0) -> Sequences:
        """Sequences start .. start + n - 1 of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        return Sequences(*numbered(partial(self._draw, split, seed), start, n, _stream(split), seed))

    def _draw(self, split: str, seed: int, n: int, rng: np.random.Generator) -> Sequences:
        rng = rng.spawn(len(SPLITS))[SPLITS.index(split)]  # the test splits share a stream of `streams`
        novel_share, bursty_share = {
            "train": (self.novel_share, self.bursty_share),
            "iw": (0, 0),
            "ic": (1, 0),
            "ic2": (0, 1),
        }[split]
        novel = rng.random(n) < novel_share
        other = ~novel & (rng.random(n) >= bursty_share)
        places = self._places(n, rng)
        classes = np.take_along_axis(self._prompt_classes(novel, rng), places, axis=1)
        classes[other] = self._pick(rng.random((other.sum(), self.pairs + 1)), 0, 1)
        labels = (classes + (split == "ic2")) % self.labels
        means, label_vectors = class_vectors(self.classes, self.labels, self.content_size, seed)
        items = means[np.where(novel[:, None], 0, classes)]
        fresh = normal((novel.sum(), self.pairs // self.burstiness, self.content_size), rng)
        items[novel] = np.take_along_axis(fresh, places[novel, :, None], axis=1)
        items += normal(items.shape, rng, self.noise)
        items /= np.float32((1 + self.noise**2) ** 0.5)
        return Sequences(self._tokens(items, label_vectors[labels[:, :-1]], rng), labels, classes)

    def _places(self, n: int, rng: np.random.Generator) -> Int[np.ndarray, "n N+1"]:
        """For every item, which of the M classes of a bursty or novel prompt it has."""
        count = self.pairs // self.burstiness
        context = rng.permuted(np.tile(np.repeat(np.arange(count), self.burstiness), (n, 1)), axis=1)
        return np.concatenate([context, rng.integers(count, size=(n, 1))], axis=1)

    def _prompt_classes(self, novel: Bool[np.ndarray, " n"], rng: np.random.Generator) -> Int[np.ndarray, "n M"]:
        """Classes of different labels: draws from P(k) in which a label that is there already does not count.

        The order in which exponential clocks of the labels' frequencies ring is such a sequence of draws.
        """
        count = self.pairs // self.burstiness
        bounds = self._cumulative[:: self.classes // self.labels]
        rates = np.where(novel[:, None], 1.0, np.diff(bounds))
        clocks = rng.standard_exponential(rates.shape) / rates
        labels = clocks.argpartition(count - 1, axis=1)[:, :count]
        known = self._pick(rng.random(labels.shape), bounds[labels], bounds[labels + 1])
        # rounding could lead to a neighbour that has another label
        known = known // self.labels * self.labels + labels
        return np.where(novel[:, None], self.classes + self.labels * np.arange(count) + labels, known)

    def _pick(self, uniform: Float[np.ndarray, "..."], low, high) -> Int[np.ndarray, "..."]:
        """Classes from P(k) within an interval of the cumulative frequencies."""
        index = self._cumulative.searchsorted(low + uniform * (high - low), side="right") - 1
        label, rank = np.divmod(index.clip(max=self.classes - 1), self.classes // self.labels)
        return rank * self.labels + label

    def _tokens(
        self, items: Float[np.ndarray, "n N+1 D"], label_vectors: Float[np.ndarray, "n N D"], rng: np.random.Generator
    ) -> Float[np.ndarray, "n T P+D"]:
        n, tokens = len(items), 2 * self.pairs + 1
        inputs = np.zeros((n, tokens, self.positions + self.content_size), dtype=np.float32)
        starts = rng.integers(self.positions - tokens + 1, size=(n, 1))
        inputs[np.arange(n)[:, None], np.arange(tokens), starts + np.arange(tokens)] = 1
        inputs[:, ::2, self.positions :] = items
        inputs[:, 1::2, self.positions :] = label_vectors
        return inputs

    def examples(self, start: int, count: int, split: str, seed: int) -> dict[str, np.ndarray]:
        """What models take: `inputs` [count, T, P + D] and the answers, `labels` [count]; for what is measured on
        them also `context_labels` [count, N] and `shown` [count], whether the context has the target's class."""
        sequences = self.generate(count, split, seed, start)
        return {
            "inputs": sequences.inputs,
            "labels": sequences.labels[:, -1],
            "context_labels": sequences.labels[:, :-1],
            "shown": (sequences.classes[:, :-1] == sequences.classes[:, -1:]).any(axis=1),
        }

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """`n` sequences with the columns of `examples`, which is much faster for a training loop."""
        return Dataset.from_dict(self._rows(0, n, split, seed), features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless sequences with the columns of `dataset`; see `streams.sharded`."""
        rows = partial(self._rows, count=CHUNK, split=split, seed=seed)
        return sharded(rows, _stream(split), seed, shards, COLUMNS)

    def _rows(self, start: int, count: int, split: str, seed: int) -> dict[str, list]:
        return {name: array.tolist() for name, array in self.examples(start, count, split, seed).items()}

    def text(self, sequences: Sequences, number: int) -> str:
        """One sequence as `class:label` of every item, the answer in brackets; novel classes are letters."""
        classes, labels = sequences.classes[number], sequences.labels[number]
        names = [
            str(k) if k < self.classes else "abcdefghijklmnopqrstuvwxyz"[(k - self.classes) // self.labels % 26]
            for k in classes
        ]
        context = [f"{name}:{label}" for name, label in zip(names[:-1], labels[:-1], strict=True)]
        return " ".join([*context, f"{names[-1]}:[{labels[-1]}]"])


def _stream(split: str) -> str:
    return "train" if split == "train" else "test"


@lru_cache(maxsize=8)
def class_vectors(
    classes: int, labels: int, size: int, seed: int
) -> tuple[Float[np.ndarray, "K D"], Float[np.ndarray, "L D"]]:
    """(means of the classes, label vectors) of a seed."""
    rng = np.random.default_rng(seed)
    vectors = normal((classes, size), rng), normal((labels, size), rng)
    for array in vectors:
        array.flags.writeable = False
    return vectors


def normal(shape: tuple[int, ...], rng: np.random.Generator, size: float = 1.0) -> Float[np.ndarray, "..."]:
    """Vectors with a squared length of size^2 on average."""
    vectors = rng.standard_normal(shape, dtype=np.float32)
    vectors *= np.float32(size * shape[-1] ** -0.5)
    return vectors
