"""Lifting coefficient transfer, on the per-head attention outputs.

`psi` is shared by all tokens, so transferring coefficients and then decoding them,
`(alpha_t + sum_i lambda_i alpha_{context_i(t)}) psi`, is exactly a weighted sum of attention outputs,
`O_t + sum_i lambda_i O_{context_i(t)}`: no copy of alpha, any attention kernel underneath.

B batch, H heads, T new tokens, P past tokens, D head dim, K contexts (paper: L-1); b is 1 or B, h is 1 or H.
Source: arXiv 2511.20194, lifting scheme.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from .precision import wide_dtype


# Elements of one time block. On a CPU its operands stay in the last-level cache over all lags, and smaller ones cost
# more in calls than they save. A GPU wants few and large kernels.
BLOCK_ELEMENTS = 1 << 19
GPU_BLOCK_ELEMENTS = 1 << 25


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
        weight: lambda, per head (h = H) or shared (h = 1), per row of the batch (b = B) or shared (b = 1). None: no
            contexts.
        lags: K distances in tokens, each >= 1.
        target: lambda_0 on the token's own coefficients. None: absent.
        age: number of tokens of the same document before each token; lag i is used where age >= lags[i].
            None: the rows are one document each that starts with the first row of `[history; outputs]`.
        history: outputs of the tokens just before, oldest first (decoding). A lag that reaches beyond it counts as no
            context.
    """
    if weight is None and target is None:
        return outputs
    full = outputs if history is None else torch.cat([history, outputs], 1)
    if _needs_composition():
        return _transfer_lags_composed(full, outputs, weight, lags, target, age)
    lags = () if weight is None else tuple(lags)
    return _TransferLags.apply(full, weight, target, age, lags, outputs.shape[1])


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
    if _needs_composition():
        return _context_sum_composed(full, weight, rows)
    return _ContextSum.apply(full, weight, rows)


def _needs_composition() -> bool:
    """The compiler fuses a chain of operations by itself; torch.func's transforms do not know our own backward."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _scaled(outputs: Tensor, target: Tensor | None) -> Tensor:
    if target is None:
        return outputs
    # not 1 + target in half precision, which has no room for a small target
    return torch.addcmul(outputs, outputs, target.to(outputs.dtype)[:, None, :, None])


def _context(full: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `rows` [r, T] of `full`, [B, T, H, D] (some row for -1), and their places in it [B * T]."""
    batch, total = full.shape[:2]
    places = (torch.arange(batch, device=rows.device)[:, None] * total + rows.clamp(min=0)).flatten()
    return full.flatten(0, 1).index_select(0, places).unflatten(0, (batch, -1)), places


def _row_share(weight: Tensor, rows: Tensor) -> Tensor:
    """lambda of one context, zero where there is none; broadcasts to [B, T, H, D]."""
    return weight[:, None, :, None] * (rows >= 0)[:, :, None, None]


def _context_sum_composed(full, weight, rows):
    weight = weight.to(full.dtype)
    terms = [_context(full, row)[0] * _row_share(weight[..., i], row) for i, row in enumerate(rows.unbind(-1))]
    return sum(terms[1:], terms[0])


