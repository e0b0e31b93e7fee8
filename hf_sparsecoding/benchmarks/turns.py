"""Contenders take turns in one run, so that a busy machine is fair to all: times, their ratios, tables and pictures.

A ratio is taken within each round and reported as the median over rounds with a bootstrapped 95 % interval. In a run's
metrics, the ratio NAME has its interval in NAME_low and NAME_high.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..reports import plots, tables


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How contenders take turns."""

    rounds: int = field(default=20, metadata={"help": "steps of every contender that count"})
    warmup: int = field(default=2, metadata={"help": "steps of every contender before"})
    threads: int = field(default=1, metadata={"help": "threads of a tensor operation"})
    clock: str = field(
        default="wall", metadata={"help": "wall, or cpu: time on the CPU, for a machine that does other work as well"}
    )
    seed: int = field(default=0, metadata={"help": "seed of weights, tokens and the order in each round"})
    progress: bool = field(default=True, metadata={"help": "show a progress bar"})

    def __post_init__(self):
        if self.clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {self.clock!r}")
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {self.warmup}")


def take_turns(contenders: Mapping[str, Callable[[], None]], turns: Turns, label: str) -> dict[str, np.ndarray]:
    """Seconds [rounds] of each contender, called once a round in an order drawn anew."""
    clock, order = CLOCKS[turns.clock], random.Random(turns.seed)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = range(turns.warmup + turns.rounds)
    for _ in tqdm(rounds, desc=label, unit="round", disable=not turns.progress):
        for name in order.sample(list(contenders), len(contenders)):
            start = clock()
            contenders[name]()
            seconds[name].append(clock() - start)
    return {name: np.array(values[turns.warmup :]) for name, values in seconds.items()}


def median_ratio(seconds: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Median over rounds of the ratio within a round, with its bootstrapped 95 % interval."""
    ratios = seconds / baseline
    draws = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def ratio_metrics(name: str, seconds: np.ndarray, baseline: np.ndarray, seed: int) -> dict[str, float]:
    """`median_ratio` as metrics of a run."""
    ratio, low, high = median_ratio(seconds, baseline, seed)
    return {name: ratio, f"{name}_low": low, f"{name}_high": high}


def ratio_cell(metrics: dict, name: str) -> str:
    """A ratio with its interval, for tables."""
    if name not in metrics:
        return tables.MISSING
    return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"


def draw_ratios(
    panels: Mapping[str, Sequence[tuple[str, dict]]], name: str, axis_label: str, path: str | Path
) -> None:
    """A ratio with its interval for each (contender, metrics), a panel per title."""
    height = 1.8 + 0.3 * max(map(len, panels.values()), default=1)
    figure, axes = plots.new_figure(4.2 * len(panels), height, len(panels))
    for axis, (title, shown) in zip(axes[0], panels.items(), strict=True):
        for place, (_, metrics) in enumerate(shown):
            axis.plot((metrics[f"{name}_low"], metrics[f"{name}_high"]), (place, place), color=plots.BEFORE)
            axis.plot(metrics[name], place, "o", color=plots.AFTER)
        axis.axvline(1, color="#333333", linewidth=0.8)
        axis.set_yticks(range(len(shown)), [contender for contender, _ in shown])
        axis.invert_yaxis()
        axis.set(title=title, xlabel=axis_label)
    plots.save_figure(figure, path)
