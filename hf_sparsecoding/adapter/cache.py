"""The adapter's decoding state: the attention outputs of the last tokens, kept on the layers of the key-value cache.

Whatever moves the cache moves the state: reorder (beams), crop (assisted decoding), batch select and repeat, reset, pickle,
deepcopy, static caches under `torch.compile`. To that end a cache layer's class is exchanged, in place, for a subclass of it
that passes each of these operations on to a `TransferHistory`.

B batch, P past tokens, H heads, D head dim.
"""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


# Tokens kept beyond the deepest lag, so that assisted decoding may take back what it guessed. Each costs H * D numbers per
# layer and sequence. Cropping deeper than this raises an error at the next forward.
ROLLBACK_TOKENS = 256


class TransferHistory:
    """Outputs (and segment numbers) of the last tokens of one cache layer, right-aligned: the last row is the newest.

    Args:
        depth: tokens that a context can lie back; None keeps all.
        static_rows: rows of a buffer of fixed size and address (static caches); None grows.
    """

    def __init__(self, depth: int | None, static_rows: int | None = None):
        self.depth = depth
        self.static_rows = static_rows
        self.outputs: Tensor | None = None  # [B, P, H, D]
        self.segments: dict[str, Tensor] = {}  # marks key -> [B, P, 2]
        self.seen = 0  # tokens of the cache layer that the history accounts for
        self.dropped = 0  # rows that were given up at the old end

    def past(self) -> Tensor | None:
        return self.outputs

    def append(self, outputs: Tensor, segments: dict[str, Tensor]) -> None:
        """Take in the outputs [B, T, H, D] of the newest tokens."""
        if self.static_rows is not None:
            self.outputs = self._roll(self.outputs, outputs)
            self.segments = {key: self._roll(self.segments.get(key), new) for key, new in segments.items()}
            return
        self.seen += outputs.shape[1]
        rows = None if self.depth is None else self.depth + ROLLBACK_TOKENS
        total = outputs.shape[1] + (0 if self.outputs is None else self.outputs.shape[1])
        if rows is not None and total > rows:
            self.dropped += total - rows
        self.outputs = self._grow(self.outputs, outputs, rows)
        self.segments = {key: self._grow(self.segments.get(key), new, rows) for key, new in segments.items()}

    def check(self, seen: int, depth: int | None) -> None:
        """Raise RuntimeError unless the rows at hand are those before token `seen` of the cache, `depth` deep."""
        if self.seen != seen:
            raise RuntimeError(
                f"SparseCoding: the cache holds {seen} tokens, but the adapter saw {self.seen} of them (it was off, or another "
                "one was active, when they were added). Start from an empty cache"
            )
        rows = 0 if self.outputs is None else self.outputs.shape[1]
        if self.dropped and (depth is None or depth > rows):
            raise RuntimeError(
                f"SparseCoding: the cache was cropped, or an adapter with deeper contexts was set; {rows} past outputs are "
                f"left where {'all' if depth is None else depth} are needed. Start from an empty cache"
            )

    def crop(self, removed: int) -> None:
        """Forget the newest `removed` tokens."""
        self.seen -= removed
        if removed and self.outputs is not None:
            self.outputs = self.outputs[:, :-removed]
            self.segments = {key: value[:, :-removed] for key, value in self.segments.items()}

    def index_batch(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def repeat_batch(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        if self.static_rows is not None:
            for tensor in (self.outputs, *self.segments.values()):
                if tensor is not None:
                    tensor.zero_()
            return
        self.outputs, self.segments, self.seen, self.dropped = None, {}, 0, 0

    def _map(self, function) -> None:
        if self.outputs is not None:
            self.outputs = self._keep_address(self.outputs, function(self.outputs))
            self.segments = {key: self._keep_address(old, function(old)) for key, old in self.segments.items()}

    def _keep_address(self, old: Tensor, new: Tensor) -> Tensor:
        if self.static_rows is None or old.shape != new.shape:
            return new
        return old.copy_(new)

    def _roll(self, old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            old = new.new_zeros(new.shape[0], self.static_rows, *new.shape[2:])
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(old)
        new = new.detach()
        if new.shape[1] >= self.static_rows:
            return old.copy_(new[:, new.shape[1] - self.static_rows :])
        return old.copy_(torch.cat([old[:, new.shape[1] :], new], 1))

    @staticmethod
    def _grow(old: Tensor | None, new: Tensor, rows: int | None) -> Tensor:
        full = new if old is None else torch.cat([old, new], 1)
        if rows is None or full.shape[1] <= rows:
            return full
        return full[:, full.shape[1] - rows :].clone()  # a view would keep the whole prompt's outputs alive


@memoize
def _with_history(layer_class: type) -> type:
    """Subclass of a cache-layer class that moves `self.history` along. Single inheritance: instances can change to it."""

    class CacheLayerWithHistory(layer_class):
        _layer_type = None  # or transformers would register the subclass as the layer type's own class
        history: TransferHistory

        def crop(self, tokens_to_remove: int) -> None:
            before = self.get_seq_length()
            super().crop(tokens_to_remove)
            self.history.crop(before - self.get_seq_length())

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self.history.index_batch(beam_idx)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.history.index_batch(indices)

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.history.repeat_batch(repeats)

        def reset(self) -> None:
            super().reset()
            self.history.reset()

        def __reduce__(self):
            # the class is made at run time: pickle and deepcopy name the one that it was made from
            return _restore, (layer_class,), self.__dict__.copy()

    CacheLayerWithHistory.__name__ = CacheLayerWithHistory.__qualname__ = f"{layer_class.__name__}WithHistory"
    return CacheLayerWithHistory


def _restore(layer_class: type) -> Any:
    restored = _with_history(layer_class)
    return restored.__new__(restored)


def history_of(cache: Cache, layer_idx: int, depth: int | None, length: int) -> TransferHistory:
    """The history of a cache's layer, attached if it has none yet.

    Call it once the layer's keys were updated with the `length` newest tokens.

    Raises:
        RuntimeError: if the history does not hold what the contexts need, `depth` tokens back (None: all).
    """
    layer = cache.layers[layer_idx]
    history = getattr(layer, "history", None)
    if history is None:
        static_rows = None
        if layer.is_compileable:
            static_rows = depth if depth is not None else max(other.get_max_length() for other in cache.layers)
        history = TransferHistory(depth, static_rows)
        history.check(int(layer.get_seq_length()) - length, depth)
        layer.history = history
        layer.__class__ = _with_history(type(layer))
    elif history.static_rows is None:
        history.depth = None if depth is None or history.depth is None else max(depth, history.depth)
        history.check(layer.get_seq_length() - length, depth)
    elif history.depth is not None and (depth is None or depth > history.depth):
        raise RuntimeError(
            f"SparseCoding: this static cache keeps {history.static_rows} past outputs, the active adapter needs "
            f"{'all' if depth is None else depth}. Start from a new cache"
        )
    return history


def past_segments(cache: Cache | None, key: str) -> Tensor | None:
    """Numbers and marks [B, P, 2] of the past tokens' segments, from whichever layer keeps them."""
    for layer in () if cache is None else cache.layers:
        history = getattr(layer, "history", None)
        if history is not None and key in history.segments:
            return history.segments[key]
    return None
