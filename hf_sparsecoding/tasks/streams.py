"""Random numbers of the tasks: one endless numbered sequence of problems per split and seed."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
from datasets import Features, IterableDataset


SPLITS = ("train", "test", "ood")
CHUNK = 256  # problems that are drawn at once


def random_generator(split: str, seed: int, *stream: int) -> np.random.Generator:
    """An own random stream per split, seed and, where given, shard and chunk."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return np.random.default_rng(np.random.SeedSequence((SPLITS.index(split), seed), spawn_key=stream))


def numbered(
    draw: Callable[[int, np.random.Generator], Sequence[np.ndarray]], start: int, n: int, split: str, seed: int
) -> list[np.ndarray]:
    """Problems start .. start + n - 1 of a split: arrays whose first axis counts problems.

    `draw(CHUNK, generator)` gives the arrays of a whole chunk, so that problem i is the same wherever a call starts.
    """
    if n < 0 or start < 0:
        raise ValueError(f"n and start must be >= 0, got {n} and {start}")
    first, last = start // CHUNK, max(start + n - 1, start) // CHUNK
    parts = [draw(CHUNK, random_generator(split, seed, chunk)) for chunk in range(first, last + 1)]
    inside = slice(start - first * CHUNK, start - first * CHUNK + n)
    return [np.concatenate(arrays)[inside] for arrays in zip(*parts, strict=True)]


def sharded(
    rows: Callable[[int], dict[str, list]], split: str, seed: int, shards: int, features: Features
) -> IterableDataset:
    """Endless problems in `shards` parts without overlap; `rows(start)` gives the columns of a chunk of `CHUNK`.

    Shard k has every `shards`-th chunk, from chunk k on. Data loader workers and
    `datasets.distributed.split_dataset_by_node` hand every process its own shards (choose `shards` as a multiple of
    the number of processes times workers); a shard never ends, so a process reads the first one it has.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    random_generator(split, seed)  # reject bad values here and not at the first problem
    kwargs = {"rows": rows, "total": shards, "shards": list(range(shards))}
    return IterableDataset.from_generator(_shard_rows, gen_kwargs=kwargs, features=features)


def _shard_rows(rows: Callable[[int], dict[str, list]], total: int, shards: list[int]) -> Iterator[dict]:
    for start in shard_starts(shards, total):
        columns = rows(start)
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def shard_starts(shards: list[int], total: int, size: int = CHUNK) -> Iterator[int]:
    """Endlessly, the first numbers of the chunks that belong to `shards` out of `total`: no two shards share one."""
    for round_ in count():
        for shard in shards:
            yield (round_ * total + shard) * size
