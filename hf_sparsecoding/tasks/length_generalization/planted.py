"""k-sparse planted correlations, with sparse parity as the standard instance. Source: arXiv 2502.16792.

n problems, S tokens of prompt and response, V values of a planted token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from .coupling import SPECIAL, SequenceTask, Sizes, random_places


RULES = ("sum", "random")
MOST_TUPLES = 2**16  # of V^k: the rule is kept as a table


@dataclass(frozen=True)
class PlantedCorrelations(SequenceTask):
    """`length` tokens, k of them planted at random places; the response is one token, a function g of these k.

    The places are uniform among all sets of k; the other tokens are independent fillers. k, g and the laws of fillers
    and planted tokens do not depend on the length. The defaults are sparse parity: fillers are 0 and 1, planted tokens
    2 and 3, and the response y0 or y1 is the parity of the 3's.

    >>> task = PlantedCorrelations(k=4, train_lengths=(8, 16))
    >>> example = task.dataset(2, "test", seed=0)[1]
    >>> task.decode(example["inputs"])
    '1 0 3 3 0 1 3 2 1 = y1'
    >>> example["position_ids"]
    [0, 4, 4, 5, 6, 4, 4, 7, 8, 4, 4, 4, 0]

    Coupled ids mark the planted tokens: the i-th from the left has s + i, all other tokens have s. So k + 1 ids do for
    any length, and they tell the order that a g without symmetry depends on.

    Args:
        k: Number of planted tokens.
        filler: Probabilities of the filler tokens.
        values: How many values V a planted token has.
        token_law: Probabilities of the V^k tuples of planted tokens, in lexicographic order; () is uniform.
        labels: How many values g has.
        rule: g. "sum": the sum of the planted values, modulo `labels`. "random": a function drawn by `rule_seed` that
            has each label equally often (up to one). Or the V^k labels of all tuples, in lexicographic order; or a
            function from all tuples [V^k, k] to their labels [V^k].
        rule_seed: Seed of the rule "random".

    Other options: see `SequenceTask`.
    """

    train_lengths: tuple[int, int] = (20, 50)
    test_lengths: tuple[int, ...] = (50, 100, 200, 400)
    k: int = 4
    filler: tuple[float, ...] = (0.5, 0.5)
    values: int = 2
    token_law: tuple[float, ...] = ()
    labels: int = 2
    rule: str | tuple[int, ...] | Callable[[Int[np.ndarray, "tuples k"]], Int[np.ndarray, " tuples"]] = "sum"
    rule_seed: int = 0

    separator: ClassVar[str] = " "

    def __post_init__(self):
        for name, fewest in (("k", 1), ("values", 2), ("labels", 2), ("rule_seed", 0)):
            if getattr(self, name) < fewest:
                raise ValueError(f"{name} must be at least {fewest}, got {getattr(self, name)}")
        if self.values**self.k > MOST_TUPLES:
            raise ValueError(f"values^k must be at most {MOST_TUPLES}, got {self.values}^{self.k}; lower one of them")
        for name in ("filler", "token_law"):
            law = getattr(self, name)
            if not isinstance(law, Sequence) or not all(isinstance(share, int | float) for share in law):
                raise ValueError(f"{name} must be a list of probabilities, got {law!r}")
            object.__setattr__(self, name, tuple(law))
        _check_law("filler", self.filler)
        if self.token_law:
            _check_law("token_law", self.token_law)
            if len(self.token_law) != self.values**self.k:
                raise ValueError(f"token_law must have values^k = {self.values**self.k} entries, got {self.token_law}")
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}, a table or a function, got {self.rule!r}")
        if not isinstance(self.rule, str | Sequence | np.ndarray) and not callable(self.rule):
            raise ValueError(f"rule must be one of {RULES}, a table or a function, got {self.rule!r}")
        if not isinstance(self.rule, str) and not callable(self.rule):
            object.__setattr__(self, "rule", tuple(self.rule))
        self._table  # noqa: B018 - a bad rule is rejected here and not at the first problem
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return self.k

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        symbols = map(str, range(len(self.filler) + self.values))
        return (*SPECIAL, *symbols, "=", *(f"y{label}" for label in range(self.labels)))

    @cached_property
    def _tuples(self) -> Int[np.ndarray, "tuples k"]:
        return np.indices((self.values,) * self.k).reshape(self.k, -1).T

    @cached_property
    def _table(self) -> Int[np.ndarray, " tuples"]:
        """g of every row of `_tuples`."""
        if self.rule == "sum":
            return self._tuples.sum(axis=1) % self.labels
        if self.rule == "random":
            return np.random.default_rng(self.rule_seed).permutation(len(self._tuples)) % self.labels
        table = np.asarray(self.rule(self._tuples) if callable(self.rule) else self.rule)
        if table.shape != (len(self._tuples),) or not np.isin(table, np.arange(self.labels)).all():
            raise ValueError(
                f"rule must give values^k = {len(self._tuples)} labels from 0 to {self.labels - 1}, got shape "
                f"{table.shape} with values {np.unique(table)[:8]}"
            )
        return table.astype(np.int64)

    def _sizes(self, length: int) -> Sizes:
        return Sizes(prompt=length + 1, response=1, ids=self.k + 1)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        places = random_places(np.full(n, self.k), length, self.k, rng)
        drawn = rng.choice(len(self._tuples), size=n, p=self.token_law or None)
        first = len(SPECIAL)
        equals = first + len(self.filler) + self.values
        tokens = np.full((n, length + 2), equals)
        tokens[:, :length] = first + rng.choice(len(self.filler), size=(n, length), p=self.filler)
        np.put_along_axis(tokens, places, first + len(self.filler) + self._tuples[drawn], axis=1)
        tokens[:, -1] = equals + 1 + self._table[drawn]
        ids = np.zeros_like(tokens)
        np.put_along_axis(ids, places, np.arange(1, self.k + 1)[None], axis=1)
        return tokens, ids

    def _answer(self, prompt: list[str]) -> list[str]:
        planted = [int(name) - len(self.filler) for name in prompt[:-1] if int(name) >= len(self.filler)]
        if self.rule == "sum":
            return [f"y{sum(planted) % self.labels}"]
        place = sum(value * self.values**power for power, value in enumerate(reversed(planted)))
        return [f"y{self._table[place]}"]


def _check_law(name: str, law: tuple[float, ...]) -> None:
    if not law or not min(law) >= 0 or not abs(sum(law) - 1) < 1e-8:  # nan neither
        raise ValueError(f"{name} must be probabilities that sum to 1, got {law}")
