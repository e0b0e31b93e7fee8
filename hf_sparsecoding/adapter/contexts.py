"""Which earlier token is context i of token t, under padding, packing and decoding.

One rule keeps padding and documents apart: the *age* of a token is the number of tokens of its own document before it,
and no context lies further back than that. Ages and segment distances are the same for all layers; they are computed
once per forward by a hook on the decoder and travel to the attention modules in its keyword arguments, so that a layer
recomputed under gradient checkpointing sees those of its own forward.

B batch, T new tokens, P past tokens, K contexts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional

from .cache import past_segments
from .config import SparseCodingConfig


CONTEXTS_KEY = "sparsecoding_contexts"

# exp(-5,000) is zero in every floating-point type; biases by distance do not come near
LOWEST_BIAS = -5_000.0


@dataclass(frozen=True)
class ContextSpec:
    """The contexts of one adapter: `lags`, or the `num_contexts` segments before.

    segment_token_ids None (with lags None): the segments are given with every forward as `segment_ids`.
    """

    num_contexts: int
    lags: tuple[int, ...] | None = None
    segment_token_ids: tuple[int, ...] | None = None

    @classmethod
    def from_config(cls, config: SparseCodingConfig) -> ContextSpec:
        if config.contexts == "lags":
            return cls(config.num_contexts, lags=tuple(config.lags))
        ids = config.segment_token_ids
        return cls(config.num_contexts, segment_token_ids=None if ids is None else tuple(ids))

    @property
    def depth(self) -> int | None:
        """Number of past tokens that a context can lie back; None: any."""
        if self.num_contexts == 0:
            return 0
        return None if self.lags is None else max(self.lags)

    @property
    def marks_key(self) -> str | None:
        """Key of the segmentation that the spec needs: equal for adapters that cut the text alike. None for lags."""
        if self.lags is not None or self.num_contexts == 0:
            return None
        return "given" if self.segment_token_ids is None else ",".join(map(str, self.segment_token_ids))


class ContextHook:
    """Forward pre-hook of the decoder: adds `sparsecoding_contexts` to its keyword arguments.

    The value is a dict of tensors (device maps move it along with the hidden states): "age" [B or 1, T] or None,
    "distances" {marks_key: [B, T, K]} and "segments" {marks_key: [B, T, 2]}.
    """

    def __init__(self, decoder: nn.Module):
        self.argument_names = [name for name in inspect.signature(decoder.forward).parameters if name != "self"]
        self.specs: dict[str, ContextSpec] = {}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = dict(kwargs)
        segment_ids = kwargs.pop("segment_ids", None)
        given = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        kwargs[CONTEXTS_KEY] = self.contexts(given, segment_ids)
        return args, kwargs

    def contexts(self, given: dict[str, Any], segment_ids: Tensor | None) -> dict[str, Any]:
        inputs = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if inputs is None:
            raise ValueError(
                "SparseCoding: the decoder was called without input_ids and inputs_embeds; pass one of them"
            )
        cache = given.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        age = document_age(
            inputs.shape[1], past, given.get("attention_mask"), given.get("position_ids"), inputs.device
        )
        contexts = {"age": age, "distances": {}, "segments": {}}
        for spec in self.specs.values():
            key = spec.marks_key
            marks = None if key is None else _marks(spec, given.get("input_ids"), segment_ids, inputs.shape[:2])
            if marks is None:  # a layer that needs them says so
                continue
            if age is None:
                age = torch.arange(inputs.shape[1], device=inputs.device)[None]
            known = past_segments(cache, key)
            known = None if known is None else known.to(inputs.device)
            if key not in contexts["segments"]:
                contexts["segments"][key] = number_segments(
                    marks, age, known, by_end=spec.segment_token_ids is not None
                )
            distances = contexts["distances"].get(key)
            if distances is None or distances.shape[-1] < spec.num_contexts:
                contexts["distances"][key] = segment_distances(
                    contexts["segments"][key], age, spec.num_contexts, known
                )
        return contexts


def document_age(
    length: int,
    past: int | Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> Int[Tensor, "b T"] | None:
    """Number of tokens of the same document before each of the `length` new tokens; negative for padding.

    None where it is simply 0..length-1. Of a 4D mask beside position ids only the documents of a whole text are read:
    generation prepares such masks for its caches, and its position ids count the tokens after the padding. Position
    ids [4, b, T] are multimodal, with those of the text first.
    """
    ages = []
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        ages.append(_of_new_tokens(_age_of_mask(attention_mask.to(device)), length, past))
    whole = isinstance(past, int) and past == 0
    mask_4d = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
    if position_ids is not None and position_ids.ndim == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]
    if position_ids is not None and position_ids.ndim == 2:
        ages.append(_age_of_positions(position_ids.to(device), past, masked=attention_mask is not None))
        if mask_4d and whole:
            ages.append(_age_of_breaks(attention_mask.to(device)))
    elif mask_4d:
        ages.append(_age_of_4d_mask(attention_mask.to(device), past))
    if not ages:
        if whole:
            return None
        ages.append((torch.arange(length, device=device) + past)[None])
    return ages[0] if len(ages) == 1 else torch.minimum(ages[0], ages[1])


def allowed_by(mask: Tensor) -> Bool[Tensor, ...]:
    """Boolean masks are True where a key may be used. Float masks are added to scores: so low, no weight remains."""
    return mask if mask.dtype == torch.bool else mask > LOWEST_BIAS


def _age_of_mask(mask: Int[Tensor, "b S"]) -> Int[Tensor, "b S"]:
    """Number of tokens since the last padding, -1 for padding itself: no context lies in or beyond it."""
    index = torch.arange(mask.shape[1], device=mask.device)
    return index - torch.where(mask == 0, index, -1).cummax(-1).values - 1


def _of_new_tokens(age: Int[Tensor, "b S"], length: int, past: int | Tensor) -> Int[Tensor, "b T"]:
    """A mask for a static cache may already have columns for tokens that are still to come."""
    if isinstance(past, int):
        end = min(past + length, age.shape[1])
        return age[:, end - length : end]
    return age.index_select(1, torch.arange(length, device=age.device) + past.to(age.device))


def _age_of_4d_mask(mask: Tensor, past: int | Tensor) -> Int[Tensor, "b T"]:
    """Distance from the first key that a token may attend to."""
    allowed = allowed_by(mask)[:, 0]  # [b, T, S]
    own = torch.arange(mask.shape[-2], device=mask.device) + past
    return own - allowed.int().argmax(-1)


def _age_of_breaks(mask: Tensor) -> Int[Tensor, "b T"]:
    """A document starts at a token that may not attend to the token before."""
    index = torch.arange(mask.shape[-2], device=mask.device)
    before = allowed_by(mask)[:, 0].diagonal(-1, -2, -1)[:, : len(index) - 1]  # [b, T - 1]
    begin = torch.where(functional.pad(before, (1, 0)), 0, index).cummax(-1).values
    return index - begin


def _age_of_positions(positions: Int[Tensor, "b T"], past: int | Tensor, *, masked: bool) -> Int[Tensor, "b T"]:
    """A document starts where the position does not follow the one before: as transformers finds packed documents.

    Beside a mask transformers does not look for them: positions may then skip ahead within a document.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    steps = positions.diff(dim=1)
    breaks = torch.ones_like(positions, dtype=torch.bool)
    breaks[:, 1:] = steps <= 0 if masked else steps != 1
    begin = torch.where(breaks, index, 0).cummax(-1).values
    age = index - begin
    if isinstance(past, int) and past == 0:
        return age
    # the first run continues the past: only its positions tell how far back its document goes
    return torch.where(begin == 0, positions, age)


