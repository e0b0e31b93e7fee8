"""Nested logits, a model of the loss landscape on which an induction head is found. Source: arXiv 2312.03002.

    q1 = e^b1 / (e^b1 + 2 N - 1)            a label attends to the item before it
    q2 = e^(a q1) / (e^(a q1) + N - 1)      the target attends to the right label
    loss = -log( e^(xi q2) / (e^(xi q2) + (N - 1) e^(xi (1 - q2) / (N - 1)) + L - N) )

Three numbers are learned one after the other: xi (answer with a label of the context), then b1, then a. At the origin
the slope is -(1 / N - 1 / L) in xi and 0 in the others: with L = N there is nowhere to go.

N pairs in the context, at least 2; L labels, at least N; S settings of (N, L).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


Numbers = Float[np.ndarray, "..."]


class Descent(NamedTuple):
    """Gradient descent, from the starting point on: the losses, and xi, b1 and a."""

    losses: Float[np.ndarray, "steps+1 S"]
    parameters: Float[np.ndarray, "steps+1 3 S"]


def nested_logits(
    parameters: Float[np.ndarray, "3 ..."], pairs: Numbers, labels: Numbers
) -> tuple[Numbers, Float[np.ndarray, "3 ..."]]:
    """(loss, its gradient) at (xi, b1, a); `pairs` and `labels` broadcast to each of the three."""
    xi, b1, a = parameters
    q1 = np.exp(b1) / (np.exp(b1) + 2 * pairs - 1)
    q2 = np.exp(a * q1) / (np.exp(a * q1) + pairs - 1)
    right, wrong = np.exp(xi * q2), (pairs - 1) * np.exp(xi * (1 - q2) / (pairs - 1))
    total = right + wrong + labels - pairs
    # of the loss in the logits of the right label and of each wrong one
    slope_right, slope_wrong = right / total - 1, wrong / total
    slope_xi = slope_right * q2 + slope_wrong * (1 - q2) / (pairs - 1)
    slope_match = xi * (slope_right - slope_wrong / (pairs - 1)) * q2 * (1 - q2)  # in a q1
    return np.log(total / right), np.stack([slope_xi, slope_match * a * q1 * (1 - q1), slope_match * q1])


def descend(
    pairs: Sequence[int], labels: Sequence[int], steps: int, learning_rate: float = 0.1, init: float = 0.01
) -> Descent:
    """Gradient descent, the gradient flow in steps of `learning_rate`, in all settings at once.

    Args:
        pairs, labels: N and L of every setting.
        init: Where xi, b1 and a start.
    """
    if len(pairs) != len(labels) or any(not 2 <= n <= l for n, l in zip(pairs, labels, strict=True)):  # noqa: E741
        raise ValueError(f"need settings of pairs >= 2 and labels >= pairs, got {list(pairs)} and {list(labels)}")
    n, l = np.array(pairs, dtype=float), np.array(labels, dtype=float)  # noqa: E741
    points, losses = np.full((steps + 1, 3, len(n)), init), np.empty((steps + 1, len(n)))
    for step in range(steps + 1):
        losses[step], gradient = nested_logits(points[step], n, l)
        if step < steps:
            points[step + 1] = points[step] - learning_rate * gradient
    return Descent(losses, points)


def steps_to(descent: Descent, pairs: Sequence[int], share: float = 0.1) -> list[int | None]:
    """Per setting, the steps until the loss is below `share` of its plateau ln N; None where it stays above."""
    below = descent.losses < share * np.log(np.array(pairs))
    return [int(column.argmax()) if column.any() else None for column in below.T]
