"""Backward kernels of thresholded attention, over the lists of tiles of `list_tiles`: no branch in a loop, no atomics.

The scores are computed again. Soft thresholding leaves its dead tiles out altogether; of a softmax's dead tiles only
the products with the values, as its gradient reaches all scores of a row through the denominator.
"""

import triton
import triton.language as tl

from .tiles import allowed, dot, listed, load_rows, map_size, narrow, outer_size, shrink, store_rows
from .tuning import KEY, configs, prune


@triton.autotune(
    configs("backward_queries"),
    key=KEY,
    prune_configs_by={"early_config_prune": prune("backward_queries")},
)
@triton.jit(do_not_specialize=["bucket"])
def backward_queries(
    query,
    key,
    value,
    grad,
    grad_query,
    log_sum,
    row_sum,
    row_threshold,
    threshold,
    mask,
    index,
    count,
    scale,
    heads,
    share,
    queries,
    keys,
    window,
    bucket,
    query_batch: tl.int64,
    query_head: tl.int64,
    query_row: tl.int64,
    key_batch: tl.int64,
    key_head: tl.int64,
    key_row: tl.int64,
    value_batch: tl.int64,
    value_head: tl.int64,
    value_row: tl.int64,
    grad_batch: tl.int64,
    grad_head: tl.int64,
    grad_row: tl.int64,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M queries of a head: their gradients (contiguous), and per query the threshold's and, for a softmax,
    `sum_s p_s dp_s` [B, H, T], which the keys' gradients need too."""
    blocks = tl.cdiv(queries, BLOCK_M)
    head_place = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    batch, head = head_place // heads, head_place % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // share) * key_head
    value += batch * value_batch + (head // share) * value_head
    grad += batch * grad_batch + head * grad_head
    mask += batch * mask_batch + head * mask_head
    first, local, columns = block * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    rows, row_place = first + local, head_place * queries + first + local
    q = load_rows(query, first, local, dims, query_row, queries, D, True)
    out_grad = load_rows(grad, first, local, value_dims, grad_row, queries, E, True)
    xi = tl.load(threshold + head_place)
    sign = tl.where(scale < 0, -1.0, 1.0)
    log_scale = scale * 1.4426950408889634
    list_place = head_place * tl.cdiv(queries, outer_size) + first // outer_size
    index += list_place * tl.cdiv(keys, map_size)
    count += list_place * 3
    steps: tl.constexpr = map_size // BLOCK_N
    unchecked, live, inside = tl.load(count) * steps, tl.load(count + 1) * steps, tl.load(count + 2) * steps

    shift, weighted = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    xi_grad = tl.zeros([BLOCK_M], tl.float32)
    if SOFTMAX:
        shift = tl.load(log_sum + row_place, mask=rows < queries, other=float("inf"))
        for part in tl.static_range(2):
            for step in range(0 if part == 0 else unchecked, unchecked if part == 0 else live):
                column = listed(index, step, BLOCK_N)
                k = load_rows(key, column, columns, dims, key_row, keys, D, part != 0)
                v = load_rows(value, column, columns, value_dims, value_row, keys, E, part != 0)
                weights = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                weights = tl.exp2(weights * log_scale - shift[:, None])
                if part != 0:
                    usable = allowed(
                        rows[:, None], (column + columns)[None, :], queries, keys, window, mask, mask_row, mask_column,
                        CAUSAL, WINDOW, MASK,
                    )  # fmt: skip
                    weights = tl.where(usable, weights, 0.0)
                delta = dot(out_grad, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                delta = tl.where(weights <= xi, 0.0, delta)
                weighted += tl.sum(weights * delta, 1)
                xi_grad -= tl.sum(delta, 1)
        tl.store(row_sum + row_place, weighted, mask=rows < queries)
    else:
        xi = xi / tl.abs(scale)

    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3 if SOFTMAX else 2):
        lower = 0 if part == 0 else (unchecked if part == 1 else live)
        upper = unchecked if part == 0 else (live if part == 1 else inside)
        for step in range(lower, upper):
            column = listed(index, step, BLOCK_N)
            k = load_rows(key, column, columns, dims, key_row, keys, D, part != 0)
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if SOFTMAX:
                scores = tl.exp2(scores * log_scale - shift[:, None])
            else:
                scores = shrink(scores, xi)
            if part != 0:
                usable = allowed(
                    rows[:, None], (column + columns)[None, :], queries, keys, window, mask, mask_row, mask_column,
                    CAUSAL, WINDOW, MASK,
                )  # fmt: skip
                scores = tl.where(usable, scores, 0.0)
            if part == 2:
                delta = -scores * weighted[:, None]
            else:
                v = load_rows(value, column, columns, value_dims, value_row, keys, E, part != 0)
                delta = dot(out_grad, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                if SOFTMAX:
                    delta = scores * (tl.where(scores <= xi, 0.0, delta) - weighted[:, None])
                else:
                    delta = tl.where(scores == 0, 0.0, delta)
                    xi_grad -= tl.sum(tl.where(scores < 0, -delta, delta), 1) * sign
            result = dot(narrow(delta, k.dtype), k, result)
    place = head_place * queries * D
    store_rows(grad_query + place, first, local, dims, tl.full([], D, tl.int64), queries, result * scale, D)
    tl.store(row_threshold + row_place, xi_grad, mask=rows < queries)


@triton.autotune(
    configs("backward_keys"),
    key=KEY,
    prune_configs_by={"early_config_prune": prune("backward_keys")},
)
@triton.jit(do_not_specialize=["bucket"])
def backward_keys(
    query,
    key,
    value,
    grad,
    grad_key,
    grad_value,
    log_sum,
    row_sum,
    threshold,
    mask,
    index,
    count,
    scale,
    heads,
    share,
    queries,
    keys,
    window,
    bucket,
    query_batch: tl.int64,
    query_head: tl.int64,
    query_row: tl.int64,
    key_batch: tl.int64,
    key_head: tl.int64,
    key_row: tl.int64,
    value_batch: tl.int64,
    value_head: tl.int64,
    value_row: tl.int64,
    grad_batch: tl.int64,
    grad_head: tl.int64,
    grad_row: tl.int64,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N keys of a key-value head: gradients of keys and values (contiguous), summed over its heads in registers.

    Tiles are keys by queries here, so that every product finds its operands as they lie.
    """
    blocks = tl.cdiv(keys, BLOCK_N)
    group_place = (tl.program_id(0) // blocks).to(tl.int64)  # of [B, G]
    block = tl.program_id(0) % blocks
    groups = heads // share
    batch, group = group_place // groups, group_place % groups
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    first, local, moving = block * BLOCK_N, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    columns = (first + local)[:, None]
    k = load_rows(key, first, local, dims, key_row, keys, D, True)
    v = load_rows(value, first, local, value_dims, value_row, keys, E, True)
    log_scale = scale * 1.4426950408889634
    steps: tl.constexpr = map_size // BLOCK_M

    key_sum, value_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for member in range(0, share):
        head = group * share + member
        head_place = batch * heads + head
        head_query = query + batch * query_batch + head * query_head
        head_grad = grad + batch * grad_batch + head * grad_head
        head_mask = mask + batch * mask_batch + head * mask_head
        xi = tl.load(threshold + head_place)
        if not SOFTMAX:
            xi = xi / tl.abs(scale)
        list_place = head_place * tl.cdiv(keys, outer_size) + first // outer_size
        head_index = index + list_place * tl.cdiv(queries, map_size)
        head_count = count + list_place * 3
        unchecked, live = tl.load(head_count) * steps, tl.load(head_count + 1) * steps
        inside = tl.load(head_count + 2) * steps
        for part in tl.static_range(3 if SOFTMAX else 2):
            lower = 0 if part == 0 else (unchecked if part == 1 else live)
            upper = unchecked if part == 0 else (live if part == 1 else inside)
            for step in range(lower, upper):
                row = listed(head_index, step, BLOCK_M)
                rows, row_place = row + moving, head_place * queries + row + moving
                q = load_rows(head_query, row, moving, dims, query_row, queries, D, part != 0)
                scores = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
                if SOFTMAX:
                    shift = tl.load(log_sum + row_place, mask=rows < queries, other=float("inf"))
                    scores = tl.exp2(scores * log_scale - shift[None, :])
                else:
                    scores = shrink(scores, xi)
                if part != 0:
                    usable = allowed(
                        rows[None, :], columns, queries, keys, window, head_mask, mask_row, mask_column,
                        CAUSAL, WINDOW, MASK,
                    )  # fmt: skip
                    scores = tl.where(usable, scores, 0.0)
                if SOFTMAX:
                    weighted = tl.load(row_sum + row_place, mask=rows < queries, other=0.0)
                if part == 2:
                    delta = -scores * weighted[None, :]
                else:
                    out_grad = load_rows(head_grad, row, moving, value_dims, grad_row, queries, E, part != 0)
                    alpha = scores
                    if SOFTMAX:
                        alpha = tl.where(scores <= xi, 0.0, scores - xi)
                    value_sum = dot(narrow(alpha, out_grad.dtype), out_grad, value_sum)
                    delta = dot(v, tl.trans(out_grad), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
                    delta = tl.where(alpha == 0, 0.0, delta)
                    if SOFTMAX:
                        delta = scores * (delta - weighted[None, :])
                key_sum = dot(narrow(delta, q.dtype), q, key_sum)
    place = group_place * keys
    store_rows(grad_key + place * D, first, local, dims, tl.full([], D, tl.int64), keys, key_sum * scale, D)
    if not SOFTMAX:
        value_sum *= scale
    store_rows(grad_value + place * E, first, local, value_dims, tl.full([], E, tl.int64), keys, value_sum, E)
