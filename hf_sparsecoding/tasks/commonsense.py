"""Eight commonsense-reasoning benchmarks as LLM-Adapters words them, and the mixture of their training sets.

A record is a dict: `task`, `question`, `options` (texts by label), `label` (of the right option), `prompt` (Alpaca
form) and `completion`. One of openbookqa:

    question    A cactus stem is used to store
    options     {"answer1": "fruit", "answer2": "liquid", "answer3": "food", "answer4": "spines"}
    label       answer2
    completion  the correct answer is answer2

Source: Hu et al. 2023, arXiv 2304.01933 (LLM-Adapters). Their code indents the lines of the prompt; here they are not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

HUB = "hub"
MIXTURE = "commonsense_170k"
MIXTURE_RECORDS = 170_420
SPLITS = ("train", "test")
SUFFIXES = (".json", ".jsonl")
# where a copy of LLM-Adapters keeps them, below its root
SUBFOLDERS = ("", "dataset", "ft-training_set")

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
COMPLETION = "the correct answer is {label}"
FORMAT = "Answer format: "

Reader = Callable[[Mapping[str, Any]], tuple[str, Sequence[str], int]]


def _boolq(row: Mapping) -> tuple[str, Sequence[str], int]:
    right = row["answer"] if "answer" in row else bool(row["label"])
    return row["question"].rstrip("?") + "?", ("true", "false"), 0 if right else 1


def _piqa(row: Mapping) -> tuple[str, Sequence[str], int]:
    return row["goal"], (row["sol1"], row["sol2"]), int(row["label"])


def _siqa(row: Mapping) -> tuple[str, Sequence[str], int]:
    options = (row["answerA"], row["answerB"], row["answerC"])
    return f"{row['context']} {row['question']}", options, int(row["label"]) - 1


def _hellaswag(row: Mapping) -> tuple[str, Sequence[str], int]:
    return f"{row['activity_label']}: {row['ctx']}", row["endings"], int(row["label"])


def _winogrande(row: Mapping) -> tuple[str, Sequence[str], int]:
    return row["sentence"], (row["option1"], row["option2"]), int(row["answer"]) - 1


def _choices(row: Mapping) -> tuple[str, Sequence[str], int]:
    """ARC and OpenBookQA."""
    question = row["question"] if "question" in row else row["question_stem"]
    return question, row["choices"]["text"], list(row["choices"]["label"]).index(row["answerKey"].strip())


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is worded and where it lies.

    Args:
        folder: Name of its folder in LLM-Adapters.
        sentence: What every instruction begins with.
        stem: Labels are the stem and a number from 1 on; without a stem they are true and false.
        most: Number of labels, also where a question has fewer options.
        read: From the benchmark's own fields to (question, options, place of the right one from 0 on).
        hub: Name on the Hub, and its parts that make up the training set; the first part has the test set.
        test_split: Split of the Hub that serves as the test set: of some benchmarks the test labels are hidden.
        test_items: How many there are.
        between: What separates the options.
        before_format: What separates them from the answer format.
    """

    folder: str
    sentence: str
    stem: str
    most: int
    read: Reader
    hub: tuple[str, tuple[str | None, ...]]
    test_split: str
    test_items: int
    between: str = " "
    before_format: str = "\n\n"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"{self.stem}{i + 1}" for i in range(self.most)) if self.stem else ("true", "false")

    def instruction(self, question: str, options: Mapping[str, str]) -> str:
        texts = [f"{label.capitalize()}: {text}" for label, text in options.items()] if self.stem else []
        listed = "\n\n" + self.between.join(texts) if texts else ""
        return f"{self.sentence}{question}{listed}{self.before_format}{FORMAT}{'/'.join(options)}"


ANSWER = "Please choose the correct answer to the question: "
WINOGRANDE = tuple(f"winogrande_{size}" for size in ("xl", "l", "m", "s", "xs", "debiased"))  # 63,238 records in all

