"""Small made-up commonsense data as LLM-Adapters keep them, and a tiny Llama that reads them by the word."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_sparsecoding.tasks.commonsense import BENCHMARKS, PROMPT
from tests.tiny_models import tiny_model


THINGS = ("a fox", "an old tree", "rain", "the sun", "bread")
WORD = r"[A-Za-z]+|[^A-Za-z]"
EXTRA = "Question: Answer: abc the correct answer is solution ending option true false"


def rows(task: str, count: int, start: int = 0) -> list[dict]:
    """Rows in LLM-Adapters' form; number i asks about i, so that all differ."""
    benchmark = BENCHMARKS[task]
    found = []
    for number in range(start, start + count):
        question = f"what is {number} {'_ ' if task == 'winogrande' else ''}like?"
        labels = benchmark.labels[:4]
        texts = [f"{THINGS[(number + i) % 5]}" if benchmark.stem else label for i, label in enumerate(labels)]
        answer = labels[number % len(labels)]
        instruction = benchmark.instruction(question, dict(zip(labels, texts, strict=True)))
        output = f"the correct answer is {answer}"
        found.append({"instruction": instruction, "input": "", "output": output, "answer": answer})
    return found


def write_data(folder: Path, tasks=("arc_easy", "boolq"), train: int = 24, test: int = 6) -> str:
    for task in tasks:
        (folder / task).mkdir(parents=True, exist_ok=True)
        (folder / task / "train.json").write_text(json.dumps(rows(task, train)))
        (folder / task / "test.json").write_text(
            json.dumps(rows(task, test, start=train - 1))
        )  # one of them trained on
    return str(folder)


def word_tokenizer() -> PreTrainedTokenizerFast:
    splitter = pre_tokenizers.Split(Regex(WORD), "isolated")
    texts = [PROMPT, EXTRA, "0123456789_", *(row["instruction"] for task in BENCHMARKS for row in rows(task, 5))]
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def word_model(seed: int = 0, **options) -> LlamaForCausalLM:
    return tiny_model(seed=seed, vocab_size=len(word_tokenizer()), max_position_embeddings=512, **options)


def save_word_model(folder: Path) -> str:
    word_tokenizer().save_pretrained(folder)
    word_model().save_pretrained(folder)
    return str(folder)
