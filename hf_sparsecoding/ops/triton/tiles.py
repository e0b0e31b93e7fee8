"""What the kernels of attention share: tiles of rows, the keys that a query may use, lists of tiles.

`alive` [B, H, T / MAP, S / MAP] rounded up holds a byte for MAP queries by MAP keys: 1 if one of their coefficients is
not zero. The backward walks lists made from it: for every OUTER queries the tiles of MAP keys, and the reverse.
"""

import triton
import triton.language as tl
from triton import knobs


MAP = 64
OUTER = 128
INTERPRETED = knobs.runtime.interpret  # fixed with the kernels' import
LISTS = 3  # ends of the three parts of a list

map_size: tl.constexpr = tl.constexpr(MAP)
outer_size: tl.constexpr = tl.constexpr(OUTER)
precision: tl.constexpr = tl.constexpr("tf32x3")  # of products of float32: three of tensor cores, 22 bits
interpreted: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    if interpreted:  # it would multiply the bit patterns of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=precision)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    if interpreted and dtype == tl.bfloat16:  # it cuts digits off where a GPU rounds to nearest
        bits = values.to(tl.uint32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def row_pointers(pointer, first, rows, columns, stride):
    """Of rows `first + rows`. The product with `first` alone needs 64 bits."""
    return pointer + first * stride + rows[:, None] * tl.cast(stride, tl.int32) + columns[None, :]


@triton.jit
def load_rows(pointer, first, rows, columns, stride, count, SIZE: tl.constexpr, CHECK: tl.constexpr):
    """[rows, columns] of a matrix [count, SIZE], zeros outside. Without CHECK all rows are known to be inside."""
    pointers = row_pointers(pointer, first, rows, columns, stride)
    if CHECK:
        inside = (first + rows < count)[:, None]
        if columns.shape[0] > SIZE:
            inside = inside & (columns < SIZE)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    if columns.shape[0] > SIZE:
        return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(pointer, first, rows, columns, stride, count, values, SIZE: tl.constexpr):
    inside = (first + rows < count)[:, None] & (columns < SIZE)[None, :]
    pointers = row_pointers(pointer, first, rows, columns, stride)
    tl.store(pointers, narrow(values, pointer.dtype.element_ty), mask=inside)


@triton.jit
def allowed(
    rows,
    columns,
    queries,
    keys,
    window,
    mask_pointer,
    mask_row: tl.int64,
    mask_column: tl.int64,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
):
    """Whether query `rows` may use key `columns`; these broadcast against each other."""
    inside = (rows < queries) & (columns < keys)
    if CAUSAL:
        inside = inside & (columns <= rows + (keys - queries))
    if WINDOW:
        inside = inside & (columns > rows + (keys - queries - window))
    if MASK:
        inside = inside & (tl.load(mask_pointer + rows * mask_row + columns * mask_column, mask=inside, other=0) != 0)
    return inside


@triton.jit
def shrink(scores, xi):
    """`prox_xi`; not a number stays so."""
    return scores - tl.minimum(tl.maximum(scores, -xi), xi)


@triton.jit
def listed(index_pointer, step, BLOCK: tl.constexpr):
    """Start of the step-th BLOCK of the tiles of a list."""
    steps: tl.constexpr = map_size // BLOCK
    tile = step // steps
    return tl.load(index_pointer + tile).to(tl.int32) * map_size + (step - tile * steps) * BLOCK


@triton.jit
def list_tiles(
    alive_pointer,
    index_pointer,
    count_pointer,
    queries,
    keys,
    window,
    outer_tiles,
    inner_tiles,
    alive_head: tl.int64,
    alive_outer: tl.int64,
    alive_inner: tl.int64,
    BY_QUERY: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One list: the alive tiles that need no check of indices, the other alive ones, the dead ones (SOFTMAX).

    `index` [B * H, outer blocks, inner_tiles] holds their numbers and `count` [B * H, outer blocks, 3] the ends.
    A program makes the list of one outer block: OUTER queries and tiles of MAP keys (BY_QUERY), or the reverse.
    """
    blocks = (outer_tiles + 1) // 2
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    place = tl.program_id(0).to(tl.int64)
    alive_pointer += head * alive_head + block * 2 * alive_outer
    row_size: tl.constexpr = outer_size if BY_QUERY else map_size
    column_size: tl.constexpr = map_size if BY_QUERY else outer_size
    offset = keys - queries
    end = 0
    for part in tl.static_range(3 if SOFTMAX else 2):
        for start in range(0, inner_tiles, CHUNK):
            tiles = start + tl.arange(0, CHUNK)
            known = tiles < inner_tiles
            found = tl.load(alive_pointer + tiles * alive_inner, mask=known, other=0)
            second = known & (block * 2 + 1 + tiles * 0 < outer_tiles)
            found = (found | tl.load(alive_pointer + alive_outer + tiles * alive_inner, mask=second, other=0)) != 0
            if BY_QUERY:
                row, column = block * row_size + tiles * 0, tiles * column_size
            else:
                row, column = tiles * row_size, block * column_size + tiles * 0
            last_row, last_column = row + row_size - 1, column + column_size - 1
            interior = (last_row < queries) & (last_column < keys)
            inside = known
            if CAUSAL:
                interior = interior & (last_column <= row + offset)
                inside = inside & (column <= tl.minimum(last_row, queries - 1) + offset)
            if WINDOW:
                interior = interior & (column > last_row + offset - window)
                inside = inside & (last_column > row + offset - window)
            if MASK:
                interior = tiles < 0
            if part == 0:
                chosen = found & interior
            elif part == 1:
                chosen = found & (interior == 0)
            else:
                chosen = inside & (found == 0)
            chosen = chosen.to(tl.int32)
            positions = end + tl.cumsum(chosen, 0) - chosen
            tl.store(index_pointer + place * inner_tiles + positions, tiles.to(tl.int16), mask=chosen != 0)
            end += tl.sum(chosen, 0)
        tl.store(count_pointer + place * 3 + part, end)
