"""RMS over heads and soft threshold as one operation, in as few passes over the scores as softmax takes.

With r = (mean_h s_h^2 + eps)^(-1/2), alpha_h = prox_xi(s_h r), and g the gradient of alpha where alpha is not zero:

    ds_h = r g_h - s_h r^3 mean_h(g_h s_h)

Blocks of whole samples stay in the CPU's cache over all passes. Kept for the backward: the scores, which nothing else
keeps, alpha, which its product with the values keeps anyway, and r [B, 1, T, S].

B batch, H heads, T queries, S keys.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .coefficients import soft_threshold
from .mixers import EPSILON, HALF, rms_over_heads


# 1 MB in float32: the last-level cache of a CPU holds a block's operands over all passes. A GPU wants few kernels.
BLOCK_ELEMENTS = 1 << 18
GPU_BLOCK_ELEMENTS = 1 << 25


def normalised_soft_threshold(
    scores: Float[Tensor, "B H T S"], threshold: float | Float[Tensor, "..."], epsilon: float = EPSILON
) -> Float[Tensor, "B H T S"]:
    """`prox_xi(s_h / sqrt(mean_h s_h^2 + eps))`: `soft_threshold(rms_over_heads(scores), xi)`.

    Args:
        threshold: xi >= 0, in units of the normalised scores. A learned one (a tensor) takes the two steps.
    """
    if scores.dtype in HALF:  # normalised and thresholded before rounding, which would flip coefficients near xi
        return normalised_soft_threshold(scores.float(), threshold, epsilon).to(scores.dtype)
    # the compiler fuses the chain by itself
    if isinstance(threshold, Tensor) or torch.compiler.is_compiling() or not scores.numel():
        return soft_threshold(rms_over_heads(scores, epsilon), threshold)
    return _NormalisedSoftThreshold.apply(scores, threshold, epsilon)


class _NormalisedSoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, threshold, epsilon):
        alpha, scale = torch.empty_like(scores), scores.new_empty(scores.shape[0], 1, *scores.shape[2:])
        blocks = _blocks(scores)
        buffer = torch.empty_like(scores[blocks[0]])
        for rows in blocks:
            s, r = scores[rows], scale[rows]
            work = buffer[: len(s)]
            torch.mul(s, s, out=work)
            torch.sum(work, 1, keepdim=True, out=r)  # twice as fast as torch.mean
            r.div_(s.shape[1]).add_(epsilon).rsqrt_()
            torch.mul(s, r, out=work)
            torch.ops.aten.softshrink.out(work, threshold, out=alpha[rows])
        ctx.save_for_backward(scores, alpha, scale)
        return alpha

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        scores, alpha, scale = ctx.saved_tensors
        result = torch.empty_like(scores)
        blocks = _blocks(scores)
        buffer, totals = torch.empty_like(scores[blocks[0]]), torch.empty_like(scale[blocks[0]])
        for rows in blocks:
            s, r, g = scores[rows], scale[rows], result[rows]
            work, total = buffer[: len(s)], totals[: len(s)]
            # zero where alpha is, the others as they are
            torch.ops.aten.softshrink_backward.grad_input(grad[rows], alpha[rows], 0.0, grad_input=g)
            torch.mul(g, s, out=work)
            torch.sum(work, 1, keepdim=True, out=total)
            total.mul_(r).mul_(r)  # r^2 sum_h g s
            g.addcmul_(s, total, value=-1 / s.shape[1]).mul_(r)
        return result, None, None


def _blocks(tensor: Tensor) -> list[slice]:
    elements = BLOCK_ELEMENTS if tensor.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, elements * tensor.shape[0] // max(1, tensor.numel()))
    return [slice(start, start + step) for start in range(0, tensor.shape[0], step)]
