"""Tables of results as Markdown, which also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .intervals import Difference, difference, mean_and_spread, wilson
from .results import by_method


MISSING = "-"
MOST_NAMES = 15


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with padded columns; all but the first are set to the right."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [_line(row, widths) for row in cells]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], _line(rule, widths), *lines[1:]])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"


def number(value: float | None) -> str:
    """Three decimals for everyday sizes, three digits for the rest."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"


def with_spread(values: Sequence[float]) -> str:
    """mean ± standard deviation over seeds."""
    if not values:
        return MISSING
    mean, spread = mean_and_spread(list(values))
    return number(values[0]) if spread is None else f"{number(mean)} ± {number(spread)}"


def with_interval(share: float, n: int) -> str:
    """A share with its Wilson 95 % interval."""
    low, high = wilson(share, n)
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"


def with_verdict(result: Difference | None) -> str:
    if result is None:
        return MISSING
    mark = "" if result.significant else ", n.s."
    return f"{result.value:+.3f} [{result.low:+.3f}, {result.high:+.3f}]{mark}"


def metric_values(runs: Sequence[dict], metric: str) -> list[float]:
    """The metric of all runs that have it."""
    return [run["metrics"][metric] for run in runs if run["metrics"].get(metric) is not None]


def method_table(results: dict, metrics: Sequence[str], baseline: str | None = None) -> str:
    """One row per method: trainable parameters, seeds, mean ± spread of each metric.

    With `baseline`, a further column holds the difference from that method, with its 95 % interval (see
    `intervals.difference`), of the first metric in which the methods differ; "n.s." marks intervals that hold 0.
    """
    methods = by_method(results)
    known = sorted({name for run in results["runs"] for name in run["metrics"]})
    for metric in metrics:
        if metric not in known:
            raise ValueError(f"no run of {results['experiment']} has the metric {metric!r}; known: {', '.join(known)}")
    if baseline is not None and baseline not in methods:
        raise ValueError(f"no method {baseline!r} in {results['experiment']}; known: {', '.join(methods)}")
    compared = next((metric for metric in metrics if _differs(methods, metric)), metrics[0])
    header = ["method", "trainable", "seeds", *metrics] + ([f"{compared} vs {baseline}"] if baseline else [])
    rows = []
    for method, runs in methods.items():
        trainable = sorted({run["trainable_parameters"] for run in runs})
        row = [method, " / ".join(f"{count:,}" for count in trainable), len({run["seed"] for run in runs})]
        row += [with_spread(metric_values(runs, metric)) for metric in metrics]
        if baseline:
            row.append(MISSING if method == baseline else compare(runs, methods[baseline], compared))
        rows.append(row)
    return table(header, rows)


def cross_table(results: dict, prefix: str, metric: str) -> str:
    """The methods named "PREFIX, ROW, COLUMN" as rows and columns, with mean ± spread of a metric.

    With an empty prefix they are named "ROW, COLUMN". A row or column that a sweep's grid named, "mixer=softmax",
    stands there with its value.
    """
    cells: dict[tuple[str, str], list[float]] = {}
    start = f"{prefix}, " if prefix else ""
    for method, runs in by_method(results).items():
        places = method.removeprefix(start).split(", ")
        if method.startswith(start) and len(places) == 2:
            row, column = (place.rpartition("=")[2] for place in places)
            cells[row, column] = metric_values(runs, metric)
    if not any(cells.values()):
        raise ValueError(f'no method of {results["experiment"]} named "{start}ROW, COLUMN" has {metric!r}')
    rows, columns = (list(dict.fromkeys(key[side] for key in cells)) for side in (0, 1))
    filled = [[row, *(with_spread(cells.get((row, column), [])) for column in columns)] for row in rows]
    return table([f"{start}{metric}", *columns], filled)


def _differs(methods: dict[str, list[dict]], metric: str) -> bool:
    return len({value for runs in methods.values() for value in metric_values(runs, metric)}) > 1


def compare(runs: list[dict], baseline: list[dict], metric: str) -> str:
    """The difference of a metric's means with its 95 % interval; "n.s." where that holds 0.

    Missing where both have one seed only: how much seeds differ is then unknown, however many items they answered.
    """
    values, reference = metric_values(runs, metric), metric_values(baseline, metric)
    if not values or not reference or max(len(values), len(reference)) == 1:
        return MISSING
    return with_verdict(difference(values, reference, _items(runs + baseline, metric)))


def _items(runs: list[dict], metric: str) -> int | None:
    """Number of test items behind a metric, where the runs say so in `settings["items"]`."""
    counts = [run["settings"].get("items", {}).get(metric) for run in runs]
    return min(counts) if counts and None not in counts else None


def notes(results: dict) -> list[str]:
    """What the runs say about themselves (cut short, smaller than it should be), once each.

    More than `MOST_NAMES` methods that say the same are counted instead of named.
    """
    found: dict[str, list[str]] = {}
    for run in results["runs"]:
        if note := run["settings"].get("note"):
            methods = found.setdefault(note, [])
            if run["method"] not in methods:
                methods.append(run["method"])
    total = len(by_method(results))
    return [
        f"{', '.join(methods) if len(methods) <= MOST_NAMES else f'{len(methods)} of {total} methods'}: {note}"
        for note, methods in found.items()
    ]


def accuracy_table(runs: Sequence[Mapping], stem: str, tasks: Sequence[str]) -> str:
    """One row per run: accuracy per task (* where it differs from the base model's, McNemar p < 0.05), the mean and
    its difference from the base model's with their 95 % intervals."""
    header = [stem.replace("_", " "), *tasks, "mean", "mean vs base"]
    if stem == "generation":
        header.append("unanswered")
    rows = []
    for run in runs:
        compared, metrics, mean = run.get("against_base", {}), run["metrics"], f"{stem}_mean"
        row = [f"{run['method']}, seed {run['seed']}" if compared else run["method"]]
        for name in (f"{stem}_{task}" for task in tasks):
            row.append(f"{metrics[name]:.3f}" + ("*" if compared and compared[name]["p"] < 0.05 else ""))
        row.append(with_interval(metrics[mean], run["settings"]["items"][mean]))
        row.append(with_verdict(Difference(*compared[mean].values()) if compared else None))
        if stem == "generation":
            row.append(f"{metrics['generation_unanswered_mean']:.3f}")
        rows.append(row)
    return table(header, rows)
