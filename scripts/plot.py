"""Draw pictures of trained models: learning curves, sparsity, coefficients, predictions.

    python scripts/plot.py samples outputs/s_raven/results.json --metric ood_accuracy --output samples.png
    python scripts/plot.py sparsity outputs/thresholds/results.json --output sparsity.png
    python scripts/plot.py coefficients outputs/s_raven/hyla__none/seed-0 --layer 0 1 --head 0 3 --output maps.png
    python scripts/plot.py predictions outputs/raven/softmax outputs/raven/hyla --problems 4 --output predictions.png

The first two read results.json files only. The others load models from the folders that scripts/train_synthetic.py
wrote, with results.json, and draw problems of their task. For in-context classification, of files and of a folder of
scripts/train_in_context.py:

    python scripts/plot.py settings outputs/in_context_map/results.json --x classes --y burstiness --output map.png
    python scripts/plot.py history outputs/in_context/results.json --output history.png
    python scripts/plot.py attention outputs/in_context --step 1000 4000 --output attention.png
    python scripts/plot.py nested_logits --pairs 4 --labels 16 --steps 600 --output landscape.png

For length generalisation and ridge regression, of files:

    python scripts/plot.py lengths outputs/lengths/results.json --method "addition, predicted, softmax" --output a.png
    python scripts/plot.py losses outputs/ridge/results.json --output losses.png

The same input gives the same file.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from hf_sparsecoding.evaluation import predictions
from hf_sparsecoding.evaluation.predictions import Pictures, TrainedModel
from hf_sparsecoding.evaluation.progress_measures import attention_snapshots
from hf_sparsecoding.models.induction.nested_logits import descend, nested_logits
from hf_sparsecoding.reports import curves, in_context, lengths, ridge
from hf_sparsecoding.reports.plots import AFTER, new_figure, require_matplotlib, save_figure


LINES = "#333333"
HISTORY = (["iw", "ic", "ic2"], ["cla", "ila1", "tila2", "tla2"], ["loss"])  # panels unless --metrics says others


def choose(name: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    """The wanted numbers, None for all; a ValueError where one is not below `count`."""
    for number in wanted or []:
        if not 0 <= number < count:
            raise ValueError(f"--{name} must be between 0 and {count - 1} for this model, got {number}")
    return list(range(count)) if wanted is None else list(wanted)


def coefficient_maps(
    alpha: Float[np.ndarray, "L H Q N"], layers: Sequence[int], heads: Sequence[int]
) -> list[list[tuple[str, Float[np.ndarray, "Q N"]]]]:
    """Per layer, titles and maps: the mean over all heads, then the given heads."""
    rows = []
    for layer in layers:
        mean = (f"layer {layer}, mean of {alpha.shape[1]} heads", alpha[layer].mean(0))
        rows.append([mean, *((f"layer {layer}, head {head}", alpha[layer, head]) for head in heads)])
    return rows


def draw_coefficients(rows: list[list], context: int, panel: int, title: str, path: str | Path) -> Path:
    """Maps as `coefficient_maps` gives them, zero in white, one scale per layer.

    Thick lines set contexts of `context` tokens apart, thin ones their pictures or groups of `panel` tokens.
    """
    queries, keys = rows[0][0][1].shape
    columns = len(rows[0])
    width, height = 4.8, 4.8 * queries / keys
    figure, axes = new_figure(
        1.6 + (width + 0.3) * columns, 1.0 + (height + 0.55) * len(rows), columns=columns, rows=len(rows)
    )
    for row, maps in zip(axes, rows, strict=True):
        limit = max(float(np.abs(values).max()) for _, values in maps) or 1.0
        for axis, (name, values) in zip(row, maps, strict=True):
            # pixel borders at token numbers
            image = axis.imshow(
                values,
                cmap="RdBu_r",
                vmin=-limit,
                vmax=limit,
                aspect="auto",
                interpolation="auto",  # nearest, or smooth where there are more tokens than pixels
                extent=(0, keys, keys, keys - queries),
            )
            draw_borders(axis, keys, queries, context, panel)
            axis.set_title(name, fontsize="medium")
        row[0].set_ylabel("query token")
        figure.colorbar(image, ax=row.tolist(), label="coefficient", pad=0.02, aspect=12)
    for axis in axes[-1]:
        axis.set_xlabel("key token, by context")
    figure.suptitle(title, fontsize="medium")
    return save_figure(figure, path)


def draw_borders(axis, keys: int, queries: int, context: int, panel: int) -> None:
    for place in range(panel, keys, panel):
        width = 1.2 if place % context == 0 else 0.3
        axis.axvline(place, color=LINES, linewidth=width)
        if place > keys - queries:
            axis.axhline(place, color=LINES, linewidth=width)
    starts = range(0, keys, context)
    names = [str(number + 1) for number in range(len(starts) - 1)] + ["target"]
    axis.set_xticks([start + context / 2 for start in starts], names)
    axis.tick_params(axis="x", length=0)
    step = panel if queries <= context else context
    axis.set_yticks(range(keys - queries, keys + 1, step))


def mosaic(matrix: Float[np.ndarray, "R C S S"]) -> Float[np.ndarray, "height width"]:
    """Pictures side by side as one."""
    return np.concatenate([np.concatenate(list(row), axis=1) for row in matrix], axis=0)


def titles(models: Sequence[TrainedModel]) -> list[str]:
    """The methods, with their seeds where a method occurs twice."""
    methods = [model.method for model in models]
    names = [
        f"{model.method}, seed {model.seed}" if methods.count(model.method) > 1 else model.method for model in models
    ]
    return [textwrap.fill(name, 26) for name in names]


def decibels(value: float) -> str:
    return "exact" if math.isinf(value) else f"{value:.1f} dB"


def draw_predictions(drawn: list[Pictures], names: list[str], path: str | Path) -> Path:
    """A row per problem: the problem, the truth, every model's drawing with its PSNR; 1 is black."""
    problems, rows, columns, size = drawn[0].matrices.shape[:4]
    ratio = columns / rows
    lines = max(name.count("\n") for name in names)
    width, height = 2.0 * (ratio + 1 + len(drawn)), 2.25 * problems + 0.3 + 0.18 * lines
    figure, axes = new_figure(
        width, height, columns=2 + len(drawn), rows=problems, width_ratios=[ratio] + [1] * (1 + len(drawn))
    )
    shown = {"cmap": "gray_r", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    for problem, row in enumerate(axes):
        row[0].imshow(mosaic(drawn[0].matrices[problem]), **shown)
        for number in range(1, columns):
            row[0].axvline(number * size - 0.5, color=AFTER, linewidth=1.2)
        for number in range(1, rows):
            row[0].axhline(number * size - 0.5, color=AFTER, linewidth=1.2)
        row[0].text((columns - 0.5) * size, (rows - 0.5) * size, "?", ha="center", va="center", fontsize="x-large")
        row[0].set_ylabel(f"problem {problem}")
        row[1].imshow(drawn[0].truth[problem], **shown)
        for axis, one in zip(row[2:], drawn, strict=True):
            axis.imshow(one.drawn[problem], **shown)
            axis.set_xlabel(decibels(one.psnr[problem]))
        for axis in row:
            axis.set(xticks=[], yticks=[])
    for axis, name in zip(axes[0], ["problem", "truth", *names], strict=True):
        axis.set_title(name, fontsize="small")
    return save_figure(figure, path)


def samples(arguments: argparse.Namespace) -> Path:
    found = curves.samples_curves(curves.read_runs(arguments.results, arguments.method), arguments.metric)
    return curves.samples_picture(found, arguments.metric, arguments.output)


def sparsity(arguments: argparse.Namespace) -> Path:
    found = curves.sparsity_curves(curves.read_runs([arguments.results], arguments.method), arguments.metric)
    return curves.sparsity_picture(found, arguments.metric, arguments.output)


def coefficients(arguments: argparse.Namespace) -> Path:
    trained = predictions.load_trained(arguments.folder)
    config = trained.model.config
    layers = choose("layer", arguments.layer, config.num_hidden_layers)
    heads = choose("head", arguments.head or [], config.num_attention_heads)
    queries = config.context_length if arguments.rows == "target" else config.sequence_length
    alpha = predictions.coefficients(trained, arguments.problem, arguments.split, arguments.seed, queries)
    maps = coefficient_maps(alpha, layers, heads)
    where = f"{trained.settings['task']}, {arguments.split} problem {arguments.problem}"
    title = f"{trained.method}: coefficients after transfer\n{where}"
    return draw_coefficients(maps, config.context_length, config.target_length, title, arguments.output)


def draw(arguments: argparse.Namespace) -> Path:
    models = [predictions.load_trained(folder) for folder in arguments.folders]
    predictions.check_same_task(models)
    drawn = [predictions.pictures(model, arguments.problems, arguments.split, arguments.seed) for model in models]
    return draw_predictions(drawn, titles(models), arguments.output)


def settings(arguments: argparse.Namespace) -> Path:
    runs = curves.read_runs(arguments.results, arguments.method)
    if arguments.y is None:
        return in_context.setting_picture(runs, arguments.x, arguments.metrics, arguments.output)
    return in_context.map_picture(runs, arguments.x, arguments.y, arguments.metrics, arguments.output)


def history(arguments: argparse.Namespace) -> Path:
    runs = curves.read_runs(arguments.results, arguments.method)
    return in_context.history_picture(runs, arguments.metrics or HISTORY, arguments.output)


def attention(arguments: argparse.Namespace) -> Path:
    snapshots, texts = attention_snapshots(arguments.folder, arguments.step, arguments.sequence, arguments.split)
    return in_context.attention_picture(snapshots, texts, arguments.output)


def landscape(arguments: argparse.Namespace) -> Path:
    pairs, labels = arguments.pairs, arguments.labels
    if arguments.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {arguments.steps}")
    descent = descend([pairs], [labels], arguments.steps)
    path = descent.parameters[:, :, 0]
    low, high = path[:, 1:].min(0) - 1, path[:, 1:].max(0) + 1
    b1, a = np.linspace(low, high, 120).T
    heights, _ = nested_logits(np.stack(np.broadcast_arrays(path[-1, 0], b1, a[:, None])), pairs, labels)
    title = f"nested logits, {pairs} pairs and {labels} labels"
    return in_context.landscape_picture(descent.losses[:, 0], path, (b1, a, heights), title, arguments.output)


def against_length(arguments: argparse.Namespace) -> Path:
    runs = curves.read_runs(arguments.results, arguments.method)
    return lengths.length_picture(runs, arguments.metric, arguments.output)


def losses(arguments: argparse.Namespace) -> Path:
    runs = curves.read_runs(arguments.results, arguments.method)
    return ridge.loss_picture(runs, arguments.metric, arguments.output)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run, parser=made)
        made.add_argument("--output", required=True, metavar="FILE.png", help="picture to write")
        return made

    runs = command("samples", samples, "a metric against training samples, one line per method")
    runs.add_argument("results", nargs="+", help="results.json files")
    thresholds = command("sparsity", sparsity, "zero coefficients per layer, and a metric, against the threshold")
    thresholds.add_argument("results", help="results.json file")
    far = command("lengths", against_length, "a metric against the length of the problems, one line per method")
    known = command("losses", losses, "losses against training samples, known solutions as dashed lines")
    for made in (far, known):
        made.add_argument("results", nargs="+", help="results.json files")
    metrics = ((runs, "ood_accuracy"), (thresholds, "ood_accuracy"), (far, "exact_match"), (known, "test_loss"))
    for made, metric in metrics:
        made.add_argument("--metric", default=metric, help=f"name in the results; default: {metric}")
        made.add_argument("--method", nargs="+", default=[], metavar="NAME", help="only these methods")
    maps = command("coefficients", coefficients, "maps of the coefficients of one problem, after transfer")
    maps.add_argument("folder", help="model folder of scripts/train_synthetic.py")
    maps.add_argument("--problem", type=int, default=0, help="number of the problem; default: 0")
    maps.add_argument("--layer", type=int, nargs="+", help="only these layers; default: all")
    maps.add_argument("--head", type=int, nargs="+", help="heads to draw beside the mean over all")
    maps.add_argument("--rows", choices=["target", "all"], default="target", help="queries: the target's, or all")
    images = command("predictions", draw, "problems of an image task, the truth and what models draw")
    images.add_argument("folders", nargs="+", help="model folders of scripts/train_synthetic.py")
    images.add_argument("--problems", type=int, default=4, help="how many problems; default: 4")
    add_in_context(command)
    for made in (maps, images):
        made.add_argument("--split", default="test", help="split of the task; default: test")
        made.add_argument("--seed", type=int, default=0, help="seed of the problems; default: 0")
    return parser


