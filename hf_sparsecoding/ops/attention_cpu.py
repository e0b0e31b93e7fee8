"""Thresholded attention on a CPU in blocks of queries, forward and backward, without the matrix of coefficients.

A block of rows has all its scores at once, so the softmax needs no running statistics. The forward notes which tiles
hold a coefficient; only these meet the values, and only these are computed again in the backward of soft thresholding.
A softmax's gradient reaches all scores of a row through its denominator: it spares only the products with the values.

Registered as custom operators, which torch.compile takes as they are. All arithmetic is float32 (float64 for float64).

B batch, H heads, G key-value heads, T queries, S keys, D and E sizes of keys and values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .precision import wide_dtype


TILE = 128  # queries in a block, and keys in a tile of it
# A search for empty tiles is a pass over the scores. It takes place among so many tiles and more; where it finds most
# tiles alive, the next one comes so many blocks later.
FEWEST_TILES, NEXT_SEARCH = 4, 8
aten = torch.ops.aten


@torch.library.custom_op("hf_sparsecoding::attention_cpu", mutates_args=())
def attention_cpu(
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
    """As `sparse_attention`; `threshold` [B, H], `window` 0: none.

    Returns:
        outputs [B, H, T, E]; whether a tile holds a coefficient, bool [B, H, T / TILE, S / TILE] rounded up; with
        `count` the number of coefficients that are not zero [B, H], else zeros.
    """
    output, alive, nonzero = _outputs(query, key, value, threshold)
    blocks = _Blocks(query, key, mask, kind, causal, window)
    thresholds = threshold.tolist()
    for batch, group, heads in blocks.heads():
        keys, values = key[batch, group].to(threshold.dtype), value[batch, group].to(threshold.dtype)
        for head in heads:
            queries, xi = query[batch, head].to(threshold.dtype) * scale, thresholds[batch][head]
            head_output, head_alive = output[batch, head], alive[batch, head].tolist()
            next_search = 0
            for number, rows, columns in blocks.rows:
                alpha = blocks.scores(queries, keys, batch, head, rows, columns)
                if kind == "thresholded_softmax":
                    blocks.softmax_(alpha)
                first, width = columns.start // TILE, alpha.shape[1]
                tiles = [True] * -(-width // TILE)
                if count or (number >= next_search and len(tiles) >= FEWEST_TILES):
                    tiles = _tiles_alive(alpha, xi, kind)
                    next_search = number + (NEXT_SEARCH if 4 * sum(tiles) >= 3 * len(tiles) else 1)
                head_alive[number][first : first + len(tiles)] = tiles
                runs = _runs(tiles, width)
                _product(alpha, xi, values[columns], runs, head_output[rows])
                if count:
                    nonzero[batch, head] += sum(alpha[:, start:stop].count_nonzero() for start, stop in runs)
            alive[batch, head] = torch.tensor(head_alive)
    return output, alive, nonzero


@attention_cpu.register_fake
def _(query, key, value, threshold, mask, kind, scale, causal, window, count):
    return _outputs(query, key, value, threshold)


def _outputs(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    # heads side by side in memory, as the output projection wants them
    output = query.new_zeros(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    alive = query.new_zeros(batch, heads, -(-queries // TILE), -(-key.shape[2] // TILE), dtype=torch.bool)
    return output, alive, torch.zeros_like(threshold, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_sparsecoding::attention_cpu_backward", mutates_args=())
def attention_cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    alive: Tensor,
    mask: Tensor | None,
    kind: str,
    scale: float,
    causal: bool,
    window: int,
    threshold_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and threshold (zeros, if it needs none)."""
    wide = threshold.dtype
    grads = _gradients(query, key, value, threshold)
    grad_query, grad_key, grad_value, grad_threshold = grads
    blocks = _Blocks(query, key, mask, kind, causal, window)
    differentiate = _softmax_block if kind == "thresholded_softmax" else _soft_threshold_block
    thresholds = threshold.tolist()
    for batch, group, heads in blocks.heads():
        keys, values = key[batch, group].to(wide), value[batch, group].to(wide)
        key_sum, value_sum = torch.zeros_like(keys), torch.zeros_like(values)
        for head in heads:
            queries = query[batch, head].to(wide) * scale
            out_grad = grad[batch, head].to(wide).contiguous()
            query_sum, total = torch.zeros_like(queries), 0.0
            head_alive = alive[batch, head].tolist()
            for number, rows, columns in blocks.rows:
                first, width = columns.start // TILE, columns.stop - columns.start
                runs = _runs(head_alive[number][first : first + -(-width // TILE)], width)
                total += differentiate(
                    blocks,
                    (queries, keys, values, out_grad),
                    (query_sum, key_sum, value_sum),
                    (batch, head, rows, columns),
                    runs,
                    thresholds[batch][head],
                    threshold_needs_grad,
                )
            grad_query[batch, head] = query_sum.mul_(scale)
            grad_threshold[batch, head] = total
        grad_key[batch, group], grad_value[batch, group] = key_sum, value_sum
    return grads


@attention_cpu_backward.register_fake
def _(grad, query, key, value, threshold, alive, mask, kind, scale, causal, window, threshold_needs_grad):
    return _gradients(query, key, value, threshold)


def _gradients(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value, threshold))


def _soft_threshold_block(blocks, operands, sums, place, runs, xi, threshold_needs_grad) -> float:
    """Adds a block's gradients to `sums`; returns that of the threshold, `-sum sign(alpha) d alpha`."""
    queries, keys, values, out_grad = operands
    query_sum, key_sum, value_sum = sums
    batch, head, rows, columns = place
    total = 0.0
    for start, stop in runs:
        run = slice(columns.start + start, columns.start + stop)
        alpha = blocks.scores(queries, keys, batch, head, rows, run)
        delta = torch.mm(out_grad[rows], values[run].T, out=blocks.buffer(1, alpha.shape))
        # zero where alpha is, which the forbidden scores are too
        aten.softshrink_backward.grad_input(delta, alpha, xi, grad_input=delta)
        aten.softshrink.out(alpha, xi, out=alpha)
        value_sum[run].addmm_(alpha.T, out_grad[rows])
        key_sum[run].addmm_(delta.T, queries[rows])
        query_sum[rows].addmm_(delta, keys[run])
        if threshold_needs_grad:
            total -= torch.dot(alpha.sign_().view(-1), delta.view(-1)).item()
    return total


def _softmax_block(blocks, operands, sums, place, runs, xi, threshold_needs_grad) -> float:
    queries, keys, values, out_grad = operands
    query_sum, key_sum, value_sum = sums
    batch, head, rows, columns = place
    weights = blocks.softmax_(blocks.scores(queries, keys, batch, head, rows, columns))
    delta = blocks.buffer(1, weights.shape)
    done = 0
    for start, stop in runs:
        delta[:, done:start].zero_()
        run = slice(columns.start + start, columns.start + stop)
        torch.mm(out_grad[rows], values[run].T, out=delta[:, start:stop])
        done = stop
    delta[:, done:].zero_()
    aten.softshrink_backward.grad_input(delta, weights, xi, grad_input=delta)
    alpha = blocks.buffer(2, weights.shape)
    aten.softshrink.out(weights, xi, out=alpha)
    for start, stop in runs:
        value_sum[columns.start + start : columns.start + stop].addmm_(alpha[:, start:stop].T, out_grad[rows])
    total = -delta.sum().item() if threshold_needs_grad else 0.0  # softmax is positive: all signs are +
    aten._softmax_backward_data.out(delta, weights, -1, weights.dtype, grad_input=delta)
    key_sum[columns].addmm_(delta.T, queries[rows])
    query_sum[rows].addmm_(delta, keys[columns])
    return total


class _Blocks:
    """Blocks of query rows, the keys that each may use, and buffers for their scores."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, kind: str, causal: bool, window: int):
        self.batch, self.num_heads, self.queries, _ = query.shape
        self.groups, self.keys = key.shape[1:3]
        self.mask = None if mask is None else mask.expand(self.batch, self.num_heads, self.queries, self.keys)
        self.forbidden = -torch.inf if kind == "thresholded_softmax" else 0.0
        self.causal, self.window = causal, window
        self.dtype = wide_dtype(query)
        self.buffers: dict[int, Tensor] = {}
        self.corners: dict[tuple, Tensor] = {}
        self.rows = list(self._rows())

    def heads(self) -> Iterator[tuple[int, int, range]]:
        """(sample, key-value head, its heads)."""
        share = self.num_heads // self.groups
        for batch in range(self.batch):
            for group in range(self.groups):
                yield batch, group, range(group * share, (group + 1) * share)

    def _rows(self) -> Iterator[tuple[int, slice, slice]]:
        """(number of the block, its queries, the keys from the first to the last that one of them may use)."""
        for number, start in enumerate(range(0, self.queries, TILE)):
            stop = min(start + TILE, self.queries)
            first, last = 0, self.keys
            if self.causal:
                last = min(self.keys, stop + self.keys - self.queries)
                first = max(0, start + self.keys - self.queries - self.window + 1) if self.window else 0
            if first < last:
                yield number, slice(start, stop), slice(first // TILE * TILE, last)

    def buffer(self, number: int, shape: tuple[int, int]) -> Tensor:
        if number not in self.buffers:
            self.buffers[number] = torch.empty(min(TILE, self.queries) * self.keys, dtype=self.dtype)
        return self.buffers[number][: shape[0] * shape[1]].view(shape)

    def scores(self, queries: Tensor, keys: Tensor, batch: int, head: int, rows: slice, columns: slice) -> Tensor:
        """Scores of a block; those of keys that may not be used are 0, or -inf where a softmax follows."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        scores = torch.mm(queries[rows], keys[columns].T, out=self.buffer(0, shape))
        if self.causal:
            # the last key of the first row, counted from the first column
            diagonal = rows.start + self.keys - self.queries - columns.start
            self._forbid(scores, max(0, diagonal + 1), shape[1], diagonal, above=True)
            if self.window:
                self._forbid(
                    scores, 0, max(0, min(shape[1], diagonal - self.window + shape[0])), diagonal, above=False
                )
        if self.mask is not None:
            scores.masked_fill_(~self.mask[batch, head, rows, columns], self.forbidden)
        return scores

    def _forbid(self, scores: Tensor, start: int, stop: int, diagonal: int, above: bool) -> None:
        """Scores above the diagonal, or below that of the window, in the columns where there are such."""
        if start >= stop:
            return
        corner, diagonal = scores[:, start:stop], diagonal - start
        if not self.forbidden:
            corner.tril_(diagonal) if above else corner.triu_(diagonal - self.window + 1)
            return
        key = (*corner.shape, diagonal, above)
        if key not in self.corners:
            forbidden = torch.full(corner.shape, self.forbidden, dtype=self.dtype)
            self.corners[key] = forbidden.triu_(diagonal + 1) if above else forbidden.tril_(diagonal - self.window)
        corner.add_(self.corners[key])

    def softmax_(self, scores: Tensor) -> Tensor:
        """Softmax of each row in place; a row without any allowed key becomes zeros."""
        empty = None
        if self.mask is not None or self.queries > self.keys:
            empty = scores.amax(1).isneginf()
        aten._softmax.out(scores, -1, False, out=scores)
        if empty is not None and empty.any():
            scores[empty] = 0
        return scores


def _tiles_alive(scores: Tensor, xi: float, kind: str) -> list[bool]:
    """Whether a tile of `TILE` keys holds a coefficient: a score beyond xi, or nan."""
    largest = scores.amax(0)
    if kind == "soft_threshold":
        largest = torch.maximum(largest, scores.amin(0).neg_())
    largest = torch.nn.functional.pad(largest, (0, -len(largest) % TILE), value=-torch.inf)
    return [not size <= xi for size in largest.view(-1, TILE).amax(1).tolist()]


def _runs(alive: list[bool], width: int) -> list[tuple[int, int]]:
    """Columns from .. to of neighbouring tiles that hold a coefficient."""
    if all(alive):
        return [(0, width)]
    runs: list[tuple[int, int]] = []
    for tile, is_alive in enumerate(alive):
        if is_alive:
            start, stop = tile * TILE, min(width, (tile + 1) * TILE)
            runs[-1:] = [(runs[-1][0], stop)] if runs and runs[-1][1] == start else [*runs[-1:], (start, stop)]
    return runs


def _product(scores: Tensor, xi: float, values: Tensor, runs: list[tuple[int, int]], out: Tensor) -> None:
    """`out = alpha values`, where alpha takes the place of the scores; `out` is zero before."""
    wide = out if out.dtype == scores.dtype else torch.zeros(out.shape, dtype=scores.dtype)
    for number, (start, stop) in enumerate(runs):
        alpha = scores[:, start:stop]
        aten.softshrink.out(alpha, xi, out=alpha)
        wide.addmm_(alpha, values[start:stop], beta=0.0 if number == 0 else 1.0)
    if wide is not out:
        out.copy_(wide)


def _setup(ctx, inputs, output) -> None:
    query, key, value, threshold, mask, *ctx.options, _ = inputs
    ctx.save_for_backward(query, key, value, threshold, output[1], mask)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, grad, *unused):
    query, key, value, threshold, alive, mask = ctx.saved_tensors
    grads = attention_cpu_backward(
        grad, query, key, value, threshold, alive, mask, *ctx.options, ctx.needs_input_grad[3]
    )
    return *grads, None, None, None, None, None, None


def _refuse(ctx, *grads):
    raise NotImplementedError('backend="cpu" has no second derivative; use backend="eager"')


attention_cpu.register_autograd(_backward, setup_context=_setup)
attention_cpu_backward.register_autograd(_refuse)
