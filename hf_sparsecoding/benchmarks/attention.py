"""Suite "attention": forward and training (forward and backward) of attention functions, against torch's SDPA.

Causal, with random queries, keys and values; or with a chosen share of tiles that hold a coefficient at all (density
below 1), which soft thresholding leaves out. SDPA takes as long whatever the values are; on a GPU, in half precision,
it is FlashAttention. Native sparse attention shares one key-value head among all heads, as its kernels demand, so its
times are those of another, smaller problem.

N tokens, H heads, D head dim.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from ..ops import sparse_attention
from ..ops.attention_cpu import TILE
from ..reports import tables
from ..reports.curves import COLOURS, MARKERS
from ..reports.plots import new_figure, save_figure
from .turns import Turns, ratio_cell, ratio_metrics, take_turns


SDPA = "sdpa"
XI = {"soft_threshold": 1.0, "thresholded_softmax": 1e-3}
HEADS = {"cpu": 4, "cuda": 16}
LONGEST_EXPLICIT = 4096  # tokens; a longer matrix of coefficients does not fit, or takes minutes
FORWARD, TRAINING = "ratio_to_sdpa_forward", "ratio_to_sdpa_training"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if not query.is_cuda or query.dtype == torch.float32:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@cache
def _flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _causal_blocks(length: int):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device="cuda")


def _flex_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _flex()(query, key, value, block_mask=_causal_blocks(query.shape[2]))


def _adasplash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    import adasplash

    return adasplash.adasplash(query, key, value, alpha=1.5, is_causal=True)


def _native_sparse_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from fla.ops.nsa import parallel_nsa

    query, key, value = query.transpose(1, 2), key[:, :1].transpose(1, 2), value[:, :1].transpose(1, 2)
    gate = query.new_ones(query.shape[:3])
    return parallel_nsa(query, key, value, gate, gate, block_counts=16, block_size=64).transpose(1, 2)


def _explicit(transform: Callable[[Tensor], Tensor]) -> Attention:
    """Attention with a matrix of coefficients, from scores with -inf at the keys after the query."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return transform(scores.masked_fill(future, -torch.inf)) @ value

    return attend


def _thresholded(kind: str, backend: str | None) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = {"coefficients": kind, "threshold": XI[kind], "causal": True, "backend": backend}
        return sparse_attention(query, key, value, **options)

    return attend


def _entmax(name: str) -> Attention:
    def transform(scores: Tensor) -> Tensor:
        import entmax

        # entmax turns -inf into nan
        return getattr(entmax, name)(scores.clamp(min=-1e4), dim=-1)

    return _explicit(transform)


CONTENDERS: dict[str, Attention] = {
    SDPA: _sdpa,
    "soft_threshold": _thresholded("soft_threshold", None),
    "thresholded_softmax": _thresholded("thresholded_softmax", None),
    "explicit softmax": _explicit(lambda scores: scores.softmax(-1)),
    "explicit soft_threshold": _thresholded("soft_threshold", "eager"),
    "explicit thresholded_softmax": _thresholded("thresholded_softmax", "eager"),
    "entmax15": _entmax("entmax15"),
    "sparsemax": _entmax("sparsemax"),
    "flex_attention": _flex_attention,
    "adasplash": _adasplash,
    "native sparse attention": _native_sparse_attention,
}
# contender -> the package it needs and the name to install it by
OPTIONAL = {
    "entmax15": ("entmax", "entmax"),
    "sparsemax": ("entmax", "entmax"),
    "adasplash": ("adasplash", "adasplash"),
    "native sparse attention": ("fla", "flash-linear-attention"),
}
NEED_GPU = ("flex_attention", "adasplash", "native sparse attention")
EXPLICIT = tuple(name for name in CONTENDERS if name.startswith(("explicit", "entmax", "sparsemax")))
TILED = "soft_threshold"  # the contender that is timed at densities below 1


