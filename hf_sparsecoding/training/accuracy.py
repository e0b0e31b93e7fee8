"""Exact-match accuracy by split and group, measured together by all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .completions import Completion, exact_match


PREFIXES = {"test": "", "ood": "ood_"}  # of the metrics' names


class Split(NamedTuple):
    """Encoded examples and the names of the groups (rules) that each belongs to."""

    examples: list[Completion]
    groups: list[tuple[str, ...]]


class Accuracy(NamedTuple):
    """Shares by metric name, and how many items are behind each.

    Names: `accuracy_<moment>` for "test", `ood_accuracy_<moment>` for "ood", each also with `_<group>`.
    """

    metrics: dict[str, float]
    items: dict[str, int]


def evaluate(
    model: torch.nn.Module,
    splits: Mapping[str, Split],
    moment: str,
    accelerator: Accelerator,
    pad: int,
    batch_size: int,
) -> Accuracy:
    """Accuracy on the splits "test" and "ood" (see `completions.exact_match`); `moment` is "before" or "after"."""
    metrics, items = {}, {}
    for name, split in splits.items():
        if name not in PREFIXES:
            continue
        mine = range(accelerator.process_index, len(split.examples), accelerator.num_processes)
        right = exact_match(model, [split.examples[number] for number in mine], pad, batch_size)
        scored = dict(gather_object(list(zip(mine, right, strict=True))))
        stem = f"{PREFIXES[name]}accuracy_{moment}"
        members = {stem: list(scored)}
        for number, groups in enumerate(split.groups):
            for group in groups:
                members.setdefault(f"{stem}_{group}", []).append(number)
        for metric, numbers in members.items():
            items[metric] = len(numbers)
            metrics[metric] = sum(scored[number] for number in numbers) / len(numbers)
    return Accuracy(metrics, items)
