"""Lifting coefficient transfer, on the per-head attention outputs.

`psi` is shared by all tokens, so transferring coefficients and then decoding them,
`(alpha_t + sum_i lambda_i alpha_{context_i(t)}) psi`, is exactly a weighted sum of attention outputs,
`O_t + sum_i lambda_i O_{context_i(t)}`: no copy of alpha, any attention kernel underneath.

B batch, H heads, T new tokens, P past tokens, D head dim, K contexts (paper: L-1); b is 1 or B, h is 1 or H.
Source: arXiv 2511.20194, lifting scheme.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


# elements of one time block: small enough that a block's operands stay in a core's L2 cache over all lags
BLOCK_ELEMENTS = 1 << 16


def transfer_lags(
    outputs: Float[Tensor, "B T H D"],
    weight: Float[Tensor, "b h K"] | None,
    lags: Sequence[int],
    *,
    target: Float[Tensor, "c g"] | None = None,
    age: Int[Tensor, "a T"] | None = None,
    history: Float[Tensor, "B P H D"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """`Z_t = (1 + lambda_0) O_t + sum_i lambda_i O_{t - lags[i]}`.

    Args:
        outputs: attention outputs of the new tokens, one row per head.
        weight: lambda, per head (h = H) or shared (h = 1), per row of the batch (b = B) or shared (b = 1). None: no contexts.
        lags: K distances in tokens, each >= 1.
        target: lambda_0 on the token's own coefficients. None: absent.
        age: number of tokens of the same document before each token; lag i is used where age >= lags[i].
            None: the rows are one document each that starts with the first row of `[history; outputs]`.
        history: outputs of the tokens just before, oldest first (decoding). A lag that reaches beyond it counts as no context.
    """
    full = outputs if history is None else torch.cat([history, outputs], 1)
    if torch.compiler.is_compiling():  # the compiler fuses this chain by itself
        return _transfer_lags_composed(full, outputs, weight, lags, target, age)
    return _TransferLags.apply(full, weight, target, age, tuple(lags), outputs.shape[1])


def transfer(
    outputs: Float[Tensor, "B T H D"],
    weight: Float[Tensor, "b h K"] | None,
    rows: Int[Tensor, "r T K"] | None,
    *,
    target: Float[Tensor, "c g"] | None = None,
    history: Float[Tensor, "B P H D"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """`Z_t = (1 + lambda_0) O_t + sum_i lambda_i O_{rows[t, i]}` for contexts at any place, such as segments.

    Args:
        rows: row of `[history; outputs]` that is context i of token t, -1 where there is none.

    The others as in `transfer_lags`.
    """
    lifted = _scaled(outputs, target)
    return lifted if weight is None else lifted + context_sum(outputs, weight, rows, history=history)


def context_sum(
    outputs: Float[Tensor, "B T H D"],
    weight: Float[Tensor, "b h K"],
    rows: Int[Tensor, "r T K"],
    *,
    history: Float[Tensor, "B P H D"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """The transferred part alone, `sum_i lambda_i O_{rows[t, i]}`; arguments as in `transfer`."""
    full = outputs if history is None else torch.cat([history, outputs], 1)
    batch, total, heads, dim = full.shape
    flat = full.reshape(batch * total, heads, dim)
    first = torch.arange(batch, device=rows.device)[:, None] * total
    weight = weight.to(outputs.dtype)
    terms = []
    for i in range(weight.shape[-1]):
        row = rows[..., i]
        context = flat.index_select(0, (first + row.clamp(min=0)).flatten()).view(outputs.shape)
        share = weight[:, None, :, i] * (row >= 0)[..., None]  # [B, T, h]
        terms.append(_scale_rows(context, share))
    return sum(terms[1:], terms[0])


def _scaled(outputs: Tensor, target: Tensor | None) -> Tensor:
    return outputs if target is None else outputs * (1 + target).to(outputs.dtype)[:, None, :, None]


def _scale_rows(values: Tensor, share: Tensor) -> Tensor:
    """`values [B, T, H, D] * share [B, T, h, 1]`, with the gradient of `share` summed along D first."""
    if torch.compiler.is_compiling():
        return values * share[..., None]
    return _ScaleRows.apply(values, share)


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, share):
        ctx.save_for_backward(values, share)
        return values * share[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        values, share = ctx.saved_tensors
        grad_values = grad * share[..., None] if ctx.needs_input_grad[0] else None
        grad_share = None
        if ctx.needs_input_grad[1]:
            # along D the sum is contiguous; one reduction over everything but the head is an order of magnitude slower
            grad_share = (grad * values).sum(-1).sum_to_size(share.shape)
        return grad_values, grad_share


def _transfer_lags_composed(full, outputs, weight, lags, target, age):
    lifted = _scaled(outputs, target)
    if weight is None:
        return lifted
    weight = weight.to(outputs.dtype)
    past, length = full.shape[1] - outputs.shape[1], outputs.shape[1]
    for i, lag in enumerate(lags):
        start = past - lag
        context = full[:, max(start, 0) : max(start + length, 0)]
        if context.shape[1] < length:
            context = torch.nn.functional.pad(context, (0, 0, 0, 0, length - context.shape[1], 0))
        share = weight[:, None, :, i, None]
        if age is not None:
            share = share * (age >= lag)[:, :, None, None]
        lifted = lifted + context * share
    return lifted


class _TransferLags(torch.autograd.Function):
    """Both directions walk over time in blocks, so that each block is read from memory once and not once per lag."""

    @staticmethod
    def forward(ctx, full, weight, target, age, lags, length):
        ctx.save_for_backward(full, weight, target, age)
        ctx.lags, ctx.length = lags, length
        past = full.shape[1] - length
        lifted = full[:, past:].clone() if target is None else _scaled(full[:, past:], target)
        if weight is None:
            return lifted
        weight = weight.to(full.dtype)
        for start, end in _blocks(full, length):
            for i, lag in enumerate(lags):
                begin = max(start, lag - past)  # tokens before have no row at this lag
                if begin < end:
                    share = _share(weight[..., i], age, lag, begin, end)
                    lifted[:, begin:end].addcmul_(full[:, past + begin - lag : past + end - lag], share)
        return lifted

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        full, weight, target, age = ctx.saved_tensors
        past = full.shape[1] - ctx.length
        grad_full = grad_weight = grad_target = None
        if ctx.needs_input_grad[0]:
            grad_full = grad.new_zeros(full.shape) if past else torch.empty_like(grad)
            grad_full[:, past:] = grad if target is None else _scaled(grad, target)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        if ctx.needs_input_grad[2]:
            grad_target = torch.zeros_like(target, dtype=_wide(target))
        cast = None if weight is None else weight.to(full.dtype)
        for start, end in _blocks(full, ctx.length):
            block = grad[:, start:end]
            if grad_target is not None:
                grad_target += _head_products(block, full[:, past + start : past + end], None, target.shape)
            for i, lag in enumerate(ctx.lags if weight is not None else ()):
                begin = max(start, lag - past)
                if begin >= end:
                    continue
                rows = slice(past + begin - lag, past + end - lag)
                block = grad[:, begin:end]
                if grad_full is not None:
                    grad_full[:, rows].addcmul_(block, _share(cast[..., i], age, lag, begin, end))
                if grad_weight is not None:
                    valid = None if age is None else age[:, begin:end] >= lag
                    grad_weight[..., i] += _head_products(block, full[:, rows], valid, weight.shape[:2])
        return (
            grad_full,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_target is None else grad_target.to(target.dtype),
            None,
            None,
            None,
        )


def _blocks(full: Tensor, length: int):
    step = max(1, BLOCK_ELEMENTS // max(1, full[:, 0].numel()))
    return ((start, min(start + step, length)) for start in range(0, length, step))


def _share(weight: Tensor, age: Tensor | None, lag: int, begin: int, end: int) -> Tensor:
    """lambda of one lag, zero where the lag leaves the document; broadcasts to [B, T, H, D]."""
    share = weight[:, None, :, None]
    return share if age is None else share * (age[:, begin:end] >= lag)[:, :, None, None]


def _head_products(grad: Tensor, rows: Tensor, valid: Tensor | None, shape: torch.Size) -> Tensor:
    """Sum of `grad * rows` over time and head dim (and batch, and heads, where `shape` [b, h] has them as 1)."""
    products = (grad * rows).sum(-1, dtype=_wide(grad))  # [B, T, H]
    if valid is not None:
        products = products * valid[..., None]
    return products.sum(1).sum_to_size(shape)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
