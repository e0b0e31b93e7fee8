"""Transfer along lags on a GPU: one kernel reads the outputs for all lags, another for both gradients.

To be called by itself: `ops.transfer` does not choose it before it has run on a GPU. Registered as custom operators.
Sums are float32. `TRITON_INTERPRET=1`, set before Python starts, runs the kernels on a CPU, slowly.

B batch, H heads, T new tokens, P past tokens, N = P + T, D head dim, K contexts.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from .attention_triton import device_of, require_gpu
from .triton.transfer import BLOCK_C, BLOCK_T, WARPS, transfer_backward, transfer_forward


def transfer_lags_triton(
    full: Tensor,
    weight: Tensor | None,
    lags: Sequence[int],
    target: Tensor | None,
    age: Tensor | None,
    length: int,
) -> Tensor:
    """As `transfer.transfer_lags`, on `full` [B, N, H, D], the outputs of past and new tokens; the last T are lifted.

    Raises:
        ValueError: tensors that are not on a GPU, or numbers of float64.
    """
    require_gpu(full)
    if full.dtype == torch.float64:
        raise ValueError("the kernels of the transfer take float32, bfloat16 or float16, got torch.float64")
    batch, _, heads, _ = full.shape
    own = full.new_ones(1, 1, 1, dtype=torch.float32) if target is None else 1 + target.float()[..., None]
    shares = own.expand(batch, heads, 1)
    if weight is not None:
        shares = torch.cat([weight.float().expand(batch, heads, -1), shares], -1)
    lags = [] if weight is None else list(lags)
    return torch.ops.hf_sparsecoding.transfer_triton(full, shares, age, lags, length)


@torch.library.custom_op("hf_sparsecoding::transfer_triton", mutates_args=())
def _forward(full: Tensor, shares: Tensor, age: Tensor | None, lags: list[int], length: int) -> Tensor:
    """`full` [B, N, H, D], `shares` [B, H, K + 1] (the last is the token's own), `age` [1 or B, T]."""
    batch, total, heads, size = full.shape
    lifted = full.new_empty(batch, length, heads, size)
    grid = (batch * triton.cdiv(length, BLOCK_T) * triton.cdiv(heads * size, BLOCK_C),)
    ages = full if age is None else age.contiguous()
    with device_of(full):
        transfer_forward[grid](
            full.contiguous(), shares.contiguous(), ages, lifted, total - length, length, heads * size,
            **_options(age, size, lags),
        )  # fmt: skip
    return lifted


@_forward.register_fake
def _(full, shares, age, lags, length):
    return full.new_empty(full.shape[0], length, *full.shape[2:])


@torch.library.custom_op("hf_sparsecoding::transfer_triton_backward", mutates_args=())
def _gradients(
    grad: Tensor, full: Tensor, shares: Tensor, age: Tensor | None, lags: list[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of `full` and `shares`."""
    batch, total, heads, size = full.shape
    length = grad.shape[1]
    grad_full = torch.empty_like(full, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(total, BLOCK_T)
    partial = shares.new_empty(batch, blocks, len(lags) + 1, heads, size)
    grid = (batch * blocks * triton.cdiv(heads * size, BLOCK_C),)
    ages = full if age is None else age.contiguous()
    with device_of(full):
        transfer_backward[grid](
            grad.contiguous(), full.contiguous(), shares.contiguous(), ages, grad_full, partial,
            total - length, length, heads * size, **_options(age, size, lags),
        )  # fmt: skip
    return grad_full, partial.sum((1, 4)).mT.contiguous()


@_gradients.register_fake
def _(grad, full, shares, age, lags):
    return (
        torch.empty_like(full, memory_format=torch.contiguous_format),
        torch.empty_like(shares, memory_format=torch.contiguous_format),
    )


def _options(age: Tensor | None, size: int, lags: list[int]) -> dict:
    return {
        "age_batch": 0 if age is None or age.shape[0] == 1 else age.shape[1],
        "D": size,
        "LAGS": tuple(lags),
        "AGE": age is not None,
        "BLOCK_T": BLOCK_T,
        "BLOCK_C": BLOCK_C,
        "num_warps": WARPS,
    }


def _setup(ctx, inputs, output) -> None:
    full, shares, age, ctx.lags, _ = inputs
    ctx.save_for_backward(full, shares, age)


def _backward(ctx, grad):
    full, shares, age = ctx.saved_tensors
    return *_gradients(grad, full, shares, age, ctx.lags), None, None, None


def _refuse(ctx, *grads):
    raise NotImplementedError("the transfer has no second derivative on a GPU")


_forward.register_autograd(_backward, setup_context=_setup)
_gradients.register_autograd(_refuse)