BENCHMARKS = {
    "boolq": Benchmark(
        folder="boolq",
        sentence="Please answer the following question with true or false, question: ",
        stem="",
        most=2,
        read=_boolq,
        hub=("google/boolq", (None,)),
        test_split="validation",
        test_items=3270,
    ),
    "piqa": Benchmark(
        folder="piqa",
        sentence="Please choose the correct solution to the question: ",
        stem="solution",
        most=2,
        read=_piqa,
        hub=("baber/piqa", (None,)),
        test_split="validation",
        test_items=1838,
        between="\n\n",
    ),
    "siqa": Benchmark(
        folder="social_i_qa",
        sentence=ANSWER,
        stem="answer",
        most=5,
        read=_siqa,
        hub=("lighteval/siqa", (None,)),
        test_split="validation",
        test_items=1954,
    ),
    "hellaswag": Benchmark(
        folder="hellaswag",
        sentence="Please choose the correct ending to complete the given sentence: ",
        stem="ending",
        most=4,
        read=_hellaswag,
        hub=("Rowan/hellaswag", (None,)),
        test_split="validation",
        test_items=10_042,
    ),
    "winogrande": Benchmark(
        folder="winogrande",
        sentence="Please choose the correct answer to fill in the blank to complete the given sentence: ",
        stem="option",
        most=2,
        read=_winogrande,
        hub=("allenai/winogrande", WINOGRANDE),
        test_split="validation",
        test_items=1267,
        before_format=" ",
    ),
    "arc_easy": Benchmark(
        folder="ARC-Easy",
        sentence=ANSWER,
        stem="answer",
        most=5,
        read=_choices,
        hub=("allenai/ai2_arc", ("ARC-Easy",)),
        test_split="test",
        test_items=2376,
    ),
    "arc_challenge": Benchmark(
        folder="ARC-Challenge",
        sentence=ANSWER,
        stem="answer",
        most=5,
        read=_choices,
        hub=("allenai/ai2_arc", ("ARC-Challenge",)),
        test_split="test",
        test_items=1172,
    ),
    "openbookqa": Benchmark(
        folder="openbookqa",
        sentence=ANSWER,
        stem="answer",
        most=5,
        read=_choices,
        hub=("allenai/openbookqa", ("main",)),
        test_split="test",
        test_items=500,
    ),
}
TASKS = tuple(BENCHMARKS)


def check_tasks(names: Sequence[str], known: Sequence[str] = TASKS) -> None:
    """Raise a ValueError for a task that does not exist, one that comes twice, or none at all."""
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"unknown task {name!r}; {hint}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"tasks must be at least one and each only once, got {list(names)}")


def parse_instruction(instruction: str) -> tuple[str, dict[str, str]]:
    """(question, option texts by label) of an instruction of any of the benchmarks."""
    body, found, labels = instruction.rpartition(FORMAT)
    if not found:
        raise ValueError(f"the instruction lacks its line {FORMAT!r}: {instruction!r}")
    labels = labels.strip().split("/")
    if labels == ["true", "false"]:
        options = {label: label for label in labels}
    else:
        texts = []
        for label in reversed(labels):  # from the end: a question may quote what looks like an option
            body, found, text = body.rpartition(f"{label.capitalize()}:")
            if not found:
                raise ValueError(f"the instruction announces {label} but has no such option: {instruction!r}")
            texts.append(text.strip())
        options = dict(zip(labels, reversed(texts), strict=True))
    for benchmark in BENCHMARKS.values():
        body = body.removeprefix(benchmark.sentence)
    return body.strip(), options


