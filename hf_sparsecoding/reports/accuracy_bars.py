"""Bars of accuracies per task and method, drawn from results.json only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .curves import COLOURS
from .plots import BEFORE, new_figure, save_figure
from .results import by_method


def accuracy_bars(results: dict, stem: str, tasks: Sequence[str], path: str | Path, base: str = "base") -> Path:
    """One group of bars per task and one for the mean, a bar per method: the mean of its runs' `<stem>_<task>`.

    Error bars: the 95 % interval in the run's "intervals"; of several runs, from the smallest to the largest value.

    Raises:
        ValueError: a run lacks one of the metrics.
    """
    methods = by_method(results)
    groups = [*tasks, "mean"]
    width = 0.8 / len(methods)
    inches = 2 + len(groups) * max(0.7, 0.22 * len(methods))
    figure, axes = new_figure(inches, 4, 1)
    axis = axes[0][0]
    colours = iter(COLOURS * len(methods))
    for place, (method, runs) in enumerate(methods.items()):
        means, bounds = zip(*(_mean_and_bounds(runs, f"{stem}_{group}") for group in groups), strict=True)
        where = np.arange(len(groups)) + (place - (len(methods) - 1) / 2) * width
        label = f"{method} ({len(runs)} seeds)" if len(runs) > 1 else method
        axis.bar(where, means, width, color=BEFORE if method == base else next(colours), label=label)
        errors = np.abs(np.array(bounds).T - np.array(means))
        axis.errorbar(where, means, yerr=errors, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=2)
    axis.set_xticks(range(len(groups)), [group.replace("_", "\n") for group in groups], fontsize="small")
    axis.set(ylim=(0, 1), ylabel=f"accuracy by {stem.replace('_', ' ')}")
    figure.legend(loc="outside lower center", ncols=max(1, int(inches / 2)), fontsize="small")
    return save_figure(figure, path)


def _mean_and_bounds(runs: Sequence[dict], metric: str) -> tuple[float, tuple[float, float]]:
    for run in runs:
        if metric not in run["metrics"]:
            raise ValueError(f"{run['method']} has no metric {metric!r}; known: {', '.join(run['metrics'])}")
    values = [run["metrics"][metric] for run in runs]
    mean = float(np.mean(values))
    if len(runs) > 1:
        return mean, (min(values), max(values))
    return mean, tuple(runs[0].get("intervals", {}).get(metric, (mean, mean)))
