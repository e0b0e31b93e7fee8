"""Curves over runs, drawn from results.json only: a metric against training samples, sparsity against the threshold.

Numbers are collected first (`samples_curves`, `sparsity_curves`) and drawn from what was collected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .intervals import mean_and_spread
from .plots import AFTER, legend_columns, new_figure, save_figure
from .results import load


# readable without colours too: together with the markers there are 56 combinations before the first repeats
COLOURS = (AFTER, "#e07a2f", "#3a9d5d", "#b0413e", "#7b5ea7", "#8c6d46", "#d17bb0", "#555b66")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ZERO_SHARE = re.compile(r"zero_share_layer_(\d+)")
BOUNDED = ("accuracy", "share")  # metrics with these words in their names are between 0 and 1


class Point(NamedTuple):
    """Mean and standard deviation (None for a single seed) over `seeds` runs at x."""

    x: float
    mean: float
    spread: float | None
    seeds: int


class Curve(NamedTuple):
    """One method: what was measured while it trained, and the final points of runs without such a history."""

    method: str
    line: list[Point]
    markers: list[Point]

    @property
    def label(self) -> str:
        seeds = max(point.seeds for point in self.line + self.markers)
        return f"{self.method} ({seeds} seeds)" if seeds > 1 else self.method


class Sparsity(NamedTuple):
    """Against the threshold: the share of zero coefficients by layer number, and a metric. `learned`: x is where the
    threshold starts, in at least one run."""

    layers: dict[int, list[Point]]
    metric: list[Point]
    learned: bool


def read_runs(paths: Iterable[str | Path], methods: Sequence[str] = ()) -> list[dict]:
    """Runs of all files; with `methods`, only theirs, in this order.

    Raises:
        ValueError: a file is missing or not as `results` describes it, or no run has one of the methods.
    """
    runs = [run for path in paths for run in load(path)["runs"]]
    known = list(dict.fromkeys(run["method"] for run in runs))
    for method in methods:
        if method not in known:
            raise ValueError(f"no method {method!r}; known: {', '.join(known)}")
    return [run for method in methods or known for run in runs if run["method"] == method]


def samples_curves(runs: Sequence[dict], metric: str) -> list[Curve]:
    """One curve per method that has the metric, over training samples, in the order in which methods appear.

    A run's points are those of its `history` and its final one. 0 samples have no place on a log axis: left out.

    Raises:
        ValueError: no run has the metric, a method has two values of one seed at the same number of samples, or an
            entry of a history lacks "samples".
    """
    curves = []
    for method in dict.fromkeys(run["method"] for run in runs):
        line, markers = [], []
        for run in (run for run in runs if run["method"] == method):
            history = history_of(run)
            values = {entry["samples"]: entry.get(metric) for entry in history}
            values[run["samples"]] = run["metrics"].get(metric, values.get(run["samples"]))
            kept = [(x, run["seed"], value) for x, value in values.items() if x > 0 and value is not None]
            (line if history else markers).extend(kept)
        curve = Curve(method, over_seeds(line, f"method {method!r}"), over_seeds(markers, f"method {method!r}"))
        if curve.line or curve.markers:
            curves.append(curve)
    if not curves:
        raise ValueError(unknown_metric(runs, metric))
    return curves


def sparsity_curves(runs: Sequence[dict], metric: str) -> Sparsity:
    """Zero shares and the metric of the runs that have zero shares, against `settings["threshold"]`.

    Raises:
        ValueError: no run has zero shares, none of those has the metric, one has no threshold, or two of them have
            the same threshold and seed.
    """
    sparse = [run for run in runs if any(ZERO_SHARE.fullmatch(name) for name in run["metrics"])]
    if not sparse:
        raise ValueError(unknown_metric(runs, "zero_share_layer_0") + "; sparse_coding models have it")
    for run in sparse:
        if "threshold" not in run["settings"]:
            raise ValueError(f"the settings of {name_of(run)} lack 'threshold'; no place on the x axis")
    found = {int(match[1]) for run in sparse for match in map(ZERO_SHARE.fullmatch, run["metrics"]) if match}
    layers = {layer: _against_threshold(sparse, f"zero_share_layer_{layer}") for layer in sorted(found)}
    points = _against_threshold(sparse, metric)
    if not points:
        raise ValueError(unknown_metric(sparse, metric))
    learned = any(run["settings"].get("threshold_type", "fixed") != "fixed" for run in sparse)
    return Sparsity(layers, points, learned)


def _against_threshold(runs: Sequence[dict], metric: str) -> list[Point]:
    """The metric over the seeds of each threshold; the two clashing runs are named where a seed occurs twice."""
    first: dict[tuple, dict] = {}
    for run in runs:
        threshold, seed = run["settings"]["threshold"], run["seed"]
        other = first.setdefault((threshold, seed), run)
        if other is not run:
            raise ValueError(
                f"{name_of(other)} and {name_of(run)} both have threshold {threshold}; choose one with --method"
            )
    values = [(run["settings"]["threshold"], run["seed"], run["metrics"].get(metric)) for run in runs]
    return over_seeds([value for value in values if value[-1] is not None], "the runs")


def over_seeds(values: Iterable[tuple[float, int, float]], owner: str) -> list[Point]:
    """(x, seed, value) -> one point per x, from left to right; `owner` is named in the error for a repeated seed."""
    found: dict[float, dict[int, float]] = {}
    for x, seed, value in values:
        seeds = found.setdefault(x, {})
        if seed in seeds:
            raise ValueError(f"{owner}: seed {seed} occurs twice at {x:,}; give each run once")
        seeds[seed] = value
    return [Point(x, *mean_and_spread(list(seeds.values())), len(seeds)) for x, seeds in sorted(found.items())]


def history_of(run: dict) -> list[dict]:
    """What was measured while the run trained; empty for runs that measured only at the end."""
    history = run.get("history") or []
    for entry in history:
        if "samples" not in entry:
            raise ValueError(f"an entry in the history of {name_of(run)} lacks 'samples': {entry}")
    return history


def name_of(run: dict) -> str:
    return f"{run['method']!r} (seed {run['seed']})"


def unknown_metric(runs: Sequence[dict], metric: str) -> str:
    known = {name for run in runs for entry in history_of(run) for name in entry}
    known = (known | {name for run in runs for name in run["metrics"]}) - {"samples", "step"}
    return f"no run has the metric {metric!r}; known: {', '.join(sorted(known)) or 'none'}"


def samples_picture(curves: Sequence[Curve], metric: str, path: str | Path) -> Path:
    """Lines with a band of one standard deviation over seeds, on a logarithmic axis of training samples."""
    columns = legend_columns([curve.label for curve in curves])
    figure, axes = new_figure(6.4, 4.2 + 0.2 * math.ceil(len(curves) / columns), 1)
    axis = axes[0][0]
    for number, curve in enumerate(curves):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        if curve.line:
            draw_line(axis, curve.line, colour, marker, curve.label)
        if curve.markers:
            draw_markers(axis, curve.markers, colour, marker, None if curve.line else curve.label)
    axis.set(xscale="log", xlabel="training samples", ylabel=metric.replace("_", " "))
    finish(axis, metric)
    if any(point.spread is not None for curve in curves for point in curve.line + curve.markers):
        axis.set_title("mean ± standard deviation over seeds", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    return save_figure(figure, path)


def sparsity_picture(found: Sparsity, metric: str, path: str | Path) -> Path:
    """Left the share of zeros per layer, right the metric, both against the threshold."""
    import matplotlib

    figure, axes = new_figure(9.6, 4.0, 2)
    left, right = axes[0]
    shades = matplotlib.colormaps["viridis"]
    for number, (layer, points) in enumerate(found.layers.items()):
        colour = shades(0.85 * number / max(1, len(found.layers) - 1))
        draw_line(left, points, colour, MARKERS[number % len(MARKERS)], f"layer {layer}")
    left.legend(fontsize="small")
    left.set(ylabel="share of zero coefficients", title="sparsity, before transfer")
    draw_line(right, found.metric, AFTER, "o", None)
    right.set(ylabel=metric.replace("_", " "), title=metric.replace("_", " "))
    for axis, name in ((left, "zero_share"), (right, metric)):
        axis.set_xlabel("initial threshold" if found.learned else "threshold")
        finish(axis, name)
    seeds = [point.seeds for point in found.metric]
    if max(seeds) > 1:
        count = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
        figure.suptitle(f"mean ± standard deviation over {count} seeds", fontsize="medium")
    return save_figure(figure, path)


def draw_line(axis, points: Sequence[Point], colour, marker: str, label: str | None) -> None:
    x, mean = [point.x for point in points], [point.mean for point in points]
    axis.plot(x, mean, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
    low = [point.mean - (point.spread or 0) for point in points]
    high = [point.mean + (point.spread or 0) for point in points]
    axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def draw_markers(axis, points: Sequence[Point], colour: str, marker: str, label: str | None) -> None:
    x, mean = [point.x for point in points], [point.mean for point in points]
    spread = [point.spread or 0 for point in points]
    axis.errorbar(x, mean, yerr=spread, fmt=marker, color=colour, markersize=7, capsize=3, label=label)


def finish(axis, metric: str) -> None:
    if any(word in metric for word in BOUNDED):
        axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
