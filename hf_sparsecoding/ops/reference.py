"""The textbook form of every operation: explicit coefficients and loops, nothing optimised. The oracle of the tests.

B batch, H heads, T queries, S keys, N past and new tokens, D head dim, K contexts (paper: L-1).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def prox(value: float, threshold: float) -> float:
    """`sign(v) max(|v| - xi, 0)` of one number. Source: arXiv 2511.20194, sec. 3."""
    if value > threshold:
        return value - threshold
    if value < -threshold:
        return value + threshold
    return 0.0


def coefficients(kind: str, scores: Tensor, mask: Tensor | None = None, threshold=0.0, k: int | None = None) -> Tensor:
    """One row at a time: `alpha[..., t, :] = sigma(scores[..., t, allowed keys])`, zero at the other keys.

    `threshold` is a number or a tensor that broadcasts to `scores`. Differentiable in scores and threshold.
    """
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    xi = torch.as_tensor(threshold, dtype=scores.dtype).expand(scores.shape)
    rows = []
    for row, row_allowed, row_xi in zip(scores.flatten(0, -2), allowed.flatten(0, -2), xi.flatten(0, -2), strict=True):
        keys = row_allowed.nonzero().flatten()
        alpha = torch.zeros_like(row)
        rows.append(alpha.index_put((keys,), _row(kind, row[keys], row_xi[keys], k)) if len(keys) else alpha + 0 * row)
    return torch.stack(rows).view(scores.shape)


def _row(kind: str, row: Tensor, xi: Tensor, k: int | None) -> Tensor:
    if kind == "linear":
        return row
    if kind == "relu":
        return torch.where(row > 0, row, 0)
    if kind == "soft_threshold":
        return _prox_row(row, xi)
    if kind == "top_k":
        kept = row.argsort(descending=True)[:k]
        weights = (row[kept] - row[kept].max()).exp()
        return torch.zeros_like(row).index_put((kept,), weights / weights.sum())
    weights = (row - row.max()).exp()
    weights = weights / weights.sum()
    return weights if kind == "softmax" else _prox_row(weights, xi)


def _prox_row(row: Tensor, xi: Tensor) -> Tensor:
    # as `prox`, with gradients: zero where the value is zero, at |v| = xi too
    return torch.where(row.abs() > xi, row.sign() * (row.abs() - xi), 0)


def context_rows(length: int, lags: Sequence[int], age: Tensor | None, past: int = 0) -> Int[Tensor, "B T K"]:
    """Row of `[past rows; the T new ones]` that is context i of token t: t - lags[i] if in the document, else -1."""
    batch = 1 if age is None else age.shape[0]
    rows = torch.full((batch, length, len(lags)), -1)
    for b in range(batch):
        for t in range(length):
            for i, lag in enumerate(lags):
                inside = past + t >= lag if age is None else age[b, t] >= lag
                if inside and past + t - lag >= 0:
                    rows[b, t, i] = past + t - lag
    return rows


def segment_rows(labels: Sequence[int], ages: Sequence[int], num_contexts: int) -> Int[Tensor, "T K"]:
    """For one sequence: the token at the same offset of the i-th segment before, or -1.

    `labels[t]` names the segment of token t; a new segment starts where the label changes or the age is 0.
    """
    starts = [t for t in range(len(labels)) if ages[t] == 0 or t == 0 or labels[t] != labels[t - 1]]
    rows = torch.full((len(labels), num_contexts), -1)
    for t in range(len(labels)):
        own = max(s for s in starts if s <= t)
        document = t - ages[t]
        before = [s for s in starts if document <= s < own][::-1]
        ends = [own, *before]
        for i, start in enumerate(before[:num_contexts]):
            row = start + (t - own)
            if row < ends[i]:
                rows[t, i] = row
    return rows


def transfer(
    alpha: Float[Tensor, "B H N N"],
    psi: Float[Tensor, "B H N D"],
    weight: Float[Tensor, "b h K"],
    rows: Int[Tensor, "r T K"],
    target: Float[Tensor, "c g"] | None = None,
    past: int = 0,
) -> Float[Tensor, "B T H D"]:
    """`alpha_t <- (1 + lambda_0) alpha_t + sum_i lambda_i alpha_{context_i(t)}`, then `alpha psi`, after `past`.

    alpha holds the coefficients of all `past + T` tokens. Source: arXiv 2511.20194, lifting scheme.
    """
    batch, heads, total, _ = alpha.shape
    weight = weight.expand(batch, heads, -1)
    rows = rows.expand(batch, -1, -1)
    out = []
    for b in range(batch):
        for h in range(heads):
            for t in range(past, total):
                gain = 1 if target is None else 1 + target.expand(batch, heads)[b, h]
                lifted = gain * alpha[b, h, t]
                for i, row in enumerate(rows[b, t - past].tolist()):
                    if row >= 0:
                        lifted = lifted + weight[b, h, i] * alpha[b, h, row]
                out.append(lifted @ psi[b, h])
    return torch.stack(out).view(batch, heads, total - past, -1).transpose(1, 2)


def context_transfer(
    alpha: Float[Tensor, "B H N N"], weight: Float[Tensor, "h K"], length: int, aligned: bool
) -> Float[Tensor, "B H N N"]:
    """`alpha_L[t, j] += lambda_i alpha_i[t - d_i, j]` (aligned: `j - d_i`); `length` tokens per context."""
    heads, tokens = alpha.shape[1:3]
    contexts = weight.shape[1]
    lifted = alpha.clone()
    for h in range(heads):
        for t in range(tokens - length, tokens):
            for i in range(contexts):
                distance = (contexts - i) * length
                for j in range(tokens):
                    source = j - distance if aligned else j
                    if source >= 0:
                        value = weight[h % len(weight), i] * alpha[:, h, t - distance, source]
                        lifted[:, h, t, j] = lifted[:, h, t, j] + value
    return lifted


def hyla(alpha: Float[Tensor, "B H T S"], values: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H T D"]:
    """`o_h[t] = sum_s a_h[t,s] ReLU(sum_g a_g[t,s] v_g[s])`. Source: arXiv 2406.05816."""
    batch, heads, queries, keys = alpha.shape
    out = alpha.new_zeros(batch, heads, queries, values.shape[-1])
    for t in range(queries):
        for s in range(keys):
            hidden = (alpha[:, :, t, s, None] * values[:, :, s]).sum(1).relu()  # [B, D]
            out[:, :, t] = out[:, :, t] + alpha[:, :, t, s, None] * hidden[:, None]
    return out


def rms_normalised(tensor: Tensor, dim: int, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over one axis."""
    return tensor / (tensor.pow(2).mean(dim, keepdim=True) + epsilon).sqrt()


def extended_linear_attention(
    hidden_states: Float[Tensor, "B m n"],
    weights: Float[Tensor, "3 H n n"],
    biases: Float[Tensor, "3 H m n"],
) -> Float[Tensor, "B m n"]:
    """`o[t] = sum_h sum_s <q_h[t], k_h[s]> v_h[s]`, `q = X W_q + B_q` and so on, in the order query, key, value.

    Source: arXiv 2503.23814; its (W3, W1, W2) and (B3, B1, B2).
    """
    out = []
    for prompt in hidden_states:
        total = torch.zeros_like(prompt)
        for head in range(weights.shape[1]):
            query, key, value = (prompt @ weights[i, head] + biases[i, head] for i in range(3))
            rows = [((key * query[t]).sum(-1, keepdim=True) * value).sum(0) for t in range(len(prompt))]
            total = total + torch.stack(rows)
        out.append(total)
    return torch.stack(out)
