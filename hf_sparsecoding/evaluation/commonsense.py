"""How well a causal language model answers commonsense questions, by three protocols.

generation: what it writes, by the rule of LLM-Adapters: the first label of the task in the text after the prompt is
    the answer; no label is wrong. A model that has not learnt the format loses by this rule whatever it knows.
label_likelihood: the label whose completion ("the correct answer is answer2") is the likeliest after the same prompt.
likelihood: the option whose text is the likeliest per character after the bare question, options unseen, as lm-eval's
    acc_norm; beside it by the plain sum of log-probabilities, its acc. WinoGrande's options are put in for the blank
    and the rest of the sentence is scored; HellaSwag's endings follow their sentence directly.

Sources: Hu et al. 2023, arXiv 2304.01933, for the rule; likelihoods are computed by lm-eval's HFLM.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..tasks.commonsense import BENCHMARKS, COMPLETION
from ..training.completions import encode, pad_token_id


PROTOCOLS = ("generation", "label_likelihood", "likelihood")
MARKER = "### Response:"

Answer = dict[str, Any]


def require_lm_eval() -> None:
    """Before long work whose end needs it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError(
            "likelihoods need lm-eval: pip install hf-sparsecoding[eval]; --protocols generation does without"
        )


def find_answer(text: str, labels: Sequence[str]) -> str | None:
    """The first of a task's labels in what was written, up to where the model begins another prompt."""
    found = re.search("|".join(labels), text.split(MARKER)[0])
    return found and found.group()


def cloze(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) per option, for scoring its text."""
    question, texts = record["question"], record["options"].values()
    if record["task"] == "winogrande":
        before, _, after = question.partition("_")
        if not after.strip():  # the options themselves are all that can be scored
            return [(before.rstrip(), f" {text}") for text in texts]
        return [(before + text, after) for text in texts]
    context = question if record["task"] == "hellaswag" else f"Question: {question}\nAnswer:"
    return [(context, f" {text}") for text in texts]


@torch.no_grad()
def generation(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Mapping[str, Any]],
    beams: int = 4,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    progress: bool = False,
) -> list[Answer]:
    """Per record {"label", "chosen" (None: no label), "right", "text"}; beams 1 is greedy.

    Raises:
        ValueError: a prompt and its answer are longer than the model's positions.
    """
    examples = encode(tokenizer, [record["prompt"] for record in records], [r["completion"] for r in records])
    prompts = [list(example.prompt) for example in examples]
    longest = getattr(model.config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if longest is not None and len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"{records[number]['task']} record {number} has {len(prompt)} tokens; with {max_new_tokens} new ones "
                f"it exceeds the {longest} positions of the model"
            )
    pad = pad_token_id(tokenizer)
    options = GenerationConfig(
        do_sample=False,
        num_beams=beams,
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,  # what is not said here comes from the model's own generation config
        pad_token_id=pad,
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
    )
    answers: list[Answer | None] = [None] * len(records)
    order = sorted(range(len(records)), key=lambda number: -len(prompts[number]))  # equal lengths need no padding
    for start in tqdm(range(0, len(order), batch_size), disable=not progress, desc="generation", leave=False):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[number]) for number in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        written = model.generate(input_ids=ids, attention_mask=mask.to(ids.device), generation_config=options)
        texts = tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
        for number, text in zip(chosen, texts, strict=True):
            record = records[number]
            answer = find_answer(text, BENCHMARKS[record["task"]].labels)
            answers[number] = {**_answer(record, answer), "text": text}
    return answers


def label_likelihood(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Mapping[str, Any]],
    batch_size: int = 16,
    progress: bool = False,
) -> list[Answer]:
    """Per record {"label", "chosen", "right", "scores" (log-probability by label)}."""
    pairs = [[(r["prompt"], COMPLETION.format(label=label)) for label in r["options"]] for r in records]
    scores = _log_likelihoods(model, tokenizer, pairs, batch_size, progress)
    return [
        {**_answer(record, max(own, key=own.get)), "scores": own}
        for record, own in zip(records, _by_label(records, scores), strict=True)
    ]


def likelihood(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Mapping[str, Any]],
    batch_size: int = 16,
    progress: bool = False,
) -> list[Answer]:
    """As `label_likelihood`, by the options' texts; "chosen" is the best per character, "plain_right" by the sum."""
    pairs = [cloze(record) for record in records]
    scores = _log_likelihoods(model, tokenizer, pairs, batch_size, progress)
    answers = []
    for record, own, its_pairs in zip(records, _by_label(records, scores), pairs, strict=True):
        lengths = {label: len(text.lstrip()) or 1 for label, (_, text) in zip(own, its_pairs, strict=True)}
        best = max(own, key=lambda label: own[label] / lengths[label])
        plain = max(own, key=own.get) == record["label"]
        answers.append({**_answer(record, best), "plain_right": plain, "scores": own})
    return answers


def _answer(record: Mapping[str, Any], chosen: str | None) -> Answer:
    return {"label": record["label"], "chosen": chosen, "right": chosen == record["label"]}


def _by_label(records: Sequence[Mapping], scores: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    return [dict(zip(record["options"], own, strict=True)) for record, own in zip(records, scores, strict=True)]


def _log_likelihoods(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Sequence[tuple[str, str]]],
    batch_size: int,
    progress: bool,
) -> list[list[float]]:
    """log P(continuation | context) of all (context, continuation) of each record."""
    require_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    # it warns that a model in memory must not be launched in several processes: each has a share of its own here
    log = logging.getLogger("lm_eval.models.huggingface")
    level = log.level
    log.setLevel(logging.ERROR)
    scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
    log.setLevel(level)
    flat = [pair for own in pairs for pair in own]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(flat)]
    found = iter(scorer.loglikelihood(requests, disable_tqdm=not progress))
    return [[next(found)[0] for _ in own] for own in pairs]
