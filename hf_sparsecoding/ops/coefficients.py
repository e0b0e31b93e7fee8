"""Coefficients `alpha = sigma(S)` on the encoding dictionary, from the scores `S = X phi(X)`.

B batch, H heads, T queries, S keys.

Every function takes scores [..., T, S] and a boolean mask broadcastable to them (True: the key may be used) and
returns coefficients of the scores' shape and dtype that are exactly zero where the mask is False. A row without any
allowed key is all zeros. Masks are boolean only: adding a large negative number to a score is right for softmax and
wrong for every proximal operator, whose coefficient grows with |S|.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


Scores = Float[Tensor, "*batch T S"]
Mask = Bool[Tensor, "..."] | None
Threshold = float | Float[Tensor, "..."]


def prox(values: Float[Tensor, "..."], threshold: Threshold) -> Float[Tensor, "..."]:
    """Proximal operator of `threshold * ||.||_1`: `sign(v) * max(|v| - threshold, 0)`, elementwise.

    Where the result is zero so are the gradients, at `|v| = threshold` too.

    Args:
        values: any shape.
        threshold: xi >= 0, a number or a tensor that broadcasts to `values`.

    Source: arXiv 2511.20194, sec. 3; Parikh & Boyd 2014, 6.5.2.
    """
    if not isinstance(threshold, Tensor):
        return torch.nn.functional.softshrink(values, threshold)
    threshold = threshold.to(values.dtype)
    # not with minimum and maximum: these split the gradient where |v| = xi, as at every masked zero when xi is 0
    return torch.where(values.abs() <= threshold, 0, values - values.sign() * threshold)  # nan stays nan


def inverse_softplus(threshold: float) -> float:
    """What a learned threshold, `softplus(raw)`, must start from to be `threshold` > 0."""
    return threshold + math.log(-math.expm1(-threshold))


def softmax(scores: Scores, mask: Mask = None) -> Scores:
    """Row-wise softmax in float32 (float64 stays float64): dense coefficients that sum to one."""
    return _wide_softmax(scores, mask).to(scores.dtype)


def soft_threshold(scores: Scores, threshold: Threshold, mask: Mask = None) -> Scores:
    """`prox_xi(S)`: signed, unnormalised, exactly zero for a zero input. Source: arXiv 2511.20194, sec. 3."""
    return _masked(prox(scores, threshold), mask)


def thresholded_softmax(scores: Scores, threshold: Threshold, mask: Mask = None) -> Scores:
    """`prox_xi(softmax(S))`: coefficients below xi become exactly zero; the rest shrink by xi, not renormalised."""
    # thresholded before it is rounded to the scores' dtype: rounding first would flip coefficients near xi
    return prox(_wide_softmax(scores, mask), threshold).to(scores.dtype)


def top_k(scores: Scores, k: int, mask: Mask = None) -> Scores:
    """Softmax over the `k` largest allowed scores of each row, zero elsewhere. All of them if a row has fewer than k.

    Raises:
        ValueError: if k < 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    ranked = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    indices = ranked.topk(min(k, scores.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)
    return softmax(scores, kept if mask is None else kept & mask)


def relu(scores: Scores, mask: Mask = None) -> Scores:
    """`max(S, 0)`: the one-sided threshold, unnormalised."""
    return _masked(scores.relu(), mask)


def linear(scores: Scores, mask: Mask = None) -> Scores:
    """`S` itself: linear attention."""
    return _masked(scores, mask)


def _wide_softmax(scores: Scores, mask: Mask) -> Scores:
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if mask is None:
        return wide.softmax(-1)
    wide = wide.masked_fill(~mask, torch.finfo(wide.dtype).min)
    # a fully masked row would come out uniform: zero it
    return wide.softmax(-1).masked_fill(~mask, 0)


def _masked(coefficients: Scores, mask: Mask) -> Scores:
    return coefficients if mask is None else coefficients.masked_fill(~mask, 0)


COEFFICIENTS = {
    "softmax": softmax,
    "soft_threshold": soft_threshold,
    "thresholded_softmax": thresholded_softmax,
    "top_k": top_k,
    "relu": relu,
    "linear": linear,
}
