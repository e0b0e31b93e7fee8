"""What is measured while in-context classification is learned: accuracies, progress measures, attention.

B batch, N pairs, T = 2 N + 1 tokens (item, label, ..., item, label, target), L labels. Source: arXiv 2312.03002.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ..reports import results
from ..tasks.in_context_classification import InContextClassification
from ..training import checkpoints


SETS = ("iw", "ic", "ic2")
BATCH = 512  # sequences in one forward pass


def progress_measures(
    attentions: tuple[Float[Tensor, "B 1 T T"], Float[Tensor, "B 1 R T"]],
    logits: Float[Tensor, "B L"],
    labels: Int[Tensor, " B"],
    context_labels: Int[Tensor, "B N"],
) -> dict[str, float]:
    """Means over a batch.

    ila1: attention of the labels to the items just before them, in layer 1.
    tila2: attention of the target to the right labels of the context, in layer 2.
    tla2: attention of the target to all labels of the context, in layer 2.
    cla: probability of the answers that occur as labels in the context.

    Args:
        attentions: Coefficients of both layers, in layer 2 of the target at least (the last row).
        labels: The answers.
    """
    first, second = (alpha[:, 0].float() for alpha in attentions)
    to_items = first[:, 1::2, ::2].diagonal(dim1=1, dim2=2)  # [B, N]
    to_labels = second[:, -1, 1::2]  # [B, N]
    shown = torch.zeros_like(logits, dtype=torch.bool).scatter(1, context_labels, True)
    return {
        "ila1": to_items.mean().item(),
        "tila2": (to_labels * (context_labels == labels[:, None])).sum(1).mean().item(),
        "tla2": to_labels.sum(1).mean().item(),
        "cla": (logits.float().softmax(-1) * shown).sum(1).mean().item(),
    }


class InContextEvaluation:
    """Metrics of a model on `items` sequences of every test split: call it with the model, while it trains or after.

    iw, ic, ic2: accuracies. iw_unseen: that of "iw" where the context lacks the target's class, so that only memory
    knows it (missing where every context has it). The progress measures are those on the sequences of "ic".
    """

    def __init__(self, task: InContextClassification, items: int, seed: int):
        self.examples = {
            name: {column: torch.from_numpy(array) for column, array in task.examples(0, items, name, seed).items()}
            for name in SETS
        }

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        model.eval()
        sums: dict[str, list[float]] = {}  # of a metric over sequences, and their number
        for name, examples in self.examples.items():
            for start in range(0, len(examples["labels"]), BATCH):
                batch = {k: v[start : start + BATCH].to(model.device) for k, v in examples.items()}
                output = model(batch["inputs"], output_attentions=name == "ic", return_dict=True)
                right = output.logits.argmax(-1) == batch["labels"]
                measured = {name: (right.float().mean().item(), len(right))}
                if name == "iw" and not batch["shown"].all():
                    unseen = right[~batch["shown"]]
                    measured["iw_unseen"] = (unseen.float().mean().item(), len(unseen))
                if name == "ic":
                    answers = batch["labels"], batch["context_labels"]
                    measures = progress_measures(output.attentions, output.logits, *answers)
                    measured |= {metric: (value, len(right)) for metric, value in measures.items()}
                for metric, (value, count) in measured.items():
                    total = sums.setdefault(metric, [0.0, 0])
                    sums[metric] = [total[0] + value * count, total[1] + count]
        return {metric: total / count for metric, (total, count) in sums.items()}


class Snapshot(NamedTuple):
    """Attention to all tokens at one step of a training run: of all tokens in layer 1, of the target in layer 2."""

    step: int
    first: Float[np.ndarray, "n T T"]
    second: Float[np.ndarray, "n 1 T"]


@torch.no_grad()
def attention_snapshots(
    folder: str | Path, steps: Sequence[int], sequences: Sequence[int], split: str = "ic"
) -> tuple[list[Snapshot], list[str]]:
    """(attention for some test sequences at the given steps, the sequences as text).

    Args:
        folder: Where scripts/train_in_context.py wrote results and checkpoints. The steps' checkpoints must be there:
            train with a `checkpoint_every` that meets them and enough `checkpoints_kept`.
        sequences: Their numbers in the split.

    Raises:
        ValueError: results or a checkpoint are missing or damaged, or not those of in-context classification.
    """
    folder = Path(folder)
    run = results.load(folder / results.FILE)["runs"][0]
    names = [option.name for option in fields(InContextClassification)]
    if missing := [name for name in names if name not in run["settings"]]:
        raise ValueError(f"{folder / results.FILE} holds no run of in-context classification: no {missing[0]!r}")
    task = InContextClassification(**{name: run["settings"][name] for name in names})
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    drawn = [task.generate(1, split, run["seed"], start=number) for number in sequences]
    inputs = torch.from_numpy(np.concatenate([sequence.inputs for sequence in drawn]))
    snapshots = []
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        if reason := checkpoints.damage(checkpoint):
            there = ", ".join(path.name for path in reversed(checkpoints.candidates(checkpoint.parent)))
            raise ValueError(f"{checkpoint} cannot be used: {reason}; there are: {there or 'no checkpoints'}")
        model.load_state_dict(load_file(checkpoint / checkpoints.WEIGHTS))
        first, second = model(inputs, output_attentions=True, return_dict=True).attentions
        snapshots.append(Snapshot(step, first[:, 0].numpy(), second[:, 0].numpy()))
    return snapshots, [task.text(sequence, 0) for sequence in drawn]
