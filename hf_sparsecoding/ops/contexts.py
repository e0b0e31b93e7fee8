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

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .precision import wide_dtype


def absolute_transfer(
    outputs: Float[Tensor, "B H N D"], weight: Float[Tensor, "h K"], length: int
) -> Float[Tensor, "B H C D"]:
    """What the target's `length` tokens receive: `sum_i lambda_i O_i`, from the outputs `alpha psi` of all tokens."""
    _check_length(outputs, weight, length)
    contexts = outputs[:, :, :-length].unflatten(2, (-1, length))  # [B, H, K, C, D]
    return (contexts * weight[:, :, None, None]).sum(2)


def aligned_decode(
    alpha: Float[Tensor, "B H N N"], values: Float[Tensor, "B H N D"], weight: Float[Tensor, "h K"], length: int
) -> Float[Tensor, "B H N D"]:
    """`alpha psi` with aligned transfer to the last `length` tokens: context i's coefficients meet psi moved d_i."""
    _check_length(alpha, weight, length)
    if torch.compiler.is_compiling():
        return _decode_moved_values(alpha, values, weight, length)
    return _AlignedDecode.apply(alpha, values, weight, length)


def _decode_moved_values(alpha: Tensor, values: Tensor, weight: Tensor, length: int) -> Tensor:
    """For the compiler, which pads the gradients of slices of alpha: here the values move, which are fewer."""
    contexts = weight.shape[1]
    distances = [(contexts - i) * length for i in range(contexts)]
    moved = torch.stack([functional.pad(values[:, :, d:], (0, 0, 0, d)) for d in distances], 2)  # [B, H, K, N, D]
    received = alpha[:, :, :-length].unflatten(2, (contexts, length)) @ moved
    received = (received * weight[..., None, None]).sum(2)
    out = alpha @ values
    return torch.cat([out[:, :, :-length], out[:, :, -length:] + received], 2)


class _AlignedDecode(torch.autograd.Function):
    """Adds the contexts' part in place, in both directions: slices of alpha would each be padded in the backward."""

    @staticmethod
    def forward(ctx, alpha, values, weight, length):
        out = alpha @ values
        alpha, values = alpha.to(out.dtype), values.to(out.dtype)  # autocast may have given out another type
        share, products = weight.to(out.dtype)[..., None, None], []
        for i, rows, distance in _aligned_rows(alpha, weight, length):
            products.append(rows @ values[:, :, distance:])
            out[:, :, -length:].addcmul_(products[-1], share[:, i])
        ctx.save_for_backward(alpha, values, weight, *products)
        ctx.length = length
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        alpha, values, weight, *products = ctx.saved_tensors
        grad_alpha, grad_values = grad @ values.mT, alpha.mT @ grad
        target, sums, lam = grad[:, :, -ctx.length :], [], weight.to(grad.dtype)[..., None, None]
        wide = wide_dtype(grad)
        for i, rows, distance in _aligned_rows(alpha, weight, ctx.length):
            share = target * lam[:, i]
            place = slice(i * ctx.length, (i + 1) * ctx.length)
            grad_alpha[:, :, place, : rows.shape[-1]] += share @ values[:, :, distance:].mT
            grad_values[:, :, distance:] += rows.mT @ share
            sums.append((target * products[i]).sum((0, 2, 3), dtype=wide))
        return grad_alpha, grad_values, torch.stack(sums, 1).sum_to_size(weight.shape).to(weight.dtype), None


def _aligned_rows(alpha: Tensor, weight: Tensor, length: int) -> Iterator[tuple[int, Tensor, int]]:
    """(i, the rows of context i as far as their keys have a place after the move, d_i)."""
    contexts = weight.shape[1]
    for i in range(contexts):
        distance = (contexts - i) * length
        yield i, alpha[:, :, i * length : (i + 1) * length, : alpha.shape[-1] - distance], distance


def transferred_coefficients(
    alpha: Float[Tensor, "B H N N"], weight: Float[Tensor, "h K"], length: int, aligned: bool
) -> Float[Tensor, "B H C N"]:
    """The coefficients that the target receives, for mixers that are not linear in them, and for pictures."""
    if not aligned:
        return absolute_transfer(alpha, weight, length)
    _check_length(alpha, weight, length)
    total = torch.zeros_like(alpha[:, :, :length])
    for i, rows, distance in _aligned_rows(alpha, weight, length):
        total = total + torch.nn.functional.pad(rows * weight[:, i, None, None], (distance, 0))
    return total


def _check_length(tensor: Tensor, weight: Tensor, length: int) -> None:
    count = weight.shape[1]
    if tensor.shape[2] != (count + 1) * length:
        raise ValueError(
            f"{tensor.shape[2]} tokens are not {count} contexts and a target of {length} tokens each; "
            f"give (K + 1) * {length} tokens"
        )
