"""What connects the synthetic tasks with the small models: sizes of a model for a task, losses, metrics.

A task has `examples(start, count, split, seed)`, a pure function that gives arrays; a model takes them as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..evaluation.images import image_metrics
from ..models import (
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
)
from ..tasks.compositional_images import CompositionalImages
from ..tasks.raven import Raven
from ..tasks.s_raven import RULES, SRaven
from .command_line import near_match, read_options
from .loop import ShuffledOrder


Examples = dict[str, Tensor]
ZERO_SHARE_ITEMS = 256
RULE_KINDS = np.array(["progression" if name.startswith("progression") else name for name in RULES])
PREFIXES = {"test": "", "ood": "ood_", "validation": "validation_"}  # of the metrics' names


@dataclass(frozen=True)
class SyntheticTask:
    """A task class, the model that solves it, and how the two fit.

    sizes: (task, contexts, patch size) -> fields of the model's configuration.
    contexts: what a context may be; the first is the default.
    splits: splits to evaluate on at the end.
    watched: splits to evaluate on in training.
    label_rules: (task, start, count, split, seed) -> names of the rules [count, T] that the labels follow, by which
        accuracy is told apart; None: it is not.
    """

    task: type
    model: type
    sizes: Callable[[Any, str, int], dict]
    contexts: tuple[str, ...]
    splits: tuple[str, ...]
    watched: tuple[str, ...]
    images: bool
    label_rules: Callable[[Any, int, int, str, int], np.ndarray] | None = None


def s_raven_sizes(task: SRaven, contexts: str, patch_size: int) -> dict:
    return {
        "input_type": "one_hot",
        "num_values": task.values,
        "sequence_length": 9 * task.features,
        "context_length": (3 if contexts == "rows" else 1) * task.features,
        "target_length": task.features,
    }


def s_raven_rules(task: SRaven, start: int, count: int, split: str, seed: int) -> np.ndarray:
    return RULE_KINDS[task.label_rules(count, split, seed, start)]


def raven_sizes(task: Raven, contexts: str, patch_size: int) -> dict:
    patches = patches_per_image(task.size, patch_size)
    context_length = (3 if contexts == "rows" else 1) * patches
    return image_sizes(task.size, patch_size, 9 * patches, context_length, patches)


def compositional_sizes(task: CompositionalImages, contexts: str, patch_size: int) -> dict:
    size = task.cells * task.cell_size
    patches = patches_per_image(size, patch_size)
    return image_sizes(size, patch_size, 2 * (task.pairs + 1) * patches, 2 * patches, patches)


def patches_per_image(size: int, patch_size: int) -> int:
    if patch_size < 1 or size % patch_size:
        raise ValueError(f"patch_size must divide the pictures' side of {size} pixels, got {patch_size}")
    return (size // patch_size) ** 2


def image_sizes(size: int, patch_size: int, sequence_length: int, context_length: int, target_length: int) -> dict:
    return {
        "input_type": "patches",
        "image_size": size,
        "patch_size": patch_size,
        "sequence_length": sequence_length,
        "context_length": context_length,
        "target_length": target_length,
    }


TASKS = {
    "s_raven": SyntheticTask(
        SRaven,
        SparseTransformerForTokenClassification,
        s_raven_sizes,
        contexts=("rows", "panels"),
        splits=("test", "ood"),
        watched=("test", "ood"),
        images=False,
        label_rules=s_raven_rules,
    ),
    "raven": SyntheticTask(
        Raven,
        SparseTransformerForImageRegression,
        raven_sizes,
        contexts=("rows", "panels"),
        splits=("validation", "test"),
        watched=("validation",),
        images=True,
    ),
    "compositional_images": SyntheticTask(
        CompositionalImages,
        SparseTransformerForImageRegression,
        compositional_sizes,
        contexts=("pairs",),
        splits=("test", "ood"),
        watched=("test", "ood"),
        images=True,
    ),
}


def make_task(name: str, options: str) -> Any:
    """The task of a name in `TASKS`; `options` are its fields as JSON text."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{near_match(name, list(TASKS))}")
    kind = TASKS[name].task
    return kind(**read_options(kind, name, options))


def make_model(kind: SyntheticTask, task: Any, contexts: str, options: dict) -> torch.nn.Module:
    """A new model for the task; `options` are fields of its configuration."""
    contexts = contexts or kind.contexts[0]
    if contexts not in kind.contexts:
        raise ValueError(f"contexts must be one of {', '.join(kind.contexts)} for this task, got {contexts!r}")
    sizes = kind.sizes(task, contexts, options["patch_size"])
    return kind.model(SparseTransformerConfig(**{**options, **sizes}))


