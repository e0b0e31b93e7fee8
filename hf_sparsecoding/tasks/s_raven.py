"""S-RAVEN: Raven's matrices as numbers, with rule combinations that are held out. Source: arXiv 2406.05816.

Shapes: n problems, 9 panels of a 3x3 grid row by row (the last one is the target), M features per panel, V values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, combinations_with_replacement, permutations, product
from typing import NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from jaxtyping import Bool, Int

from .streams import CHUNK, numbered, sharded


RULES = (
    "constant",
    "progression_plus_1",
    "progression_plus_2",
    "progression_minus_1",
    "progression_minus_2",
    "addition",
    "subtraction",
    "distribute_three",
)
STEPS = {
    "constant": 0,
    "progression_plus_1": 1,
    "progression_plus_2": 2,
    "progression_minus_1": -1,
    "progression_minus_2": -2,
}
SIGNS = {"addition": 1, "subtraction": -1}
UNKNOWN = -1  # stands for the values of the target panel in a model's input
COLUMNS = Features({"inputs": List(Value("int64")), "labels": List(Value("int64")), "rules": List(Value("string"))})


class Problems(NamedTuple):
    """What `SRaven.generate` returns.

    grid: values of all panels, the answer `grid[:, -1, -1]` included.
    rules: the rule combination, indices into `RULES` in ascending order.
    """

    grid: Int[np.ndarray, "n 3 3 features"]
    rules: Int[np.ndarray, "n features"]


@dataclass(frozen=True)
class SRaven:
    """3x3 grids of panels with `features` integers each; every feature follows one rule over the panels of a row.

    | rule             | row                                                              | drawn anew per row |
    |------------------|------------------------------------------------------------------|--------------------|
    | constant         | c, c, c                                                          | c                  |
    | progression      | s, s + d, s + 2 d with d one of +1, +2, -1, -2                   | s                  |
    | addition         | a, b, a + b                                                      | (a, b)             |
    | subtraction      | a, b, a - b                                                      | (a, b)             |
    | distribute three | three distinct values, the same set in all rows, in random order | the order          |

    Arithmetic is modulo `values`. A problem's rules are a multiset, drawn uniformly from those of its split: "train"
    and "test" share theirs and differ in their random streams, "ood" has those that are held out. Each column's
    features are shuffled, the same way in all rows: the solver must also find which features belong together.

    >>> task = SRaven(features=2, permute_features=False)
    >>> problem = task.generate(1, "test", seed=0)
    >>> [RULES[rule] for rule in problem.rules[0]]
    ['constant', 'progression_plus_1']
    >>> print(task.text(problem.grid[0]))
    45 46 47
    73 74 75
    04 05 [06]

    Some problems have a second answer, by other rules that fit as well: see `ambiguous_share`.

    Args:
        features: Numbers M per panel. With 1 there are so few problems that most of "test" occur in a long training,
            and "ood" is rules that were never seen.
        values: How many values V a feature has; at least 5 (with fewer, +2 and -2 are the same rule).
        held_out_share: Share of the rule combinations kept for "ood" (a quarter: 82 of 330 with 4 features).
        split_seed: Seed of the shuffle that chooses them.
        permute_features: Shuffle the features of each column.
    """

    features: int = 4
    values: int = 8
    held_out_share: float = 0.25
    split_seed: int = 0
    permute_features: bool = True

    def __post_init__(self):
        if not 1 <= self.features <= 8:
            raise ValueError(f"features must be between 1 and 8, got {self.features}")
        if not 5 <= self.values <= 64:
            raise ValueError(f"values must be between 5 and 64 (with 4, +2 and -2 are one rule), got {self.values}")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, both excluded, got {self.held_out_share}")
        if self.split_seed < 0:
            raise ValueError(f"split_seed must be at least 0, got {self.split_seed}")

    @cached_property
    def combinations(self) -> tuple[Int[np.ndarray, "kept M"], Int[np.ndarray, "held_out M"]]:
        """(rule combinations of train and test, those of ood)."""
        every = np.array(list(combinations_with_replacement(range(len(RULES)), self.features)))
        held_out = min(max(1, int(self.held_out_share * len(every))), len(every) - 1)
        every = np.random.default_rng(self.split_seed).permutation(every)
        return every[held_out:], every[:held_out]

    def generate(self, n: int, split: str, seed: int, start: int = 0) -> Problems:
        """Problems start .. start + n - 1 of a split ("train", "test", "ood")."""
        grid, rules, _ = self._numbered(n, split, seed, start)
        return Problems(grid, rules)

    def label_rules(self, n: int, split: str, seed: int, start: int = 0) -> Int[np.ndarray, "n features"]:
        """Rules (indices into `RULES`) of the numbers of the target panel, in the order of `labels` in `examples`."""
        return self._numbered(n, split, seed, start)[2]

    def _numbered(self, n: int, split: str, seed: int, start: int) -> list[np.ndarray]:
        return numbered(lambda size, rng: self._draw(size, split, rng), start, n, split, seed)

    def _draw(self, n: int, split: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        known = self.combinations[split == "ood"]
        rules = known[rng.integers(len(known), size=n)]
        grid = draw_rows(rules, self.values, rng)
        if not self.permute_features:
            return grid, rules, rules
        order = rng.random((n, 1, 3, self.features)).argsort(axis=-1)
        grid = np.take_along_axis(grid, np.broadcast_to(order, grid.shape), axis=-1)
        return grid, rules, np.take_along_axis(rules, order[:, 0, -1], axis=-1)

    def examples(self, start: int, count: int, split: str, seed: int) -> dict[str, np.ndarray]:
        """What models take: `inputs` [count, 9 M], panel by panel, -1 in the target, and its values [count, M]."""
        return self._columns(self.generate(count, split, seed, start))

    @staticmethod
    def _columns(problems: Problems) -> dict[str, np.ndarray]:
        tokens = problems.grid.reshape(len(problems.grid), -1)
        features = problems.rules.shape[1]
        inputs, labels = tokens.copy(), tokens[:, -features:].copy()
        inputs[:, -features:] = UNKNOWN
        return {"inputs": inputs, "labels": labels}

    def _rows(self, problems: Problems) -> dict[str, list]:
        columns = {name: array.tolist() for name, array in self._columns(problems).items()}
        return {**columns, "rules": [[RULES[rule] for rule in row] for row in problems.rules]}

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """`n` problems with the columns `inputs`, `labels` (see `examples`) and `rules` (names)."""
        return Dataset.from_dict(self._rows(self.generate(n, split, seed)), features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`; see `streams.sharded`."""
        return sharded(partial(self._chunk, split=split, seed=seed), split, seed, shards, COLUMNS)

    def _chunk(self, start: int, split: str, seed: int) -> dict[str, list]:
        return self._rows(self.generate(CHUNK, split, seed, start))

    def text(self, grid: Int[np.ndarray, "3 3 features"]) -> str:
        """A picture of one problem, the answer in brackets; values above 9 are letters."""
        digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/"
        panels = [["".join(digits[value] for value in panel) for panel in row] for row in grid]
        panels[-1][-1] = f"[{panels[-1][-1]}]"
        return "\n".join(" ".join(row) for row in panels)

    def ambiguous_share(self, n: int, split: str, seed: int) -> float:
        """Share of problems with a second answer: other rules, or (with `permute_features`) another choice of which
        features belong together, fit all that is known and predict another last panel."""
        grid = self.generate(n, split, seed).grid
        return float(ambiguous(grid, RULES, self.values, self.permute_features).mean())


