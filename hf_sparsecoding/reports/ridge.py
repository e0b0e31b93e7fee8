"""Losses of trained layers against training samples, with what known solutions reach, drawn from results.json only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .curves import COLOURS, MARKERS, draw_line, finish, samples_curves
from .intervals import mean_and_spread
from .plots import new_figure, save_figure
from .results import by_method


REFERENCE = "#333333"


def reference_losses(runs: Sequence[dict], metric: str) -> dict[str, float]:
    """Mean metric of every method that was measured without training (0 samples)."""
    solved = by_method({"runs": [run for run in runs if not run["samples"] and metric in run["metrics"]]})
    return {method: mean_and_spread([run["metrics"][metric] for run in found])[0] for method, found in solved.items()}


def loss_picture(runs: Sequence[dict], metric: str, path: str | Path) -> Path:
    """A line per trained method, with a band of one standard deviation over seeds; a dashed one per known solution.

    Raises:
        ValueError: no trained run has the metric, or see `curves.samples_curves`.
    """
    curves = samples_curves([run for run in runs if run["samples"]], metric)
    references = reference_losses(runs, metric)
    figure, axes = new_figure(7.2, 4.4 + 0.2 * ((len(curves) + 1) // 2), 1)
    axis = axes[0][0]
    for number, curve in enumerate(curves):
        points = curve.line or curve.markers
        draw_line(axis, points, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], curve.label)
    for method, value in references.items():
        axis.axhline(value, color=REFERENCE, linestyle="--", linewidth=1)
        axis.annotate(
            method, (1.01, value), xycoords=("axes fraction", "data"), va="center", fontsize="small", color=REFERENCE
        )
    axis.set(xscale="log", yscale="log", xlabel="training samples", ylabel=metric.replace("_", " "))
    finish(axis, metric)
    if any(point.spread is not None for curve in curves for point in curve.line):
        axis.set_title("mean ± standard deviation over seeds", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return save_figure(figure, path)