class _ContextSum(torch.autograd.Function):
    """Keeps no copy of the contexts: the backward looks them up again."""

    @staticmethod
    def forward(ctx, full, weight, rows):
        ctx.save_for_backward(full, weight, rows)
        weight, total = weight.to(full.dtype), None
        for i, row in enumerate(rows.unbind(-1)):
            context, share = _context(full, row)[0], _row_share(weight[..., i], row)
            total = context.mul_(share) if total is None else total.addcmul_(context, share)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        full, weight, rows = ctx.saved_tensors
        needs_full, needs_weight = ctx.needs_input_grad[:2]
        grad_full = full.new_zeros(full.shape) if needs_full else None
        sums = []
        for i, row in enumerate(rows.unbind(-1)):
            context, places = _context(full, row)
            if needs_weight:
                sums.append(_head_products(grad, context, row >= 0))
            if needs_full:
                term = torch.mul(grad, _row_share(weight[..., i].to(full.dtype), row), out=context)
                grad_full.flatten(0, 1).index_add_(0, places, term.flatten(0, 1))
        grad_weight = torch.stack(sums, -1).sum_to_size(weight.shape).to(weight.dtype) if needs_weight else None
        return grad_full, grad_weight, None


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
        shares = _shares(weight, age, lags, full.dtype)
        lifted = full.new_empty(full.shape[0], length, *full.shape[2:])
        for start, end in _blocks(full, length):
            lifted[:, start:end] = _scaled(full[:, past + start : past + end], target)
            for i, tokens, rows in _terms(lags, past, start, end):
                share = shares[i] if age is None else shares[i][:, tokens]
                lifted[:, tokens].addcmul_(full[:, rows], share)
        return lifted

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        full, weight, target, age = ctx.saved_tensors
        needs_full, needs_weight, needs_target = ctx.needs_input_grad[:3]
        batch, total, heads, _ = full.shape
        past = total - ctx.length
        shares = _shares(weight, age, ctx.lags, full.dtype)
        grad_full = grad.new_empty(full.shape) if needs_full else None
        if needs_full and past:
            grad_full[:, :past] = 0
        # of lambda, and last of lambda_0
        sums = grad.new_zeros(len(ctx.lags) + 1, batch, heads, dtype=wide_dtype(grad))
        for start, end in _blocks(full, ctx.length):
            block, own = grad[:, start:end], slice(past + start, past + end)
            if needs_full:
                grad_full[:, own] = _scaled(block, target)
            if needs_target:
                sums[-1].add_(_head_products(block, full[:, own]))
            for i, tokens, rows in _terms(ctx.lags, past, start, end):
                block = grad[:, tokens]
                if needs_full:
                    grad_full[:, rows].addcmul_(block, shares[i] if age is None else shares[i][:, tokens])
                if needs_weight:
                    valid = None if age is None else age[:, tokens] >= ctx.lags[i]
                    sums[i].add_(_head_products(block, full[:, rows], valid))
        grad_weight = sums[:-1].movedim(0, -1).sum_to_size(weight.shape).to(weight.dtype) if needs_weight else None
        grad_target = sums[-1].sum_to_size(target.shape).to(target.dtype) if needs_target else None
        return grad_full, grad_weight, grad_target, None, None, None


def _blocks(full: Tensor, length: int) -> list[tuple[int, int]]:
    elements = BLOCK_ELEMENTS if full.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, elements // max(1, full.numel() // full.shape[1]))
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _terms(lags: Sequence[int], past: int, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
    """Index of each lag, the tokens of a block that have a row at that distance, and these rows of `[past; block]`."""
    for i, lag in enumerate(lags):
        begin = max(start, lag - past)
        if begin < end:
            yield i, slice(begin, end), slice(past + begin - lag, past + end - lag)


def _shares(weight: Tensor | None, age: Tensor | None, lags: Sequence[int], dtype: torch.dtype) -> Sequence[Tensor]:
    """lambda of each lag, zero where the lag leaves the document; each broadcasts to [B, T, H, D]."""
    if weight is None:
        return ()
    shares = weight.to(dtype)[:, None, :, None].unbind(-1)
    if age is None:
        return shares
    return [share * (age >= lag)[:, :, None, None] for share, lag in zip(shares, lags, strict=True)]


def _head_products(grad: Tensor, rows: Tensor, valid: Tensor | None = None) -> Float[Tensor, "B H"]:
    """Sum of `grad * rows` over time (where `valid` [b, T]) and head dim."""
    products = grad * rows
    if valid is None:
        return products.sum((1, 3), dtype=wide_dtype(grad))
    return (products.sum(-1, dtype=wide_dtype(grad)) * valid[..., None]).sum(1)
