"""How sparse a language model's attention coefficients are on a text, and what thresholding them costs in perplexity.

B windows, T tokens per window, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from ..adapter.layer import SparseCodingAttention
from ..ops.attention import Sparsity, explicit_sparsity


class TextMeasures(NamedTuple):
    """Over the windows of a text.

    loss: Mean cross-entropy per predicted token, in nats.
    elements, tiles: Shares of coefficients and of tiles that are zero, of what causality allows, by layer and head
        [layers, H].
    """

    loss: float
    elements: Tensor
    tiles: Tensor


def windows(tokens: Sequence[int], length: int, count: int) -> Int[Tensor, "B T"]:
    """The first `count` windows of `length` tokens, end to end.

    Raises:
        ValueError: the text is shorter.
    """
    if len(tokens) < length * count:
        raise ValueError(
            f"{count} windows of {length} tokens need {length * count:,} tokens, the text has {len(tokens):,}; give a "
            "longer text, or fewer or shorter windows"
        )
    return torch.tensor(tokens[: length * count]).view(count, length)


@torch.no_grad()
def measure(model: torch.nn.Module, inputs: Int[Tensor, "B T"], progress: bool = False) -> TextMeasures:
    """Loss and sparsity of a model with an adapter whose coefficients are explicit (attn_implementation "eager")."""
    model.eval()
    losses, found = [], []
    for window in tqdm(inputs, disable=not progress, desc="windows", leave=False):
        with recorded_sparsity(model) as layers:
            logits = model(input_ids=window[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits.float(), window[1:].to(logits.device)).item())
        found.append(layers)
    means = [torch.stack([torch.stack([layer[i] for layer in layers]) for layers in found]).mean(0) for i in (0, 1)]
    return TextMeasures(sum(losses) / len(losses), *means)


@contextmanager
def recorded_sparsity(model: torch.nn.Module) -> Iterator[list[Sparsity]]:
    """A list that receives the sparsity of every adapted attention module's coefficients, in order of the layers.

    Raises:
        ValueError: the model has no adapted attention module, or none that shows its coefficients.
    """
    layers: list[Sparsity] = []

    def record(module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        if outputs[1] is None:
            raise ValueError(
                'the coefficients are not computed as a whole; load the model with attn_implementation="eager"'
            )
        layers.append(explicit_sparsity(outputs[1], causal=True))

    modules = [module for module in model.modules() if isinstance(module, SparseCodingAttention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no SparseCoding adapter; add one with get_peft_model first")
    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()