def defaults() -> dict:
    """The suite's own options."""
    gpu = torch.cuda.is_available()
    absent = missing()
    return {
        "method": [name for name in CONTENDERS if name not in absent],
        "dtype": ["bfloat16" if gpu else "float32"],
        "length": [4096, 8192, 16384] if gpu else [512, 1024, 2048, 4096],
        "density": [1.0, 0.5, 0.1, 0.01] if gpu else [1.0, 0.5, 0.1],
        "head_dim": [64, 128] if gpu else [64],
    }


def missing() -> dict[str, str]:
    """Contenders that cannot run here -> what they need."""
    absent = {}
    for name in CONTENDERS:
        if name in NEED_GPU and not torch.cuda.is_available():
            absent[name] = "a GPU"
        elif name in OPTIONAL and find_spec(OPTIONAL[name][0]) is None:
            absent[name] = f"its package: pip install {OPTIONAL[name][1]}"
    return absent


def measure(
    turns: Turns,
    *,
    method: Iterable[str],
    dtype: Iterable[str],
    length: Iterable[int],
    density: Iterable[float],
    head_dim: Iterable[int] = (64,),
) -> list[dict]:
    """Runs as results.json holds them, one per contender, length, type, head dim and density."""
    names = [SDPA, *(name for name in check(method, density) if name != SDPA)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = []
    for size in head_dim:
        for kind in dtype:
            for tokens in length:
                for share in sorted(density, reverse=True):
                    chosen = names if share == 1 else [SDPA, TILED]
                    chosen = [name for name in chosen if tokens <= LONGEST_EXPLICIT or name not in EXPLICIT]
                    if share == 1 or TILED in names:
                        _forget_tuning(device)
                        runs += _measure(turns, chosen, getattr(torch, kind), tokens, size, share, device)
    return runs


def check(method: Iterable[str], density: Iterable[float]) -> list[str]:
    """The contenders, if they are known and can run here."""
    names, absent = list(method), missing()
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"method must be one of {', '.join(CONTENDERS)}, got {name!r}")
        if name in absent:
            raise ImportError(f"{name} needs {absent[name]}, or leave it out")
    for share in density:
        if not 0 < share <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {share}")
    return names


def _forget_tuning(device: str) -> None:
    # whether leaving tiles out pays depends on how many are dead, which the tuner's key cannot see
    if device == "cuda" and find_spec("triton"):
        from ..ops.attention_triton import forget_tuning

        forget_tuning()


