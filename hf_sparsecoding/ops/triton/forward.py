"""Forward kernel of thresholded attention. Soft thresholding needs no statistics of a row, so it is one pass over the
keys without any rescaling; the softmax takes a first pass for its log-sum-exp and is thresholded in a second.
"""

import triton
import triton.language as tl

from .tiles import allowed, dot, load_rows, map_size, narrow, shrink, store_rows
from .tuning import KEY, configs, prune


@triton.autotune(
    configs("forward"),
    key=[*KEY, "TRACK", "COUNT"],
    prune_configs_by={"early_config_prune": prune("forward")},
    reset_to_zero=["alive"],
)
@triton.jit(do_not_specialize=["bucket"])
def forward(
    query,
    key,
    value,
    output,
    log_sum,
    threshold,
    mask,
    alive,
    nonzero,
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
    output_batch: tl.int64,
    output_head: tl.int64,
    output_row: tl.int64,
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
    TRACK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SKIP: tl.constexpr,
):
    """BLOCK_M queries of a head. TRACK: mark the tiles that hold a coefficient; COUNT: coefficients of each query.

    SKIP leaves out the values of dead tiles, at the cost of loads that cannot be made ahead: tuned, not chosen.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    head_place = (tl.program_id(0) // blocks).to(tl.int64)  # of [B, H]
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # those with the most keys first
    batch, head = head_place // heads, head_place % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // share) * key_head
    value += batch * value_batch + (head // share) * value_head
    output += batch * output_batch + head * output_head
    mask += batch * mask_batch + head * mask_head
    first, local, columns = block * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    rows = first + local
    q = load_rows(query, first, local, dims, query_row, queries, D, True)
    xi = tl.load(threshold + head_place)

    # [start, left) and [right, end) hold keys that some query may not use; all may use all of [left, right)
    start, end, right = 0, keys, keys // BLOCK_N * BLOCK_N
    left = start
    if CAUSAL:
        diagonal = first + keys - queries  # the last key of the first query
        end = tl.maximum(0, tl.minimum(keys, diagonal + BLOCK_M))
        right = tl.minimum(right, tl.maximum(0, diagonal + 1) // BLOCK_N * BLOCK_N)
        if WINDOW:
            start = tl.maximum(0, diagonal - window + 1) // BLOCK_N * BLOCK_N
            right = tl.maximum(right, start)
            left = tl.cdiv(tl.maximum(0, diagonal + BLOCK_M - window), BLOCK_N) * BLOCK_N
            left = tl.minimum(tl.maximum(left, start), right)
    if MASK or first + BLOCK_M > queries:
        right = left

    log_scale = scale * 1.4426950408889634
    shift = tl.zeros([BLOCK_M], tl.float32)
    if SOFTMAX:
        largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for part in tl.static_range(3):
            lower = start if part == 0 else (left if part == 1 else right)
            upper = left if part == 0 else (right if part == 1 else end)
            for column in range(lower, upper, BLOCK_N):
                k = load_rows(key, column, columns, dims, key_row, keys, D, part != 1)
                scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * log_scale
                if part != 1:
                    usable = allowed(
                        rows[:, None], (column + columns)[None, :], queries, keys, window, mask, mask_row, mask_column,
                        CAUSAL, WINDOW, MASK,
                    )  # fmt: skip
                    scores = tl.where(usable, scores, float("-inf"))
                larger = tl.maximum(largest, tl.max(scores, 1))
                shift = tl.where(larger == float("-inf"), 0.0, larger)
                total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
                largest = larger
        # without any key all weights are exp(-inf)
        shift = tl.where(total == 0, float("inf"), shift + tl.log2(total))
        tl.store(log_sum + head_place * queries + rows, shift, mask=rows < queries)
    else:
        xi = xi / tl.abs(scale)

    result, found = tl.zeros([BLOCK_M, BLOCK_E], tl.float32), tl.zeros([BLOCK_M], tl.int32)
    for part in tl.static_range(3):
        lower = start if part == 0 else (left if part == 1 else right)
        upper = left if part == 0 else (right if part == 1 else end)
        for column in range(lower, upper, BLOCK_N):
            k = load_rows(key, column, columns, dims, key_row, keys, D, part != 1)
            alpha = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if SOFTMAX:
                alpha = tl.exp2(alpha * log_scale - shift[:, None])
                alpha = tl.where(alpha <= xi, 0.0, alpha - xi)
            else:
                alpha = shrink(alpha, xi)
            if part != 1:
                usable = allowed(
                    rows[:, None], (column + columns)[None, :], queries, keys, window, mask, mask_row, mask_column,
                    CAUSAL, WINDOW, MASK,
                )  # fmt: skip
                alpha = tl.where(usable, alpha, 0.0)
            if COUNT:
                found += tl.sum((alpha != 0).to(tl.int32), 1)
            if TRACK:
                # each row for itself: all that find something write the same byte, and no thread waits for another
                row_alive = tl.max((alpha != 0).to(tl.int32), 1) != 0
                places = alive + (head_place * tl.cdiv(queries, map_size) + rows // map_size) * tl.cdiv(keys, map_size)
                for tile in tl.static_range((BLOCK_N + map_size - 1) // map_size):
                    place = column // map_size + tile + local * 0
                    known = row_alive & (place < tl.cdiv(keys, map_size))
                    tl.store(places + place, tl.full([BLOCK_M], 1, tl.int8), mask=known)
            if SKIP:
                if tl.max(tl.max((alpha != 0).to(tl.int32), 1), 0) != 0:
                    v = load_rows(value, column, columns, value_dims, value_row, keys, E, part != 1)
                    result = dot(narrow(alpha, v.dtype), v, result)
            else:
                v = load_rows(value, column, columns, value_dims, value_row, keys, E, part != 1)
                result = dot(narrow(alpha, v.dtype), v, result)
    if not SOFTMAX:
        result *= scale
    store_rows(output, first, local, value_dims, output_row, queries, result, E)
    if COUNT:
        tl.store(nonzero + head_place * queries + rows, found, mask=rows < queries)
