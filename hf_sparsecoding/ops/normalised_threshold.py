"""RMS over heads or keys and soft threshold as one operation, in as few passes over the scores as softmax takes.

With the mean over heads or keys, r = (mean(s^2) + eps)^(-1/2), alpha = prox_xi(s r), and g the gradient of alpha where
alpha is not zero:

    ds = r g - s r^3 mean(g s)

Blocks of whole samples stay in the CPU's cache over all passes. Kept for the backward: the scores, which nothing else
keeps, alpha, which its product with the values keeps anyway, and r, which has the one axis less.

B batch, H heads, T queries, S keys.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .coefficients import soft_threshold
from .mixers import EPSILON, HALF, rms_over_heads, rms_over_keys


# 1 MB in float32: the last-level cache of a CPU holds a block's operands over all passes. A GPU wants few kernels.
BLOCK_ELEMENTS = 1 << 18
GPU_BLOCK_ELEMENTS = 1 << 25

NORMS = {"heads": (rms_over_heads, 1), "keys": (rms_over_keys, -1)}


def normalised_soft_threshold(
    scores: Float[Tensor, "B H T S"], threshold: float | Float[Tensor, "..."], over: str, epsilon: float = EPSILON
) -> Float[Tensor, "B H T S"]:
    """`prox_xi(s / sqrt(mean s^2 + eps))`, the mean over `over`: `soft_threshold(rms_over_heads(scores), xi)`.

    Args:
        threshold: xi >= 0, in units of the normalised scores. A learned one (a tensor) takes the two steps.
        over: "heads" or "keys".
    """
    norm, dim = NORMS[over]
    if scores.dtype in HALF:  # normalised and thresholded before rounding, which would flip coefficients near xi
        return normalised_soft_threshold(scores.float(), threshold, over, epsilon).to(scores.dtype)
    # the compiler fuses the chain by itself
    if isinstance(threshold, Tensor) or torch.compiler.is_compiling() or not scores.numel():
        return soft_threshold(norm(scores, epsilon), threshold)
    return _NormalisedSoftThreshold.apply(scores, threshold, dim, epsilon)


class _NormalisedSoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, threshold, dim, epsilon):
        alpha, scale = torch.empty_like(scores), torch.empty_like(scores.narrow(dim, 0, 1))
        blocks = _blocks(scores)
        buffer = torch.empty_like(scores[blocks[0]])
        for rows in blocks:
            s, r = scores[rows], scale[rows]
            work = buffer[: len(s)]
            torch.mul(s, s, out=work)
            torch.sum(work, dim, keepdim=True, out=r)  # twice as fast as torch.mean
            r.div_(s.shape[dim]).add_(epsilon).rsqrt_()
            torch.mul(s, r, out=work)
            torch.ops.aten.softshrink.out(work, threshold, out=alpha[rows])
        ctx.save_for_backward(scores, alpha, scale)
        ctx.dim = dim
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
            torch.sum(work, ctx.dim, keepdim=True, out=total)
            total.mul_(r).mul_(r)  # r^2 sum g s
            g.addcmul_(s, total, value=-1 / s.shape[ctx.dim]).mul_(r)
        return result, None, None, None


def _blocks(tensor: Tensor) -> list[slice]:
    elements = BLOCK_ELEMENTS if tensor.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, elements * tensor.shape[0] // max(1, tensor.numel()))
    return [slice(start, start + step) for start in range(0, tensor.shape[0], step)]