def draw_rows(
    rules: Int[np.ndarray, "n features"], base: int, rng: np.random.Generator
) -> Int[np.ndarray, "n 3 3 features"]:
    """Grids whose feature m follows `rules[:, m]`, all free values uniform."""
    n, features = rules.shape
    first, second = rng.integers(base, size=(2, n, 3, features))  # of each row
    steps = np.array([STEPS.get(name, 0) for name in RULES])[rules][:, None]
    signs = np.array([SIGNS.get(name, 0) for name in RULES])[rules][:, None]
    second = np.where(signs == 0, first + steps, second)
    third = np.where(signs == 0, first + 2 * steps, first + signs * second)
    grid = np.stack([first, second, third], axis=2) % base
    sets = rng.random((n, features, base)).argsort(axis=-1)[..., :3]  # of distribute three
    order = rng.random((n, 3, features, 3)).argsort(axis=-1)
    shuffled = np.take_along_axis(np.broadcast_to(sets[:, None], order.shape), order, axis=-1).swapaxes(2, 3)
    distributed = rules == RULES.index("distribute_three")
    return np.where(distributed[:, None, None], shuffled, grid)


def parameter_rows(name: str, base: int) -> Int[np.ndarray, "parameters 3"]:
    """Every free parameter of a rule, written as the row it gives (distribute three: as its set)."""
    values = np.arange(base)
    if name in STEPS:
        return (values[:, None] + STEPS[name] * np.arange(3)) % base
    if name in SIGNS:
        a, b = (axis.ravel() for axis in np.meshgrid(values, values, indexing="ij"))
        return np.stack([a, b, (a + SIGNS[name] * b) % base], axis=-1)
    return np.array(list(combinations(values, 3)))


