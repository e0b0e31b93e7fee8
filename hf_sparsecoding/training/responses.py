"""Prompts with responses for transformers' Trainer: encoded data sets, and batches that are padded or packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from datasets import Dataset, concatenate_datasets
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerBase

from .completions import Completion, encode


IGNORED = -100  # label of a position that counts for nothing
ENCODED_AT_ONCE = 1000


def encode_records(
    tokenizer: PreTrainedTokenizerBase, records: list[dict], max_length: int, progress: bool = False
) -> tuple[Dataset, int]:
    """(input_ids and labels of every record, how many were longer than `max_length`).

    Responses end with the end-of-text token and are never cut.
    """
    parts, longer = [], 0
    for start in tqdm(range(0, len(records), ENCODED_AT_ONCE), disable=not progress, desc="encoding", leave=False):
        some = records[start : start + ENCODED_AT_ONCE]
        examples = encode(tokenizer, [r["prompt"] for r in some], [r["completion"] for r in some], append_eos=True)
        longer += sum(len(example) > max_length for example in examples)
        examples = [shorten(example, max_length, tokenizer.bos_token_id) for example in examples]
        parts.append(
            Dataset.from_dict(
                {
                    "input_ids": [example.prompt + example.completion for example in examples],
                    "labels": [(IGNORED,) * len(example.prompt) + example.completion for example in examples],
                }
            )
        )
    return concatenate_datasets(parts), longer


def shorten(example: Completion, max_length: int, begin: int | None) -> Completion:
    """The example in at most `max_length` tokens: its prompt loses tokens on the left, except `begin`."""
    if len(example) <= max_length:
        return example
    first = example.prompt[:1] if example.prompt[0] == begin else ()
    room = max_length - len(first) - len(example.completion)
    if room < 1:
        raise ValueError(
            f"max_length must leave room for a prompt beside a response of {len(example.completion)} tokens, got "
            f"{max_length}"
        )
    return Completion(first + example.prompt[-room:], example.completion)


class Collator:
    """Batches of B records: padded on the right to [B, T], or with `packing` end to end [1, T] with position_ids.

    With `select`, only the N positions that predict a response go through the language-model head: the batch says
    which ("logits_to_keep", of the tokens' shape) and what they predict ("shift_labels" [N]).
    """

    def __init__(self, pad: int, packing: bool, select: bool):
        self.pad, self.select = pad, select
        self.flatten = DataCollatorWithFlattening() if packing else None

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.flatten(features) if self.flatten else self.padded(features)
        if self.select:
            targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
            batch["logits_to_keep"] = targets != IGNORED
            batch["shift_labels"] = targets[batch["logits_to_keep"]]
        return batch

    def padded(self, features: list[dict]) -> dict[str, torch.Tensor]:
        def column(rows: list, value: int) -> torch.Tensor:
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

        ids = [feature["input_ids"] for feature in features]
        return {
            "input_ids": column(ids, self.pad),
            "attention_mask": column([[1] * len(row) for row in ids], 0),
            "labels": column([feature["labels"] for feature in features], IGNORED),
        }
