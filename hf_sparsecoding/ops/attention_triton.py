"""Thresholded attention on a GPU: Triton kernels, forward and backward, without the matrix of coefficients.

The forward marks the tiles that hold a coefficient, a byte for 64 queries by 64 keys; the backward walks lists of
these: besides the operands, a few bytes for 4096 scores. Sums, softmax and threshold are float32; a product of float32
is three of tensor cores, 22 bits. Block sizes are tuned on the first call with a new kind of problem
(`triton.tuning.KEY`), with the numbers of that call.

Registered as custom operators, which torch.compile takes as they are. `TRITON_INTERPRET=1`, set before Python starts,
runs the kernels on a CPU, slowly.

B batch, H heads, G key-value heads, T queries, S keys, D and E sizes of keys and values.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from .attention import LARGEST_TRITON_SIZE, TRITON_DTYPES
from .attention_cpu import TILE
from .triton import backward, forward, tuning
from .triton.tiles import INTERPRETED, LISTS, MAP, OUTER, list_tiles


def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    mask: Tensor | None,
    kind: str,
    scale: float,
    causal: bool,
    window: int,
    count: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_cpu`; the tiles that hold a coefficient are found only if `count`, else there are none of them.

    Raises:
        ValueError: operands that the kernels do not know: see `check`.
    """
    check(query, key, value, scale)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, threshold))
    output, alive, nonzero, _ = torch.ops.hf_sparsecoding.attention_triton(
        query, key, value, threshold, mask, kind, scale, causal, window, count, count or needs_grad
    )
    return output, _coarse(alive) if count else alive[:, :, :0, :0].bool(), nonzero


def forget_tuning() -> None:
    """Choose block sizes anew with the next numbers, for one whose share of dead tiles has changed."""
    for kernel in (forward.forward, backward.backward_queries, backward.backward_keys):
        kernel.cache.clear()


def check(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
    """Raise ValueError for what the kernels do not know."""
    require_gpu(query)
    if query.dtype not in TRITON_DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            'backend="triton" takes queries, keys and values of one type, float32, bfloat16 or float16, got '
            f'{query.dtype}, {key.dtype}, {value.dtype}; use backend="eager"'
        )
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST_TRITON_SIZE:
        raise ValueError(
            f'backend="triton" takes heads of up to {LARGEST_TRITON_SIZE}, got {largest}; use backend="eager"'
        )
    if scale == 0:
        raise ValueError('backend="triton" needs a scale other than 0; use backend="eager"')


def require_gpu(tensor: Tensor) -> None:
    """Raise ValueError where no kernel can run."""
    if not (tensor.is_cuda or INTERPRETED):
        raise ValueError(
            f"Triton's kernels need tensors on a GPU, got {tensor.device} (or TRITON_INTERPRET=1 in the environment "
            "before Python starts, to run them in its interpreter)"
        )


def device_of(tensor: Tensor) -> AbstractContextManager:
    """Kernels start on the current GPU: make it that of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _coarse(alive: Tensor) -> Tensor:
    """[B, H, T / TILE, S / TILE] rounded up, as the other backends count tiles."""
    step = TILE // MAP
    padded = torch.nn.functional.pad(alive, (0, -alive.shape[3] % step, 0, -alive.shape[2] % step))
    return padded.unflatten(3, (-1, step)).unflatten(2, (-1, step)).amax((3, 5)).bool()


@torch.library.custom_op("hf_sparsecoding::attention_triton", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    mask: Tensor | None,
    kind: str,
    scale: float,
    causal: bool,
    window: int,
    count: bool,
    track: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, H, T, E]; with `track` the tiles that hold a coefficient, int8 [B, H, T / MAP, S / MAP] rounded up;
    with `count` the number of coefficients that are not zero [B, H], else zeros; for a softmax the logarithms, to base
    2, of its denominators [B, H, T]."""
    output, alive, nonzero, log_sum = _outputs(query, key, value, threshold, kind, track)
    alive.zero_()
    query, key, value, threshold = _rows(query), _rows(key), _rows(value), threshold.contiguous()
    per_query = query.new_empty(query.shape[:3] if count else (0,), dtype=torch.int32)
    launch, options, mask_strides = _common(query, key, value, mask, kind, causal, window, alive)
    with device_of(query):
        forward.forward[_grid(query.shape[2], query.shape[:2], "BLOCK_M")](
            query,
            key,
            value,
            output,
            log_sum,
            threshold,
            launch.pop("mask"),
            alive,
            per_query,
            scale,
            **launch,
            **_strides(query=query, key=key, value=value, output=output),
            **mask_strides,
            **options,
            TRACK=track,
            COUNT=count,
        )
    return output, alive, per_query.sum(2).to(nonzero.dtype) if count else nonzero.zero_(), log_sum


@_forward.register_fake
def _(query, key, value, threshold, mask, kind, scale, causal, window, count, track):
    return _outputs(query, key, value, threshold, kind, track)


