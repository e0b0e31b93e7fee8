"""Compile the Triton kernels for GPUs that need not be here, and report registers, spills and shared memory.

    python scripts/compile_kernels.py                                  # all that may be tuned: an hour on one core
    python scripts/compile_kernels.py --first --head_size 64           # the first choice of each: minutes
    python scripts/compile_kernels.py --arch 90 --dtype bf16 --kernel forward --head_size 128

Prints a table and writes results.json. The exit status is 1 if a kernel is above a limit: more registers or shared
memory than the GPU has, or spills: none on sm_90; on sm_80, whose tensor cores take their operands from registers, at
most `--max_spills` bytes per thread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_sparsecoding.ops.triton import transfer, tuning
from hf_sparsecoding.ops.triton.backward import backward_keys, backward_queries
from hf_sparsecoding.ops.triton.forward import forward
from hf_sparsecoding.ops.triton.tiles import list_tiles
from hf_sparsecoding.reports import results, tables


ATTENTION = {"forward": forward, "backward_queries": backward_queries, "backward_keys": backward_keys}
KERNELS = (*ATTENTION, "list_tiles", "transfer_forward", "transfer_backward")
KINDS = ("soft_threshold", "thresholded_softmax")
ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes that a block can have
REGISTERS = 255  # that a thread can have

# argument -> type, where it is neither a stride nor an array of the numbers that are compiled for
TYPES = {
    **dict.fromkeys(("log_sum", "row_sum", "row_threshold", "threshold", "shares", "partial"), "*fp32"),
    **dict.fromkeys(("nonzero", "count", "count_pointer"), "*i32"),
    **dict.fromkeys(("index", "index_pointer"), "*i16"),
    **dict.fromkeys(("heads", "share", "queries", "keys", "window", "bucket"), "i32"),
    **dict.fromkeys(("outer_tiles", "inner_tiles", "past", "length", "channels"), "i32"),
    **dict.fromkeys(("alive", "alive_pointer"), "*i8"),
    "mask": "*u8",
    "age": "*i64",
    "scale": "fp32",
}
NUMBERS = ("query", "key", "value", "output", "grad", "grad_query", "grad_key", "grad_value")
NUMBERS += ("full", "lifted", "grad_full")


class Build(NamedTuple):
    """One kernel as it is compiled."""

    kernel: str
    kind: str
    dtype: str
    head_size: int
    function: triton.JITFunction
    constants: dict
    warps: int
    stages: int

    @property
    def name(self) -> str:
        blocks = [f"{key.removeprefix('BLOCK_')} {self.constants[key]}" for key in ("BLOCK_M", "BLOCK_N")
                  if key in self.constants]  # fmt: skip
        blocks += ["skip"] if self.constants.get("SKIP") else []
        if "BY_QUERY" in self.constants:
            blocks.append("by query" if self.constants["BY_QUERY"] else "by key")
        return ", ".join([self.kernel, self.kind, self.dtype, f"D {self.head_size}", *blocks, f"{self.warps} warps"])


def builds(options: argparse.Namespace, arch: int) -> Iterator[Build]:
    """What the autotuner may choose from on such a GPU, causal and with tiles marked, as training needs them."""
    for kernel in options.kernel:
        for dtype in options.dtype:
            if kernel in ATTENTION:
                for size in options.head_size:
                    for kind in options.kind:
                        yield from _attention(kernel, kind, dtype, size, arch, options.first)
            elif kernel != "list_tiles":
                blocks = {"BLOCK_T": transfer.BLOCK_T, "BLOCK_C": transfer.BLOCK_C}
                constants = {"D": 64, "LAGS": (1, 2, 3), "AGE": True, **blocks}
                yield Build(kernel, "lags", dtype, 64, getattr(transfer, kernel), constants, transfer.WARPS, 3)
        if kernel == "list_tiles":
            for by_query in (False, True):
                constants = {"BY_QUERY": by_query, "SOFTMAX": True, "CAUSAL": True, "WINDOW": True, "MASK": False}
                yield Build(kernel, "lists", "int16", 0, list_tiles, constants | {"CHUNK": 256}, 4, 3)


def _attention(kernel: str, kind: str, dtype: str, size: int, arch: int, first: bool) -> Iterator[Build]:
    softmax, element_size = kind == "thresholded_softmax", ELEMENT_SIZES[dtype]
    constants = {"D": size, "E": size, "BLOCK_D": size, "BLOCK_E": size}
    constants |= {"SOFTMAX": softmax, "CAUSAL": True, "WINDOW": False, "MASK": False}
    if kernel == "forward":
        constants |= {"TRACK": True, "COUNT": False}
    fitting = [
        shape
        for shape in tuning.shapes(kernel, element_size, size, softmax)
        if tuning.shared_memory(shape, element_size, size, size) <= SHARED_MEMORY[arch]
    ]
    for shape in fitting[:1] if first else fitting:
        for skip in ({"SKIP": False}, {"SKIP": True}) if kernel == "forward" else ({},):
            chosen = tuning.config(kernel, shape, **skip)
            yield Build(
                kernel, kind, dtype, size, ATTENTION[kernel].fn, constants | chosen.kwargs, shape.warps, shape.stages
            )
            if first:
                break


def signature(build: Build) -> tuple[dict[str, str], dict]:
    """Types of the arguments, and which are multiples of 16, as those of a contiguous tensor are."""
    types, attributes = {}, {}
    for place, name in enumerate(build.function.arg_names):
        if name in build.constants:
            types[name] = "constexpr"
            continue
        types[name] = f"*{build.dtype}" if name in NUMBERS else TYPES.get(name, "i64")
        if types[name].startswith("*") or (types[name] == "i64" and not name.startswith(("mask", "alive", "age"))):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return types, attributes


def compile_for(build: Build, arch: int) -> dict[str, int]:
    """Registers and bytes spilled per thread, bytes of shared memory per block."""
    types, attributes = signature(build)
    source = ASTSource(build.function, types, build.constants, attributes)
    options = {"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True}
    log = io.StringIO()
    with contextlib.redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # from the cache there is no log
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", log.getvalue(), re.S
    )
    if found is None:
        raise RuntimeError(f"ptxas reported nothing for {build.name}: {log.getvalue()!r}")
    stores, loads, registers = map(int, found.groups())
    return {"registers": registers, "spill_bytes": max(stores, loads), "shared_bytes": compiled.metadata.shared}


def excess(metrics: dict[str, int], arch: int, options: argparse.Namespace) -> list[str]:
    """What is above its limit."""
    limits = {
        "registers": options.max_registers,
        "spill_bytes": 0 if arch >= 90 else options.max_spills,
        "shared_bytes": SHARED_MEMORY[arch],
    }
    return [f"{name} {metrics[name]} > {limit}" for name, limit in limits.items() if metrics[name] > limit]


def main(options: argparse.Namespace) -> int:
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled then; unset it")
    runs, rows, failed = [], [], []
    for arch in options.arch:
        for build in builds(options, arch):
            metrics = compile_for(build, arch)
            above = excess(metrics, arch, options)
            name = f"{build.name}, sm_{arch}"
            failed += [f"{name}: {reason}" for reason in above]
            print(f"{name}: {metrics}", flush=True)
            settings = {"arch": arch, "kind": build.kind, "dtype": build.dtype, "head_size": build.head_size}
            settings |= {key: value for key, value in build.constants.items() if key.startswith(("BLOCK", "SKIP"))}
            settings |= {"warps": build.warps, "stages": build.stages, "triton": triton.__version__}
            runs.append(
                {"method": name, "seed": 0, "trainable_parameters": 0, "samples": 0, "settings": settings,
                 "metrics": metrics}
            )  # fmt: skip
            rows.append([name, *(str(metrics[key]) for key in ("registers", "spill_bytes", "shared_bytes"))])
    path = Path(options.output_dir) / results.FILE
    results.write(path, results.new("kernels-compiled", runs))
    print(tables.table(["kernel", "registers", "spills, bytes", "shared memory, bytes"], rows))
    print(f"wrote {path}")
    for line in failed:
        print(f"above the limit: {line}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_MEMORY))
    made.add_argument("--kernel", nargs="+", default=list(KERNELS), choices=KERNELS)
    made.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    made.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=sorted(ELEMENT_SIZES))
    made.add_argument("--head_size", type=int, nargs="+", default=[64, 128], choices=[16, 32, 64, 128, 256])
    made.add_argument("--first", action="store_true", help="only the first choice for each problem")
    made.add_argument("--max_registers", type=int, default=REGISTERS, help="that a thread may use")
    made.add_argument("--max_spills", type=int, default=0, help="bytes per thread that sm_80 may spill")
    made.add_argument("--output_dir", default="outputs/compile_kernels")
    return made


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
