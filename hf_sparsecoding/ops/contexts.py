"""Coefficient transfer between contexts of equal length, for small models that hold their coefficients.

A sequence of N = (K + 1) C tokens is K contexts and the target, C tokens each; context i starts at token i C.
Coefficients reach the target in one of two ways, with d_i the distance from context i to the target:

- absolute (the paper's): `alpha_L[t, j] += lambda_i alpha_i[t - d_i, j]`, the same keys. As psi is shared, this is a
  weighted sum of the contexts' outputs.
- aligned: `alpha_L[t, j] += lambda_i alpha_i[t - d_i, j - d_i]`, the keys move along: what a context's token does with
  the tokens around it the target's token does with those around itself. It carries a rule instead of values.

B batch, H heads, N tokens, D head dim, K contexts (paper: L-1), C tokens per context; h is 1 or H.
Source: arXiv 2511.20194, lifting scheme; aligned transfer is this package's own.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def absolute_transfer(
    outputs: Float[Tensor, "B H N D"], weight: Float[Tensor, "h K"], length: int
) -> Float[Tensor, "B H C D"]:
    """What the target's `length` tokens receive: `sum_i lambda_i O_i`, from the outputs `alpha psi` of all tokens."""
    contexts = _contexts(outputs, weight, length)
    return (contexts * weight[:, :, None, None]).sum(2)


def aligned_transfer(
    alpha: Float[Tensor, "B H N N"], values: Float[Tensor, "B H N D"], weight: Float[Tensor, "h K"], length: int
) -> Float[Tensor, "B H C D"]:
    """What the target's tokens receive: `sum_i lambda_i alpha_i psi`, psi moved by d_i; no copy of alpha."""
    contexts = weight.shape[1]
    total = None
    for i in range(contexts):
        distance = (contexts - i) * length
        rows = alpha[:, :, i * length : (i + 1) * length, : alpha.shape[-1] - distance]
        term = (rows @ values[:, :, distance:]) * weight[:, i, None, None]
        total = term if total is None else total + term
    return total


def transferred_coefficients(
    alpha: Float[Tensor, "B H N N"], weight: Float[Tensor, "h K"], length: int, aligned: bool
) -> Float[Tensor, "B H C N"]:
    """The coefficients that the target receives, for mixers that are not linear in them, and for pictures."""
    if not aligned:
        return absolute_transfer(alpha, weight, length)
    contexts = weight.shape[1]
    total = torch.zeros_like(alpha[:, :, :length])
    for i in range(contexts):
        distance = (contexts - i) * length
        rows = alpha[:, :, i * length : (i + 1) * length, : alpha.shape[-1] - distance]
        total = total + torch.nn.functional.pad(rows * weight[:, i, None, None], (distance, 0))
    return total


def _contexts(tensor: Tensor, weight: Tensor, length: int) -> Float[Tensor, "B H K C D"]:
    count = weight.shape[1]
    if tensor.shape[2] != (count + 1) * length:
        raise ValueError(
            f"{tensor.shape[2]} tokens are not {count} contexts and a target of {length} tokens each; "
            f"give (K + 1) * {length} tokens"
        )
    return tensor[:, :, : count * length].unflatten(2, (count, length))