def predict_last(
    name: str,
    a: Int[np.ndarray, "n rows ..."],
    b: Int[np.ndarray, "n rows ..."],
    c: Int[np.ndarray, "n rows ..."],
    base: int,
) -> tuple[Bool[np.ndarray, "n ..."], Int[np.ndarray, "n ..."]]:
    """Does the rule fit rows (a, b, c), the last row's c left out, and which last c does it predict?"""
    if name == "distribute_three":
        sets = np.sort(np.stack([a, b, c], axis=-1), axis=-1)  # [n, R, ..., 3]
        values = sets[:, 0]
        same = (sets[:, :-1] == sets[:, :1]).all(axis=(1, -1)) & (np.diff(values, axis=-1) > 0).all(axis=-1)
        left = values.sum(axis=-1) - a[:, -1] - b[:, -1]
        rest = np.sort(np.stack([a[:, -1], b[:, -1], left], axis=-1), axis=-1)
        return same & (rest == values).all(axis=-1), left
    if name in STEPS:
        second, third = (a + STEPS[name]) % base, (a + 2 * STEPS[name]) % base
    else:
        second, third = b, (a + SIGNS[name] * b) % base
    return (b == second).all(axis=1) & (c == third)[:, :-1].all(axis=1), third[:, -1]


def ambiguous(
    grid: Int[np.ndarray, "n rows 3 features"], rules: Sequence[str], base: int, permuted: bool
) -> Bool[np.ndarray, "n"]:
    """Which problems have a second answer: some other choice of `rules` (if `permuted`, also of which features belong
    together) fits every complete row and the known panels of the last row, but predicts another last panel."""
    features = grid.shape[-1]
    if permuted and features > 5:  # (M!)^2 matchings
        raise ValueError(f"ambiguity is found by trying all matchings, for up to 5 permuted features; got {features}")
    fits, wrong = _explanations(grid, rules, base)
    matchings = list(permutations(range(features)))[: None if permuted else 1]
    first = np.arange(features)
    found = np.zeros(len(grid), dtype=bool)
    for second, third in product(matchings, repeat=2):
        explained = fits[:, first, second, third].all(axis=-1)
        found |= explained & wrong[:, first, second, third].any(axis=-1)
    return found


def _explanations(
    grid: Int[np.ndarray, "n rows 3 features"], rules: Sequence[str], base: int
) -> tuple[Bool[np.ndarray, "n features features features"], Bool[np.ndarray, "n features features features"]]:
    """For feature i of the first, j of the second and k of the third panels as one sequence: does a rule fit it, and
    does one that fits predict a wrong value."""
    features = grid.shape[-1]
    shape = (*grid.shape[:2], features, features, features)  # [n, R, M, M, M]
    a = np.broadcast_to(grid[:, :, 0, :, None, None], shape)
    b = np.broadcast_to(grid[:, :, 1, None, :, None], shape)
    c = np.broadcast_to(grid[:, :, 2, None, None, :], shape)
    fits = np.zeros((len(grid), *shape[2:]), dtype=bool)
    wrong = fits.copy()
    for name in rules:
        known, predicted = predict_last(name, a, b, c, base)  # [n, R, M, M, M], [n, M, M, M]
        fits |= known
        wrong |= known & (predicted != c[:, -1])
    return fits, wrong
