"""Accuracy against the length of the problems, drawn from results.json only."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from .curves import COLOURS, MARKERS, Point, draw_line, finish, over_seeds
from .plots import legend_columns, new_figure, save_figure


SHADE = "#dde5ec"


def length_curves(runs: Sequence[dict], metric: str) -> dict[str, list[Point]]:
    """Per method, in the order in which they appear: `<metric>_<length>` over the lengths, mean and spread over seeds.

    Raises:
        ValueError: no run has such a metric, or a method has two runs of one seed.
    """
    pattern = re.compile(re.escape(metric) + r"_(\d+)")
    found: dict[str, list[tuple[float, int, float]]] = {}
    for run in runs:
        matches = {match: value for name, value in run["metrics"].items() if (match := pattern.fullmatch(name))}
        values = [(int(match[1]), run["seed"], value) for match, value in matches.items()]
        if values:
            found.setdefault(run["method"], []).extend(values)
    if not found:
        known = sorted({name.rpartition("_")[0] for run in runs for name in run["metrics"] if name[-1].isdigit()})
        raise ValueError(f"no run has {metric!r} by length; known: {', '.join(known) or 'none'}")
    return {method: over_seeds(values, f"method {method!r}") for method, values in found.items()}


def length_picture(runs: Sequence[dict], metric: str, path: str | Path) -> Path:
    """One line per method; the range of the training lengths is shaded.

    Raises:
        ValueError: the runs were trained on different lengths, or as `length_curves`.
    """
    curves = length_curves(runs, metric)
    ranges = {tuple(run["settings"].get("train_lengths", ())) for run in runs if run["method"] in curves}
    if len(ranges) > 1 or ranges == {()}:
        raise ValueError(
            f"one picture needs runs with the same train_lengths, got {sorted(ranges)}; choose by --method"
        )
    seeds = {method: max(point.seeds for point in points) for method, points in curves.items()}
    labels = [f"{method} ({count} seeds)" if count > 1 else method for method, count in seeds.items()]
    columns = legend_columns(labels)
    figure, axes = new_figure(6.4, 4.2 + 0.2 * math.ceil((len(curves) + 1) / columns), 1)
    axis, (shortest, longest) = axes[0][0], ranges.pop()
    axis.axvspan(min(shortest, longest - 0.5), longest, color=SHADE, label="lengths of training")
    for number, (points, label) in enumerate(zip(curves.values(), labels, strict=True)):
        draw_line(axis, points, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], label)
    axis.set(xlabel="length", ylabel=metric.replace("_", " "))
    finish(axis, "accuracy" if metric.endswith("match") else metric)
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    return save_figure(figure, path)
