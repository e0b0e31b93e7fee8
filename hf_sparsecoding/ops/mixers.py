"""Scores and outputs of the baselines beside softmax attention. Source: arXiv 2406.05816.

B batch, H heads, T queries, S keys, D head dim.
"""

import torch
from jaxtyping import Float, Num
from torch import Tensor


HALF = (torch.float16, torch.bfloat16)
EPSILON = 1e-6  # flax's, as in the reference


def rms_over_heads(scores: Float[Tensor, "B H T S"], epsilon: float = EPSILON) -> Float[Tensor, "B H T S"]:
    """`a_h / sqrt(mean_h a_h^2 + eps)`: each pair of tokens gets coefficients of size one over the heads."""
    return _rms_normalised(scores, 1, epsilon)


def rms_over_keys(
    scores: Float[Tensor, "B H T S"], epsilon: float = EPSILON, count: Num[Tensor, "..."] | None = None
) -> Float[Tensor, "B H T S"]:
    """`a[t, :] / sqrt(mean_s a[t, s]^2 + eps)`: each row of coefficients has size one.

    Args:
        count: Over how many keys the mean is, where the scores of the others are zero; broadcasts to [B, H, T, 1].
    """
    return _rms_normalised(scores, -1, epsilon, count)


def rms_per_head(outputs: Float[Tensor, "B H T D"], epsilon: float = EPSILON) -> Float[Tensor, "B H T D"]:
    """Each head's output divided by its root mean square."""
    return _rms_normalised(outputs, -1, epsilon)


def _rms_normalised(tensor: Tensor, dim: int, epsilon: float, count: Tensor | None = None) -> Tensor:
    wide = tensor.float() if tensor.dtype in HALF else tensor  # a square leaves the range of float16
    squares = wide.square()
    mean = squares.mean(dim, keepdim=True) if count is None else squares.sum(dim, keepdim=True) / count
    return (wide * (mean + epsilon).rsqrt()).to(tensor.dtype)


def hyla(alpha: Float[Tensor, "B H T S"], values: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H T D"]:
    """Hypernetwork linear attention: `o_h[t] = sum_s a_h[t,s] u[t,s]`, `u[t,s] = ReLU(sum_h a_h[t,s] v_h[s])`.

    The heads' coefficients generate both layers of a network that is applied to the key's value.
    """
    hidden = (alpha.permute(0, 3, 2, 1) @ values.transpose(1, 2)).relu()  # [B, S, T, D]
    return (alpha.transpose(1, 2) @ hidden.transpose(1, 2)).transpose(1, 2)