def add_in_context(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The sub-commands for in-context classification."""
    cells = command("settings", settings, "accuracies at the end of training over one setting, or a map over two")
    cells.add_argument("--x", required=True, metavar="SETTING", help="name of a number in the settings of the runs")
    cells.add_argument("--y", metavar="SETTING", help="a second one")
    cells.add_argument("--metrics", nargs="+", default=["ic", "iw"], metavar="NAME", help="default: ic iw")
    course = command("history", history, "metrics in the course of training, a row of panels per method")
    course.add_argument("--metrics", nargs="+", action="append", metavar="NAME", help="a panel; may be repeated")
    for made in (cells, course):
        made.add_argument("results", nargs="+", help="results.json files")
        made.add_argument("--method", nargs="+", default=[], metavar="NAME", help="only these methods")
    maps = command("attention", attention, "attention of both layers at some steps of training, from checkpoints")
    maps.add_argument("folder", help="folder of scripts/train_in_context.py")
    maps.add_argument("--step", type=int, nargs="+", required=True, help="steps with a checkpoint")
    maps.add_argument("--sequence", type=int, nargs="+", default=[0, 1], help="numbers of sequences; default: 0 1")
    maps.add_argument("--split", default="ic", help="split of the sequences; default: ic")
    logits = command("nested_logits", landscape, "loss and parameters of nested logits along gradient descent")
    logits.add_argument("--pairs", type=int, default=4, help="N; default: 4")
    logits.add_argument("--labels", type=int, default=16, help="L; default: 16")
    logits.add_argument("--steps", type=int, default=600, help="steps of gradient descent; default: 600")


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if Path(arguments.output).suffix != ".png":
        arguments.parser.error(f"--output must end in .png, got {arguments.output}")
    require_matplotlib()
    try:
        print(f"wrote {arguments.run(arguments)}")
    except (ValueError, OSError) as error:
        arguments.parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
