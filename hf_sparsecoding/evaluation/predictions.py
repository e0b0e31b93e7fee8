"""Arrays for pictures, computed with a model that `scripts/train_synthetic.py` saved: coefficients and drawn images.

n problems, L layers, H heads, N tokens, S pixels per side, R rows and C columns of the pictures of one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from ..reports import results
from ..training.synthetic import TASKS, SyntheticTask, make_task, tensors
from .images import psnr


# how the pictures of one problem lie side by side, the one to be drawn last
MATRICES: dict[str, Callable[[Float[np.ndarray, "n images S S"]], Float[np.ndarray, "n R C S S"]]] = {
    "raven": lambda images: images.reshape(len(images), 3, 3, *images.shape[2:]),
    # a column per pair, its input above its output
    "compositional_images": lambda images: images.reshape(len(images), -1, 2, *images.shape[2:]).swapaxes(1, 2),
}


@dataclass(frozen=True)
class TrainedModel:
    """A saved model with the task that it was trained on; `settings` are those of its run."""

    folder: Path
    method: str
    seed: int
    settings: dict
    kind: SyntheticTask
    task: Any
    model: torch.nn.Module


class Pictures(NamedTuple):
    """What a model draws.

    matrices: the pictures of each problem as it is posed; the last one, to be drawn, is empty.
    truth: what was to be drawn, ink between 0 and 1.
    drawn: the model's prediction, clamped to [0, 1].
    psnr: of `drawn`, in dB; inf where it is the truth.
    """

    matrices: Float[np.ndarray, "n R C S S"]
    truth: Float[np.ndarray, "n S S"]
    drawn: Float[np.ndarray, "n S S"]
    psnr: Float[np.ndarray, " n"]


def load_trained(folder: str | Path) -> TrainedModel:
    """Model and task of a folder with `results.json` and what `save_pretrained` wrote.

    Raises:
        ValueError: the folder lacks one of the two, or its results are not those of one run on a known task.
        OSError: the weights are missing.
    """
    folder = Path(folder)
    for name in (results.FILE, "config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name} in {folder}; give an --output_dir of scripts/train_synthetic.py")
    runs = results.load(folder / results.FILE)["runs"]
    if len(runs) != 1:
        raise ValueError(f"{folder / results.FILE} holds {len(runs)} runs; the model's own is needed alone")
    settings = runs[0]["settings"]
    name = settings.get("task", "")
    try:
        task = make_task(name, settings.get("task_options", "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / results.FILE}: {error}") from error
    kind = TASKS[name]
    model = kind.model.from_pretrained(folder).eval()
    return TrainedModel(folder, runs[0]["method"], runs[0]["seed"], settings, kind, task, model)


@torch.no_grad()
def coefficients(
    trained: TrainedModel, problem: int, split: str, seed: int, queries: int
) -> Float[np.ndarray, "L H {queries} N"]:
    """The coefficients of every layer for one problem, after transfer: the last `queries` tokens in rows, all keys in
    columns.

    Raises:
        ValueError: the task has no such problem, split or seed.
    """
    if problem < 0:
        raise ValueError(f"problem must be at least 0, got {problem}")
    inputs = tensors(trained.task.examples(problem, 1, split, seed))["inputs"]
    layers = trained.model(inputs, output_attentions=True).attentions
    return torch.cat([alpha[:, :, -queries:] for alpha in layers]).float().numpy()


@torch.no_grad()
def pictures(trained: TrainedModel, problems: int, split: str, seed: int) -> Pictures:
    """What the model draws for the first `problems` problems of a split.

    Raises:
        ValueError: the task has no pictures, or no such split or seed; problems is below 1.
    """
    name = trained.settings["task"]
    if not trained.kind.images:
        known = ", ".join(name for name, kind in TASKS.items() if kind.images)
        raise ValueError(f"{trained.folder}: task {name} has no pictures; tasks that have: {known}")
    if problems < 1:
        raise ValueError(f"problems must be at least 1, got {problems}")
    examples = trained.task.examples(0, problems, split, seed)
    batch = tensors(examples)
    drawn = trained.model(batch["inputs"]).logits.float().clamp(0, 1)[:, 0]  # [n, S, S]
    quality = psnr(drawn, batch["labels"][:, 0])
    return Pictures(MATRICES[name](examples["inputs"]), examples["labels"][:, 0], drawn.numpy(), quality.numpy())


def check_same_task(models: Sequence[TrainedModel]) -> None:
    """Raise a ValueError that names the first difference between the tasks of the models."""
    first = models[0]
    for other in models[1:]:
        one, two = ({"task": model.settings["task"], **asdict(model.task)} for model in (first, other))
        for name, value in one.items():
            if two.get(name) != value:
                raise ValueError(
                    f"{first.folder} was trained with {name}={value!r}, {other.folder} with {two.get(name)!r}; "
                    "models are compared on the same problems"
                )
