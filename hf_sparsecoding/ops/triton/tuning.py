"""Block sizes, warps and stages that the autotuner may try for a problem.

For numbers of two bytes and heads of up to 128 the table holds what compiles without spilling a register on sm_90, as
`scripts/compile_kernels.py` reports it; the rest is smaller, and not all of it has been compiled. What does not fit
into the shared memory of the GPU at hand is left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton import knobs


# A tuned choice holds for these. Lengths count by their power of two, so that not every new length is tuned for.
KEY = ["bucket", "D", "E", "SOFTMAX", "CAUSAL", "WINDOW", "MASK"]
LONGEST_BUCKET = 1 << 14


class Shape(NamedTuple):
    """Of a program: the rows it keeps, the rows of a step along the others, and how it runs."""

    kept: int
    step: int
    warps: int
    stages: int
    softmax: bool = True  # whether a softmax, which needs more registers, may have it too


# kernel -> (bytes of a number, largest head size) -> shapes. The first is what a single choice would be.
SHAPES: dict[str, dict[tuple[int, int], tuple[Shape, ...]]] = {
    "forward": {
        (2, 64): (Shape(128, 64, 8, 3), Shape(128, 128, 8, 2), Shape(64, 64, 4, 3)),
        (2, 128): (Shape(128, 64, 8, 3), Shape(64, 64, 4, 3, softmax=False), Shape(64, 32, 4, 2)),
        (2, 256): (Shape(64, 32, 8, 2), Shape(32, 32, 8, 2)),
        (4, 64): (Shape(64, 32, 4, 2),),
        (4, 128): (Shape(16, 16, 4, 1),),
        (4, 256): (Shape(16, 16, 8, 1),),
    },
    "backward_queries": {
        (2, 64): (Shape(128, 64, 8, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 2)),
        (2, 128): (Shape(128, 64, 8, 2), Shape(64, 32, 4, 2)),
        (2, 256): (Shape(64, 32, 8, 2), Shape(32, 32, 8, 2)),
        (4, 64): (Shape(32, 16, 4, 2),),
        (4, 128): (Shape(16, 16, 4, 1),),
        (4, 256): (Shape(16, 16, 8, 1),),
    },
    "backward_keys": {
        (2, 64): (Shape(128, 32, 8, 2), Shape(128, 64, 8, 2, softmax=False), Shape(64, 32, 4, 2)),
        (2, 128): (Shape(64, 32, 8, 2), Shape(128, 32, 8, 2, softmax=False), Shape(32, 32, 4, 2)),
        (2, 256): (Shape(32, 32, 8, 2),),
        (4, 64): (Shape(32, 16, 4, 2),),
        (4, 128): (Shape(16, 16, 4, 1),),
        (4, 256): (Shape(16, 16, 8, 1),),
    },
}
INTERPRETED = Shape(64, 32, 4, 1)  # nothing is timed: one for all


def shapes(kernel: str, element_size: int, head_size: int, softmax: bool) -> list[Shape]:
    """Those of the table for numbers of `element_size` bytes and heads of up to `head_size`."""
    size = next(size for bytes_, size in SHAPES[kernel] if bytes_ == element_size and size >= head_size)
    return [shape for shape in SHAPES[kernel][element_size, size] if shape.softmax or not softmax]


def shared_memory(shape: Shape, element_size: int, block_d: int, block_e: int) -> int:
    """About how many bytes a program takes: what it keeps, and the steps that are under way."""
    return element_size * (block_d + block_e) * (shape.kept + shape.step * shape.stages)


def config(kernel: str, shape: Shape, **options) -> triton.Config:
    kept, step = ("BLOCK_N", "BLOCK_M") if kernel == "backward_keys" else ("BLOCK_M", "BLOCK_N")
    blocks = {kept: shape.kept, step: shape.step}
    return triton.Config(blocks | options, num_warps=shape.warps, num_stages=shape.stages)


def configs(kernel: str) -> list[triton.Config]:
    """Everything in the table; the forward's with and without leaving out values of dead tiles."""
    skips = [{"SKIP": False}, {"SKIP": True}] if kernel == "forward" else [{}]
    if knobs.runtime.interpret:
        return [config(kernel, INTERPRETED, **skips[-1])]
    known = dict.fromkeys(shape._replace(softmax=True) for table in SHAPES[kernel].values() for shape in table)
    return [config(kernel, shape, **skip) for shape in known for skip in skips]


def prune(kernel: str):
    """An `early_config_prune` of `triton.autotune`."""

    def pruned(configs: Sequence[triton.Config], arguments: dict, **options) -> list[triton.Config]:
        query, options = arguments["query"], arguments | options
        size, block_d, block_e = query.element_size(), options["BLOCK_D"], options["BLOCK_E"]
        chosen = shapes(kernel, size, max(block_d, block_e), options["SOFTMAX"])
        limit = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin
        fitting = [shape for shape in chosen if shared_memory(shape, size, block_d, block_e) <= limit]
        smallest = min(chosen, key=lambda shape: shared_memory(shape, size, block_d, block_e))
        kept = {_identity(config(kernel, shape)) for shape in fitting or [smallest]}
        return [candidate for candidate in configs if _identity(candidate) in kept]

    return pruned


def _identity(config: triton.Config) -> tuple[int, ...]:
    return config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.num_warps, config.num_stages
