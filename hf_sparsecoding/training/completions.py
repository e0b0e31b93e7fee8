"""Prompts with completions for causal language models: tokens, batches, loss, exact match.

Only the positions that predict a completion token go through the language-model head: with a vocabulary of 49k it
costs as much as several layers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """Token ids of one example: the model reads `prompt` and has to continue with `completion`."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str], append_eos: bool = False
) -> list[Completion]:
    """Tokens of each prompt, exactly as at generation, followed by the tokens of its completion.

    The completion's tokens are what the tokens of prompt + completion add to those of the prompt. Where a tokenizer
    merges characters across the boundary, the completion is tokenised alone.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            f"append_eos needs a tokenizer with an end-of-sequence token; {type(tokenizer).__name__} has none"
        )
    before = _special_prefix(tokenizer)
    starts = _plain(tokenizer, list(prompts))
    wholes = _plain(tokenizer, [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)])
    encoded, merged = [], 0
    for number, (start, whole) in enumerate(zip(starts, wholes, strict=True)):
        ids = whole[len(start) :]
        if whole[: len(start)] != start:
            ids, merged = _encode_alone(tokenizer, completions[number]), merged + 1
        # a chat template may have written the first special token into the text
        prompt = start if before and start[: len(before)] == before else before + start
        if not prompt or not ids:
            part, text = ("completion", completions[number]) if prompt else ("prompt", prompts[number])
            raise ValueError(f"example {number}: the {part} {text!r} has no tokens; give it some text")
        encoded.append(Completion(tuple(prompt), tuple(ids) + ((tokenizer.eos_token_id,) if append_eos else ())))
    if merged:
        logger.warning("%d of %d completions merge with their prompt; they were tokenised alone", merged, len(encoded))
    return encoded


def _plain(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def _special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text (the first special token of a Llama); what it appends is left out."""
    plain, whole = _plain(tokenizer, ["a"])[0], tokenizer("a")["input_ids"]
    for length in range(len(whole) - len(plain) + 1):
        if whole[length : length + len(plain)] == plain:
            return list(whole[:length])
    raise ValueError(f"{type(tokenizer).__name__} encodes 'a' as {whole} but without special tokens as {plain}")


def _encode_alone(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text in the middle of a document: without the space that some tokenizers put at the start of one."""
    anchor, whole = _plain(tokenizer, ["\n", "\n" + text])
    return whole[len(anchor) :] if whole[: len(anchor)] == anchor else _plain(tokenizer, [text])[0]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Padding is on the right and no position that counts can see it, so any token does."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0


def collate(examples: Sequence[Completion], pad: int) -> dict[str, torch.Tensor]:
    """A batch of B examples with N completion tokens in all.

    input_ids [B, T]; attention_mask [B, T], only where something is padded; predicts [B, T], true where the next token
    is one of the completion; labels [N], row by row; weights [N], which make the mean over examples of their mean.
    """
    # the last token of the completion is only predicted, never read
    rows = [(*example.prompt, *example.completion[:-1]) for example in examples]
    length = max(len(row) for row in rows)
    batch = {"input_ids": torch.tensor([row + (pad,) * (length - len(row)) for row in rows])}
    position = torch.arange(length)
    ends = torch.tensor([len(row) for row in rows])[:, None]
    starts = torch.tensor([len(example.prompt) - 1 for example in examples])[:, None]
    if any(len(row) < length for row in rows):
        batch["attention_mask"] = (position < ends).long()
    batch["predicts"] = (position >= starts) & (position < ends)
    batch["labels"] = torch.tensor([token for example in examples for token in example.completion])
    counts = torch.tensor([len(example.completion) for example in examples])
    batch["weights"] = (1 / (counts * len(examples))).repeat_interleave(counts)
    return batch


def selects_positions(model: torch.nn.Module) -> bool:
    """Whether the model's forward takes a mask of positions as `logits_to_keep`.

    All models of transformers do. Code from elsewhere may know only a number there, and adapters that put virtual
    tokens before the text shift its positions: these compute all logits.
    """
    model = getattr(model, "module", model)  # DistributedDataParallel
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = type(base).__module__.startswith("transformers.")
    return known and "logits_to_keep" in inspect.signature(base.forward).parameters


def completion_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [N, V] that predict the completion tokens, in the order of `batch["labels"]`."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    predicts = batch["predicts"]
    if selects_positions(model):
        logits = model(**inputs, use_cache=False, logits_to_keep=predicts).logits
    else:
        # counted from the end, where virtual tokens change nothing
        logits = model(**inputs, use_cache=False).logits[:, -predicts.shape[1] :][predicts]
    return logits.reshape(len(batch["labels"]), -1).float()


def completion_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the completion tokens: the mean over examples of each example's mean."""
    losses = F.cross_entropy(completion_logits(model, batch), batch["labels"], reduction="none")
    return (losses * batch["weights"]).sum()


@torch.no_grad()
def exact_match(model: torch.nn.Module, examples: Sequence[Completion], pad: int, batch_size: int) -> list[bool]:
    """Whether greedy decoding would write each completion, token for token.

    One forward pass with the completion given decides it: greedy decoding writes the completion exactly if at every
    position the arg max over the whole vocabulary, given the right tokens so far, is the right token.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    right: dict[Completion, bool] = {}
    # small tasks repeat themselves: every example once; sorted, as equal lengths need no padding
    distinct = sorted(dict.fromkeys(examples), key=len)
    for start in range(0, len(distinct), batch_size):
        chosen = distinct[start : start + batch_size]
        batch = {name: value.to(device) for name, value in collate(chosen, pad).items()}
        hits = (completion_logits(model, batch).argmax(-1) == batch["labels"]).tolist()
        for example in chosen:
            count = len(example.completion)
            right[example], hits = all(hits[:count]), hits[count:]
    model.train(was_training)
    return [right[example] for example in examples]