def _marks(
    spec: ContextSpec, input_ids: Tensor | None, segment_ids: Tensor | None, shape: torch.Size
) -> Int[Tensor, "B T"] | None:
    """Per token what decides where segments begin: 1 for a token that ends one, or the given segment's id."""
    if spec.segment_token_ids is None:
        if segment_ids is not None and segment_ids.shape != shape:
            raise ValueError(
                f"segment_ids must have the shape of the tokens given with them, {list(shape)}, "
                f"got {list(segment_ids.shape)}"
            )
        return segment_ids
    if input_ids is None:
        return None
    ids = torch.tensor(spec.segment_token_ids, device=input_ids.device)
    return torch.isin(input_ids, ids).long()


def number_segments(
    marks: Int[Tensor, "B T"], age: Int[Tensor, "b T"], past: Int[Tensor, "B P 2"] | None, *, by_end: bool
) -> Int[Tensor, "B T 2"]:
    """Running number of each token's segment, beside its mark. Documents and padding begin new segments.

    by_end: a mark of 1 ends a segment; otherwise a segment begins where the mark changes.
    """
    marks = marks.long()
    before = marks[:, :1] if past is None else past[:, -1:, 1]
    previous = torch.cat([before, marks[:, :-1]], 1)
    begins = (previous == 1 if by_end else previous != marks) | (age == 0)
    numbers = begins.long().cumsum(-1)
    if past is None:
        # the first token begins a segment; from 1, as the rows that a static cache has not filled yet hold 0
        numbers = numbers - numbers[:, :1] + 1
    else:
        numbers = numbers + past[:, -1:, 0]
    return torch.stack([numbers, marks], -1)


def segment_distances(
    segments: Int[Tensor, "B T 2"], age: Int[Tensor, "b T"], num_contexts: int, past: Int[Tensor, "B P 2"] | None
) -> Int[Tensor, "B T K"]:
    """How many tokens back context i lies: the same offset in the i-th segment before. 0 where there is none."""
    length = segments.shape[1]
    numbers = segments[..., 0] if past is None else torch.cat([past[..., 0], segments[..., 0]], 1)
    index = torch.arange(numbers.shape[1], device=numbers.device)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers.diff(dim=1) != 0
    starts = torch.where(begins, index, 0).cummax(-1).values  # [B, P + T] where the token's segment begins
    own = index[-length:]
    document = own - age
    end = starts[:, -length:]
    offset = own - end
    distances = []
    for _ in range(num_contexts):
        inside = end > document  # there is a segment before, in this document
        start = starts.gather(1, (end - 1).clamp(min=0))
        row = start + offset
        distances.append(torch.where(inside & (row < end), own - row, 0))
        end = torch.where(inside, start, end)
    return torch.stack(distances, -1)