def _measure(
    turns: Turns, names: list[str], dtype: torch.dtype, length: int, head_dim: int, density: float, device: str
) -> list[dict]:
    operands = make_operands(length, density, dtype, turns.seed, device, head_dim)
    cotangent = torch.randn(operands[0].shape, device=device, dtype=dtype)
    forward, training = {}, {}
    for name in names:
        forward[name] = _synchronised(lambda f=CONTENDERS[name]: _without_gradients(f, operands), device)
        training[name] = _synchronised(
            lambda f=CONTENDERS[name]: torch.autograd.grad(f(*operands), operands, cotangent), device
        )
    memory = {name: peak_memory(step, device) for name, step in training.items()}
    seconds = {
        kind: take_turns(steps, turns, f"{length} tokens, {dtype}, D {head_dim}, density {density:g}, {kind}")
        for kind, steps in (("forward", forward), ("training", training))
    }
    runs = []
    for name in names:
        metrics = {"peak_memory_bytes": memory[name]}
        for metric, kind in ((FORWARD, "forward"), (TRAINING, "training")):
            metrics[f"{kind}_seconds"] = float(sorted(seconds[kind][name])[turns.rounds // 2])
            metrics |= ratio_metrics(metric, seconds[kind][name], seconds[kind][SDPA], turns.seed)
        settings = {
            "contender": name,
            "length": length,
            "density": density,
            "dtype": str(dtype).removeprefix("torch."),
            "heads": HEADS[device],
            "head_dim": head_dim,
            "threshold": XI.get(name.removeprefix("explicit ")),
            "threads": turns.threads,
            "rounds": turns.rounds,
            "clock": turns.clock,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        }
        runs.append(
            {
                "method": ", ".join((*_label(settings), f"{length} tokens")),  # as cross_table reads it
                "seed": turns.seed,
                "trainable_parameters": 0,
                "samples": turns.rounds,
                "settings": settings,
                "metrics": metrics,
            }
        )
    return runs


def _label(settings: dict) -> tuple[str, str]:
    """What is common to the runs of a table or panel, and the name of one row or line of it."""
    share = "" if settings["density"] == 1 else f" at density {settings['density']:g}"
    return f"{settings['dtype']} D {settings['head_dim']}", f"{settings['contender']}{share}"


def _without_gradients(attend: Attention, operands: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return attend(*operands)


def _synchronised(step: Callable[[], object], device: str) -> Callable[[], None]:
    def run() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def make_operands(
    length: int, density: float, dtype: torch.dtype, seed: int, device: str, head_dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, H, N, D]. Below density 1, this share of the tiles below the diagonal, and those on
    it, hold scores of 4; all others of almost 0.

    Each tile of keys has a direction of its own; with more tiles than D, every D-th has the same one.
    """
    generator, heads = torch.Generator().manual_seed(seed), HEADS[device]
    tensors = [torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3)]
    if density < 1:
        tiles = -(-length // TILE)
        own = torch.eye(min(tiles, head_dim), dtype=torch.bool).repeat(-(-tiles // head_dim), 1)[:tiles]
        alive = (torch.rand(heads, *own.shape, generator=generator) < density) | own
        directions = 4 * head_dim**0.25 * torch.eye(own.shape[1], head_dim)
        keys = directions[torch.arange(tiles) % head_dim].repeat_interleave(TILE, 0)[:length]
        queries = (alive.float() @ directions / 4).repeat_interleave(TILE, 1)[:, :length]
        tensors[:2] = [queries[None] + 1e-3 * tensors[0], keys + 1e-3 * tensors[1]]
    return tuple(tensor.to(device, dtype).requires_grad_() for tensor in tensors)


def peak_memory(step: Callable[[], None], device: str) -> int:
    """Bytes that a step holds at most, beside what was there before."""
    step()  # what is only allocated once
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = np.cumsum([event["args"]["Bytes"] for event in events if event["name"] == "[memory]"])
    return int(held.max(initial=0))


def table(runs: list[dict]) -> str:
    header = ["contender", "forward / SDPA", "training / SDPA", "peak memory, MB"]
    rows = [
        [
            run["method"],
            ratio_cell(run["metrics"], FORWARD),
            ratio_cell(run["metrics"], TRAINING),
            f"{run['metrics']['peak_memory_bytes'] / 1e6:.1f}",
        ]
        for run in runs
    ]
    lines = [tables.table(header, rows)]
    lines += [f"not measured: {name}, which needs {need}" for name, need in missing().items()]
    if any(run["settings"]["length"] > LONGEST_EXPLICIT for run in runs):
        lines.append(f"above {LONGEST_EXPLICIT} tokens not measured: {', '.join(EXPLICIT)}")
    return "\n".join(lines)


def picture(runs: list[dict], path: Path) -> None:
    """Training's ratio to SDPA over the tokens, with its interval: a panel per data type and size of a head."""
    panels: dict[str, dict[str, list[tuple[int, dict]]]] = {}
    for run in runs:
        settings = run["settings"]
        if settings["contender"] != SDPA or settings["density"] == 1:
            panel, name = _label(settings)
            panels.setdefault(panel, {}).setdefault(name, []).append((settings["length"], run["metrics"]))
    figure, axes = new_figure(5.2 * len(panels), 4.6, len(panels))
    from matplotlib.ticker import LogLocator, NullLocator

    for axis, (panel, curves) in zip(axes[0], panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            lengths, metrics = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            middle, low, high = (
                np.array([entry[TRAINING + end] for entry in metrics]) for end in ("", "_low", "_high")
            )
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            axis.errorbar(lengths, middle, [middle - low, high - middle], label=name, **style)
        ticks = sorted({length for points in curves.values() for length, _ in points})
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="training, ratio to SDPA", title=panel)
        axis.set_xticks(ticks, [str(length) for length in ticks], minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    labelled = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=3, fontsize="small")
    save_figure(figure, path)
