"""RAVEN as a task: problems, arrays for models and data sets, pure in (configuration, split, seed, index)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as count_up
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from jaxtyping import Float32, UInt8
from PIL import Image

from . import files
from .attributes import CONFIGURATIONS
from .generator import Problem, draw_panels, draw_problem, random_generator
from .rendering import SIDE, check_size, draw_picture, ink, render_all


COLUMNS = Features({**files.COLUMNS, "rules": Value("string")})


@dataclass(frozen=True)
class Raven:
    """Matrices of 3 x 3 panels; each row of panels follows the same rules, and the ninth panel is the answer.

    Every component of a panel (the left and the right half, the outer shape, the grid, ...) has one rule on Number or
    Position and one each on Type, Size and Color:

    | rule             | row                                                             | free parameter |
    |------------------|-----------------------------------------------------------------|----------------|
    | constant         | a, a, a                                                         |                |
    | progression      | a, a + d, a + 2 d; on Position all slots shift by d             | d = ±1 or ±2   |
    | arithmetic       | a, b, a + b or a - b; on Position union or difference; no Type  | sign           |
    | distribute three | a, b, c, in a new cyclic order per row                          |                |

    >>> problem = Raven("left_right").generate(2, "test", seed=0)[1]
    >>> print(problem.describe())
    left: number/position constant, type constant, size distribute three, color progression +1
    right: number/position constant, type constant, size progression +2, color distribute three
    >>> [panel[0][0].color for panel in problem.panels]  # levels of the shapes on the left
    [3, 4, 5, 3, 4, 5, 6, 7, 8]

    How much of the answer the contexts determine, apart from the few problems that two rules explain (`solve`):

    - The angle is under no rule, but an entity keeps it along its row. So without a grid the whole answer is
      determined, and in grids under Constant, where all entities stay.
    - Under a rule on Position the whole answer is determined too. With a progression the entities move along; under
      the other rules they stay where they can, and those that cannot take the new slots in order. A union shows the
      entities of both panels.
    - Under a rule on Number the slots of a row are nested: a panel with more entities shows all slots of a panel with
      fewer. Random are which slots the answer adds to those of the panel before it in that order, and, in slots that
      no other panel of the row shows, the angle and those of type, size and color that its panels mix.

    The streams of the three splits, and those of the seeds and configurations, share no random numbers.

    Args:
        configuration: One of `CONFIGURATIONS`.
        size: Side of the panels in pixels. They are drawn with 160 and averaged over boxes, so it must divide 160.
    """

    configuration: str = "center"
    size: int = SIDE

    def __post_init__(self):
        if self.configuration not in CONFIGURATIONS:
            raise ValueError(f"configuration must be one of {tuple(CONFIGURATIONS)}, got {self.configuration!r}")
        check_size(self.size)

    def generate(self, n: int, split: str, seed: int, start: int = 0) -> list[Problem]:
        """Problems `start` to `start + n - 1` of a split ("train", "validation" or "test")."""
        self._check(n, start, split, seed)
        return [draw_problem(self.configuration, split, seed, index) for index in range(start, start + n)]

    def examples(
        self, start: int, count: int, split: str, seed: int
    ) -> dict[str, Float32[np.ndarray, "{count} panels {self.size} {self.size}"]]:
        """Problems `start` to `start + count - 1` as ink, 1 - grey / 255, for models that draw the answer.

        inputs: [count, 9, size, size], the contexts and an empty (all zero) ninth panel.
        labels: [count, 1, size, size], the answer.
        """
        self._check(count, start, split, seed)
        inputs = np.zeros((count, 9, self.size, self.size), dtype=np.float32)
        labels = np.empty((count, 1, self.size, self.size), dtype=np.float32)
        for row in range(count):
            panels = draw_panels(self.configuration, split, seed, start + row)
            panels = ink(render_all(panels, self.configuration), self.size)  # [9, size, size]
            inputs[row, :8], labels[row, 0] = panels[:8], panels[8]
        return {"inputs": inputs, "labels": labels}

    def images(self, problem: Problem) -> UInt8[np.ndarray, "16 160 160"]:
        """Greys of the 8 contexts and the 8 choices, in full size whatever `size` says."""
        return render_all([*problem.panels[:8], *problem.choices], problem.configuration)

    def dataset(self, n: int, split: str, seed: int, start: int = 0) -> Dataset:
        """`n` problems: 8 `panels` and 8 `choices` as images, `target` (index of the answer) and `rules` in words."""
        self._check(n, start, split, seed)
        columns = {name: [] for name in COLUMNS}
        for index in range(start, start + n):
            for name, value in self._columns(split, seed, index).items():
                columns[name].append(value)
        return Dataset.from_dict(columns, features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`.

        Of S shards, number s holds the problems s, s + S, s + 2 S, ..., so shards never overlap. Data loader workers
        and `datasets.distributed.split_dataset_by_node` hand every process its own shards (choose `shards` as a
        multiple of the number of processes times workers). As shards have no end, a process stays with its first one.
        """
        if shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        self._check(0, 0, split, seed)  # reject bad values here and not at the first problem
        kwargs = {"split": split, "seed": seed, "step": shards, "shards": list(range(shards))}
        return IterableDataset.from_generator(self._stream_problems, gen_kwargs=kwargs, features=COLUMNS)

    def _stream_problems(self, split: str, seed: int, step: int, shards: list[int]) -> Iterator[dict[str, Any]]:
        for start in count_up(0, step):
            for shard in shards:
                yield self._columns(split, seed, start + shard)

    def _columns(self, split: str, seed: int, index: int) -> dict[str, Any]:
        problem = draw_problem(self.configuration, split, seed, index)
        columns = files.columns_of(self.images(problem), problem.target, self.size)
        return {**columns, "rules": problem.describe()}

    def picture(self, seed: int = 0, split: str = "test", index: int = 0) -> Image.Image:
        """One problem for people: the matrix with a question mark for the answer, below it the choices."""
        images = self.images(draw_problem(self.configuration, split, seed, index))
        return draw_picture(images[:8], images[8:])

    def _check(self, n: int, start: int, split: str, seed: int) -> None:
        if n < 0:
            raise ValueError(f"number of problems must be >= 0, got {n}")
        random_generator(self.configuration, split, seed, start)
