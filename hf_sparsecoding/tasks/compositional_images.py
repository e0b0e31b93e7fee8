"""Small images composed of shapes, and a rule that moves them: a shift of the cells, then a symmetry of the square.

n problems, P = pairs + 1 image pairs (the last one is the target), S pixels per side, N = S * S pixels,
C = cells * cells cells, K shapes per image at most, R rules.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import numpy as np
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from jaxtyping import Int, UInt8
from PIL import Image as Picture

from .streams import CHUNK, numbered, sharded


# No glyph is one of its own rotations or reflections, and no two are closer than 3 pixels in any orientation.
GLYPHS = (
    "####/#.../##../#...",
    "###./..#./.#../####",
    "####/#.../###./...#",
    "##../##../.#../.##.",
    "####/#.../#.##/###.",
    "####/..#./..#./.##.",
    "#.../#.../###./#.#.",
    "..#./.###/#.#./..#.",
    ".##./####/..#./..##",
    "##.#/.###/.#../....",
    "#..#/##.#/.##./..#.",
    ".#../####/.#.#/...#",
)
GLYPH_SIZE = 4  # pixels
LEVELS = (80, 105, 130, 155, 180, 205, 230, 255)  # grey values of shapes: 255 is full ink, the background is 0
SYMMETRIES = (
    "identity",
    "rotate_90",  # anticlockwise
    "rotate_180",
    "rotate_270",
    "transpose",
    "flip_up_down",
    "transpose_other_diagonal",
    "flip_left_right",
)
RULES = ("both", "shift", "symmetry")
COLUMNS = Features({"inputs": List(Image()), "outputs": List(Image()), "rule": Value("string")})


class Problems(NamedTuple):
    """What `CompositionalImages.generate` returns; grey values are 0 to 255, the last pair of images is the target.

    shifts: cells that the shapes move down and to the right.
    symmetries: index into `SYMMETRIES`.
    """

    inputs: UInt8[np.ndarray, "n P S S"]
    outputs: UInt8[np.ndarray, "n P S S"]
    shifts: Int[np.ndarray, "n 2"]
    symmetries: Int[np.ndarray, " n"]


@dataclass(frozen=True)
class CompositionalImages:
    """Pairs of images that follow one rule, and a last input whose output is to be drawn.

    An image is a torus of `cells` x `cells` cells with a few distinct shapes, each in its own cell and with its own
    grey level. The rule of a problem has two independent parts: a shift by whole cells, over the borders, and then a
    symmetry of the square (a rotation or reflection of the whole image). With 3 x 3 cells that is 9 x 8 = 72 rules.

    The target of one problem, its input on the left and the output to be drawn on the right:

    >>> problem = CompositionalImages().generate(1, "test", seed=0)
    >>> for line in np.concatenate([problem.inputs[0, -1], problem.outputs[0, -1]], axis=-1) > 0:
    ...     print("".join(np.where(line, "#", ".")))
    .##.....................
    ####....................
    ..#.....................
    ..##....................
    ........................
    ........................
    ........................
    ........................
    ##.#...........#......#.
    .###.........###......##
    .#............#.....####
    ..............##....#.#.
    >>> rule_name(problem.shifts[0], int(problem.symmetries[0]))
    'shift_0_2+rotate_270'

    Splits go by rules: a share of the combinations is held out, and "ood" draws from these, "train" and "test" from
    the others. With `rules="both"` every shift and every symmetry occurs in training, only not combined as in "ood".
    The three splits have disjoint random streams. Problem number i of a stream depends on the options, the split, the
    seed and i only, so any part of a stream can be drawn without what comes before it.

    Args:
        pairs: Context pairs per problem, at least 1.
        cells: Cells per side of the image, at least 2.
        cell_size: Pixels per side of a cell, a multiple of the glyphs' 4.
        shapes: Fewest and most shapes per image, between 1 and 8, and no more than there are cells.
        rules: "both", or one part alone: "shift" or "symmetry". The held-out rules are then parts never seen before.
        held_out_share: Share of the rules kept for "ood"; at least one is held out and one is left.
        split_seed: Seed of the shuffle that chooses the held-out rules.
    """

    pairs: int = 3
    cells: int = 3
    cell_size: int = 4
    shapes: tuple[int, int] = (2, 3)
    rules: str = "both"
    held_out_share: float = 0.25
    split_seed: int = 0

    def __post_init__(self):
        if self.pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {self.pairs}")
        if self.cells < 2:
            raise ValueError(f"cells must be at least 2, got {self.cells}")
        if self.cell_size < 1 or self.cell_size % GLYPH_SIZE:
            raise ValueError(f"cell_size must be a multiple of {GLYPH_SIZE}, got {self.cell_size}")
        most = min(len(LEVELS), self.cells**2)
        if not isinstance(self.shapes, list | tuple) or [type(number) for number in self.shapes] != [int, int]:
            raise ValueError(f"shapes must be two whole numbers, fewest and most, got {self.shapes!r}")
        object.__setattr__(self, "shapes", tuple(self.shapes))
        if not 1 <= self.shapes[0] <= self.shapes[1] <= most:
            raise ValueError(f"shapes must be (fewest, most) with 1 <= fewest <= most <= {most}, got {self.shapes}")
        if self.rules not in RULES:
            raise ValueError(f"rules must be one of {RULES}, got {self.rules!r}")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, both excluded, got {self.held_out_share}")
        if self.split_seed < 0:
            raise ValueError(f"split_seed must be at least 0, got {self.split_seed}")
        if self.rules == "both" and not self._every_part_is_trained():
            raise ValueError(
                "every shift and every symmetry must occur in training, got held_out_share="
                f"{self.held_out_share} with split_seed={self.split_seed}; lower the share or choose another seed"
            )

    def _every_part_is_trained(self) -> bool:
        trained = self._table[self._halves[0]]
        return len(np.unique(trained[:, :2], axis=0)) == self.cells**2 and len(np.unique(trained[:, 2])) == 8

    @property
    def size(self) -> int:
        """Pixels per side of an image."""
        return self.cells * self.cell_size

    @cached_property
    def _table(self) -> Int[np.ndarray, "R 3"]:
        """Every rule: cells down, cells to the right, symmetry."""
        steps = range(self.cells) if self.rules != "symmetry" else range(1)
        symmetries = range(len(SYMMETRIES)) if self.rules != "shift" else range(1)
        return np.array(list(product(steps, steps, symmetries)))

    @cached_property
    def _halves(self) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " held_out"]]:
        """Rules of train and test, and rules of ood, as rows of `_table`."""
        rules = np.random.default_rng(self.split_seed).permutation(len(self._table))
        held_out = min(max(1, round(self.held_out_share * len(rules))), len(rules) - 1)
        return rules[held_out:], rules[:held_out]

    @cached_property
    def _sources(self) -> Int[np.ndarray, "R N"]:
        """For every rule and every pixel of the output, the pixel of the input that it shows."""
        pixels = np.arange(self.size**2).reshape(self.size, self.size)
        return np.stack([apply_rule(pixels, rule[:2] * self.cell_size, int(rule[2])).ravel() for rule in self._table])

    @cached_property
    def _glyphs(self) -> UInt8[np.ndarray, "glyphs cell_size cell_size"]:
        glyphs = np.array([[list(row) for row in glyph.split("/")] for glyph in GLYPHS]) == "#"
        scale = self.cell_size // GLYPH_SIZE
        return glyphs.repeat(scale, axis=1).repeat(scale, axis=2).astype(np.uint8)

    def generate(self, n: int, split: str, seed: int, start: int = 0) -> Problems:
        """Problems `start` to `start + n` of a split's stream ("train", "test" or "ood")."""
        draw = partial(self._draw, self._halves[split == "ood"])
        return Problems(*numbered(draw, start, n, split, seed))

    def _draw(self, allowed: Int[np.ndarray, " rules"], n: int, rng: np.random.Generator) -> Problems:
        rules = allowed[rng.integers(len(allowed), size=n)]
        inputs = self._draw_inputs(n, rng)
        flat = inputs.reshape(*inputs.shape[:2], -1)  # [n, P, N]
        outputs = np.take_along_axis(flat, self._sources[rules][:, None], axis=-1).reshape(inputs.shape)
        return Problems(inputs, outputs, self._table[rules, :2], self._table[rules, 2])

    def _draw_inputs(self, n: int, rng: np.random.Generator) -> UInt8[np.ndarray, "n P S S"]:
        images, (fewest, most) = n * (self.pairs + 1), self.shapes
        cells, glyphs, levels = (
            rng.random((images, choices)).argsort(axis=-1)[:, :most]  # [n * P, K], distinct in an image
            for choices in (self.cells**2, len(GLYPHS), len(LEVELS))
        )
        missing = np.arange(most) >= rng.integers(fewest, most + 1, size=(images, 1))
        ink = np.where(missing, 0, np.array(LEVELS)[levels]).astype(np.uint8)
        canvas = np.zeros((images, self.cells**2, self.cell_size, self.cell_size), dtype=np.uint8)
        canvas[np.arange(images)[:, None], cells] = self._glyphs[glyphs] * ink[:, :, None, None]
        canvas = canvas.reshape(images, self.cells, self.cells, self.cell_size, self.cell_size).swapaxes(2, 3)
        return canvas.reshape(n, self.pairs + 1, self.size, self.size)

    def examples(self, start: int, count: int, split: str, seed: int) -> dict[str, np.ndarray]:
        """Problems `start` to `start + count` for a model, as ink between 0 (background) and 1.

        Returns:
            `inputs` [count, 2 P, S, S]: first input, first output, second input, ..., the target's input, zeros.
            `labels` [count, 1, S, S]: the target's output. Both are float32.
        """
        problems = self.generate(count, split, seed, start)
        images = np.stack([problems.inputs, problems.outputs], axis=2).astype(np.float32) / 255  # [count, P, 2, S, S]
        labels = images[:, -1, 1:].copy()
        images[:, -1, 1] = 0
        return {"inputs": images.reshape(count, 2 * (self.pairs + 1), self.size, self.size), "labels": labels}

    def dataset(self, n: int, split: str, seed: int) -> Dataset:
        """The first `n` problems, with columns `inputs` and `outputs` (images, the target last) and `rule` (text).

        Images are PNG files in memory, to look at and to share; `examples` is much faster for a training loop.
        """
        return Dataset.from_dict(columns(self.generate(n, split, seed)), features=COLUMNS)

    def stream(self, split: str, seed: int, shards: int = 64) -> IterableDataset:
        """Endless problems with the columns of `dataset`; see `streams.sharded`."""
        return sharded(partial(self._chunk, split=split, seed=seed), split, seed, shards, COLUMNS)

    def _chunk(self, start: int, split: str, seed: int) -> dict[str, list]:
        return columns(self.generate(CHUNK, split, seed, start))

    def ambiguous_share(self, n: int, split: str, seed: int) -> float:
        """Share of problems with a second answer: some other rule, held out or not, turns every context input into its
        output, but draws another target output. With `GLYPHS` it is zero, as none has a symmetry of its own."""
        problems = self.generate(n, split, seed)
        inputs, outputs = (images.reshape(n, self.pairs + 1, self.size**2) for images in problems[:2])
        ambiguous = np.zeros(n, dtype=bool)
        for source in self._sources:
            follows = (inputs[..., source] == outputs).all(axis=-1)  # [n, P]
            ambiguous |= follows[:, :-1].all(axis=1) & ~follows[:, -1]
        return float(ambiguous.mean())

    def picture(self, seed: int = 0, split: str = "test") -> Picture.Image:
        """The first problem of a stream: a column per pair, inputs above outputs, the target on the right."""
        problem = self.generate(1, split, seed)
        gap, scale = 2, max(1, 96 // self.size)
        step = self.size + gap  # a wider gap sets the target apart
        canvas = np.full((2 * step + gap, (self.pairs + 1) * step + 2 * gap), 255, dtype=np.uint8)
        for row, images in enumerate(problem[:2]):
            for column, image in enumerate(images[0]):
                top, left = gap + row * step, gap + column * step + gap * (column == self.pairs)
                canvas[top : top + self.size, left : left + self.size] = image
        return Picture.fromarray(canvas.repeat(scale, axis=0).repeat(scale, axis=1))


def apply_rule(image: Int[np.ndarray, "S S"], shift: Int[np.ndarray, " 2"], symmetry: int) -> Int[np.ndarray, "S S"]:
    """Shift by pixels down and to the right on the torus, then apply one of `SYMMETRIES`."""
    shifted = np.roll(image, shift, axis=(0, 1))
    if symmetry >= 4:
        shifted = shifted.T
    return np.rot90(shifted, symmetry % 4)


def rule_name(shift: Int[np.ndarray, " 2"], symmetry: int) -> str:
    return f"shift_{shift[0]}_{shift[1]}+{SYMMETRIES[symmetry]}"


def columns(problems: Problems) -> dict[str, list]:
    """Columns of a data set, the pictures as Pillow's."""
    inputs, outputs = ([list(map(Picture.fromarray, images)) for images in arrays] for arrays in problems[:2])
    names = [rule_name(*rule) for rule in zip(problems.shifts, problems.symmetries.tolist(), strict=True)]
    return {"inputs": inputs, "outputs": outputs, "rule": names}