def _outputs(query, key, value, threshold, kind, track) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    # heads side by side in memory, as the output projection wants them
    output = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    tiles = (-(-queries // MAP), -(-key.shape[2] // MAP)) if track else (0, 0)
    alive = query.new_empty(batch, heads, *tiles, dtype=torch.int8)
    nonzero = torch.empty_like(threshold, memory_format=torch.contiguous_format)
    log_sum = threshold.new_empty(batch, heads, queries if kind == "thresholded_softmax" else 0)
    return output, alive, nonzero, log_sum


@torch.library.custom_op("hf_sparsecoding::attention_triton_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    alive: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    kind: str,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and threshold."""
    grads = _empty_gradients(query, key, value, threshold)
    query, key, value, grad = _rows(query), _rows(key), _rows(value), _rows(grad)
    threshold = threshold.contiguous()
    batch, heads, queries, _ = query.shape
    launch, options, strides = _common(query, key, value, mask, kind, causal, window, alive)
    mask = launch.pop("mask")
    strides |= _strides(query=query, key=key, value=value, grad=grad)
    softmax = options["SOFTMAX"]
    row_sum = threshold.new_empty(batch, heads, queries if softmax else 0)
    row_threshold = threshold.new_empty(batch, heads, queries)
    with device_of(query):
        lists = _lists(alive, launch, options, by_query=True)
        backward.backward_queries[_grid(queries, query.shape[:2], "BLOCK_M")](
            query, key, value, grad, grads[0], log_sum, row_sum, row_threshold, threshold, mask, *lists, scale,
            **launch, **strides, **options,
        )  # fmt: skip
        lists = _lists(alive, launch, options, by_query=False)
        backward.backward_keys[_grid(key.shape[2], key.shape[:2], "BLOCK_N")](
            query, key, value, grad, grads[1], grads[2], log_sum, row_sum, threshold, mask, *lists, scale,
            **launch, **strides, **options,
        )  # fmt: skip
    return *grads[:3], row_threshold.sum(2)


@_gradients.register_fake
def _(grad, query, key, value, threshold, alive, log_sum, mask, kind, scale, causal, window):
    return _empty_gradients(query, key, value, threshold)


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value, threshold))


def _lists(alive: Tensor, launch: dict, options: dict, by_query: bool) -> tuple[Tensor, Tensor]:
    """Numbers of the tiles and the ends of the parts of each list, as `list_tiles` makes them."""
    batch, heads, *tiles = alive.shape
    outer, inner = tiles if by_query else reversed(tiles)
    strides = alive.stride()[2:] if by_query else alive.stride()[:1:-1]
    blocks = -(-outer * MAP // OUTER)
    index = alive.new_empty(batch * heads, blocks, inner, dtype=torch.int16)
    count = alive.new_empty(batch * heads, blocks, LISTS, dtype=torch.int32)
    kept = {name: options[name] for name in ("SOFTMAX", "CAUSAL", "WINDOW", "MASK")}
    lengths = {name: launch[name] for name in ("queries", "keys", "window")}
    chunk = min(1024, max(16, triton.next_power_of_2(inner)))
    list_tiles[(batch * heads * blocks,)](
        alive, index, count, **lengths, outer_tiles=outer, inner_tiles=inner, alive_head=alive.stride(1),
        alive_outer=strides[0], alive_inner=strides[1], BY_QUERY=by_query, CHUNK=chunk, **kept,
    )  # fmt: skip
    return index, count


def _common(query, key, value, mask, kind, causal, window, unused) -> tuple[dict, dict, dict]:
    """Arguments that all kernels take: run-time ones, compile-time ones, and the strides of the mask."""
    size, value_size = query.shape[3], value.shape[3]
    queries, keys = query.shape[2], key.shape[2]
    launch = {
        "mask": unused,
        "heads": query.shape[1],
        "share": query.shape[1] // key.shape[1],
        "queries": queries,
        "keys": keys,
        "window": window,
        "bucket": min(tuning.LONGEST_BUCKET, triton.next_power_of_2(max(queries, keys, 1))),
    }
    strides = dict.fromkeys(("mask_batch", "mask_head", "mask_row", "mask_column"), 0)
    if mask is not None:
        launch["mask"] = mask.expand(*query.shape[:3], keys).view(torch.uint8)
        strides = dict(zip(strides, launch["mask"].stride(), strict=True))
    options = {
        "D": size,
        "E": value_size,
        "BLOCK_D": max(16, triton.next_power_of_2(size)),
        "BLOCK_E": max(16, triton.next_power_of_2(value_size)),
        "SOFTMAX": kind == "thresholded_softmax",
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "MASK": mask is not None,
    }
    return launch, options, strides


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {
        f"{name}_{dim}": stride
        for name, tensor in tensors.items()
        for dim, stride in zip(("batch", "head", "row"), tensor.stride()[:3], strict=True)
    }


def _grid(length: int, heads: torch.Size, block: str):
    # one dimension: the others end at 65535
    return lambda meta: (triton.cdiv(length, meta[block]) * heads.numel(),)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _setup(ctx, inputs, output) -> None:
    query, key, value, threshold, mask, *ctx.options, _, ctx.tracked = inputs
    _, alive, nonzero, log_sum = output
    ctx.save_for_backward(query, key, value, threshold, alive, log_sum, mask)
    ctx.mark_non_differentiable(alive, nonzero, log_sum)


def _backward(ctx, grad, *unused):
    if not ctx.tracked:
        raise RuntimeError("the forward ran with track=False, which leaves nothing to differentiate with")
    return *_gradients(grad, *ctx.saved_tensors, *ctx.options), *[None] * 7


def _refuse(ctx, *grads):
    raise NotImplementedError('backend="triton" has no second derivative; use backend="eager"')


_forward.register_autograd(_backward, setup_context=_setup)
_gradients.register_autograd(_refuse)