def tensors(arrays: dict[str, np.ndarray]) -> Examples:
    """Arrays of a task as a model's `inputs` and `labels`."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class TrainingData:
    """`batch(start, count)` for the training loop: fresh problems, or a fixed number of them in shuffled epochs."""

    def __init__(self, task: Any, seed: int, items: int = 0):
        self.task, self.seed, self.items = task, seed, items
        self.order = ShuffledOrder(items, seed) if items else None

    @cached_property
    def fixed(self) -> dict[str, np.ndarray]:
        """All problems, made when the first batch is wanted: a finished run that is measured again needs none."""
        return self.task.examples(0, self.items, "train", self.seed)

    def __call__(self, start: int, count: int) -> Examples:
        if self.order is None:
            return tensors(self.task.examples(start, count, "train", self.seed))
        indices = self.order(start, count)
        return tensors({name: array[indices] for name, array in self.fixed.items()})


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    kind: SyntheticTask,
    task: Any,
    accelerator: Accelerator,
    items: int,
    batch_size: int,
    seed: int,
    splits: tuple[str, ...] = (),
) -> dict[str, float]:
    """Metrics on `items` problems of every split (default: all of the task), shared by the processes.

    Numbers: `accuracy` (all numbers of the target right), `accuracy_per_feature`, and the latter over the numbers that
    follow one kind of rule, `accuracy_addition` and so on. Images: see `image_metrics`. Sparse coding also:
    `zero_share`, the share of coefficients that are exactly zero among those of the contexts' tokens, which transfer
    leaves alone, over all layers and per layer, on the first `ZERO_SHARE_ITEMS` problems of "test".
    """
    model.eval()
    metrics: dict[str, float] = {}
    for split in splits or kind.splits:
        measured = []
        for start, count in own_batches(accelerator, items, batch_size):
            batch = tensors(task.examples(start, count, split, seed))
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            logits = model(batch["inputs"]).logits.float()
            values = {name: (value, count) for name, value in measure(kind, logits, batch["labels"]).items()}
            if kind.label_rules is not None:
                rules = kind.label_rules(task, start, count, split, seed)
                values.update(accuracies_by_rule(logits, batch["labels"], rules))
            measured.append((start, values))
        # in the order of the problems: the same sum whatever the number of processes
        everyone = [values for _, values in sorted(gather_object(measured), key=lambda entry: entry[0])]
        for name in dict.fromkeys(name for values in everyone for name in values):
            parts = [values[name] for values in everyone if name in values]
            total = sum(count * value for value, count in parts)
            metrics[PREFIXES[split] + name] = total / sum(count for _, count in parts)
    if model.config.mixer == "sparse_coding":
        metrics.update(zero_shares(model, task, accelerator, min(items, ZERO_SHARE_ITEMS), batch_size, seed))
    return metrics


def own_batches(accelerator: Accelerator, items: int, batch_size: int) -> list[tuple[int, int]]:
    """(first problem, number of problems) of the batches that this process evaluates."""
    starts = range(0, items, batch_size)[accelerator.process_index :: accelerator.num_processes]
    return [(start, min(batch_size, items - start)) for start in starts]


def measure(kind: SyntheticTask, logits: Tensor, labels: Tensor) -> dict[str, float]:
    if not kind.images:
        return accuracies(logits, labels)
    # ink is between 0 and 1: a picture has no other values
    return image_metrics(logits.clamp(0, 1).flatten(0, 1), labels.flatten(0, 1))


def accuracies(logits: Tensor, labels: Tensor) -> dict[str, float]:
    right = logits.argmax(-1) == labels
    return {"accuracy": right.all(-1).float().mean().item(), "accuracy_per_feature": right.float().mean().item()}


def accuracies_by_rule(logits: Tensor, labels: Tensor, rules: np.ndarray) -> dict[str, tuple[float, int]]:
    """Share of right numbers and how many numbers there are, for every rule that occurs."""
    right = (logits.argmax(-1) == labels).cpu().numpy()
    return {
        f"accuracy_{rule}": (float(right[rules == rule].mean()), int((rules == rule).sum()))
        for rule in np.unique(rules)
    }


def zero_shares(
    model: torch.nn.Module, task: Any, accelerator: Accelerator, items: int, batch_size: int, seed: int
) -> dict[str, float]:
    """Share of zeros in the contexts' rows on problems of "test", counted by all processes together."""
    rows = model.config.sequence_length - model.config.context_length
    counts = []  # of zeros, then of coefficients, by layer
    for start, count in own_batches(accelerator, items, batch_size):
        batch = tensors(task.examples(start, count, "test", seed))
        attentions = model(batch["inputs"].to(accelerator.device), output_attentions=True).attentions
        kept = [alpha[:, :, :rows] for alpha in attentions]
        counts.append([[int((alpha == 0).sum()) for alpha in kept], [alpha.numel() for alpha in kept]])
    zeros, totals = np.sum(gather_object(counts), axis=0)
    shares = (zeros / totals).tolist()
    layers = {f"zero_share_layer_{i}": share for i, share in enumerate(shares)}
    return {"zero_share": sum(shares) / len(shares), **layers}
