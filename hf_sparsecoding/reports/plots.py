"""Pictures of results, drawn from files only. matplotlib is imported late: the package works without it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .intervals import wilson


LAMBDA, TARGET = "sparsecoding_lambda", "sparsecoding_target"
BEFORE, AFTER = "#9aa5b1", "#2a6f97"
WIDEST_OF_TWO = 44  # letters of a label of which two stand side by side below a picture of 6.4 inches


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "pictures need matplotlib: pip install hf-sparsecoding[plots]; adapt.py leaves them out with --no_plots"
        )


def new_figure(width: float, height: float, columns: int, rows: int = 1, **options):
    """(figure, axes [rows][columns]) of a size in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def save_figure(figure, path: str | Path) -> Path:
    import matplotlib.pyplot as plt

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date inside: the same results give the same file
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    return path


def groups(metrics: dict, prefix: str = "") -> list[str]:
    """Names X for which there is a metric `<prefix>accuracy_before_X`."""
    stem = f"{prefix}accuracy_before_"
    return sorted(name.removeprefix(stem) for name in metrics if name.startswith(stem))


def accuracy_per_rule(run: dict, path: str | Path) -> Path:
    """Accuracy before and after training of one run, over all items and per rule, with 95 % intervals."""
    metrics, items = run["metrics"], run["settings"]["items"]
    splits = [prefix for prefix in ("", "ood_") if f"{prefix}accuracy_before" in metrics]
    rows = 1 + max(len(groups(metrics, prefix)) for prefix in splits)
    figure, axes = new_figure(5.5 * len(splits), 1.2 + 0.45 * rows, len(splits))
    for axis, prefix in zip(axes[0], splits, strict=True):
        names = ["", *(f"_{name}" for name in groups(metrics, prefix))]
        for offset, when, colour in ((-0.2, "before", BEFORE), (0.2, "after", AFTER)):
            keys = [f"{prefix}accuracy_{when}{name}" for name in names]
            shares = np.array([metrics[key] for key in keys])
            bounds = np.array([wilson(share, items[key]) for share, key in zip(shares, keys, strict=True)])
            errors = np.abs(bounds.T - shares)
            places = np.arange(len(names)) + offset
            axis.barh(places, shares, 0.4, color=colour, label=when)
            axis.errorbar(shares, places, xerr=errors, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=2)
        axis.set_yticks(range(len(names)), ["all", *(name[1:].replace("_", " ") for name in names[1:])])
        axis.invert_yaxis()
        axis.set(xlim=(0, 1), xlabel="accuracy (95 % interval)", title="out of distribution" if prefix else "test")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(f"{run['method']}, seed {run['seed']}")
    return save_figure(figure, path)


def read_lambda(adapter: str | Path) -> tuple[np.ndarray, list[str]] | None:
    """Learned numbers [layers, heads or 1, columns] of a saved SPARSECODING adapter and the columns' names.

    None for an adapter of another method. Layers without the adapter are NaN.
    """
    adapter = Path(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("peft_type") != "SPARSECODING":
        return None
    tensors = dict(_tensors(adapter / "adapter_model.safetensors"))
    contexts = config.get("num_contexts") or 0
    names = [f"lag {lag}" for lag in config.get("lags") or []] or [f"context {i + 1}" for i in range(contexts)]
    columns = {LAMBDA: slice(0, contexts), TARGET: slice(contexts, contexts + 1)}
    learned = {name: value for name, value in tensors.items() if LAMBDA in name or TARGET in name}
    heads = max(len(value) for value in learned.values())
    layers = 1 + max(layer_index(name) for name in learned)
    has_target = any(TARGET in name for name in learned)
    numbers = np.full((layers, heads, contexts + has_target), np.nan)
    for name, value in learned.items():
        kind = LAMBDA if LAMBDA in name else TARGET
        numbers[layer_index(name), :, columns[kind]] = value.reshape(len(value), -1)
    return numbers, names + ["target"] * has_target


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:  # numpy has no bfloat16
        for name in file.keys():  # noqa: SIM118  not a dict
            yield name, file.get_tensor(name).float().numpy()


def layer_index(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise ValueError(f"no layer number in the parameter name {name!r}")
    return int(found.group(1))


def learned_lambda(adapter: str | Path, path: str | Path) -> Path | None:
    """Learned lambda by layer, head and context; None (and no picture) for adapters without lambda."""
    found = read_lambda(adapter)
    if found is None:
        return None
    numbers, names = found
    layers, heads, _ = numbers.shape
    if heads == 1:  # one number per layer and context: all contexts in one panel
        panels, ticks, across = [("", numbers[:, 0])], names, "context"
    else:
        panels = [(name, numbers[:, :, i]) for i, name in enumerate(names)]
        ticks, across = [str(head) for head in range(heads)], "head"
    limit = np.nanmax(np.abs(numbers)) or 1.0
    columns = max(len(ticks), 4)
    figure, axes = new_figure(1.2 + (0.6 + 0.22 * columns) * len(panels), 1.5 + 0.18 * max(layers, 6), len(panels))
    for axis, (title, values) in zip(axes[0], panels, strict=True):
        image = axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        every = max(1, len(ticks) // 16)
        axis.set_xticks(range(0, len(ticks), every), ticks[::every], fontsize="small")
        axis.set(title=title, xlabel=across)
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0].tolist(), label="lambda")
    return save_figure(figure, path)


def legend_columns(labels: Sequence[str]) -> int:
    """Two where they fit below a picture of 6.4 inches, else one."""
    return 2 if max(map(len, labels)) <= WIDEST_OF_TWO else 1
