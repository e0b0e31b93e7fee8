"""Linear regression in context: noisy values of a linear function, and a query whose value is to be predicted.

n problems, N examples per problem, d features.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from jaxtyping import Float

from .streams import CHUNK, numbered, sharded


SPLITS = ("train", "test")
STEP_SIZES = np.linspace(0.05, 2.0, 40)  # tried by `tuned_step_size`, in units of 1 / (N + lambda)
COLUMNS = Features({"inputs": List(List(Value("float32"))), "labels": Value("float32")})


class Problems(NamedTuple):
    """What `RidgeRegression.generate` returns, in float64: `targets = inputs weights + noise`."""

    inputs: Float[np.ndarray, "n N d"]
    targets: Float[np.ndarray, "n N"]
    query: Float[np.ndarray, "n d"]
    weights: Float[np.ndarray, "n d"]


@dataclass(frozen=True)
class RidgeRegression:
    """Problems `y = x^T w + noise` with x ~ N(0, I) and w ~ N(prior_mean, I) / sqrt(d), and the known solutions.

    The splits "train" and "test" have disjoint random streams. Problem number i of a stream depends on the options,
    the split, the seed and i only, so any part of a stream can be drawn without what comes before it.

    >>> task = RidgeRegression(num_features=1, num_examples=2)
    >>> print(task.examples(0, 1, "test", seed=0)["inputs"][0].round(1))
    [[-0.6  1. ]
     [ 0.4 -0.9]
     [-1.2  0. ]]
    """

    num_features: int = field(default=4, metadata={"help": "features d"})
    num_examples: int = field(default=16, metadata={"help": "examples N per problem"})
    noise: float = field(default=0.5, metadata={"help": "standard deviation of the examples' noise"})
    prior_mean: float = field(
        default=0.0, metadata={"help": "mean of every weight, in units of its standard deviation 1 / sqrt(d)"}
    )
    penalty: float | None = field(
        default=None,
        metadata={"help": "lambda; default: d noise^2, with which ridge regression is the best predictor"},
    )

    def __post_init__(self):
        for name in ("num_features", "num_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.noise < math.inf:  # nan neither
            raise ValueError(f"noise must be >= 0 and finite, got {self.noise}")
        if not math.isfinite(self.prior_mean):
            raise ValueError(f"prior_mean must be finite, got {self.prior_mean}")
        if self.penalty is None:
            object.__setattr__(self, "penalty", self.num_features * self.noise**2)
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty must be >= 0 and finite, got {self.penalty}")
        if self.penalty == 0 and self.num_examples < self.num_features:
            raise ValueError(
                f"penalty must be above 0 with fewer examples ({self.num_examples}) than features "
                f"({self.num_features}): there are many solutions otherwise"
            )

    @property
    def centre(self) -> float:
        """Mean of every weight, which the penalty pulls it to and gradient descent starts from."""
        return self.prior_mean / self.num_features**0.5

    def generate(self, n: int, split: str, seed: int, start: int = 0) -> Problems:
        """Problems start .. start + n - 1 of a split's stream."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        return Problems(*numbered(self._draw, start, n, split, seed))

    def _draw(self, n: int, rng: np.random.Generator) -> Problems:
        inputs = rng.standard_normal((n, self.num_examples, self.num_features))
        weights = self.centre + rng.standard_normal((n, self.num_features)) / self.num_features**0.5
        noise = self.noise * rng.standard_normal((n, self.num_examples))
        return Problems(inputs, dot(inputs, weights) + noise, rng.standard_normal((n, self.num_features)), weights)

    def examples(self, start: int, count: int, split: str, seed: int) -> dict[str, np.ndarray]:
        """`inputs` [count, N + 1, d + 1], prompts [[X, y], [x, 0]], and the query's value without noise as `labels`
        [count], in float32. Noise in the labels would change no expected gradient, only add variance."""
        problems = self.generate(count, split, seed, start)
        labels = (problems.query * problems.weights).sum(-1)
        return {"inputs": query_prompts(problems).astype(np.float32), "labels": labels.astype(np.float32)}

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """The first `n` problems with the columns of `examples`."""
        return Dataset.from_dict(self._rows(0, n, split, seed), features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`; see `streams.sharded`."""
        return sharded(partial(self._rows, count=CHUNK, split=split, seed=seed), split, seed, shards, COLUMNS)

    def _rows(self, start: int, count: int, split: str, seed: int) -> dict[str, list]:
        return {name: array.tolist() for name, array in self.examples(start, count, split, seed).items()}

    def ridge_weights(self, problems: Problems) -> Float[np.ndarray, "n d"]:
        """`c + (X^T X + lambda I)^-1 X^T (y - X c)` with the prior's mean c, usually 0."""
        gram, moment = self._normal_equations(problems)
        return self.centre + np.linalg.solve(gram, moment[..., None])[..., 0]

    def descent_weights(self, problems: Problems, steps: int, step_size: float) -> Float[np.ndarray, "n d"]:
        """w after steps `w <- w - eta [X^T (X w - y) + lambda (w - c)]` of gradient descent from c."""
        return self._descend(*self._normal_equations(problems), steps, step_size)

    def tuned_step_size(self, problems: Problems, steps: int) -> float:
        """The best of `STEP_SIZES` for these problems and this number of steps."""
        equations = self._normal_equations(problems)
        candidates = STEP_SIZES / (self.num_examples + self.penalty)
        return float(min(candidates, key=lambda size: loss(problems, self._descend(*equations, steps, size))))

    def _descend(
        self, gram: Float[np.ndarray, "n d d"], moment: Float[np.ndarray, "n d"], steps: int, step_size: float
    ) -> Float[np.ndarray, "n d"]:
        moved = np.zeros_like(moment)
        for _ in range(steps):
            moved = moved - step_size * (dot(gram, moved) - moment)
        return self.centre + moved

    def _normal_equations(self, problems: Problems) -> tuple[Float[np.ndarray, "n d d"], Float[np.ndarray, "n d"]]:
        """`X^T X + lambda I` and `X^T (y - X c)`."""
        transposed = problems.inputs.swapaxes(1, 2)
        rest = problems.targets - self.centre * problems.inputs.sum(-1)
        return transposed @ problems.inputs + self.penalty * np.eye(self.num_features), dot(transposed, rest)


def dot(matrices: Float[np.ndarray, "n rows d"], vectors: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n rows"]:
    """A matrix times a vector, problem by problem."""
    return (matrices @ vectors[..., None])[..., 0]


def loss(problems: Problems, weights: Float[np.ndarray, "n d"]) -> float:
    """Mean squared error of the query's value without noise; 1 is what the prior's mean alone gives."""
    return float(np.square((problems.query * (weights - problems.weights)).sum(-1)).mean())


def query_prompts(problems: Problems) -> Float[np.ndarray, "n tokens columns"]:
    """[[X, y], [x, 0]], [n, N + 1, d + 1]: examples and, last, the query without its value."""
    n, examples, features = problems.inputs.shape
    prompts = np.zeros((n, examples + 1, features + 1))
    prompts[:, :-1, :-1], prompts[:, :-1, -1] = problems.inputs, problems.targets
    prompts[:, -1, :-1] = problems.query
    return prompts


def parameter_prompts(
    problems: Problems, weights: Float[np.ndarray, "n d"] | float = 0.0, zero_rows: bool = False
) -> Float[np.ndarray, "n tokens columns"]:
    """[[X, y, 0, 0], [0, 0, w, -1]], [n, N + 1, 2 d + 2], for steps of gradient descent from `weights`.

    `zero_rows` appends 2 d + 2 rows of zeros, as the construction with one head needs them.
    """
    n, examples, features = problems.inputs.shape
    columns = 2 * features + 2
    prompts = np.zeros((n, examples + 1 + columns * zero_rows, columns))
    prompts[:, :examples, :features], prompts[:, :examples, features] = problems.inputs, problems.targets
    prompts[:, examples, features + 1 : -1], prompts[:, examples, -1] = weights, -1
    return prompts
