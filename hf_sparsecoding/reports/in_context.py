"""Pictures of in-context classification: accuracies over settings, the course of training, attention, nested logits.

Numbers come from results.json files or as arrays; no model code. n sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from .curves import COLOURS, MARKERS, Point, draw_line, finish, name_of, over_seeds, unknown_metric
from .plots import AFTER, new_figure, save_figure
from .results import by_method


UNBOUNDED = {"loss", "xi", "b1", "a"}  # the other metrics are shares
SHADES = "viridis"


def setting_of(run: dict, name: str) -> float:
    value = run["settings"].get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the settings of {name_of(run)} hold no number {name!r}, got {value!r}")
    return value


def against_setting(runs: Sequence[dict], setting: str, metric: str) -> list[Point]:
    """A metric at the end of training, over seeds, against a setting.

    Raises:
        ValueError: a run has no such number among its settings, no run has the metric, or two runs have the same
            setting and seed.
    """
    values = [(setting_of(run, setting), run["seed"], run["metrics"].get(metric)) for run in runs]
    points = over_seeds([value for value in values if value[-1] is not None], f"at one {setting} the runs")
    if not points:
        raise ValueError(unknown_metric(runs, metric))
    return points


def settings_map(
    runs: Sequence[dict], x: str, y: str, metric: str
) -> tuple[list[float], list[float], Float[np.ndarray, "y x"]]:
    """(values of setting x, values of setting y, means of the metric over seeds: nan where there is no run)."""
    rows = sorted({setting_of(run, y) for run in runs})
    with_metric = [run for run in runs if run["metrics"].get(metric) is not None]
    if not with_metric:
        raise ValueError(unknown_metric(runs, metric))
    parts = [[run for run in with_metric if run["settings"][y] == row] for row in rows]
    found = [against_setting(part, x, metric) if part else [] for part in parts]
    columns = sorted({point.x for points in found for point in points})
    means = np.full((len(rows), len(columns)), np.nan)
    for row, points in zip(means, found, strict=True):
        for point in points:
            row[columns.index(point.x)] = point.mean
    return columns, rows, means


def map_picture(runs: Sequence[dict], x: str, y: str, metrics: Sequence[str], path: str | Path) -> Path:
    """A map per metric over two settings, from 0 (dark) to 1, with the means written into it."""
    maps = [settings_map(runs, x, y, metric) for metric in metrics]
    columns, rows, _ = maps[0]
    width, height = 1.4 + 0.6 * len(columns), 1.3 + 0.45 * len(rows)
    figure, axes = new_figure(width * len(metrics) + 0.8, height, len(metrics))
    for axis, metric, (columns, rows, means) in zip(axes[0], metrics, maps, strict=True):
        image = axis.imshow(means, cmap=SHADES, vmin=0, vmax=1, origin="lower", aspect="auto")
        for (row, column), value in np.ndenumerate(means):
            if np.isfinite(value):
                colour = "black" if value > 0.6 else "white"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="small")
        axis.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axis.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        axis.set(title=metric, xlabel=words(x), ylabel=words(y))
    figure.colorbar(image, ax=axes[0].tolist())
    return save_figure(figure, path)


def setting_picture(runs: Sequence[dict], setting: str, metrics: Sequence[str], path: str | Path) -> Path:
    """A line per metric against one setting, with a band of one standard deviation over seeds."""
    figure, axes = new_figure(6.4, 4.2, 1)
    draw_metrics(axes[0][0], {metric: against_setting(runs, setting, metric) for metric in metrics})
    axes[0][0].set_xlabel(words(setting))
    return save_figure(figure, path)


def history_of_metric(runs: Sequence[dict], metric: str) -> list[Point]:
    """A metric in the course of training, over the seeds of one method, against the step."""
    values = []
    for run in runs:
        for entry in run.get("history", []):
            if "step" not in entry:
                raise ValueError(f"an entry of the history of {name_of(run)} has no step: {entry}")
            values.append((entry["step"], run["seed"], entry.get(metric)))
    return over_seeds([value for value in values if value[-1] is not None], name_of(runs[0]))


def history_picture(runs: Sequence[dict], panels: Sequence[Sequence[str]], path: str | Path) -> Path:
    """A row per method, a panel per group of metrics: lines over steps, bands of one standard deviation over seeds.

    Raises:
        ValueError: a method lacks a metric in the history of its runs.
    """
    methods = by_method({"runs": runs})
    figure, axes = new_figure(4.6 * len(panels), 0.6 + 2.9 * len(methods), len(panels), len(methods))
    for row, (method, found) in zip(axes, methods.items(), strict=True):
        for axis, metrics in zip(row, panels, strict=True):
            lines = {metric: history_of_metric(found, metric) for metric in metrics}
            for metric, points in lines.items():
                if not points:
                    raise ValueError(f"method {method!r}: {unknown_metric(found, metric)} (here in the history)")
            draw_metrics(axis, lines, markersize=0)
        row[0].set_title(method, loc="left", fontsize="medium")
    for axis in axes[-1]:
        axis.set_xlabel("training step")
    return save_figure(figure, path)


def draw_metrics(axis, lines: dict[str, list[Point]], **options) -> None:
    for number, (metric, points) in enumerate(lines.items()):
        draw_line(axis, points, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], words(metric))
    if options:
        for line in axis.lines:
            line.set(**options)
    finish(axis, "share" if not UNBOUNDED & lines.keys() else "")
    axis.legend(fontsize="small")


def words(name: str) -> str:
    return name.replace("_", " ")


def token_names(text: str) -> list[str]:
    """Names of the tokens of a sequence as `InContextClassification.text` writes it: items, labels in brackets."""
    pairs = [pair.split(":") for pair in text.split()]
    names = [name for item, label in pairs for name in (item, f"[{label}]")]
    return names[:-1]  # the target's label is no token


def attention_picture(
    snapshots: Sequence[tuple[int, Float[np.ndarray, "n T T"], Float[np.ndarray, "n 1 T"]]],
    texts: Sequence[str],
    path: str | Path,
) -> Path:
    """A column per step; for every sequence the attention of layer 1, below it that of the target in layer 2.

    Args:
        snapshots: (step, attention of all tokens in layer 1, attention of the target in layer 2).
        texts: The sequences.
    """
    tokens = snapshots[0][1].shape[-1]
    height = 0.28 * tokens
    figure, axes = new_figure(
        (height + 0.7) * len(snapshots) + 0.9,
        (height + 1.5) * len(texts) + 0.4,
        len(snapshots),
        2 * len(texts),
        height_ratios=[tokens, 1.5] * len(texts),
    )
    limit = max(float(np.abs(layer).max()) for _, *layers in snapshots for layer in layers)
    shown = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, "aspect": "auto"}
    for number, text in enumerate(texts):
        names = token_names(text)
        for column, (step, first, second) in enumerate(snapshots):
            top, bottom = axes[2 * number][column], axes[2 * number + 1][column]
            image = top.imshow(first[number], **shown)
            bottom.imshow(second[number], **shown)
            top.set_title(f"step {step:,}", fontsize="small")
            top.set_yticks(range(tokens), names, fontsize="x-small")
            top.set_xticks([])
            bottom.set_yticks([0], ["target"], fontsize="x-small")
            bottom.set_xticks(range(tokens), names, fontsize="x-small", rotation=90)
        axes[2 * number][0].set_ylabel("layer 1", fontsize="small")
        axes[2 * number + 1][0].set_ylabel("layer 2", fontsize="small")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="attention", aspect=40)
    return save_figure(figure, path)


def landscape_picture(
    losses: Float[np.ndarray, " steps"],
    parameters: Float[np.ndarray, "steps 3"],
    plane: tuple[Float[np.ndarray, " b1"], Float[np.ndarray, " a"], Float[np.ndarray, "a b1"]],
    title: str,
    path: str | Path,
) -> Path:
    """Left the loss of nested logits and its three parameters along gradient descent, right the loss over b1 and a.

    Args:
        losses, parameters: Of every step; the parameters are xi, b1, a.
        plane: (values of b1, values of a, the loss there).
    """
    figure, axes = new_figure(10.4, 4.2, 2)
    left, right = axes[0]
    for number, (name, values) in enumerate(zip(("loss", "xi", "b1", "a"), (losses, *parameters.T), strict=True)):
        left.plot(values, color=COLOURS[number], linewidth=1.5, label=name)
    left.set(xlabel="step of gradient descent", title=title)
    finish(left, "")
    left.legend(fontsize="small")
    b1, a, heights = plane
    image = right.pcolormesh(b1, a, heights, cmap=SHADES, shading="gouraud")
    right.plot(parameters[:, 1], parameters[:, 2], color="white", linewidth=1.5)
    right.plot(*parameters[0, 1:], marker="o", color=AFTER, markeredgecolor="white")
    right.set(xlabel="b1", ylabel="a", title="loss at the last xi, and the path of descent")
    figure.colorbar(image, ax=right, label="loss")
    return save_figure(figure, path)