def to_record(task: str, row: object, place: str) -> dict[str, Any]:
    """A record from a row in LLM-Adapters' form or, except for the mixture, with the benchmark's own fields.

    Raises:
        ValueError: the row is neither, or its right answer is none of the options; `place` says where it is.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: a record must be an object, got {row!r}")
    try:
        if "instruction" in row or task == MIXTURE:
            if row.get("input"):
                raise ValueError(f"input must be empty, got {row['input']!r}")
            instruction, completion, label = row["instruction"], row["output"].strip(), row["answer"]
            question, options = parse_instruction(instruction)
        else:
            benchmark = BENCHMARKS[task]
            question, texts, number = benchmark.read(row)
            question, texts = question.strip(), [text.strip() for text in texts]
            options = dict(zip(benchmark.labels, texts, strict=False))
            label = benchmark.labels[number] if 0 <= number < len(benchmark.labels) else number
            instruction, completion = benchmark.instruction(question, options), COMPLETION.format(label=label)
        if task == "winogrande" and "_" not in question:
            raise ValueError(f"the sentence has no blank _: {question!r}")
        if label not in options:
            raise ValueError(f"the answer {label!r} is none of the options {', '.join(options)}")
    except KeyError as error:
        raise ValueError(f"{place}: the record lacks {error}; it has {', '.join(row) or 'nothing'}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: {error}") from error
    return {
        "task": task,
        "question": question,
        "options": options,
        "label": label,
        "prompt": PROMPT.format(instruction=instruction),
        "completion": completion,
    }


def load(source: str, task: str, split: str, any_size: bool = False) -> list[dict[str, Any]]:
    """The records of a benchmark, or of the mixture with task "commonsense_170k" and split "train".

    Args:
        source: "hub", or a folder with `<task>/<split>.json` (or .jsonl) and `commonsense_170k.json`. Folders may have
            the names of LLM-Adapters (ARC-Easy for arc_easy), and a copy of its repository does too.
        any_size: Take a test set or mixture that is not of the published size, with a warning.

    Raises:
        ValueError: unknown task or split, no such file, a record that is not as it should be, or another size.
        OSError: the Hub cannot be reached.
    """
    check_tasks([task], (*TASKS, MIXTURE))
    if split not in SPLITS or (task == MIXTURE and split == "test"):
        raise ValueError(f"split must be one of {', '.join(SPLITS)} (the mixture has only train), got {split!r}")
    if source != HUB:
        path = find_file(source, task, split)
        records = [to_record(task, row, f"{path}: record {i}") for i, row in enumerate(_read(path))]
    elif task == MIXTURE:
        records = [{**record, "task": MIXTURE} for name in TASKS for record in load(HUB, name, "train")]
    else:
        records = [to_record(task, row, f"{task} {split} record {i}") for i, row in enumerate(_download(task, split))]
    expected = MIXTURE_RECORDS if task == MIXTURE else BENCHMARKS[task].test_items if split == "test" else len(records)
    if not records:
        raise ValueError(f"{task} has no {split} records in {source}")
    if len(records) != expected:
        message = f"{task} has {len(records):,} {split} records in {source}, published are {expected:,}"
        if not any_size:
            raise ValueError(f"{message}; complete the file, or allow a subset with any_size")
        logger.warning("%s", message)
    return records


def find_file(folder: str | Path, task: str, split: str) -> Path:
    """The file of a task below a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}; give a folder with <task>/{split}.json, or {HUB!r}")
    stems = [MIXTURE] if task == MIXTURE else [f"{task}/{split}", f"{BENCHMARKS[task].folder}/{split}"]
    for below in SUBFOLDERS:
        for stem in stems:
            for suffix in SUFFIXES:
                if (path := folder / below / f"{stem}{suffix}").is_file():
                    return path
    raise ValueError(f"{folder} has no {' or '.join(f'{stem}.json' for stem in dict.fromkeys(stems))}")


def _read(path: Path) -> list[object]:
    text = path.read_text(encoding="utf-8")
    parts = [text] if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    rows = []
    for number, part in enumerate(parts):
        try:
            rows.append(json.loads(part))
        except json.JSONDecodeError as error:
            place = f"{path}:{error.lineno}" if path.suffix == ".json" else f"{path}: record {number}"
            raise ValueError(f"{place}: not JSON ({error.msg})") from error
    if path.suffix == ".json":
        (rows,) = rows
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of records, got {type(rows).__name__}")
    return rows


def _download(task: str, split: str) -> Iterable[Mapping]:
    from datasets import concatenate_datasets, load_dataset

    benchmark = BENCHMARKS[task]
    name, parts = benchmark.hub
    try:
        if split == "test":
            return load_dataset(name, parts[0], split=benchmark.test_split)
        return concatenate_datasets([load_dataset(name, part, split="train") for part in parts])
    except OSError as error:
        raise OSError(f"{task} cannot be had from the Hub ({error}); give a folder of files instead") from error


def train_test_duplicates(train: Iterable[Mapping], test: Iterable[Mapping]) -> dict[str, int]:
    """How many test items of each task also occur in training: same question and options, in any order or case."""

    def key(record: Mapping) -> tuple[str, frozenset[str]]:
        return _plain(record["question"]), frozenset(map(_plain, record["options"].values()))

    seen = {key(record) for record in train}
    counts: dict[str, int] = {}
    for record in test:
        counts[record["task"]] = counts.get(record["task"], 0) + (key(record) in seen)
    return counts


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
