"""The adapter's decoding state: the attention outputs of the last tokens, kept on the layers of the key-value cache.

Whatever moves the cache moves the state: reorder (beams), crop (assisted decoding), batch select and repeat, reset,
pickle, deepcopy, static caches under `torch.compile`. To that end a cache layer is replaced by one of a subclass of
its class that passes each of these operations on to a `TransferHistory`. (Assigning `layer.__class__` is shorter,
but a compiled forward may create the cache, and dynamo cannot trace that.)

B batch, P past tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


# Tokens kept beyond the deepest lag, so that assisted decoding may take back what it guessed. Each costs H * D numbers
# per layer and sequence. Cropping deeper than this raises an error at the next forward.
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
        self.seen: int | Tensor = 0  # tokens of the cache layer that the history accounts for; a tensor if static
        self.dropped = 0  # rows that were given up at the old end

    def past(self) -> Tensor | None:
        return self.outputs

    def append(self, outputs: Tensor, segments: dict[str, Tensor]) -> None:
        """Take in the outputs [B, T, H, D] of the newest tokens."""
        if self.outputs is not None:  # segments that were not known from the start have no use
            segments = {key: new for key, new in segments.items() if key in self.segments}
        if self.static_rows is not None:
            if self.outputs is None:
                self.seen = _static(torch.zeros((), dtype=torch.long, device=outputs.device))
            self.seen.add_(outputs.shape[1])
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

    def check(self, seen: int | Tensor, depth: int | None) -> None:
        """Raise RuntimeError unless the rows at hand are those before token `seen` of the cache, `depth` deep."""
        if self.static_rows is not None:
            if self.depth is not None and (depth is None or depth > self.depth):
                raise RuntimeError(
                    f"SparseCoding: this static cache keeps {self.static_rows} past outputs, the active adapter needs "
                    f"{'all' if depth is None else depth}. Start from a new cache"
                )
            if torch.compiler.is_compiling():  # a graph cannot look into its tensors
                return
        if self.seen != seen:
            raise RuntimeError(
                f"SparseCoding: the cache holds {int(seen)} tokens, but the adapter saw {int(self.seen)} of them (it "
                "was off, or another one was active, when they were added). Start from an empty cache"
            )
        rows = 0 if self.outputs is None else self.outputs.shape[1]
        if self.dropped and (depth is None or depth > rows):
            raise RuntimeError(
                f"SparseCoding: the cache was cropped, or an adapter with deeper contexts was set; {rows} past "
                f"outputs are left where {'all' if depth is None else depth} are needed. Start from an empty cache"
            )

    def check_segments(self, key: str) -> None:
        """Raise RuntimeError if there are past outputs without their segments."""
        if self.outputs is not None and key not in self.segments:
            raise RuntimeError(
                "SparseCoding: the cache holds tokens whose segments are not known (the adapter was not there, or "
                "segment_ids were left out, when they came in). Start from an empty cache"
            )

    def crop(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the cache layer."""
        removed = self.seen - length
        if removed <= 0:
            return
        self.seen = length
        if self.outputs is not None:
            self.outputs = self.outputs[:, :-removed]
            self.segments = {key: value[:, :-removed] for key, value in self.segments.items()}

    def index_batch(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def repeat_batch(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        if self.static_rows is not None:
            if self.outputs is not None:
                for tensor in (self.seen, self.outputs, *self.segments.values()):
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
            old = _static(new.new_zeros(new.shape[0], self.static_rows, *new.shape[2:]))
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


def _static(tensor: Tensor) -> Tensor:
    """Mark a buffer that keeps its address, or every change of it would break a compiled decode's CUDA graph."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def _subclass(layer_class: type) -> type:
    """Subclass of a cache-layer class that moves `self.history` along."""

    class CacheLayerWithHistory(layer_class):
        _layer_type = None  # or transformers would register the subclass as the layer type's own class
        history: TransferHistory

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            self.history.crop(self.get_seq_length())

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


# Made here and not when they are first needed: that may be in a compiled forward, and dynamo traces no `class`.
_SUBCLASSES = {
    layer_class: _subclass(layer_class)
    for layer_class in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
}


def _with_history(layer_class: type) -> type:
    if layer_class not in _SUBCLASSES:
        _SUBCLASSES[layer_class] = _subclass(layer_class)
    return _SUBCLASSES[layer_class]


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
    seen = layer.get_seq_length() - length
    history = getattr(layer, "history", None)
    if history is None:
        history = TransferHistory(depth, _static_rows(cache, layer, depth))
        history.check(seen, depth)
        replacement = _restore(type(layer))
        replacement.__dict__.update(layer.__dict__)
        replacement.history = history
        cache.layers[layer_idx] = replacement
        return history
    if history.static_rows is None:
        history.depth = None if depth is None or history.depth is None else max(depth, history.depth)
    history.check(seen, depth)
    return history


def _static_rows(cache: Cache, layer: Any, depth: int | None) -> int | None:
    if not layer.is_compileable:
        return None
    if depth is not None:
        return depth
    whole = [other for other, sliding in zip(cache.layers, cache.is_sliding, strict=True) if not sliding]
    length = max((other.get_max_length() for other in whole), default=-1)
    if length < 0:
        raise RuntimeError(
            "SparseCoding: contexts='segments' needs all past outputs, but a static cache whose layers all have "
            "sliding windows does not say how long the text can be. Use a dynamic cache"
        )
    return length


def past_segments(cache: Cache | None, key: str) -> Tensor | None:
    """Numbers and marks [B, P, 2] of the past tokens' segments, from the layer that saw most of them."""
    newest = None
    for layer in () if cache is None else cache.layers:
        history = getattr(layer, "history", None)
        if history is None or key not in history.segments:
            continue
        if history.static_rows is not None:
            return history.segments[key]
        if newest is None or history.seen > newest.seen:
            newest = history
    return None if newest is None else newest.segments[key]
