"""S-RAVEN's eight rules written as rows of digits, for language models.

Source of the rules: S-RAVEN, arXiv 2406.05816. Here as text, with splits by rule parameters.

Shapes: n problems, R rows of the grid (the last one is the target), 3 panels per row, M features per panel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from jaxtyping import Int

from .s_raven import RULES, ambiguous, parameter_rows
from .streams import CHUNK, random_generator


SLOT = "\0"  # stands for a value in the template of a text
COLUMNS = Features(
    {
        "prompt": Value("string"),
        "completion": Value("string"),
        "rule": Value("string"),
        "grid": List(List(List(Value("int64")))),
    }
)


class Problems(NamedTuple):
    """What `SRavenText.generate` returns.

    grid: values of all panels, the answer `grid[:, -1, -1]` included.
    rules: index into `RULES` of each feature's rule; with `permute_features` in the order before the permutation.
    """

    grid: Int[np.ndarray, "n rows 3 features"]
    rules: Int[np.ndarray, "n features"]


@dataclass(frozen=True)
class SRavenText:
    """Number puzzles: every row follows the same rule, the last panel of the last row is to be completed.

    Each feature of a panel follows one rule over the three panels of a row (arithmetic is modulo `base`):

    | rule             | row                                                       | free parameter |
    |------------------|-----------------------------------------------------------|----------------|
    | constant         | c, c, c                                                   | c              |
    | progression      | s, s + d, s + 2 d with d one of +1, +2, -1, -2            | s              |
    | addition         | a, b, a + b                                               | (a, b)         |
    | subtraction      | a, b, a - b                                               | (a, b)         |
    | distribute three | three distinct values of the grid, in a new order per row | the set        |

    One problem with two features per panel, the first by addition, the second by progression +1, answer in brackets:

    >>> task = SRavenText(features=2, rules=("progression_plus_1", "addition"))
    >>> problem = task.dataset(20, "test", seed=0)[5]
    >>> print(problem["prompt"] + "[" + problem["completion"] + "]")
    56 47 10
    12 33 44
    07 50 [51]
    >>> problem["rule"]
    'addition+progression_plus_1'

    Splits go by rule parameters: a share of every rule's parameters is held out; "ood" problems draw every row from
    the held-out parameters, "train" and "test" from the others, so that no rule was trained on a row it has in "ood".
    The three splits have disjoint random streams; with one feature there are few problems, so "test" meets some of
    "train" again. Rows are drawn with replacement: where a rule has few parameters the target row often repeats
    an earlier one and can be copied, in "ood" more often than in "test". `distinct_rows=True` forbids it.

    Args:
        features: Rule features per panel, 1 to 4; each is one character.
        base: Number of values V of a feature, 4 up to the length of `alphabet`.
        rows: Rows of the grid, the target row included; at least 2.
        rules: Names out of `RULES` that features draw from, uniformly.
        orientation: "rows" writes one grid row per line; "columns" writes one grid column per line, so that a rule
            runs down the lines.
        panel_separator: Text between the panels of a line.
        row_separator: Text between lines.
        feature_separator: Text between the features of a panel.
        prefix: Text before the first line.
        alphabet: One distinct character per value.
        permute_features: Shuffle the features of each column of panels, the same way in all rows of a problem, so that
            the solver must also find which features belong together.
        distinct_rows: Never draw the same parameter twice within one feature of a problem. Distribute three is
            exempt: its set belongs to the grid.
        held_out_share: Share of each rule's parameters kept for "ood"; at least one is held out and one is left.
        split_seed: Seed of the shuffle that chooses the held-out parameters.
    """

    features: int = 1
    base: int = 8
    rows: int = 3
    rules: tuple[str, ...] = RULES
    orientation: str = "rows"
    panel_separator: str = " "
    row_separator: str = "\n"
    feature_separator: str = ""
    prefix: str = ""
    alphabet: str = "0123456789"
    permute_features: bool = False
    distinct_rows: bool = False
    held_out_share: float = 0.25
    split_seed: int = 0

    def __post_init__(self):
        if not 1 <= self.features <= 4:
            raise ValueError(f"features must be between 1 and 4, got {self.features}")
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must not repeat a character, got {self.alphabet!r}")
        if not 4 <= self.base <= len(self.alphabet):
            raise ValueError(
                f"base must be between 4 and {len(self.alphabet)}, got {self.base}; a longer alphabet allows more"
            )
        if self.rows < 2:
            raise ValueError(f"rows must be at least 2, got {self.rows}")
        if self.split_seed < 0:
            raise ValueError(f"split_seed must be at least 0, got {self.split_seed}")
        if not isinstance(self.rules, list | tuple):
            raise ValueError(f"rules must be distinct names out of {RULES}, got {self.rules!r}")
        object.__setattr__(self, "rules", tuple(self.rules))
        unknown = [name for name in self.rules if name not in RULES]
        if unknown or not self.rules or len(set(self.rules)) != len(self.rules):
            raise ValueError(f"rules must be distinct names out of {RULES}, got {self.rules}")
        if self.orientation not in ("rows", "columns"):
            raise ValueError(f"orientation must be 'rows' or 'columns', got {self.orientation!r}")
        if not self.row_separator:
            raise ValueError(f"row_separator must not be empty, got {self.row_separator!r}; the default is a newline")
        for name in ("panel_separator", "row_separator", "feature_separator"):
            if shared := set(getattr(self, name)) & set(self.alphabet[: self.base]):
                raise ValueError(f"{name} must not hold a symbol of the alphabet, got {''.join(sorted(shared))!r}")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, both excluded, got {self.held_out_share}")
        if self.distinct_rows:
            self._check_distinct_rows()

    def _check_distinct_rows(self):
        for name, halves in self._parameters.items():
            fewest = min(len(half) for half in halves)
            if name != "distribute_three" and fewest < self.rows:
                raise ValueError(
                    f"distinct_rows needs rows <= {fewest}, the parameters of rule {name!r} in its smaller split, "
                    f"got {self.rows}; raise base or move held_out_share towards 0.5"
                )

    @cached_property
    def _parameters(self) -> dict[str, tuple[Int[np.ndarray, "kept 3"], Int[np.ndarray, "held_out 3"]]]:
        """Rule name -> (parameters of train and test, parameters of ood), each written as the row it gives."""
        halves = {}
        for name in self.rules:
            rng = np.random.default_rng([self.split_seed, RULES.index(name)])
            rows = rng.permutation(parameter_rows(name, self.base))
            held_out = min(max(1, round(self.held_out_share * len(rows))), len(rows) - 1)
            halves[name] = (rows[held_out:], rows[:held_out])
        return halves

    def generate(self, n: int, split: str, seed: int) -> Problems:
        """Draw `n` problems of a split ("train", "test" or "ood"), the same ones for the same arguments."""
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        return self._draw(n, split, random_generator(split, seed))

    def _draw(self, n: int, split: str, rng: np.random.Generator) -> Problems:
        allowed = np.array([RULES.index(name) for name in self.rules])
        rules = allowed[rng.integers(len(allowed), size=(n, self.features))]
        grid = np.empty((n, self.features, self.rows, 3), dtype=np.int64)
        for name in self.rules:
            chosen = rules == RULES.index(name)  # [n, M]
            rows = self._parameters[name][split == "ood"]
            grid[chosen] = self._draw_rows(name, rows, int(chosen.sum()), rng)
        grid = grid.transpose(0, 2, 3, 1)  # [n, R, 3, M]
        if self.permute_features:
            order = rng.random((n, 1, 3, self.features)).argsort(axis=-1)
            grid = np.take_along_axis(grid, np.broadcast_to(order, grid.shape), axis=-1)
        return Problems(np.ascontiguousarray(grid), rules)

    def _draw_rows(
        self, name: str, rows: Int[np.ndarray, "parameters 3"], cells: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "cells rows 3"]:
        if name == "distribute_three":
            values = rows[rng.integers(len(rows), size=cells)]  # [cells, 3]
            order = rng.random((cells, self.rows, 3)).argsort(axis=-1)
            return np.take_along_axis(np.broadcast_to(values[:, None], order.shape), order, axis=-1)
        if self.distinct_rows:
            return rows[rng.random((cells, len(rows))).argsort(axis=-1)[:, : self.rows]]
        return rows[rng.integers(len(rows), size=(cells, self.rows))]

    def write(self, grid: Int[np.ndarray, "n rows 3 features"]) -> tuple[list[str], list[str]]:
        """Grids as text: the prompts, which end where the last panel begins, and the completions."""
        panels = grid if self.orientation == "rows" else grid.swapaxes(1, 2)
        template = self._template(*panels.shape[1:3])
        text = np.empty((len(grid), len(template)), dtype="<U1")
        text[:] = list(template)
        symbols = np.array(list(self.alphabet))
        slots = [position for position, character in enumerate(template) if character == SLOT]
        text[:, slots] = symbols[panels.reshape(len(grid), len(slots))]
        split = slots[-self.features]
        return join_characters(text[:, :split]), join_characters(text[:, split:])

    def _template(self, lines: int, panels: int) -> str:
        """The text of any problem, with `SLOT` in place of every value."""
        panel = self.feature_separator.join(SLOT * self.features)
        line = self.panel_separator.join([panel] * panels)
        return self.prefix + self.row_separator.join([line] * lines)

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """`n` problems with the columns of `columns()`."""
        return Dataset.from_dict(self._columns(self.generate(n, split, seed)), features=COLUMNS)

    def _columns(self, problems: Problems) -> dict[str, list]:
        prompts, completions = self.write(problems.grid)
        names = ["+".join(RULES[index] for index in row) for row in problems.rules]
        return {"prompt": prompts, "completion": completions, "rule": names, "grid": problems.grid.tolist()}

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`, in `shards` independent streams.

        The shard's index enters the seed, so shards never share random numbers. Data loader workers and
        `datasets.distributed.split_dataset_by_node` hand every process its own shards (choose `shards` as a multiple
        of the number of processes times workers); Accelerate's default for iterable datasets, to read on one process
        and dispatch, is also without overlap.
        """
        if shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        random_generator(split, seed)  # reject bad values here and not at the first problem
        kwargs = {"split": split, "seed": seed, "shards": list(range(shards))}
        return IterableDataset.from_generator(self._stream_problems, gen_kwargs=kwargs, features=COLUMNS)

    def _stream_problems(self, split: str, seed: int, shards: list[int]) -> Iterator[dict]:
        for chunk in count():
            for shard in shards:
                columns = self._columns(self._draw(CHUNK, split, random_generator(split, seed, shard, chunk)))
                for values in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))

    def ambiguous_share(self, n: int, split: str, seed: int) -> float:
        """Share of problems with a second answer: see `s_raven.ambiguous`."""
        grid = self.generate(n, split, seed).grid
        return float(ambiguous(grid, self.rules, self.base, self.permute_features).mean())


def join_characters(text: np.ndarray) -> list[str]:
    """An array of characters [n, length] as n strings."""
    return np.ascontiguousarray(text).view(f"<U{text.shape[1]}").ravel().tolist()
