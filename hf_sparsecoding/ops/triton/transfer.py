"""Kernels of the transfer along lags: all lags in one pass over the outputs, forward and backward.

Outputs [B, N, H, D] are matrices [N, C], C = H D channels; N = P past and T new tokens. `shares` [B, H, K + 1] are the
weights of the K lags and, last, of the token itself.
"""

import triton
import triton.language as tl


BLOCK_T, BLOCK_C, WARPS = 32, 64, 8


@triton.jit
def place(length, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sample, tokens [BLOCK_T, 1] and channels [1, BLOCK_C] of this program."""
    strips = tl.cdiv(channels, BLOCK_C)
    strip, block = tl.program_id(0) % strips, tl.program_id(0) // strips
    blocks = tl.cdiv(length, BLOCK_T)
    tokens = (block % blocks * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    return (block // blocks).to(tl.int64), tokens, (strip * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]


@triton.jit
def old_enough(age, sample, age_batch: tl.int64, tokens, length, lag: tl.constexpr, AGE: tl.constexpr):
    """Whether these are tokens whose context at the lag is in their document."""
    inside = (tokens >= 0) & (tokens < length)
    if AGE:
        inside = inside & (tl.load(age + sample * age_batch + tokens, mask=inside, other=-1) >= lag)
    return inside


@triton.jit
def transfer_forward(
    full,
    shares,
    age,
    lifted,
    past,
    length,
    channels,
    age_batch: tl.int64,
    D: tl.constexpr,
    LAGS: tl.constexpr,
    AGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sample, tokens, columns = place(length, channels, BLOCK_T, BLOCK_C)
    known = columns < channels
    count: tl.constexpr = len(LAGS)
    shares += (sample * (channels // D) + columns // D) * (count + 1)
    full += sample * (past + length) * channels + columns
    own = known & (tokens < length)
    total = tl.load(full + (past + tokens).to(tl.int64) * channels, mask=own, other=0.0).to(tl.float32)
    total *= tl.load(shares + count, mask=known, other=0.0)
    for i in tl.static_range(count):
        rows = past + tokens - LAGS[i]
        used = known & (rows >= 0) & old_enough(age, sample, age_batch, tokens, length, LAGS[i], AGE)
        context = tl.load(full + rows.to(tl.int64) * channels, mask=used, other=0.0).to(tl.float32)
        total += context * tl.load(shares + i, mask=known, other=0.0)
    pointers = lifted + sample * length * channels + tokens.to(tl.int64) * channels + columns
    tl.store(pointers, total.to(lifted.dtype.element_ty), mask=own)


@triton.jit
def transfer_backward(
    grad,
    full,
    shares,
    age,
    grad_full,
    partial,
    past,
    length,
    channels,
    age_batch: tl.int64,
    D: tl.constexpr,
    LAGS: tl.constexpr,
    AGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Gradients of BLOCK_T rows of `[past; new]`, and what their tokens add to those of `shares` [.., K + 1, C]."""
    sample, rows, columns = place(past + length, channels, BLOCK_T, BLOCK_C)
    known = columns < channels
    count: tl.constexpr = len(LAGS)
    shares += (sample * (channels // D) + columns // D) * (count + 1)
    full += sample * (past + length) * channels + columns
    grad += sample * length * channels + columns
    blocks = tl.cdiv(past + length, BLOCK_T)
    block = sample * blocks + tl.program_id(0) // tl.cdiv(channels, BLOCK_C) % blocks
    partial += block * (count + 1) * channels + columns
    tokens = rows - past
    own = known & (tokens >= 0) & (tokens < length)
    own_grad = tl.load(grad + tokens.to(tl.int64) * channels, mask=own, other=0.0).to(tl.float32)
    own_row = tl.load(full + rows.to(tl.int64) * channels, mask=own, other=0.0).to(tl.float32)
    tl.store(partial + count * channels, tl.sum(own_grad * own_row, 0)[None, :], mask=known)
    total = own_grad * tl.load(shares + count, mask=known, other=0.0)
    for i in tl.static_range(count):
        later = tokens + LAGS[i]
        used = known & old_enough(age, sample, age_batch, later, length, LAGS[i], AGE)
        used = used & (rows < past + length)
        later_grad = tl.load(grad + later.to(tl.int64) * channels, mask=used, other=0.0).to(tl.float32)
        total += later_grad * tl.load(shares + i, mask=known, other=0.0)
        used = own & (rows >= LAGS[i]) & old_enough(age, sample, age_batch, tokens, length, LAGS[i], AGE)
        context = tl.load(full + (rows - LAGS[i]).to(tl.int64) * channels, mask=used, other=0.0).to(tl.float32)
        tl.store(partial + i * channels, tl.sum(own_grad * context, 0)[None, :], mask=known)
    pointers = grad_full + sample * (past + length) * channels + rows.to(tl.int64) * channels + columns
    tl.store(pointers, total.to(grad_full.dtype.element_ty), mask=known & (rows < past + length))
