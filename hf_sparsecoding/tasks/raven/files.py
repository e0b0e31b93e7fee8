"""RAVEN's files: one `.npz` per problem with the keys `image` and `target`, ours and the original ones alike.

`image` holds the 8 contexts and then the 8 choices, (16, 160, 160) uint8; `target` is the index of the answer among
the choices. Names are `RAVEN_<index>_<split>.npz`, where the split is train, val or test.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from jaxtyping import Float32, Int64, UInt8
from PIL import Image as Pictures
from tqdm.auto import tqdm

from .attributes import CONFIGURATIONS
from .generator import SPLITS, draw_problem
from .rendering import SIDE, check_size, ink, render_all


SHAPE = (16, SIDE, SIDE)
NAME = re.compile(r"RAVEN_(\d+)(?:_(train|val|validation|test))?\.npz")
COLUMNS = Features({"panels": List(Image(mode="L")), "choices": List(Image(mode="L")), "target": Value("int64")})


def split_of(index: int) -> str:
    """Of ten problems, six are for training, two for validation and two for testing."""
    return (("train",) * 6 + ("validation",) * 2 + ("test",) * 2)[index % 10]


def file_name(index: int) -> str:
    return f"RAVEN_{index}_{split_of(index).replace('validation', 'val')}.npz"


def save(path: str | os.PathLike, images: UInt8[np.ndarray, "16 160 160"], target: int) -> None:
    """Write one problem; a file of that name is there completely or not at all."""
    check_problem(path, images, target)
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            np.savez_compressed(file, image=images, target=np.int64(target))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike) -> tuple[UInt8[np.ndarray, "16 160 160"], int]:
    """Images and target of one problem; other keys of an original file are not read."""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("one array instead of an archive")
        with file:
            images, target = file["image"], file["target"]
    except FileNotFoundError:
        raise
    except Exception as error:  # what zip, zlib and numpy raise depends on which bytes are damaged
        raise ValueError(f"{path} cannot be read ({error}); delete it and write it again") from error
    check_problem(path, images, target)
    return images, int(target)


def check_problem(path: str | os.PathLike, images: np.ndarray, target: Any) -> None:
    if images.shape != SHAPE or images.dtype != np.uint8:
        raise ValueError(f"{path}: image must be uint8 of shape {SHAPE}, got {images.dtype} of shape {images.shape}")
    target = np.asarray(target)
    if target.shape != () or target.dtype.kind not in "iu" or not 0 <= target < 8:
        raise ValueError(f"{path}: target must be a whole number from 0 to 7, got {target}")


def write_folder(
    folder: str | os.PathLike,
    configurations: Sequence[str] = tuple(CONFIGURATIONS),
    indices: Iterable[int] = range(10_000),
    seed: int = 0,
    progress: bool = True,
) -> None:
    """Write `<folder>/<configuration>/RAVEN_<index>_<split>.npz` for all indices; a file that is there is kept.

    File i is problem i of its split's stream. To share the work, give each process its own range of indices. Files of
    another seed are kept too, so give each seed a folder of its own.
    """
    unknown = [name for name in configurations if name not in CONFIGURATIONS]
    if unknown:
        raise ValueError(f"configurations must be out of {tuple(CONFIGURATIONS)}, got {unknown}")
    indices = list(indices)
    with tqdm(total=len(configurations) * len(indices), disable=not progress, unit="problem") as bar:
        for configuration in configurations:
            place = Path(folder, configuration)
            place.mkdir(parents=True, exist_ok=True)
            for index in indices:
                path = place / file_name(index)
                if not path.exists():
                    problem = draw_problem(configuration, split_of(index), seed, index)
                    images = render_all([*problem.panels[:8], *problem.choices], configuration)
                    save(path, images, problem.target)
                bar.update()


def find_files(folder: str | os.PathLike, split: str, start: int, count: int | None) -> list[Path]:
    """A split's files in one folder by index; a name without a split belongs to that of its index modulo 10."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if start < 0 or (count is not None and count < 0):
        raise ValueError(f"start and count must be >= 0, got {start} and {count}")
    found = []
    for path in Path(folder).iterdir():
        if match := NAME.fullmatch(path.name):
            index = int(match[1])
            own = {None: split_of(index), "val": "validation"}.get(match[2], match[2])
            if own == split:
                found.append((index, path.name, path))
    if not found:
        raise ValueError(f"no RAVEN_*.npz of split {split!r} in {folder}; write_folder writes some into subfolders")
    return [path for *_, path in sorted(found)][start:][:count]


def read_folder(
    folder: str | os.PathLike, split: str, start: int = 0, count: int | None = None
) -> tuple[UInt8[np.ndarray, "n 16 160 160"], Int64[np.ndarray, " n"]]:
    """Images and targets of a split, `count` or all from its file number `start` on; 1000 problems take 410 MB."""
    paths = find_files(folder, split, start, count)
    images, targets = np.empty((len(paths), *SHAPE), dtype=np.uint8), np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        images[row], targets[row] = load(path)
    return images, targets


def folder_dataset(
    folder: str | os.PathLike, split: str, start: int = 0, count: int | None = None, size: int = SIDE
) -> Dataset:
    """The problems of `read_folder` with the columns `panels`, `choices` and `target`, images as PNGs in memory."""
    check_size(size)
    columns = {name: [] for name in COLUMNS}
    for path in find_files(folder, split, start, count):
        for name, value in columns_of(*load(path), size).items():
            columns[name].append(value)
    return Dataset.from_dict(columns, features=COLUMNS)


def columns_of(images: UInt8[np.ndarray, "16 160 160"], target: int, size: int) -> dict[str, Any]:
    """One problem as an example of a data set."""
    if size < SIDE:
        images = np.round(255 * (1 - ink(images, size))).astype(np.uint8)
    pictures = [Pictures.fromarray(image) for image in images]
    return {"panels": pictures[:8], "choices": pictures[8:], "target": target}


def model_arrays(
    images: UInt8[np.ndarray, "n 16 160 160"], targets: Int64[np.ndarray, " n"], size: int = SIDE
) -> dict[str, Float32[np.ndarray, "n panels {size} {size}"]]:
    """What `Raven.examples` returns, from read files: `inputs` [n, 9, size, size], `labels` [n, 1, size, size]."""
    check_size(size)
    inputs = np.zeros((len(images), 9, size, size), dtype=np.float32)
    labels = np.empty((len(images), 1, size, size), dtype=np.float32)
    for row, (image, target) in enumerate(zip(images, targets, strict=True)):
        inputs[row, :8] = ink(image[:8], size)
        labels[row, 0] = ink(image[8 + target], size)
    return {"inputs": inputs, "labels": labels}
